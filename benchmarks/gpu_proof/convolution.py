"""Rows of the autoencoder's convolutions: some outputs against exact sums in float64."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.gpu_proof.attention import timed
from benchmarks.gpu_proof.cases import NATIVE_CONV3D, TAPS, Convolution
from benchmarks.gpu_proof.errors import error, save, verdict
from benchmarks.gpu_proof.values import Values, in_jax
from cogvideox_flax.nn.conv import xla
from cogvideox_flax.nn.conv.causal_conv import conv3d


def inputs(case: Convolution) -> tuple[Array, Array, Array]:
    """x, kernel [kt, kh, kw, in, out] and bias; to be jitted."""
    x, kernel, bias = case.values()
    weights = in_jax(kernel, case.kernel_shape, case.dtype).transpose(2, 3, 4, 1, 0)
    return in_jax(x, case.input_shape, case.dtype), weights, in_jax(bias, (case.out_channels,), case.dtype)


def program(case: Convolution) -> Callable[[Array, Array, Array], Array]:
    """To be jitted."""
    if case.form == NATIVE_CONV3D:
        zeros = ((1, 1), (1, 1))
        return lambda x, kernel, bias: xla.convolve(x, kernel, stride=1, padding=zeros, dtype=None) + bias
    return conv3d


def shapes(case: Convolution) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the program's arguments."""
    x, kernel, bias = jax.eval_shape(partial(inputs, case))
    return x, kernel, bias


def patches(x: Float[Array, "1 T H W C"], points: Array, taps: int) -> Float[Array, "P taps 3 3 C"]:
    """The inputs that the outputs at these points read, with zeros outside the picture; to be jitted."""
    t, y, z = (jnp.arange(n) - before for n, before in ((taps, 0), (TAPS, 1), (TAPS, 1)))
    frame = points[:, 0, None] + t
    row, column = points[:, 1, None] + y, points[:, 2, None] + z
    inside = [(index >= 0) & (index < n) for index, n in ((row, x.shape[2]), (column, x.shape[3]))]
    row, column = row.clip(0, x.shape[2] - 1), column.clip(0, x.shape[3] - 1)
    seen = x[0][frame[:, :, None, None], row[:, None, :, None], column[:, None, None, :]]
    return jnp.where((inside[0][:, None, :, None] & inside[1][:, None, None, :])[..., None], seen, 0)


def run(report: Callable[..., None], *, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """One row: errors, seconds and operations a second."""
    case = Convolution(**options)
    x, kernel, bias = jax.block_until_ready(jax.jit(partial(inputs, case))())
    start = time.perf_counter()
    compiled = jax.jit(program(case)).lower(x, kernel, bias).compile()
    report(compile_s=time.perf_counter() - start, calls=calls_of(compiled.as_text() or ""))
    y = jax.block_until_ready(compiled(x, kernel, bias))
    report(first_s=time.perf_counter() - start)
    seconds = timed(lambda: compiled(x, kernel, bias), case.repeat)
    report(seconds=seconds, flops_per_s=case.flops / seconds)
    points = case.points()
    seen = jax.jit(patches, static_argnums=2)(x, jnp.asarray(points), case.taps)
    flat = np.asarray(kernel, np.float64).reshape(-1, case.out_channels)
    exact = np.asarray(seen, np.float64).reshape(len(points), -1) @ flat + np.asarray(bias, np.float64)
    save(folder, case.name, reference=exact, points=points)
    found = y[0][tuple(jnp.asarray(points).T)]
    narrow = exact.astype(jnp.dtype(case.dtype)).astype(np.float64)
    row = verdict(error(found, exact), None if case.dtype == "float32" else error(narrow, exact))
    row["finite"] = bool(jnp.isfinite(y).all())
    if not row["finite"]:
        row["status"] = "wrong"
    if case.form == NATIVE_CONV3D:
        row |= {"status": "ok", "note": f"not used here; {'right' if row['status'] == 'ok' else 'WRONG'} on this shape"}
    return row


def calls_of(text: str) -> str:
    """The cuDNN convolutions of a compiled program: count and kind."""
    found = Counter(re.findall(r'custom_call_target="(__cudnn\$conv\w+)"', text))
    return ", ".join(f"{n} {kind}" for kind, n in found.items())


def gradient_program(x: Array, kernel: Array, bias: Array, dy: Array) -> tuple[Array, Array]:
    """The gradients in x and the kernel; to be jitted."""
    return jax.vjp(lambda x, kernel: conv3d(x, kernel, bias), x, kernel)[1](dy)


def gradient(report: Callable[..., None], *, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """A row: some values of the gradients in input and kernel, against exact sums in float64."""
    case = Convolution(**options)
    x, kernel, bias = jax.jit(partial(inputs, case))()
    shape = case.output_shape
    dy = jax.jit(lambda: in_jax(Values(f"dy {shape}"), shape, case.dtype))()
    start = time.perf_counter()
    compiled = jax.jit(gradient_program).lower(x, kernel, bias, dy).compile()
    report(compile_s=time.perf_counter() - start, calls=calls_of(compiled.as_text() or ""))
    dx, dkernel = jax.block_until_ready(compiled(x, kernel, bias, dy))
    report(first_s=time.perf_counter() - start)
    seconds = timed(lambda: compiled(x, kernel, bias, dy), case.repeat)
    report(seconds=seconds, flops_per_s=2 * case.flops / seconds)

    # the gradient in the input is a convolution of dy, with zeros around its frames, with the kernel turned around
    points = case.points()
    before = case.taps - 1
    around = jnp.pad(dy, ((0, 0), (before, before), (0, 0), (0, 0), (0, 0)))
    seen = jax.jit(patches, static_argnums=2)(around, jnp.asarray(points), case.taps)
    flat = np.asarray(kernel[::-1, ::-1, ::-1].swapaxes(-1, -2), np.float64).reshape(-1, case.channels)
    exact = np.asarray(seen, np.float64).reshape(len(points), -1) @ flat
    found = error(dx[0][tuple(jnp.asarray(points).T)], exact)
    kernel_error = _of_kernel(case, x, dy, dkernel)
    right = found["rms"] <= 0.01 and kernel_error <= 0.01  # three roundings of 16 bit, of parts of the sum
    return {
        "error_rms": found["rms"],
        "error_max": found["max"],
        "error_rms_dkernel": kernel_error,
        "status": "ok" if right else "wrong",
    }


def _of_kernel(case: Convolution, x: Array, dy: Array, dkernel: Array) -> float:
    """The largest relative difference of a few of the kernel's gradients, in units of their root mean square."""
    random = np.random.default_rng(1)
    sizes = (case.taps, TAPS, TAPS, case.channels, case.out_channels)
    places = np.stack([random.integers(0, n, 12) for n in sizes], 1)

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
