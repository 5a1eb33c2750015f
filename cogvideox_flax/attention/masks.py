"""Which keys a query attends to."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)
"""A score that no key reaches, below -2^126 as it is; differences of it stay finite."""


def attended(
    query: Int[Array, " Q"], key: Int[Array, " S"], length: Int[Array, "*B"], window: tuple[int, int] | None
) -> Bool[Array, "*B Q S"]:
    """Which keys are real, and inside the query's window."""
    valid = key < length
    if window is None:
        return valid
    away = key - query[:, None]
    return valid & (away >= -window[0]) & (away <= window[1])
