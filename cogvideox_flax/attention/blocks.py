"""Tile sizes of the splash kernel: what they must satisfy, and the table that says which are best for a length."""

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

VMEM = 96 * 2**20
"""Bytes of fast memory that a kernel may plan with; the chips have 95 (v5p) to 128 MiB (v5e, v6e)."""

LANES = 128


@dataclass(frozen=True)
class Blocks:
    """Tile sizes, in tokens.

    q: queries that stay while all keys pass by.
    kv: keys that are fetched at a time; all of them, if they fit, are fetched once per head.
    chunk: keys whose work is scheduled as one run of straight code.
    slice: keys whose scores are held at a time.
    """

    q: int
    kv: int
    chunk: int
    slice: int

    def check(self, keys: int, dim: int, dtype: Any, part: bool = False) -> None:
        """Refuse sizes that cannot run; `part` as for `splash.attend_part`.

        Raises:
            InputError: they do not nest, do not fill registers, or need more memory than a chip has.
        """
        if min(self.q, self.kv, self.slice) < LANES or any(n % LANES for n in (self.q, self.kv, self.slice)):
            raise InputError(f"{self}: q, kv and slice must be multiples of {LANES}")
        if self.chunk % self.slice or self.chunk < self.slice:
            raise InputError(f"{self}: slice must divide chunk")
        if self.kv < keys and self.kv % self.chunk:
            raise InputError(f"{self}: chunk must divide kv where that is not all {keys} keys")
        need = self.vmem(keys, dim, dtype, part)
        if need > VMEM:
            raise InputError(
                f"{self} needs about {need / 2**20:.0f} MiB of fast memory at head size {dim}; "
                f"{VMEM // 2**20} MiB is the most: take smaller q or kv"
            )

    def vmem(self, keys: int, dim: int, dtype: Any, part: bool = False) -> int:
        """Bytes: every operand twice (one is fetched while the other is used), sums, and the scores of two slices."""
        each, dim, kv = jnp.dtype(dtype).itemsize, round_up(dim, 64), min(self.kv, round_up(keys, LANES))
        operands = 2 * 2 * dim * self.q + 2 * (dim + max(dim, LANES)) * kv
        more = 2 * self.q * ((4 - each) * dim + 4 * 8) if part else 0  # a float32 result, and its weight
        return each * operands + 4 * self.q * (dim + 16 + 2 * self.slice) + more

    def vmem_limit(self, keys: int, dim: int, dtype: Any, part: bool = False) -> int:
        """What to allow the compiler: the plan and as much again for what it spills, within the chip."""
        return min(VMEM, max(32 * 2**20, 2 * self.vmem(keys, dim, dtype, part)))


@cache
def table() -> tuple[dict[str, Any], ...]:
    """Rows of `blocks.json`: tokens and head_dim that were searched at, and the q, chunk and slice that won."""
    return tuple(json.loads(files(__package__).joinpath("blocks.json").read_text())["rows"])


def choose_blocks(queries: int, keys: int, dim: int, dtype: Any, part: bool = False) -> Blocks:
    """The tile sizes of the searched length nearest to `keys` in ratio, cut down to what this call fills and holds.

    Head sizes that were not searched take those of the nearest one; float32, which was not either, takes a third of
    the queries.
    """
    row = min(table(), key=lambda r: (abs(r["head_dim"] - dim), abs(math.log(r["tokens"] / keys))))
    q = row["q"] if jnp.dtype(dtype).itemsize <= 2 else max(row["q"] // 3 // LANES, 1) * LANES
    piece = min(row["slice"], round_up(keys, LANES))
    chunk = min(row["chunk"] // piece, max(keys // piece, 1)) * piece
    blocks = Blocks(min(q, round_up(queries, LANES)), round_up(keys, LANES), chunk, piece)
    parts = 1
    while blocks.vmem(keys, dim, dtype, part) > VMEM and blocks.kv > chunk:
        parts += 1
        blocks = replace(blocks, kv=round_up(-(-keys // parts), chunk))
    return blocks
