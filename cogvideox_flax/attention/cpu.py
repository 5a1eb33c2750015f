"""Exact attention on a CPU: a block of queries sees all keys at once, in as many scores as a cache holds.

Operations on little are dear here, since each is handed to all threads and waited for, so there is no loop over keys.
Nor is there a pass over the scores for their maximum: they are taken relative to |q| max |k|, which none exceeds
(Cauchy and Schwarz). Where that is too far above them for float32, or for the values, the head is done again with the
maximum.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from cogvideox_flax.attention.bounds import min_nonzero, norms
from cogvideox_flax.attention.masks import NEVER, attended
from cogvideox_flax.nn.layers import precision, round_up

TILE = 2**22
"""Scores held at a time: 16 MiB in float32."""

ROWS = 128
"""Queries of a block at least, so that products stay products of matrices."""

ALIGNED = 16
"""The queries of a block are a multiple of it: a vector of any CPU."""

LEAST = 2.0**-60
"""Sums of 2^(score - bound) from here on are taken as they are: little is lost in such differences, and what counts in
the sums is normal numbers."""

LEAST_TIMES_VALUE = 2.0**-80
"""The same of these sums times the largest value of a channel: a million products that count as 0, being below 2^-126,
are together no more than 2^-26 of that."""

EXP2_FACTORS = [math.log(2) ** n / math.factorial(n) for n in range(4, -1, -1)]
"""Those of 2^x by powers of x, the highest first."""


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

    def heads_first(x: Float[Array, "B S N K"]) -> Float[Array, "heads S K"]:
        return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], dim)

    by_maximum = partial(_attend_head, rows=rows, window=window, bounded=False)
    # float16 has no numbers as small as a bound makes them, and a window may hide all keys from a row of padding
    bounded = window is None and v.dtype != jnp.float16
    # with a derivative of its own: that of a bounded head would lose what is far below the bound
    one_head = jax.custom_jvp(partial(_attend_head, rows=rows, window=window, bounded=bounded))
    one_head.defjvp(partial(jax.jvp, by_maximum))
    lengths = None if kv_len is None else kv_len.repeat(heads)
    out, weight = jax.lax.map(lambda args: one_head(*args), (heads_first(q), heads_first(k), heads_first(v), lengths))
    out = out.reshape(batch, heads, queries, dim).transpose(0, 2, 1, 3).astype(dtype)
    return out, weight.reshape(batch, heads, queries).swapaxes(1, 2)


def _attend_head(
    q: Float[Array, "Q K"],
    k: Float[Array, "S K"],
    v: Float[Array, "S K"],
    length: Int[Array, ""] | None,
    *,
    rows: int,
    window: tuple[int, int] | None,
    bounded: bool,
) -> tuple[Float32[Array, "Q K"], Float32[Array, " Q"]]:
    """One head of one batch element, block by block of so many queries."""
    (queries, dim), keys = q.shape, len(k)
    exact = precision(q.dtype)
    # 2^x is what the hardware has; the base change rides on the scale
    scale = math.log2(math.e) / math.sqrt(dim)
    # written as columns: XLA would have the product with rows of bfloat16 in float32
    columns = jax.lax.optimization_barrier(k.T)
    real = jnp.int32(keys) if length is None else length

    def products(q: Float[Array, "rows K"], first: Int[Array, ""]) -> Float32[Array, "rows S"]:
        # the barriers here keep XLA from giving all of this to the library of its products, whose 2^x is slow
        found = jnp.matmul(q, columns, preferred_element_type=jnp.float32, precision=exact)
        found = jax.lax.optimization_barrier(found)
        if length is None and window is None:
            return found
        return jnp.where(attended(first + jnp.arange(rows), jnp.arange(keys), real, window), found, NEVER)

    def sums(p: Float[Array, "rows S"]) -> tuple[Float32[Array, "rows 1"], Float32[Array, "rows K"]]:
        p = jax.lax.optimization_barrier(p)
        pv = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=exact)
        return p.sum(-1, keepdims=True, dtype=jnp.float32), pv

    def relative_to_maximum(block: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, _, first = block
        found = products(q, first)
        # its own derivative is not left out: it takes up what rounding leaves of the row's, whose sum is 0
        top = found.max(-1, keepdims=True)
        # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
        return scale * top, *sums(jnp.exp2(scale * (found - top)))

    def relative_to_bound(block: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, bound, first = block
        below = scale * products(q, first) - bound
        return bound, *sums(_exp2_bfloat16(below) if v.dtype == jnp.bfloat16 else jnp.exp2(below))

    def blocks(x: Float[Array, "Q n"]) -> Float[Array, "blocks rows n"]:
        padded = jnp.pad(x, ((0, -queries % rows), (0, 0)))
        return jax.lax.optimization_barrier(padded.reshape(-1, rows, x.shape[-1]))

    is_real = jnp.arange(keys) < real
    # above every score however the products are rounded: by dim 2^-24 of |q| |k|, and the norms by as much
    bound = scale * (1 + dim * 2.0**-22) * norms(q)[:, None] * jnp.where(is_real, norms(k), 0).max()
    operands = blocks(q), blocks(bound), jnp.arange(0, queries, rows)
    if bounded:
        found = jax.lax.map(relative_to_bound, operands)
        value = min_nonzero(jnp.where(is_real[:, None], jnp.abs(v), 0).max(0))
        kept = (found[1] >= jnp.maximum(LEAST, LEAST_TIMES_VALUE / value)).all()
        found = jax.lax.cond(kept, lambda: found, lambda: jax.lax.map(relative_to_maximum, operands))
    else:
        found = jax.lax.map(relative_to_maximum, operands)
    top, total, out = (x.reshape(-1, x.shape[-1])[:queries] for x in found)
    return out / total, (top + jnp.log2(total))[:, 0]


def _exp2_bfloat16(x: Float32[Array, "*any"]) -> BFloat16[Array, "*any"]:
    """2^x for x up to 127, rounded; 0 from -127 down.

    By Taylor's polynomial between -1/2 and 1/2, to 5e-5 of itself, and the exponent set by its bits: less work than
    XLA's own and its rounding, and one pass over the scores.
    """
    x = jnp.maximum(x, -127)
    whole = jnp.round(x)
    rest, power = x - whole, jnp.float32(EXP2_FACTORS[0])
    for factor in EXP2_FACTORS[1:]:
        power = power * rest + factor
    bits = jax.lax.bitcast_convert_type(power, jnp.int32) + (whole.astype(jnp.int32) << 23)
    nearest = (bits + (1 << 15)) >> 16
    return jax.lax.bitcast_convert_type(nearest.astype(jnp.int16), jnp.bfloat16)
