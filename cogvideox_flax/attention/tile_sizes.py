"""Tile sizes of the splash kernel: their constraints, and the table of the best ones by number of tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import jax.numpy as jnp

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import round_up
from cogvideox_flax.nn.tpu import LANES

VMEM = 96 * 2**20
"""Bytes of VMEM that a kernel may use; the chips have 95 (v5p) to 128 MiB (v5e, v6e)."""


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes, in tokens.

    q: queries in a block, which stay in VMEM while all keys are read.
    kv: keys in a block, which are fetched together. If all keys fit, they are fetched once per head.
    chunk: keys in one unrolled loop body.
    slice: keys whose scores are in memory at a time.
    """

    q: int
    kv: int
    chunk: int
    slice: int

    def check(self, keys: int, dim: int, dtype: Any, with_lse: bool = False, key_buffers: int = 2) -> None:
        """Refuse sizes that cannot run. with_lse: for `splash.attend_with_lse`. key_buffers: as for `vmem`.

        Raises:
            InputError: they do not nest, do not fill registers, or need more memory than a chip has.
        """
        if min(self.q, self.kv, self.slice) < LANES or any(n % LANES for n in (self.q, self.kv, self.slice)):
            raise InputError(f"{self}: q, kv and slice must be multiples of {LANES}")
        if self.chunk % self.slice or self.chunk < self.slice:
            raise InputError(f"{self}: slice must divide chunk")
        if self.kv < keys and self.kv % self.chunk:
            raise InputError(f"{self}: chunk must divide kv where that is not all {keys} keys")
        need = self.vmem(keys, dim, dtype, with_lse, key_buffers)
        if need > VMEM:
            raise InputError(
                f"{self} needs about {need / 2**20:.0f} MiB of fast memory at head size {dim}; "
                f"{VMEM // 2**20} MiB is the most: take smaller q or kv"
            )

    def vmem(self, keys: int, dim: int, dtype: Any, with_lse: bool = False, key_buffers: int = 2) -> int:
        """Bytes: two buffers per operand (one is fetched while the other is used), sums, the scores of two slices.

        key_buffers: of keys and values.
        """
        each, dim, kv = jnp.dtype(dtype).itemsize, round_up(dim, 64), min(self.kv, round_up(keys, LANES))
        operands = 2 * 2 * dim * self.q + key_buffers * (dim + max(dim, LANES)) * kv
        more = 2 * self.q * ((4 - each) * dim + 4 * 8) if with_lse else 0  # a float32 result, and log_sum_exp
        return each * operands + 4 * self.q * (dim + 16 + 2 * self.slice) + more

    def vmem_limit(self, keys: int, dim: int, dtype: Any, with_lse: bool = False, key_buffers: int = 2) -> int:
        """Bytes that the compiler may use: twice `vmem`, for what it spills, within the chip."""
        return min(VMEM, max(32 * 2**20, 2 * self.vmem(keys, dim, dtype, with_lse, key_buffers)))


@cache
def table() -> tuple[dict[str, Any], ...]:
    """Rows of `tile_sizes.json`: the tokens and head_dim of a search, and the best q, chunk and slice."""
    return tuple(json.loads(files(__package__).joinpath("tile_sizes.json").read_text())["rows"])


def choose_tile_sizes(queries: int, keys: int, dim: int, dtype: Any, with_lse: bool = False) -> TileSizes:
    """The row of the table nearest to `dim` and `keys` (in ratio), reduced to the size of this call and the memory.

    The table was searched in bfloat16; float32 takes a third of the queries.
    """
    row = min(table(), key=lambda r: (abs(r["head_dim"] - dim), abs(math.log(r["tokens"] / keys))))
    q = row["q"] if jnp.dtype(dtype).itemsize <= 2 else max(row["q"] // 3 // LANES, 1) * LANES
    piece = min(row["slice"], round_up(keys, LANES))
    chunk = min(row["chunk"] // piece, max(keys // piece, 1)) * piece
    return fit_key_block(min(q, round_up(queries, LANES)), chunk, piece, keys, dim, dtype, with_lse)


def fit_key_block(
    q: int, chunk: int, piece: int, keys: int, dim: int, dtype: Any, with_lse: bool = False, key_buffers: int = 2
) -> TileSizes:
    """Tile sizes whose block of keys is as large as fast memory allows: all keys, or an equal part of them.

    q, chunk, piece: as q, chunk and slice of `TileSizes`. key_buffers: as for its `vmem`.
    """
    sizes = TileSizes(q, round_up(keys, LANES), chunk, piece)
    parts = 1
    while sizes.vmem(keys, dim, dtype, with_lse, key_buffers) > VMEM and sizes.kv > chunk:
        parts += 1
        sizes = replace(sizes, kv=round_up(-(-keys // parts), chunk))
    return sizes
