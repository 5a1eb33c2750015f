"""The convolution for NVIDIA GPUs: 2-D, channels last, in 16 bit, which uses fast tensor cores.

XLA calls cuDNN's 3-D convolutions with channels first, and in float32 if the result is wider than the operands; both
are slow. cuDNN's 3-D convolutions before 9.15 are also wrong in bfloat16 on large images (pytorch/pytorch#163539).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from cogvideox_flax.nn.conv.frames import FrameConv, conv2d, convolve_frames
from cogvideox_flax.sharding import Padding


def forward(
    x: Array, residual: Array | None, kernel: Array, bias: Array, *, stride: int, padding: Padding, dtype: Any
) -> Array:
    """See `causal_conv.conv3d`."""
    how: dict[str, Any] = {"stride": stride, "padding": padding, "dtype": dtype}
    return convolve_frames(_taps_as_channels, x, residual, kernel, bias, **how)


def _taps_as_channels(kernel: Array, *, stride: int, padding: Padding) -> FrameConv:
    """One 2-D convolution with the taps in time as channels. Its sums are float32 inside and are rounded to the
    operands' dtype once, as in PyTorch."""
    size, inputs, outputs = kernel.shape[1], kernel.shape[0] * kernel.shape[3], kernel.shape[4]
    flat = kernel.transpose(1, 2, 0, 3, 4).reshape(size, size, inputs, outputs)

    def frame_conv(frames: list[Array]) -> Array:
        x = jnp.concatenate(frames, -1)
        return conv2d(x, flat, stride=stride, padding=padding, dtype=x.dtype).astype(jnp.float32)

    return frame_conv


def backward(x: Array, kernel: Array, dy: Array, *, stride: int, padding: Padding) -> tuple[Array, Array]:
    """The gradients in x and kernel, in their dtypes: those of 2-D convolutions of all frames, tap by tap."""
    batch, frames = dy.shape[:2]
    dy = dy.astype(x.dtype).reshape(batch * frames, *dy.shape[2:])
    convolve = partial(conv2d, stride=stride, padding=padding, dtype=None)
    dx, dkernel = jnp.zeros(x.shape, jnp.float32), []
    for i, tap in enumerate(kernel):
        seen = x[:, i : i + frames]
        _, pull = jax.vjp(convolve, seen.reshape(batch * frames, *x.shape[2:]), tap)
        dframes, dtap = pull(dy)
        dx = dx.at[:, i : i + frames].add(dframes.reshape(seen.shape).astype(jnp.float32))
        dkernel.append(dtap)
    return dx.astype(x.dtype), jnp.stack(dkernel)
