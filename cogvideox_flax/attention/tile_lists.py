"""Lists of tiles of keys, for block-sparse attention."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class TileLists(NamedTuple):
    """The tiles of keys that each tile of queries attends to.

    tiles: in ascending order.
    counts: how many of them are meant; what comes after those is not attended.
    """

    tiles: Int32[Array, "B N q M"]
    counts: Int32[Array, "B N q"]

    def before(self, tiles: Int[Array, "B P"]) -> Int32[Array, "B N q P"]:
        """How many entries of each list are below each of these tiles' numbers."""
        meant = jnp.arange(self.tiles.shape[-1]) < self.counts[..., None]
        return ((self.tiles[..., None] < tiles[:, None, None, None]) & meant[..., None]).sum(-2, dtype=jnp.int32)
