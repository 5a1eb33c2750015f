"""Checks of the autoencoder's convolutions: some outputs and gradients against exact sums in float64."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cogvideox_flax.nn.conv import xla
from cogvideox_flax.nn.conv.causal_conv import conv3d
from tests.support.gpu_errors import compiled, error, fault, sample_indices, why_no_memory

TAPS = 3
"""In time (but for spatial convolutions), height and width."""

GRADIENT_BAR = 0.01
"""Largest relative error of a 16-bit gradient: three roundings, of parts of the sum."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of the decoder: valid over `frames + taps - 1` frames, zero-padded in space.

    native: one 3-D convolution of cuDNN, which this library does not use. positions: outputs that are compared, all
    channels of each.
    """

    frames: int
    height: int
    width: int
    channels: int
    out_channels: int
    taps: int = TAPS
    dtype: str = "bfloat16"
    native: bool = False
    positions: int = 512

    def __str__(self) -> str:
        kind = "native " if self.native else "spatial " if self.taps == 1 else ""
        return f"{kind}{self.height}x{self.width}, {self.channels} to {self.out_channels}, {self.dtype}"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 1, self.frames + self.taps - 1, self.height, self.width, self.channels

    @property
    def output_shape(self) -> tuple[int, ...]:
        return 1, self.frames, self.height, self.width, self.out_channels

    @property
    def needed_gib(self) -> float:
        """About: the input, and the random numbers that it is made of."""
        return 5 * math.prod(self.input_shape) * jnp.dtype(self.dtype).itemsize / 2**30

    def points(self) -> np.ndarray:
        """(frame, row, column) of the outputs that are compared: int [positions, 3], corners and edges among them."""
        sides = (self.frames, self.height, self.width)
        random = np.random.default_rng(0)
        found = [random.choice(sample_indices(n, self.positions, seed), self.positions) for seed, n in enumerate(sides)]
        ends = [[0, n - 1] for n in sides]
        return np.stack([np.concatenate(pair)[: self.positions] for pair in zip(ends, found, strict=True)], 1)


def cases(*, small: bool = False) -> Iterator[Convolution]:
    """Of a later chunk at 480x720 and 768x1360, what matters most first; small: to try the checks."""
    (h, w), (big_h, big_w) = ((64, 96), (48, 80)) if small else ((480, 720), (768, 1360))
    narrow, middle, wide = (32, 48, 64) if small else (128, 256, 512)
    frames = 3 if small else 8
    yield Convolution(frames, h, w, narrow, narrow)
    yield Convolution(frames, h // 2, w // 2, middle, middle)
    yield Convolution(frames, big_h, big_w, narrow, narrow)
    yield Convolution(frames, big_h, big_w, middle, narrow)  # the decoder's largest: more than 2^31 values
    yield Convolution(frames, h, w, middle, narrow)
    yield Convolution(frames // 2, h // 4, w // 4, wide, middle)
    yield Convolution(frames, h, w, middle, middle, taps=1)
    yield Convolution(frames, h, w, narrow, narrow, dtype="float32")
    yield Convolution(frames, h, w, narrow, narrow, dtype="float16")


def native_case(*, small: bool = False) -> Convolution:
    """cuDNN's own 3-D convolution, wrong in bfloat16 on large shapes before 9.15 (pytorch/pytorch#163539)."""
    return Convolution(3, 48, 80, 32, 32, native=True) if small else Convolution(8, 768, 1360, 128, 128, native=True)


def gradient_case(*, small: bool = False) -> Convolution:
    return Convolution(3, 32, 48, 48, 48) if small else Convolution(8, 240, 360, 256, 256)


def inputs(case: Convolution) -> tuple[Array, Array, Array]:
    """x, kernel [kt, kh, kw, in, out] and bias; to be jitted."""
    shape = case.taps, TAPS, TAPS, case.channels, case.out_channels
    shapes = case.input_shape, shape, (case.out_channels,)
    scales = 1.0, (case.channels * case.taps * TAPS**2) ** -0.5, 0.2
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel, bias = (
        jax.random.normal(key, shape, case.dtype) * jnp.asarray(scale, case.dtype)
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    )
    return x, kernel, bias


def program(case: Convolution) -> Callable[[Array, Array, Array], Array]:
    """To be jitted."""
    if case.native:
        zeros = ((1, 1), (1, 1))
        return lambda x, kernel, bias: xla.convolve(x, kernel, stride=1, padding=zeros, dtype=None) + bias
    return conv3d


def shapes(case: Convolution) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the program's arguments."""
    x, kernel, bias = jax.eval_shape(partial(inputs, case))
    return x, kernel, bias


@partial(jax.jit, static_argnums=2)
def patches(x: Float[Array, "1 T H W C"], points: Array, taps: int) -> Float[Array, "P taps 3 3 C"]:
    """The inputs that the outputs at these points read, with zeros outside the frame."""
    t, y, z = (jnp.arange(n) - before for n, before in ((taps, 0), (TAPS, 1), (TAPS, 1)))
    frame = points[:, 0, None] + t
    row, column = points[:, 1, None] + y, points[:, 2, None] + z
    inside = [(index >= 0) & (index < n) for index, n in ((row, x.shape[2]), (column, x.shape[3]))]
    row, column = row.clip(0, x.shape[2] - 1), column.clip(0, x.shape[3] - 1)
    seen = x[0][frame[:, :, None, None], row[:, None, :, None], column[:, None, None, :]]
    return jnp.where((inside[0][:, None, :, None] & inside[1][:, None, None, :])[..., None], seen, 0)


def _exact(x: Array, kernel: Array, points: np.ndarray) -> np.ndarray:
    """The convolution of x at these points, without a bias, in float64: [positions, out]."""
    seen = np.asarray(patches(x, jnp.asarray(points), kernel.shape[0]), np.float64)
    flat = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1])
    return seen.reshape(len(points), -1) @ flat


def check(case: Convolution) -> dict[str, Any]:
    """Errors and seconds; "fault" says what is wrong, "skip" why it cannot be tried here."""
    if why := why_no_memory(case.needed_gib):
        return {"skip": why}
    x, kernel, bias = jax.jit(partial(inputs, case))()
    y, text, times = compiled(program(case), x, kernel, bias)
    points = case.points()
    exact = _exact(x, kernel, points) + np.asarray(bias, np.float64)
    errors = error(y[0][tuple(jnp.asarray(points).T)], exact)
    rounding = error(exact.astype(jnp.dtype(case.dtype)).astype(np.float64), exact)
    faults = [fault(errors, None if case.dtype == "float32" else rounding) or ""]
    faults += [] if bool(jnp.isfinite(y).all()) else ["not all outputs are finite"]
    calls = dict(Counter(re.findall(r'custom_call_target="(__cudnn\$conv\w+)"', text)))
    return {"cuDNN": calls, **times, "error": errors, "rounding": rounding, "fault": "; ".join(filter(None, faults))}


def gradients(x: Array, kernel: Array, bias: Array, dy: Array) -> tuple[Array, Array]:
    """The gradients in x and the kernel; to be jitted."""
    return jax.vjp(lambda x, kernel: conv3d(x, kernel, bias), x, kernel)[1](dy)


def check_gradients(case: Convolution) -> dict[str, Any]:
    """Some values of the gradients in input and kernel."""
    x, kernel, bias = jax.jit(partial(inputs, case))()
    dy = jax.jit(lambda: jax.random.normal(jax.random.key(1), case.output_shape, case.dtype))()
    (dx, dkernel), _, times = compiled(gradients, x, kernel, bias, dy)
    # the gradient in the input is a convolution of dy, with zeros around its frames, with the kernel turned around
    points, before = case.points(), case.taps - 1
    around = jnp.pad(dy, ((0, 0), (before, before), (0, 0), (0, 0), (0, 0)))
    exact = _exact(around, kernel[::-1, ::-1, ::-1].swapaxes(-1, -2), points)
    errors = {
        "dx": error(dx[0][tuple(jnp.asarray(points).T)], exact)["rms"],
        "dkernel": _of_kernel(case, x, dy, dkernel),
    }
    faults = [f"{name}: {value:.1e}" for name, value in errors.items() if not value <= GRADIENT_BAR]
    return {**times, "error": errors, "fault": "; ".join(faults)}


def _of_kernel(case: Convolution, x: Array, dy: Array, dkernel: Array) -> float:
    """The largest relative difference of a few of the kernel's gradients, in units of their root mean square."""
    random = np.random.default_rng(1)
    places = np.stack([random.integers(0, n, 12) for n in dkernel.shape], 1)

    @jax.jit
    def channels(x: Array, dy: Array, place: Array) -> tuple[Array, Array]:
        frames = jax.lax.dynamic_slice_in_dim(x[0], place[0], case.frames)
        return frames[..., place[3]], dy[0, ..., place[4]]

    exact = []
    for place in places:
        seen, back = (np.asarray(a, np.float64) for a in channels(x, dy, jnp.asarray(place)))
        _, row, column, *_ = place
        seen = np.pad(seen, ((0, 0), (1, 1), (1, 1)))[:, row : row + case.height, column : column + case.width]
        exact.append(float((seen * back).sum()))
    found = np.asarray(dkernel[tuple(jnp.asarray(places).T)], np.float64)
    return float(np.abs(found - exact).max() / np.sqrt(np.square(exact).mean()))
