"""Bounds of scores and values, by which a head is found to need no maximum."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

TINY = 2.0**-126
"""The least normal number of float32. What is smaller counts as 0, and so does a product of two numbers."""


def norms(x: Float[Array, "*batch S K"]) -> Float32[Array, "*batch S"]:
    """Upper bounds of the Euclidean norms: K 2^-126 is added for squares that underflow. Infinity beyond 2^63."""
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1) + x.shape[-1] * TINY)


def min_nonzero(x: Float[Array, "*batch K"]) -> Float32[Array, "*batch"]:
    """The smallest of these numbers, all 0 or more, that is not 0; infinity if there is none."""
    x = x.astype(jnp.float32)
    return jnp.where(x > 0, x, jnp.inf).min(-1)
