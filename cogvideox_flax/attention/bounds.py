"""Bounds of scores and values, which decide whether a head needs a maximum."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

TINY = 2.0**-126
"""The least normal number of float32. Smaller numbers and products count as 0."""

NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a key that is not attended: below every score (at least -2^126), and finite in differences."""


def norms(x: Float[Array, "*batch S K"]) -> Float32[Array, "*batch S"]:
    """Upper bounds of the Euclidean norms: K 2^-126 is added for squares that underflow. Infinity beyond 2^63."""
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1) + x.shape[-1] * TINY)


def min_nonzero(x: Float[Array, "*batch K"]) -> Float32[Array, "*batch"]:
    """The smallest of these numbers, all 0 or more, that is not 0; infinity if there is none."""
    x = x.astype(jnp.float32)
    return jnp.where(x > 0, x, jnp.inf).min(-1)
