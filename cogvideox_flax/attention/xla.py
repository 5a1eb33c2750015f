"""Exact attention in plain XLA, blockwise in memory: runs anywhere, holds the score matrix of short sequences only.

Queries are taken in blocks, and each block sees all keys in blocks with a running maximum and sum (online softmax:
arXiv 1805.02867; memory-efficient attention: arXiv 2112.05682). On a CPU the maximum is that of the first keys, which
saves a pass over the scores, and runs only where others are so much larger that sums grow out of bounds. Short
sequences, whose scores fit in a cache, are one batched product.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from cogvideox_flax.layers import precision, round_up

TILE = 1024, 1024
"""Queries and keys of one tile of scores at most."""

CPU_TILE = 4608, 512
"""The same where one head is computed after another: 9 MiB. Measured best of 1024 to 4608 x 256 to 1024."""

BOUND = 2.0**60
"""Sums of 2^(score - that of a first key) up to here are taken as they are: their reciprocals are normal numbers."""

ALIGNED = 16
"""Rows and columns of a tile are a multiple of it: a vector of any CPU. The first keys' tile has what is left, too."""

SHORT = 512
"""Up to this many queries and keys, the scores of all heads are computed at once: at most 1 MiB a head."""

_NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)  # a logit that no key reaches; differences of it stay finite


def _heads_first(x: Float[Array, "B S N K"]) -> Float[Array, "BN S K"]:
    return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def _cut(
    x: Float[Array, " S *rest"], others: int, block: int
) -> tuple[Float[Array, " first *rest"], Float[Array, "others block *rest"]]:
    """The first tile along axis 0, and the others, which have this size."""
    first = x.shape[0] - others * block
    return x[:first], x[first:].reshape(others, block, *x.shape[1:])


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
    *,
    window: tuple[int, int] | None = None,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`."""
    if max(q.shape[1], k.shape[1]) <= SHORT:
        return _attend_short(q, k, v, kv_len, window)
    return _attend_blockwise(q, k, v, kv_len, window, q.dtype)[0]


def attend_part(
    q: Float[Array, "B Q N K"], k: Float[Array, "B S N K"], v: Float[Array, "B S N K"], kv_len: Int[Array, " B"]
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Attention to some of the keys, and how much they weigh: log2 of the sum of 2^score over them.

    Parts make the whole as their mean by 2^weight. kv_len is 1 or more.
    """
    return _attend_blockwise(q, k, v, kv_len, None, jnp.float32)


def _attend_blockwise(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
    window: tuple[int, int] | None,
    dtype: Any,
) -> tuple[Float[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """The result in `dtype`, and the weights of `attend_part`."""
    batch, queries, heads, dim = q.shape
    lengths = jnp.broadcast_to(jnp.int32(k.shape[1]) if kv_len is None else kv_len, (batch,)).repeat(heads)
    head = partial(_attend_head, masked=kv_len is not None or window is not None, window=window, dtype=dtype)
    running = partial(head, tile=CPU_TILE, leap=False)
    # with a derivative of its own: that of a leap would overflow where the leap did, and keep what either needs
    leaping = jax.custom_jvp(running if window is not None else partial(head, tile=CPU_TILE, leap=True))
    leaping.defjvp(partial(jax.jvp, running))
    out, weight = jax.lax.platform_dependent(
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        lengths,
        # one head's tiles stay in a CPU's cache; an accelerator wants all heads at once
        cpu=lambda *args: jax.lax.map(lambda a: leaping(*a), args),
        default=jax.vmap(partial(head, tile=TILE, leap=False)),
    )
    out = out.reshape(batch, heads, queries, dim).transpose(0, 2, 1, 3)
    return out, weight.reshape(batch, heads, queries).swapaxes(1, 2)


def _attend_head(
    q: Float[Array, "Q K"],
    k: Float[Array, "S K"],
    v: Float[Array, "S K"],
    length: Int[Array, ""],
    *,
    masked: bool,
    window: tuple[int, int] | None,
    dtype: Any,
    tile: tuple[int, int],
    leap: bool,
) -> tuple[Float[Array, "Q K"], Float32[Array, " Q"]]:
    """One head, tile by tile.

    leap: scores are first taken relative to the largest of the first tile, and the maximum runs only if sums of that
        exceed `BOUND`. Not for windows, which may hide all of the first tile, and not to be differentiated.
    """
    (queries, dim), keys = q.shape, len(k)
    # tiles alike, so that little is padding: of queries; keys have none, and so no mask, their first tile is larger
    q_block = round_up(-(-queries // -(-queries // tile[0])), ALIGNED)
    tiles = -(-keys // tile[1])
    kv_block = max(keys // tiles // ALIGNED, 1) * ALIGNED
    exact = precision(q.dtype)
    # 2^x is what the hardware has; the base change rides on the scale
    scale = math.log2(math.e) / math.sqrt(dim)
    firsts, rest = zip(*(_cut(x, tiles - 1, kv_block) for x in (k, v, jnp.arange(keys))), strict=True)

    def one_block(block: tuple[Array, Array]) -> tuple[Float[Array, "block K"], Float32[Array, " block"]]:
        q, first = block

        def scores_of(k: Array, position: Array) -> Float32[Array, "block keys"]:
            scores = scale * jnp.matmul(q, k.T, preferred_element_type=jnp.float32, precision=exact)
            if not masked:
                return scores
            valid = _attended(first + jnp.arange(q_block), position, length, window)
            return jnp.where(valid, scores, _NEVER)

        def weigh(scores: Array, top: Array, v: Array) -> tuple[Float32[Array, "block 1"], Float32[Array, "block K"]]:
            p = jnp.exp2(scores - top)
            pv = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=exact)
            return p.sum(-1, keepdims=True), pv

        def running() -> tuple[Array, Array, Array]:
            def add(carry: tuple[Array, Array, Array], kv: tuple[Array, Array, Array]) -> tuple[tuple, None]:
                top, *sums = carry
                k, v, position = kv
                scores = scores_of(k, position)
                new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
                fade = jnp.exp2(top - new_top)
                return (new_top, *(fade * a + b for a, b in zip(sums, weigh(scores, new_top, v), strict=True))), None

            zeros = jnp.zeros((q_block, 1), jnp.float32)
            start = zeros + _NEVER, zeros, jnp.zeros((q_block, dim), jnp.float32)
            return jax.lax.scan(add, add(start, firsts)[0], rest)[0]

        def leaping() -> tuple[Array, Array, Array]:
            k, v, position = firsts
            scores = scores_of(k, position)
            top = scores.max(-1, keepdims=True)

            def add(sums: tuple[Array, Array], kv: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
                k, v, position = kv
                return jax.tree.map(jnp.add, sums, weigh(scores_of(k, position), top, v)), None

            sums, _ = jax.lax.scan(add, weigh(scores, top, v), rest)
            fits = (sums[0] < BOUND).all() & jnp.isfinite(sums[1]).all()
            return jax.lax.cond(fits, lambda: (top, *sums), running)

        top, total, out = leaping() if leap else running()
        return (out / total).astype(dtype), (top + jnp.log2(total))[:, 0]

    blocks = jnp.pad(q, ((0, -queries % q_block), (0, 0))).reshape(-1, q_block, dim)
    out, weight = jax.lax.map(one_block, (blocks, q_block * jnp.arange(len(blocks))))
    return out.reshape(-1, dim)[:queries], weight.reshape(-1)[:queries]


def _attend_short(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
    window: tuple[int, int] | None,
) -> Float[Array, "B Q N K"]:
    """The same by its definition, heads beside the batch so that each product is of plain matrices."""
    exact = precision(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = jnp.matmul(q, k.swapaxes(2, 3), preferred_element_type=jnp.float32, precision=exact)
    scores = scores / math.sqrt(q.shape[-1])
    if kv_len is not None or window is not None:
        length = jnp.asarray(k.shape[2] if kv_len is None else kv_len[:, None, None, None])
        valid = _attended(jnp.arange(q.shape[2]), jnp.arange(k.shape[2]), length, window)
        scores = jnp.where(valid, scores, _NEVER)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.matmul(p, v, preferred_element_type=jnp.float32, precision=exact).astype(q.dtype).swapaxes(1, 2)


def _attended(
    query: Int[Array, " Q"], key: Int[Array, " S"], length: Int[Array, "*B"], window: tuple[int, int] | None
) -> Bool[Array, "*B Q S"]:
    """Which keys are real, and inside the query's window."""
    valid = key < length
    if window is None:
        return valid
    away = key - query[:, None]
    return valid & (away >= -window[0]) & (away <= window[1])
