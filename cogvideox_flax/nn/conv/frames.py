"""Convolutions frame by frame: shared by the implementations for CPUs and NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from cogvideox_flax.nn.layers import precision
from cogvideox_flax.sharding import Padding

FrameConv = Callable[[list[Float[Array, "B H W I"]]], Float32[Array, "B h w O"]]
"""One frame of the result, in float32, from the frames that the taps in time read."""


def convolve_frames(
    make_frame_conv: Callable[..., FrameConv],
    x: Float[Array, "B T+kt-1 H W I"],
    residual: Float[Array, "B T h w O"] | None,
    kernel: Float[Array, "kt kh kw I O"],
    bias: Float[Array, " O"],
    *,
    stride: int,
    padding: Padding,
    dtype: Any,
) -> Float[Array, "B T h w O"]:
    """A loop over frames. Each is written in place, into the residual's memory if XLA can reuse it.

    make_frame_conv: make_frame_conv(kernel, stride=, padding=) -> FrameConv, called once.
    """
    taps = kernel.shape[0]
    frame_conv = make_frame_conv(kernel, stride=stride, padding=padding)

    def write_frame(t: Array, y: Array) -> Array:
        frames = [jax.lax.dynamic_index_in_dim(x, t + i, 1, keepdims=False) for i in range(taps)]
        sums = frame_conv(frames)
        before = jax.lax.dynamic_index_in_dim(y, t, 1, keepdims=False) if residual is not None else None
        return jax.lax.dynamic_update_index_in_dim(y, finish(sums, before, bias, dtype), t, 1)

    start = output_buffer(residual, result_shape(x, kernel, stride, padding), dtype)
    return jax.lax.fori_loop(0, start.shape[1], write_frame, start)


def conv2d(
    x: Float[Array, "B H W I"],
    kernel: Float[Array, "kh kw I O"],
    *,
    stride: int = 1,
    padding: Padding,
    dtype: Any = jnp.float32,
) -> Float[Array, "B h w O"]:
    """XLA's 2-D convolution with a result in `dtype`; None is x's."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


def finish(
    sums: Float32[Array, "*shape O"], residual: Float[Array, "*shape O"] | None, bias: Float[Array, " O"], dtype: Any
) -> Float[Array, "*shape O"]:
    """Add bias and residual in float32, and round once."""
    y = sums + bias.astype(jnp.float32)
    return (y if residual is None else y + residual.astype(jnp.float32)).astype(dtype)


def result_shape(x: Array, kernel: Array, stride: int, padding: Padding) -> tuple[int, ...]:
    """[B, T, h, w, O] of the convolution of x."""
    taps, size, *_, channels = kernel.shape
    height, width = ((n + sum(zeros) - size) // stride + 1 for n, zeros in zip(x.shape[2:4], padding, strict=True))
    return x.shape[0], x.shape[1] - taps + 1, height, width, channels


def output_buffer(residual: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """The buffer for the result: the residual if there is one."""
    return jax.lax.empty(shape, dtype) if residual is None else residual.astype(dtype)
