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

from cogvideox_flax.attention.bounds import MASKED
from cogvideox_flax.attention.tile_sizes import TileSizes
from cogvideox_flax.nn.layers import precision
from cogvideox_flax.nn.tpu import LANES

ONLINE, SHIFTED, BOUNDED = range(3)
"""Modes of a head; see `attention.splash`."""

ROW_SUM_LIMIT = 80.0
"""log2 of the largest row sum of a shifted head, in each of its eight parts: times a value, it fits float32."""

RESCALE_BY = 60.0
"""Row sums of a shifted head above 2^RESCALE_BY are multiplied by 2^-RESCALE_BY."""

SUBLANES = 8
"""Rows of a float32 register."""

AT_ONCE = 4
"""Slices of a list in one product: 384 keys alone leave a quarter of the matrix unit's rows empty."""


def kernel(
    tile_sizes: TileSizes,
    length_ref: Any,
    mode_ref: Any,
    row_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    *refs: Any,
) -> None:
    """The grid is heads, blocks of queries, blocks of keys.

    Refs: lengths, modes and rows of k [BN] in SMEM; q [1, K, q], k [1, kv, K], v [1, kv / 128, K, 128],
    out [1, K, q], and log_sum_exp [1, 1, q] if requested. Three scratch buffers carry state over the blocks of keys of
    one block of queries: sums [K, q], the unnormalised output; row_sum [8, q], the sum of the probabilities in eight
    parts; and reference [8, q], eight copies of the score that is subtracted, which a bounded head does not use.
    """
    *lse_ref, sums, row_sum, reference = refs
    head, j = pl.program_id(0), pl.program_id(2)
    mode = mode_ref[head]
    bounded = mode == BOUNDED
    length = length_ref[head] - j * tile_sizes.kv
    block = _Block(tile_sizes, length, q_ref, k_ref, v_ref, sums, row_sum, reference)

    @pl.when(j == 0)
    def _start() -> None:
        block.start()

        @pl.when(mode == SHIFTED)
        def _set_reference() -> None:
            reference[...] = jnp.broadcast_to(block.masked_scores(0).max(0, keepdims=True), reference.shape)

    # keys before `unmasked` run in chunks and slices without a mask; an online head has none of these
    last = jnp.clip(length, 0, tile_sizes.kv)
    unmasked = jnp.where(mode == ONLINE, 0, last // LANES * LANES)

    @pl.when(bounded)
    def _bounded() -> None:
        block.loop_over_keys(unmasked, last, block.add_bounded, block.add_masked)

    @pl.when(jnp.logical_not(bounded))
    def _not_bounded() -> None:
        block.loop_over_keys(unmasked, last, block.add_shifted, block.add_online)

    @pl.when(j == pl.num_programs(2) - 1)
    def _finish() -> None:
        denominator = block.finish(out_ref)
        for ref in lse_ref:
            ref[0] = math.log2(math.e) * jnp.log(denominator) + jnp.where(bounded, 0.0, reference[:1])


def sparse_kernel(
    tile_sizes: TileSizes,
    length_ref: Any,
    mode_ref: Any,
    row_ref: Any,
    lists_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    *scratch: Any,
) -> None:
    """`kernel`, but of the slices of keys in a list; a head's mode is bounded or online.

    lists [1, 1, 1, 2 parts + 1 + n] in SMEM: where the list of each block of keys begins in the n slices, and where the
    last one ends; where in each the slices end that are attended whole; and the slices, ascending.
    """
    head, j, parts = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    bounded = mode_ref[head] == BOUNDED
    block = _Block(tile_sizes, length_ref[head] - j * tile_sizes.kv, q_ref, k_ref, v_ref, *scratch)
    begin, end, whole = (lists_ref[0, 0, 0, at] for at in (j, j + 1, parts + 1 + j))
    piece = tile_sizes.slice

    pl.when(j == 0)(block.start)

    def slice_at(n: Any) -> Any:
        return pl.multiple_of(lists_ref[0, 0, 0, 2 * parts + 1 + n] * piece - j * tile_sizes.kv, piece)

    def in_groups(first: Any, add: Callable[[Any, None], None]) -> None:
        """Adds the slices from the first on, up to their length, LANES keys at a time."""

        def add_slice(n: Any, _: None) -> None:
            at = slice_at(n)
            count = jnp.clip(block.length - at, 0, piece)
            jax.lax.fori_loop(at // LANES, at // LANES + pl.cdiv(count, LANES), add, None)

        jax.lax.fori_loop(first, end, add_slice, None)

    @pl.when(bounded)
    def _bounded() -> None:
        together = (whole - begin) // AT_ONCE

        def add(n: Any, _: None) -> None:
            block.add_slices([slice_at(begin + n * AT_ONCE + i) for i in range(AT_ONCE)])

        jax.lax.fori_loop(0, together, add, None)
        rest = begin + together * AT_ONCE
        jax.lax.fori_loop(rest, whole, lambda n, _: block.add_slices([slice_at(n)]), None)
        in_groups(whole, block.add_masked)

    @pl.when(jnp.logical_not(bounded))
    def _online() -> None:
        in_groups(begin, block.add_online)

    @pl.when(j == parts - 1)
    def _finish() -> None:
        block.finish(out_ref)


@dataclass(frozen=True)
class _Block:
    """The refs of one grid step. length: attended keys, counted from the start of this block."""

    tile_sizes: TileSizes
    length: Any
    q_ref: Any
    k_ref: Any
    v_ref: Any
    sums: Any
    row_sum: Any
    reference: Any

    def start(self) -> None:
        """Nothing is summed yet."""
        self.sums[...] = jnp.zeros_like(self.sums)
        self.row_sum[...] = jnp.zeros_like(self.row_sum)
        self.reference[...] = jnp.full_like(self.reference, MASKED)

    def finish(self, out_ref: Any) -> Float[Array, "1 q"]:
        """Writes the normalised output; returns the sums of the probabilities."""
        denominator = self.row_sum[...].sum(0, keepdims=True)
        out_ref[0] = (self.sums[...] / denominator).astype(out_ref.dtype)
        return denominator

    def loop_over_keys(self, unmasked: Any, last: Any, add: Callable[[Any, int], None], add_tail: Callable) -> None:
        """Calls add(start, count) for all keys before `unmasked`, chunk by chunk and then slice by slice, and
        add_tail(n, None) for every group n of LANES keys from there to `last`."""
        chunk, piece = self.tile_sizes.chunk, self.tile_sizes.slice

        def run_all(start: Any, count: int) -> None:
            n = jnp.maximum(unmasked - start, 0) // count
            jax.lax.fori_loop(0, n, lambda n, _: add(pl.multiple_of(start + n * count, count), count), None)

        chunks = unmasked // chunk * chunk
        slices = chunks + (unmasked - chunks) // piece * piece
        run_all(0, chunk)
        if piece < chunk:
            run_all(chunks, piece)
        jax.lax.fori_loop(slices // LANES, pl.cdiv(last, LANES), add_tail, None)

    def add_bounded(self, at: Any, count: int) -> None:
        """Adds `count` unmasked keys, with nothing subtracted."""
        self.sums[...], self.row_sum[...] = self._accumulate(at, count, None)

    def add_slices(self, starts: list[Any]) -> None:
        """Adds slices of unmasked keys, with nothing subtracted."""
        keys, values = zip(*(self._keys_and_values(at, self.tile_sizes.slice) for at in starts), strict=True)
        p = jnp.exp2(_dot(jnp.concatenate([ref[...] for ref in keys]), self.q_ref[0]))
        out, part = _values_and_row_sum([ref[t] for ref in values for t in range(ref.shape[0])], p)
        self.sums[...] += out
        self.row_sum[...] += part

    def add_masked(self, n: Any, _: None) -> None:
        """Adds LANES keys with a mask, with nothing subtracted."""
        at = pl.multiple_of(n * LANES, LANES)
        out, part = _values_and_row_sum(self._keys_and_values(at, LANES)[1], jnp.exp2(self.masked_scores(at)))
        self.sums[...] += out
        self.row_sum[...] += part

    def add_shifted(self, at: Any, count: int) -> None:
        """Adds `count` unmasked keys relative to the reference; with a running maximum if the sums grow too large."""
        sums, row_sum, reference = self.sums, self.row_sum, self.reference
        out, part = self._accumulate(at, count, reference[:1])
        fits = part.max() < 2.0**ROW_SUM_LIMIT

        @pl.when(fits)
        def _accept() -> None:
            rescale_by = jnp.where(part.sum(0, keepdims=True) > 2.0**RESCALE_BY, RESCALE_BY, 0.0)
            rescale = jnp.exp2(-rescale_by)
            sums[...] = rescale * out
            row_sum[...] = rescale * part
            reference[...] += rescale_by

        @pl.when(jnp.logical_not(fits))
        def _recompute() -> None:
            jax.lax.fori_loop(at // LANES, (at + count) // LANES, self.add_online, None)

    def add_online(self, n: Any, _: None) -> None:
        """Adds LANES keys with a mask and a running maximum."""
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
        """The scores of LANES keys; MASKED for those that are not attended."""
        s = _dot(self._keys_and_values(at, LANES)[0][...], self.q_ref[0])
        key = at + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
        return jnp.where(key < self.length, s, MASKED)

    def _accumulate(self, at: Any, count: int, relative_to: Float[Array, "1 q"] | None) -> tuple[Array, Array]:
        """sums and row_sum after adding `count` unmasked keys, slice by slice, relative to these scores (None: 0)."""
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
    """The sum of values weighted by p, and the sum of p in eight parts."""
    v = jnp.concatenate([values[t] for t in range(p.shape[0] // LANES)], 1)
    return _dot(v, p.astype(v.dtype)), p.reshape(-1, SUBLANES, p.shape[-1]).sum(0)


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    return jax.lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=precision(a.dtype), preferred_element_type=jnp.float32
    )
