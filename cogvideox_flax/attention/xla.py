"""Exact attention in plain XLA, for every platform.

Long sequences are computed in tiles of queries and keys with a running maximum and sum (online softmax: arXiv
1805.02867; memory-efficient attention: arXiv 2112.05682). Short sequences are one batched product with a full score
matrix. On a CPU, `attention.cpu` computes all but the smallest products.

The gradient recomputes tile by tile (`jax.checkpoint`), so it holds no more scores than the result does.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.attention import cpu
from cogvideox_flax.attention.bounds import MASKED
from cogvideox_flax.attention.tile_lists import TileLists
from cogvideox_flax.nn.layers import precision, round_up
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.scopes import runs_in

TILE = 1024, 1024
"""The maximum queries and keys of one tile of scores."""

ALIGNED = 16
"""Rows and columns of a tile are a multiple of this, the longest vector of any CPU; the first tile of keys also takes
the remainder."""

SHORT = 512
"""Up to this many queries and keys, the scores of all heads are computed at once: at most 1 MiB a head."""


def _split_first_tile(
    x: Float[Array, " S *rest"], others: int, block: int
) -> tuple[Float[Array, " first *rest"], Float[Array, "others block *rest"]]:
    """The first tile along axis 0, and the others, of size `block`."""
    first = x.shape[0] - others * block
    return x[:first], x[first:].reshape(others, block, *x.shape[1:])


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`."""
    short = max(q.shape[1], k.shape[1]) <= SHORT
    if short and math.prod(q.shape[:3]) * k.shape[1] <= cpu.TILE:
        return dense(q, k, v, kv_len)
    return by_platform(
        *(q, k, v, kv_len),
        cpu=lambda *args: cpu.attend(*args, dtype=q.dtype)[0],
        default=dense if short else lambda *args: tiled(*args, dtype=q.dtype)[0],
    )


def attend_to_first(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, ""],
    *,
    share: float,
) -> Float[Array, "B Q N K"]:
    """`attend` to the first `kv_len` keys of a buffer: tiles of keys past them are left out, but
    for a CPU and short buffers, where they are masked.

    share: of the keys that are attended in the mean over all calls, for `plan`.
    """

    def masked(q: Array, k: Array, v: Array, kv_len: Array) -> Array:
        return attend(q, k, v, jnp.full(len(q), kv_len))

    if max(q.shape[1], k.shape[1]) <= SHORT:
        return masked(q, k, v, kv_len)
    return by_platform(
        *(q, k, v, kv_len), cpu=masked, default=lambda *args: tiled(*args, dtype=q.dtype, share=share)[0]
    )


def attend_with_lse(
    q: Float[Array, "B Q N K"], k: Float[Array, "B S N K"], v: Float[Array, "B S N K"], kv_len: Int[Array, " B"]
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Attention in float32, and log_sum_exp in base 2: log2 of the sum over keys of 2^(log2(e) q k^T / sqrt(K)).

    The mean of several such results, weighted by 2^log_sum_exp, is attention to all their keys (ring attention).
    kv_len is 1 or more.
    """
    on_cpu, default = (partial(form, dtype=jnp.float32) for form in (cpu.attend, tiled))
    return by_platform(q, k, v, kv_len, cpu=on_cpu, default=default)


def tiled(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, "*B"] | None,
    *,
    dtype: Any,
    share: float | None = None,
) -> tuple[Float[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """All heads, tile by tile with a running maximum: the result in `dtype`, and log_sum_exp.

    share: as for `attend_to_first`, with one kv_len for the batch; None leaves no tile out.
    """
    batch, queries, heads, dim = q.shape

    def heads_first(x: Float[Array, "B S N K"]) -> Float[Array, "BN S K"]:
        return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], dim)

    lengths: Any = jnp.int32(k.shape[1]) if kv_len is None else kv_len
    if share is None:
        lengths = jnp.broadcast_to(lengths, (batch,)).repeat(heads)
    one_head = partial(_attend_head, masked=kv_len is not None, dtype=dtype, share=share)
    # with a length for each head, a choice would become a selection between two results
    each_head = jax.vmap(one_head, (0, 0, 0, 0 if share is None else None))
    out, log_sum_exp = each_head(heads_first(q), heads_first(k), heads_first(v), lengths)
    out = out.reshape(batch, heads, queries, dim).transpose(0, 2, 1, 3)
    return out, log_sum_exp.reshape(batch, heads, queries).swapaxes(1, 2)


def _attend_head(
    q: Float[Array, "Q K"],
    k: Float[Array, "S K"],
    v: Float[Array, "S K"],
    length: Int[Array, ""],
    *,
    masked: bool,
    dtype: Any,
    share: float | None,
) -> tuple[Float[Array, "Q K"], Float32[Array, " Q"]]:
    (queries, dim), keys = q.shape, len(k)
    # Tiles of queries have equal sizes, which keeps padding small. Keys are not padded, so they need no mask: the first
    # tile is larger instead.
    q_block = round_up(-(-queries // -(-queries // TILE[0])), ALIGNED)
    tiles = -(-keys // TILE[1])
    kv_block = max(keys // tiles // ALIGNED, 1) * ALIGNED
    exact = precision(q.dtype)
    # hardware computes 2^x: log2(e) is folded into the scale
    scale = math.log2(math.e) / math.sqrt(dim)
    parts = k, v, jnp.arange(keys)
    firsts, rest = zip(*(_split_first_tile(x, tiles - 1, kv_block) for x in parts), strict=True)
    starts = rest[2][:, 0]

    def attend_block(q: Float[Array, "block K"]) -> tuple[Float[Array, "block K"], Float32[Array, " block"]]:
        def add(carry: tuple[Array, Array, Array], kv: tuple[Array, Array, Array]) -> tuple[tuple, None]:
            running_max, row_sum, out = carry
            k, v, position = kv
            products = jnp.matmul(q, k.T, preferred_element_type=jnp.float32, precision=exact)
            if masked:
                products = jnp.where(position < length, products, MASKED)
            new_max = jnp.maximum(running_max, products.max(-1, keepdims=True))
            # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
            rescale = jnp.exp2(scale * (running_max - new_max))
            p = jnp.exp2(scale * (products - new_max))
            pv = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=exact)
            return (new_max, rescale * row_sum + p.sum(-1, keepdims=True), rescale * out + pv), None

        def add_if_attended(carry: tuple[Array, Array, Array], start: Int[Array, ""]) -> tuple[tuple, None]:
            assert share is not None

            def attended() -> tuple[Array, Array, Array]:
                # slices of the buffer: as values of a scan, all but the first tile would be copied before it
                k, v, position = (jax.lax.dynamic_slice_in_dim(x, start, kv_block) for x in parts)
                return add(carry, (k, v, position))[0]

            with runs_in(share):
                return jax.lax.cond(start < length, attended, lambda: carry), None

        zeros = jnp.zeros((q_block, 1), jnp.float32)
        nothing = zeros + MASKED, zeros, jnp.zeros((q_block, dim), jnp.float32)
        step, each = (add, rest) if share is None else (add_if_attended, starts)
        step = jax.checkpoint(step, prevent_cse=False)
        running_max, row_sum, out = jax.lax.scan(step, add(nothing, firsts)[0], each)[0]
        return (out / row_sum).astype(dtype), (scale * running_max + jnp.log2(row_sum))[:, 0]

    blocks = jnp.pad(q, ((0, -queries % q_block), (0, 0))).reshape(-1, q_block, dim)
    out, log_sum_exp = jax.lax.map(jax.checkpoint(attend_block, prevent_cse=False), blocks)
    return out.reshape(-1, dim)[:queries], log_sum_exp.reshape(-1)[:queries]


def dense(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
) -> Float[Array, "B Q N K"]:
    """`attend` by its definition, as batched matrix products over batch and heads."""
    exact = precision(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    products = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32, precision=exact)
    if kv_len is not None:
        products = jnp.where(jnp.arange(k.shape[2]) < kv_len[:, None, None, None], products, MASKED)
    # relative to the maximum before they are scaled, as in `tiled`
    p = jnp.exp((products - jax.lax.stop_gradient(products.max(-1, keepdims=True))) / math.sqrt(q.shape[-1]))
    # no jax.nn.softmax: with its own maximum, libtpu 0.0.42 fuses three products and overflows its stack
    p = (p / p.sum(-1, keepdims=True)).astype(v.dtype)
    return jnp.matmul(p, v, preferred_element_type=jnp.float32, precision=exact).astype(q.dtype).swapaxes(1, 2)


def attend_to_listed(
    size: int,
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    lists: TileLists,
    kv_len: Int32[Array, " B"],
) -> Float[Array, "B Q N K"]:
    """See `sparse_tiles.attend_to_listed`: head by head, and one tile of queries after the other. size: of a tile."""
    batch, _, heads, dim = q.shape

    def in_tiles(x: Float[Array, "B S N K"]) -> Float[Array, "BN s size K"]:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0))).swapaxes(1, 2)
        return x.reshape(batch * heads, -1, size, dim)

    def one_head(args: tuple[Array, ...]) -> Array:
        q, k, v, tiles, counts, length = args

        def one_tile(args: tuple[Array, ...]) -> Array:
            q, tiles, count = args
            at = tiles[:, None] * size + jnp.arange(size)
            attended = (jnp.arange(len(tiles)) < count)[:, None] & (at < length)
            s = jnp.einsum("qd,msd->qms", q, k[tiles], preferred_element_type=jnp.float32, precision=precision(q.dtype))
            s = jnp.where(attended, s, MASKED).reshape(size, -1)
            p = jnp.exp((s - s.max(-1, keepdims=True)) / math.sqrt(dim))
            p = (p / p.sum(-1, keepdims=True)).astype(v.dtype)
            values = v[tiles].reshape(-1, dim)
            return jnp.matmul(p, values, preferred_element_type=jnp.float32, precision=precision(q.dtype))

        return jax.lax.map(jax.checkpoint(one_tile, prevent_cse=False), (q, tiles, counts)).astype(q.dtype)

    by_head = [x.reshape(batch * heads, *x.shape[2:]) for x in lists]
    out = jax.lax.map(one_head, (*map(in_tiles, (q, k, v)), *by_head, kv_len.repeat(heads)))
    return out.reshape(batch, heads, -1, dim).swapaxes(1, 2)
