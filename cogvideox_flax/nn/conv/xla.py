"""XLA's own 3-D convolution, for platforms without a special implementation."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from cogvideox_flax.nn.conv.frames import finish
from cogvideox_flax.nn.layers import precision
from cogvideox_flax.sharding import Padding


def convolve(x: Array, kernel: Array, *, stride: int, padding: Padding, dtype: Any = jnp.float32) -> Array:
    """The sums in `dtype`; None is x's."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, stride, stride),
        padding=((0, 0), *padding),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


def forward(
    x: Array, residual: Array | None, kernel: Array, bias: Array, *, stride: int, padding: Padding, dtype: Any
) -> Array:
    """See `causal_conv.conv3d`."""
    return finish(convolve(x, kernel, stride=stride, padding=padding), residual, bias, dtype)


def backward(x: Array, kernel: Array, dy: Array, *, stride: int, padding: Padding) -> tuple[Array, Array]:
    """The gradients in x and kernel, in their dtypes."""
    _, pull = jax.vjp(partial(convolve, stride=stride, padding=padding, dtype=None), x, kernel)
    return pull(dy.astype(x.dtype))
