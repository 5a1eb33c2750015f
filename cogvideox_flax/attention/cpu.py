"""Exact attention on a CPU: a block of queries sees all keys at once, in as many scores as a cache holds.

Operations on little are dear here, since each is handed to all threads and waited for, so there is no loop over keys.
Nor is there a pass over the scores for their maximum: they are taken relative to |q| max |k|, which none exceeds
(Cauchy and Schwarz). Where that is too far above them for float32, the block is done again with the maximum.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.attention.masks import NEVER, attended
from cogvideox_flax.layers import precision, round_up

TILE = 2**22
"""Scores held at a time: 16 MiB in float32."""

ROWS = 128
"""Queries of a block at least, so that products stay products of matrices."""

ALIGNED = 16
"""The queries of a block are a multiple of it: a vector of any CPU."""

LEAST = 2.0**-60
"""Sums of 2^(score - bound) from here on are taken as they are: little is lost in such differences, and what counts in
the sums is normal numbers."""


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
    *,
    window: tuple[int, int] | None,
    dtype: Any,
) -> tuple[Float[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """The result in `dtype`, and the weights of `xla.attend_part`."""
    batch, queries, heads, dim = q.shape
    keys = k.shape[1]
    blocks = -(-queries // max(TILE // keys, ROWS))
    rows = round_up(-(-queries // blocks), ALIGNED)
    group = max(n for n in range(1, heads + 1) if n == 1 or (heads % n == 0 and n * blocks * rows * keys <= TILE))

    def groups(x: Float[Array, "B S N K"]) -> Float[Array, "groups group S K"]:
        return x.transpose(0, 2, 1, 3).reshape(-1, group, x.shape[1], dim)

    by_maximum = partial(_attend_group, rows=rows, window=window, bounded=False)
    # float16 has no numbers as small as a bound makes them, and a window may hide all keys from a row of padding
    bounded = window is None and v.dtype != jnp.float16
    # with a derivative of its own: that of a bounded block would lose what is far below the bound
    one_group = jax.custom_jvp(partial(_attend_group, rows=rows, window=window, bounded=bounded))
    one_group.defjvp(partial(jax.jvp, by_maximum))
    lengths = None if kv_len is None else kv_len.repeat(heads // group)
    out, weight = jax.lax.map(lambda args: one_group(*args), (groups(q), groups(k), groups(v), lengths))
    out = out.reshape(batch, heads, queries, dim).transpose(0, 2, 1, 3).astype(dtype)
    return out, weight.reshape(batch, heads, queries).swapaxes(1, 2)


def _attend_group(
    q: Float[Array, "G Q K"],
    k: Float[Array, "G S K"],
    v: Float[Array, "G S K"],
    length: Int[Array, ""] | None,
    *,
    rows: int,
    window: tuple[int, int] | None,
    bounded: bool,
) -> tuple[Float32[Array, "G Q K"], Float32[Array, "G Q"]]:
    """Some heads of one batch element, block by block of so many queries."""
    (group, queries, dim), keys = q.shape, k.shape[1]
    exact = precision(q.dtype)
    # 2^x is what the hardware has; the base change rides on the scale
    scale = math.log2(math.e) / math.sqrt(dim)
    bound = scale * _norms(q) * _norms(k).max(1, keepdims=True)

    # written as columns: XLA would have the product with rows of bfloat16 in float32
    columns = jax.lax.optimization_barrier(k.swapaxes(1, 2))

    def one_block(block: tuple[Array, Array, Array]) -> tuple[Float32[Array, "G rows K"], Float32[Array, "G rows"]]:
        q, bound, first = block

        def scores() -> Float32[Array, "G rows S"]:
            # the barriers here keep XLA from giving all of this to the library of its products, whose 2^x is slow
            plain = jnp.matmul(q, columns, preferred_element_type=jnp.float32, precision=exact)
            plain = scale * jax.lax.optimization_barrier(plain)
            if length is None and window is None:
                return plain
            real = jnp.int32(keys) if length is None else length
            return jnp.where(attended(first + jnp.arange(rows), jnp.arange(keys), real, window), plain, NEVER)

        def relative_to(top: Float32[Array, "G rows 1"], scores: Array) -> tuple[Array, Array, Array]:
            p = jax.lax.optimization_barrier(jnp.exp2(scores - top))
            pv = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=exact)
            return top, p.sum(-1, keepdims=True), pv

        def relative_to_maximum() -> tuple[Array, Array, Array]:
            found = scores()
            # its own derivative is not left out: it takes up what rounding leaves of the row's, whose sum is 0
            return relative_to(found.max(-1, keepdims=True), found)

        if bounded:
            sums = relative_to(bound, scores())
            top, total, out = jax.lax.cond((sums[1] >= LEAST).all(), lambda: sums, relative_to_maximum)
        else:
            top, total, out = relative_to_maximum()
        return out / total, (top + jnp.log2(total))[..., 0]

    def blocks(x: Float[Array, "G Q n"]) -> Float[Array, "blocks G rows n"]:
        padded = jnp.pad(x, ((0, 0), (0, -queries % rows), (0, 0)))
        return jax.lax.optimization_barrier(padded.reshape(group, -1, rows, x.shape[-1]).swapaxes(0, 1))

    out, weight = jax.lax.map(one_block, (blocks(q), blocks(bound), jnp.arange(0, queries, rows)))
    out, weight = out.swapaxes(0, 1).reshape(group, -1, dim), weight.swapaxes(0, 1).reshape(group, -1)
    return out[:, :queries], weight[:, :queries]


def _norms(x: Float[Array, "G S K"]) -> Float32[Array, "G S 1"]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1, keepdims=True))
