"""Bounds of scores and values, which decide whether softmax needs the maximum score."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

MIN_NORMAL = 2.0**-126
"""The smallest normal number of float32. Smaller numbers and products count as 0."""

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of a masked key: below every score (at least -2^126), and small enough that differences stay finite."""


def norms(x: Float[Array, "*batch S K"]) -> Float32[Array, "*batch S"]:
    """Upper bounds of the Euclidean norms: K 2^-126 is added for squares that underflow. Norms above 2^63 overflow to
    infinity."""
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1) + x.shape[-1] * MIN_NORMAL)


def min_nonzero(x: Float[Array, "*batch K"]) -> Float32[Array, "*batch"]:
    """The smallest number above 0 of non-negative numbers; infinity if there is none."""
    x = x.astype(jnp.float32)
    return jnp.where(x > 0, x, jnp.inf).min(-1)
