"""Exact attention on a CPU: one block of queries against all keys, with as many scores as a cache holds.

A CPU distributes each operation over all threads, which makes small operations expensive, so there is no loop over
keys. Softmax subtracts |q| max |k|, an upper bound of the scores (Cauchy-Schwarz), which saves the pass over the scores
for their maximum. Where the bound is too far above the scores for float32, the head is computed again with the maximum.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from cogvideox_flax.attention.bounds import MASKED, min_nonzero, norms
from cogvideox_flax.nn.layers import precision, round_up

TILE = 2**22
"""Scores in memory at a time: 16 MiB in float32."""

ROWS = 128
"""The minimum number of queries in a block, so that products stay matrix products."""

ALIGNED = 16
"""The number of queries in a block is a multiple of this, the longest vector of any CPU."""

MIN_ROW_SUM = 2.0**-60
"""The smallest row sum of 2^(score - bound) that is accurate: the terms that matter are normal numbers."""

MIN_ROW_SUM_TIMES_VALUE = 2.0**-80
"""The same limit for the row sum times a channel's largest value: a million products below 2^-126, which count as 0,
add up to at most 2^-26 of it."""

EXP2_COEFFICIENTS = [math.log(2) ** n / math.factorial(n) for n in range(4, -1, -1)]
"""Taylor coefficients of 2^x, the highest power first."""


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
    *,
    dtype: Any,
) -> tuple[Float[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """The result in `dtype`, and log_sum_exp as `xla.attend_with_lse`."""
    batch, queries, heads, dim = q.shape
    keys = k.shape[1]
    blocks = -(-queries // max(TILE // keys, ROWS))
    rows = round_up(-(-queries // blocks), ALIGNED)

    def heads_first(x: Float[Array, "B S N K"]) -> Float[Array, "heads S K"]:
        return x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], dim)

    # relative to the bound, probabilities may underflow in float16
    one_head = jax.custom_jvp(partial(_attend_head, rows=rows, bounded=v.dtype != jnp.float16))
    # the derivative needs the maximum: relative to the bound, small terms would be lost
    one_head.defjvp(partial(jax.jvp, partial(_attend_head, rows=rows, bounded=False)))
    lengths = None if kv_len is None else kv_len.repeat(heads)
    operands = *map(heads_first, (q, k, v)), lengths
    out, log_sum_exp = jax.lax.map(lambda args: one_head(*args), operands)
    out = out.reshape(batch, heads, queries, dim).transpose(0, 2, 1, 3).astype(dtype)
    return out, log_sum_exp.reshape(batch, heads, queries).swapaxes(1, 2)


def _attend_head(
    q: Float[Array, "Q K"],
    k: Float[Array, "S K"],
    v: Float[Array, "S K"],
    length: Int[Array, ""] | None,
    *,
    rows: int,
    bounded: bool,
) -> tuple[Float32[Array, "Q K"], Float32[Array, " Q"]]:
    """One head of one batch element, in blocks of `rows` queries. bounded: subtract the bound where that is exact."""
    (queries, dim), keys = q.shape, len(k)
    # hardware computes 2^x: log2(e) is folded into the scale
    scale = math.log2(math.e) / math.sqrt(dim)
    # transposed in memory: XLA would compute a product with untransposed bfloat16 keys in float32
    head = _Head(jax.lax.optimization_barrier(k.T), v, length, scale)
    is_real = jnp.arange(keys) < (keys if length is None else length)
    # above every score, also after rounding: products err by dim 2^-24 of |q| |k|, and so do the norms
    bound = scale * (1 + dim * 2.0**-22) * norms(q)[:, None] * jnp.where(is_real, norms(k), 0).max()

    def blocks(x: Float[Array, "Q n"]) -> Float[Array, "blocks rows n"]:
        padded = jnp.pad(x, ((0, -queries % rows), (0, 0)))
        return jax.lax.optimization_barrier(padded.reshape(-1, rows, x.shape[-1]))

    operands = blocks(q), blocks(bound)
    # the gradient recomputes the scores of each block, which would otherwise all be held; those of one block are
    by_maximum = head.relative_to_maximum
    if len(operands[0]) > 1:
        by_maximum = jax.checkpoint(by_maximum, prevent_cse=False)
    if bounded:
        found = jax.lax.map(head.relative_to_bound, operands)
        value = min_nonzero(jnp.where(is_real[:, None], jnp.abs(v), 0).max(0))
        exact = (found[1] >= jnp.maximum(MIN_ROW_SUM, MIN_ROW_SUM_TIMES_VALUE / value)).all()
        found = jax.lax.cond(exact, lambda: found, lambda: jax.lax.map(by_maximum, operands))
    else:
        found = jax.lax.map(by_maximum, operands)
    reference, row_sum, out = (x.reshape(-1, x.shape[-1])[:queries] for x in found)
    return out / row_sum, (reference + jnp.log2(row_sum))[:, 0]


class _Head(NamedTuple):
    """The keys and values of a head. The barriers keep XLA from fusing softmax into its matrix library, whose 2^x is
    slow."""

    columns: Float[Array, "K S"]
    v: Float[Array, "S K"]
    length: Int[Array, ""] | None
    scale: float

    def relative_to_maximum(self, block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """For a block of queries: the maximum score, the row sums of probabilities, and the sums of values."""
        q, _ = block
        products = self._products(q)
        # the maximum is differentiated: that compensates rounding in the gradient of a row, whose sum is 0
        row_max = products.max(-1, keepdims=True)
        # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
        return self.scale * row_max, *self._sums(jnp.exp2(self.scale * (products - row_max)))

    def relative_to_bound(self, block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """As `relative_to_maximum`, with the bound in place of the maximum."""
        q, bound = block
        scores = self.scale * self._products(q) - bound
        return bound, *self._sums(_exp2_bfloat16(scores) if self.v.dtype == jnp.bfloat16 else jnp.exp2(scores))

    def _products(self, q: Float[Array, "rows K"]) -> Float32[Array, "rows S"]:
        products = jnp.matmul(q, self.columns, preferred_element_type=jnp.float32, precision=precision(q.dtype))
        products = jax.lax.optimization_barrier(products)
        if self.length is None:
            return products
        return jnp.where(jnp.arange(products.shape[-1]) < self.length, products, MASKED)

    def _sums(self, p: Float[Array, "rows S"]) -> tuple[Float32[Array, "rows 1"], Float32[Array, "rows K"]]:
        p, v = jax.lax.optimization_barrier(p), self.v
        pv = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=precision(v.dtype))
        return p.sum(-1, keepdims=True, dtype=jnp.float32), pv


def _exp2_bfloat16(x: Float32[Array, "*any"]) -> BFloat16[Array, "*any"]:
    """2^x rounded, for x up to 127; 0 for x of -127 and below.

    A Taylor polynomial between -1/2 and 1/2, with relative error 5e-5; the exponent is added to the bits. Cheaper than
    XLA's 2^x with its rounding, and one pass over the scores.
    """
    x = jnp.maximum(x, -127)
    whole = jnp.round(x)
    rest, power = x - whole, jnp.float32(EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = power * rest + coefficient
    bits = jax.lax.bitcast_convert_type(power, jnp.int32) + (whole.astype(jnp.int32) << 23)
    nearest = (bits + (1 << 15)) >> 16
    return jax.lax.bitcast_convert_type(nearest.astype(jnp.int16), jnp.bfloat16)
