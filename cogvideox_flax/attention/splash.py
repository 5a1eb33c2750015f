"""Exact attention as a Pallas TPU kernel, for the long, full attention of video transformers.

The scores of a tile are K·Qᵀ, keys down the sublanes and queries along the lanes, so that sums over keys are additions
of whole registers. Values come transposed too and Vᵀ·P gathers the output, of which a head fills 64 rows and not half
of 128 lanes. Softmax is base 2, in float32; scale and log2(e) ride on the queries.

Keys past their length are never attended. Chunks and slices of keys that all queries see run without any mask; what is
left at a ragged end goes in pieces of 128 keys with one.

Softmax is the same relative to any reference, and float32 holds 2^-126 to 2^127, so most heads need no running maximum.
Each head runs in one of three modes, which its numbers choose (`_modes`). Scores here are base 2, and no score is
larger than max |q| max |k| (Cauchy-Schwarz):

* bounded: relative to 0. Scores are at most 100, no sum of values passes 2^126, and a million products that underflow
  do not show in any channel. So it is where queries and keys are normalised, as CogVideoX's are.
* referred: relative to each query's largest score among the first keys. If a chunk's sum then passes 2^80, its work is
  dropped and the chunk is done again with a running maximum; past 2^60, all is scaled down by that much. Scores are at
  most 2^17, so that a score as it is among other keys in a product differs by 1 at most; values are below 2^40.
* online: relative to a running maximum, taken anew for every 128 keys. For all else: no probability exceeds 1.

So the kernel serves all that `attend` says, and only scores and values of a kind that no model is known to have cost
more than a subtraction. Scaled queries are rounded to their dtype, so in bfloat16 a score is known to 2^-9 of |q| |k|.

Sources: online softmax (arXiv 1805.02867), FlashAttention-2 (arXiv 2307.08691), splash attention in jax (the grid).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.attention.blocks import LANES, Blocks, choose_blocks
from cogvideox_flax.attention.bounds import min_nonzero, norms
from cogvideox_flax.attention.gradient import Static, with_plain_gradient
from cogvideox_flax.attention.masks import NEVER
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision

DTYPES = (jnp.bfloat16, jnp.float32)
"""What the compiler for TPUs takes in a kernel. In float16, bounded probabilities would overflow, too."""

ONLINE, REFERRED, BOUNDED = range(3)
"""Modes of a head; see above."""

BOUND = 100.0
"""Scores, in powers of 2, up to which a head may be bounded: 2^100 times a million keys is a float32, and so is 2^-100.
"""

LARGEST_SUM = 126.0
"""Power of 2 of what sums of a bounded head's values may reach."""

REFERRED_BOUND = 2.0**17
"""Scores up to which a head may be referred."""

REFERRED_VALUE = 2.0**40
"""Values below which a head may be referred."""

FITS = 80.0
"""Power of 2 below which sums of a referred head are kept, in each of eight parts: times its values, a float32."""

STEP = 60.0
"""Powers of 2 by which sums of a referred head that have grown past that are scaled down."""

NAME = "cogvideox_splash"

_SUBLANES = 8  # of a float32 register

Window = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is known of a call before it runs."""

    blocks: Blocks
    window: Window | None
    first: int
    """Number of the first query."""

    def key_blocks(self, keys: int) -> int:
        """Blocks of keys that one block of queries may have to see."""
        count = pl.cdiv(keys, self.blocks.kv)
        if self.window is None:
            return count
        return min(count, pl.cdiv(self.blocks.q + sum(self.window), self.blocks.kv) + 1)

    def first_key_block(self, i: Any) -> Any:
        """The first block of keys that query block i sees."""
        if self.window is None:
            return 0
        return jnp.maximum(self.first + i * self.blocks.q - self.window[0], 0) // self.blocks.kv

    def seen(self, i: Any, length: Any) -> tuple[Any, Any, Any, Any]:
        """Keys [first, last) that some query of block i attends, and [low, high) that all of them do."""
        if self.window is None:
            return 0, length, 0, length
        left, right = self.window
        start = self.first + i * self.blocks.q
        end = start + self.blocks.q
        first, last = jnp.maximum(start - left, 0), jnp.minimum(end + right, length)
        return first, last, jnp.maximum(end - 1 - left, 0), jnp.minimum(start + right + 1, length)

    def __call__(
        self,
        length_ref: Any,
        mode_ref: Any,
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        out_ref: Any,
        *refs: Any,
    ) -> None:
        """One block of queries against one block of keys.

        Refs: lengths and modes [BN] in SMEM; q [1, K, q], k [1, kv, K], v [1, kv / 128, K, 128], out [1, K, q], and
        where the keys are a part, weight [1, 1, q]. Over the blocks of keys of one block of queries, sums [K, q] holds
        the unnormalised output, row_sum [8, q] the sum of the probabilities in eight parts, and reference [8, q] the
        score that both are relative to, eight times; a bounded head has none.
        """
        *weight_ref, sums, row_sum, reference = refs
        size, chunk, piece = self.blocks.kv, self.blocks.chunk, self.blocks.slice
        head, i, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        mode, length = mode_ref[head], length_ref[head]
        bounded = mode == BOUNDED
        origin = (self.first_key_block(i) + j) * size

        def part_of(at: Any, count: int) -> tuple[Any, Any]:
            """Refs of `count` keys and their values."""
            return k_ref.at[0, pl.ds(at, count)], v_ref.at[0, pl.ds(at // LANES, count // LANES)]

        def masked_scores(at: Any) -> Float[Array, "LANES q"]:
            s = _dot(part_of(at, LANES)[0][...], q_ref[0])
            key = origin + at + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
            valid = key < length
            if self.window is not None:
                query = self.first + i * self.blocks.q + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
                valid &= (key >= query - self.window[0]) & (key <= query + self.window[1])
            return jnp.where(valid, s, NEVER)

        def gather(values: Any, p: Float[Array, "count q"]) -> tuple[Float[Array, "K q"], Float[Array, "8 q"]]:
            v = jnp.concatenate([values[t] for t in range(p.shape[0] // LANES)], 1)
            return _dot(v, p.astype(v.dtype)), p.reshape(-1, _SUBLANES, p.shape[-1]).sum(0)

        def online(n: Any, _: None) -> None:
            """LANES keys, masked, with a running maximum."""
            at = pl.multiple_of(n * LANES, LANES)
            s = masked_scores(at)
            new_max = jnp.maximum(reference[:1], s.max(0, keepdims=True))
            rescale = jnp.exp2(reference[:1] - new_max)
            out, part = gather(part_of(at, LANES)[1], jnp.exp2(s - new_max))
            sums[...] = rescale * sums[...] + out
            row_sum[...] = rescale * row_sum[...] + part
            reference[...] = jnp.broadcast_to(new_max, reference.shape)

        def masked(n: Any, _: None) -> None:
            """LANES keys, masked, relative to 0."""
            at = pl.multiple_of(n * LANES, LANES)
            out, part = gather(part_of(at, LANES)[1], jnp.exp2(masked_scores(at)))
            sums[...] += out
            row_sum[...] += part

        def plain(at: Any, count: int, relative_to: Float[Array, "1 q"] | None) -> tuple[Array, Array]:
            """The sums with `count` more keys in slices, unmasked, relative to these scores (None is 0)."""
            keys, values = part_of(at, count)
            out, part = sums[...], row_sum[...]
            for offset in range(0, count, piece):
                s = _dot(keys[offset : offset + piece], q_ref[0])
                p = jnp.exp2(s if relative_to is None else s - relative_to)
                more, more_part = gather(values.at[offset // LANES : (offset + piece) // LANES], p)
                out, part = out + more, part + more_part
            return out, part

        def free(at: Any, count: int) -> None:
            sums[...], row_sum[...] = plain(at, count, None)

        def referred(at: Any, count: int) -> None:
            out, part = plain(at, count, reference[:1])
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
                jax.lax.fori_loop(at // LANES, (at + count) // LANES, online, None)

        def each(f: Callable[[Any, int], None], start: Any, count: int, end: Any) -> None:
            """f at start, start + count, ... as long as all of it lies before the end."""
            n = jnp.maximum(end - start, 0) // count
            aligned = LANES if self.window is not None else count
            jax.lax.fori_loop(0, n, lambda n, _: f(pl.multiple_of(start + n * count, aligned), count), None)

        @pl.when(j == 0)
        def _start() -> None:
            sums[...] = jnp.zeros_like(sums)
            row_sum[...] = jnp.zeros_like(row_sum)
            reference[...] = jnp.full_like(reference, NEVER)

            @pl.when((mode == REFERRED) & (self.window is None))  # in a window, a maximum may run first
            def _refer() -> None:
                reference[...] = jnp.broadcast_to(masked_scores(0).max(0, keepdims=True), reference.shape)

        first, last, low, high = (jnp.clip(x - origin, 0, size) for x in self.seen(i, length))
        low = pl.cdiv(low, LANES) * LANES
        high = jnp.where(mode == ONLINE, low, jnp.maximum(high // LANES * LANES, low))
        slices = low + (high - low) // chunk * chunk
        pieces = slices + (high - slices) // piece * piece
        if self.window is not None:
            jax.lax.fori_loop(first // LANES, jnp.minimum(low // LANES, pl.cdiv(last, LANES)), online, None)
        for wanted, f, rest in ((bounded, free, masked), (jnp.logical_not(bounded), referred, online)):

            @pl.when(wanted)
            def _run(f: Callable[[Any, int], None] = f, rest: Callable[[Any, None], None] = rest) -> None:
                each(f, low, chunk, high)
                if piece < chunk:
                    each(f, slices, piece, high)
                jax.lax.fori_loop(pieces // LANES, pl.cdiv(last, LANES), rest, None)

        @pl.when(j == pl.num_programs(2) - 1)
        def _finish() -> None:
            whole = row_sum[...].sum(0, keepdims=True)
            out_ref[0] = (sums[...] / whole).astype(out_ref.dtype)
            for ref in weight_ref:
                ref[0] = math.log2(math.e) * jnp.log(whole) + jnp.where(bounded, 0.0, reference[:1])


def why_not(q: Float[Array, "B Q N K"]) -> str | None:
    """Why the kernel does not serve these queries, or None if it does."""
    return None if q.dtype in DTYPES else f"it computes in bfloat16 or float32; got {q.dtype}"


def _modes(
    scaled: Float32[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    values: Float[Array, "BN k s"],
    lengths: Int[Array, " B"],
    window: Window | None,
) -> Int32[Array, " BN"]:
    """How each head runs; see the top of this file. Keys past their length do not count.

    values: the values as `_columns`, so that their largest are found as they are laid out for the kernel.
    """
    heads = k.shape[2]
    real = jnp.arange(k.shape[1]) < lengths[:, None]
    bound = (norms(scaled).max(1) * jnp.where(real[..., None], norms(k), 0).max(1)).reshape(-1)
    real = jnp.arange(values.shape[-1]) < lengths.repeat(heads)[:, None]
    by_channel = jnp.where(real[:, None], jnp.abs(values), 0).max(-1)
    value = by_channel.max(-1).astype(jnp.float32)
    # a million products of 2^-bound and a value underflow together to 2^-26 of a channel's largest
    bounded = (bound <= BOUND + jnp.minimum(jnp.log2(min_nonzero(by_channel)), 0)) & (window is None)
    bounded &= bound + jnp.log2(value) + math.log2(k.shape[1]) <= LARGEST_SUM
    referred = (bound <= REFERRED_BOUND) & (value < REFERRED_VALUE)
    return jnp.where(bounded, BOUNDED, jnp.where(referred, REFERRED, ONLINE)).astype(jnp.int32)


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    return jax.lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=precision(a.dtype), preferred_element_type=jnp.float32
    )


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
    *,
    window: Window | None = None,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`.

    The gradient is that of the plain XLA form, computed anew.

    Args:
        q, k, v: bfloat16 or float32.
        blocks: tile sizes; None takes them from the table that `python -m benchmarks.attention --search` writes.
        interpret: run on any device, slowly.

    Raises:
        InputError: another dtype, or blocks that do not fit together or into the chip's fast memory, with the numbers.
    """
    lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32) if kv_len is None else kv_len
    return _attend(Static(window, blocks, interpret, is_part=False), q, k, v, lengths)[0]


def attend_part(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"],
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Attention to some of the keys, and how much they weigh; see `xla.attend_part`. Errors as for `attend`."""
    out, weight = _attend(Static(None, blocks, interpret, is_part=True), q, k, v, kv_len)
    return out, weight


@with_plain_gradient
def _attend(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[Array, ...]:
    """The result, and of a part its weight."""
    window, blocks, interpret, is_part = static
    if reason := why_not(q):
        raise InputError(f"attention backend 'splash': {reason}. Take 'auto', or another dtype")
    batch, queries, heads, dim = q.shape
    blocks = blocks or choose_blocks(queries, k.shape[1], dim, q.dtype, is_part)
    blocks.check(k.shape[1], dim, q.dtype, is_part)

    scaled = q.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(dim))
    values = _columns(v, blocks.kv)
    scalars = kv_len.repeat(heads), _modes(scaled, k, values, kv_len, window)
    keys = _columns(k, blocks.kv).swapaxes(1, 2), _tiles(values)

    def some(first: int, last: int, width: int) -> list[Array]:
        pairs = batch * heads * (last - first) * k.shape[1]
        cost = pl.CostEstimate(
            flops=4 * pairs * dim,
            transcendentals=pairs,
            bytes_accessed=2 * batch * heads * (last - first + k.shape[1]) * dim * q.dtype.itemsize,
        )
        call = _call(dataclasses.replace(blocks, q=width), window, first, k.shape[1], cost, interpret, is_part)
        found = call(*scalars, _columns(scaled[:, first:last].astype(q.dtype), width), *keys)
        return [x[:, :dim, : last - first] for x in found]

    parts, first = [], 0
    for count, width in query_parts(queries, blocks.q):
        parts.append(some(first, first + count, width))
        first += count
    out, *weight = (jnp.concatenate(x, -1).reshape(batch, heads, -1, queries) for x in zip(*parts, strict=True))
    return out.transpose(0, 3, 1, 2), *(w[:, :, 0].swapaxes(1, 2) for w in weight)


def query_parts(queries: int, block: int) -> list[tuple[int, int]]:
    """(queries, block) of the kernels that serve them: a last block that is far from full goes by itself, narrower."""
    whole = queries // block * block
    rest = -(-(queries - whole) // LANES) * LANES
    if whole == 0 or rest > 0.75 * block:
        return [(queries, min(block, -(-queries // LANES) * LANES))]
    return [(whole, block)] + ([(queries - whole, rest)] if rest else [])


def _call(
    blocks: Blocks,
    window: Window | None,
    first: int,
    keys: int,
    cost: pl.CostEstimate,
    interpret: bool,
    is_part: bool,
) -> Callable[..., list[Float[Array, "BN K q"]]]:
    """The kernel for queries from number `first` on.

    It takes lengths and modes [BN], q [BN, K, Q], k [BN, S, K] and v [BN, S / 128, K, 128], and gives the result; of
    a part in float32, with its weight [BN, 1, Q].
    """
    kernel = _Kernel(blocks, window, first)
    last_block = pl.cdiv(keys, blocks.kv) - 1

    def key_block(i: Any, j: Any) -> Any:
        return jnp.minimum(kernel.first_key_block(i) + j, last_block)

    def call(lengths: Array, modes: Array, q: Array, k: Array, v: Array) -> list[Array]:
        heads, dim, queries = q.shape
        q_spec = pl.BlockSpec((1, dim, blocks.q), lambda n, i, j, *_: (n, 0, i))
        return pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32 if is_part else q.dtype)]
            + [jax.ShapeDtypeStruct((heads, 1, queries), jnp.float32)] * is_part,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(heads, queries // blocks.q, kernel.key_blocks(keys)),
                in_specs=[
                    q_spec,
                    pl.BlockSpec((1, blocks.kv, dim), lambda n, i, j, *_: (n, key_block(i, j), 0)),
                    pl.BlockSpec((1, blocks.kv // LANES, dim, LANES), lambda n, i, j, *_: (n, key_block(i, j), 0, 0)),
                ],
                out_specs=[q_spec] + [pl.BlockSpec((1, 1, blocks.q), lambda n, i, j, *_: (n, 0, i))] * is_part,
                scratch_shapes=[
                    pltpu.VMEM((dim, blocks.q), jnp.float32),
                    pltpu.VMEM((_SUBLANES, blocks.q), jnp.float32),
                    pltpu.VMEM((_SUBLANES, blocks.q), jnp.float32),
                ],
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=blocks.vmem_limit(keys, dim, q.dtype, is_part),
            ),
            cost_estimate=cost,
            interpret=interpret,
            name=NAME,
        )(lengths, modes, q, k, v)

    return call


def _columns(x: Float[Array, "B S N K"], multiple: int) -> Float[Array, "BN k s"]:
    """One matrix per head, tokens along the lanes; zeros fill up tokens to the multiple and K to whole registers."""
    batch, tokens, heads, dim = x.shape
    x = x.transpose(0, 2, 3, 1).reshape(batch * heads, dim, tokens)
    return jnp.pad(x, ((0, 0), (0, -dim % 64), (0, -tokens % multiple)))


def _tiles(x: Float[Array, "BN k s"]) -> Float[Array, "BN t k LANES"]:
    """Cut into squares that lie whole in memory, so that their addresses are plain."""
    return x.reshape(*x.shape[:2], -1, LANES).swapaxes(1, 2)
