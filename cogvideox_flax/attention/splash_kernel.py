"""The body of the splash kernel: one block of queries of a head against one block of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from cogvideox_flax.attention.bounds import NEVER
from cogvideox_flax.attention.tile_sizes import LANES, TileSizes
from cogvideox_flax.nn.layers import precision

ONLINE, REFERRED, BOUNDED = range(3)
"""Modes of a head; see `attention.splash`."""

FITS = 80.0
"""Power of 2 below which a referred head keeps its row sums, in each of eight parts: times its values, a float32."""

STEP = 60.0
"""Row sums of a referred head above 2^STEP are scaled down by that much."""

SUBLANES = 8
"""Rows of a float32 register."""


def kernel(
    tile_sizes: TileSizes, length_ref: Any, mode_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, *refs: Any
) -> None:
    """The grid is heads, blocks of queries, blocks of keys.

    Refs: lengths and modes [BN] in SMEM; q [1, K, q], k [1, kv, K], v [1, kv / 128, K, 128], out [1, K, q], and
    log_sum_exp [1, 1, q] if wanted. Three more keep their contents over the blocks of keys of one block of queries:
    sums [K, q], the unnormalised output; row_sum [8, q], the sum of the probabilities in eight parts; and reference [8,
    q], the score that both are relative to, eight times, which a bounded head does not use.
    """
    *lse_ref, sums, row_sum, reference = refs
    head, j = pl.program_id(0), pl.program_id(2)
    mode = mode_ref[head]
    bounded = mode == BOUNDED
    length = length_ref[head] - j * tile_sizes.kv
    block = _Block(tile_sizes, length, q_ref, k_ref, v_ref, sums, row_sum, reference)

    @pl.when(j == 0)
    def _start() -> None:
        sums[...] = jnp.zeros_like(sums)
        row_sum[...] = jnp.zeros_like(row_sum)
        reference[...] = jnp.full_like(reference, NEVER)

        @pl.when(mode == REFERRED)
        def _set_reference() -> None:
            reference[...] = jnp.broadcast_to(block.masked_scores(0).max(0, keepdims=True), reference.shape)

    # chunks and slices of keys that are all attended run without a mask, not so in an online head
    last = jnp.clip(length, 0, tile_sizes.kv)
    unmasked = jnp.where(mode == ONLINE, 0, last // LANES * LANES)

    @pl.when(bounded)
    def _bounded() -> None:
        block.walk(unmasked, last, block.add_bounded, block.add_masked)

    @pl.when(jnp.logical_not(bounded))
    def _not_bounded() -> None:
        block.walk(unmasked, last, block.add_referred, block.add_online)

    @pl.when(j == pl.num_programs(2) - 1)
    def _finish() -> None:
        whole = row_sum[...].sum(0, keepdims=True)
        out_ref[0] = (sums[...] / whole).astype(out_ref.dtype)
        for ref in lse_ref:
            ref[0] = math.log2(math.e) * jnp.log(whole) + jnp.where(bounded, 0.0, reference[:1])


@dataclass(frozen=True)
class _Block:
    """The refs of one grid step; length: keys from the start of this block on that are attended."""

    tile_sizes: TileSizes
    length: Any
    q_ref: Any
    k_ref: Any
    v_ref: Any
    sums: Any
    row_sum: Any
    reference: Any

    def walk(self, unmasked: Any, last: Any, add: Callable[[Any, int], None], add_lanes: Callable) -> None:
        """add(start, count) for all keys before `unmasked`, by chunk and then by slice; add_lanes(n, None) for the n-th
        LANES keys of the rest before `last`."""
        chunk, piece = self.tile_sizes.chunk, self.tile_sizes.slice

        def each(start: Any, count: int) -> None:
            n = jnp.maximum(unmasked - start, 0) // count
            jax.lax.fori_loop(0, n, lambda n, _: add(pl.multiple_of(start + n * count, count), count), None)

        chunks = unmasked // chunk * chunk
        slices = chunks + (unmasked - chunks) // piece * piece
        each(0, chunk)
        if piece < chunk:
            each(chunks, piece)
        jax.lax.fori_loop(slices // LANES, pl.cdiv(last, LANES), add_lanes, None)

    def add_bounded(self, at: Any, count: int) -> None:
        """`count` keys, unmasked, relative to 0."""
        self.sums[...], self.row_sum[...] = self._with_more(at, count, None)

    def add_masked(self, n: Any, _: None) -> None:
        """LANES keys, masked, relative to 0."""
        at = pl.multiple_of(n * LANES, LANES)
        out, part = _values_and_row_sum(self._keys_and_values(at, LANES)[1], jnp.exp2(self.masked_scores(at)))
        self.sums[...] += out
        self.row_sum[...] += part

    def add_referred(self, at: Any, count: int) -> None:
        """`count` keys, unmasked, relative to the reference; again with a running maximum where sums grow too large."""
        sums, row_sum, reference = self.sums, self.row_sum, self.reference
        out, part = self._with_more(at, count, reference[:1])
        fits = part.max() < 2.0**FITS

        @pl.when(fits)
        def _keep() -> None:
            down = jnp.where(part.sum(0, keepdims=True) > 2.0**STEP, STEP, 0.0)
            rescale = jnp.exp2(-down)
            sums[...] = rescale * out
            row_sum[...] = rescale * part
            reference[...] += down

        @pl.when(jnp.logical_not(fits))
        def _again() -> None:
            jax.lax.fori_loop(at // LANES, (at + count) // LANES, self.add_online, None)

    def add_online(self, n: Any, _: None) -> None:
        """LANES keys, masked, with a running maximum."""
        sums, row_sum, reference = self.sums, self.row_sum, self.reference
        at = pl.multiple_of(n * LANES, LANES)
        s = self.masked_scores(at)
        new_max = jnp.maximum(reference[:1], s.max(0, keepdims=True))
        rescale = jnp.exp2(reference[:1] - new_max)
        out, part = _values_and_row_sum(self._keys_and_values(at, LANES)[1], jnp.exp2(s - new_max))
        sums[...] = rescale * sums[...] + out
        row_sum[...] = rescale * row_sum[...] + part
        reference[...] = jnp.broadcast_to(new_max, reference.shape)

    def masked_scores(self, at: Any) -> Float[Array, "LANES q"]:
        """Of LANES keys; NEVER for those that are not attended."""
        s = _dot(self._keys_and_values(at, LANES)[0][...], self.q_ref[0])
        key = at + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
        return jnp.where(key < self.length, s, NEVER)

    def _with_more(self, at: Any, count: int, relative_to: Float[Array, "1 q"] | None) -> tuple[Array, Array]:
        """sums and row_sum with `count` more keys in slices, unmasked, relative to these scores (None is 0)."""
        keys, values = self._keys_and_values(at, count)
        out, part = self.sums[...], self.row_sum[...]
        piece = self.tile_sizes.slice
        for offset in range(0, count, piece):
            s = _dot(keys[offset : offset + piece], self.q_ref[0])
            p = jnp.exp2(s if relative_to is None else s - relative_to)
            more, more_part = _values_and_row_sum(values.at[offset // LANES : (offset + piece) // LANES], p)
            out, part = out + more, part + more_part
        return out, part

    def _keys_and_values(self, at: Any, count: int) -> tuple[Any, Any]:
        """Refs of `count` keys and their values."""
        return self.k_ref.at[0, pl.ds(at, count)], self.v_ref.at[0, pl.ds(at // LANES, count // LANES)]


def _values_and_row_sum(values: Any, p: Float[Array, "count q"]) -> tuple[Float[Array, "K q"], Float[Array, "8 q"]]:
    """The values weighted by p, and the sum of p in eight parts."""
    v = jnp.concatenate([values[t] for t in range(p.shape[0] // LANES)], 1)
    return _dot(v, p.astype(v.dtype)), p.reshape(-1, SUBLANES, p.shape[-1]).sum(0)


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    return jax.lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=precision(a.dtype), preferred_element_type=jnp.float32
    )
