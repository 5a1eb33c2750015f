"""Exact attention on a CPU: a block of queries against all keys, with as many scores as a cache holds.

Small operations are expensive on a CPU, since each is distributed over all threads, so there is no loop over keys. Nor
is there a pass over the scores for their maximum: scores are taken relative to |q| max |k|, which none exceeds (the
Cauchy-Schwarz bound). Where that bound is too far above the scores for float32, the head is computed again with the
maximum.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from cogvideox_flax.attention.bounds import NEVER, min_nonzero, norms
from cogvideox_flax.nn.layers import precision, round_up

TILE = 2**22
"""Scores held at a time: 16 MiB in float32."""

ROWS = 128
"""The least queries of a block, so that products stay matrix products."""

ALIGNED = 16
"""The queries of a block are a multiple of it, a vector of any CPU."""

MIN_ROW_SUM = 2.0**-60
"""The least sum of 2^(score - bound) for which the bound is accurate: the terms that matter are normal numbers."""

MIN_ROW_SUM_TIMES_VALUE = 2.0**-80
"""The same for that sum times the largest value of a channel: a million products below 2^-126, which count as 0, add up
to at most 2^-26 of it."""

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

    # relative to a bound, probabilities may be smaller than float16 holds
    one_head = jax.custom_jvp(partial(_attend_head, rows=rows, bounded=v.dtype != jnp.float16))
    # the derivative of a bounded head would lose terms far below the bound
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
    """One head of one batch element, in blocks of `rows` queries; `bounded`: relative to a bound where that is
    exact."""
    (queries, dim), keys = q.shape, len(k)
    # 2^x is what the hardware has; the base change rides on the scale
    scale = math.log2(math.e) / math.sqrt(dim)
    # transposed in memory: XLA would compute a product with untransposed bfloat16 keys in float32
    head = _Head(jax.lax.optimization_barrier(k.T), v, length, scale)
    is_real = jnp.arange(keys) < (keys if length is None else length)
    # above every score however the products are rounded: by dim 2^-24 of |q| |k|, and the norms by as much
    bound = scale * (1 + dim * 2.0**-22) * norms(q)[:, None] * jnp.where(is_real, norms(k), 0).max()

    def blocks(x: Float[Array, "Q n"]) -> Float[Array, "blocks rows n"]:
        padded = jnp.pad(x, ((0, -queries % rows), (0, 0)))
        return jax.lax.optimization_barrier(padded.reshape(-1, rows, x.shape[-1]))

    operands = blocks(q), blocks(bound)
    if bounded:
        found = jax.lax.map(head.relative_to_bound, operands)
        value = min_nonzero(jnp.where(is_real[:, None], jnp.abs(v), 0).max(0))
        exact = (found[1] >= jnp.maximum(MIN_ROW_SUM, MIN_ROW_SUM_TIMES_VALUE / value)).all()
        found = jax.lax.cond(exact, lambda: found, lambda: jax.lax.map(head.relative_to_maximum, operands))
    else:
        found = jax.lax.map(head.relative_to_maximum, operands)
    reference, row_sum, out = (x.reshape(-1, x.shape[-1])[:queries] for x in found)
    return out / row_sum, (reference + jnp.log2(row_sum))[:, 0]


class _Head(NamedTuple):
    """The keys and values of a head. Barriers keep XLA from handing softmax to its matrix library, whose 2^x is
    slow."""

    columns: Float[Array, "K S"]
    v: Float[Array, "S K"]
    length: Int[Array, ""] | None
    scale: float

    def relative_to_maximum(self, block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Of a block of queries: what the sums are relative to, the sums of the probabilities, and those of values."""
        q, _ = block
        products = self._products(q)
        # the maximum has its derivative: it compensates rounding in the gradient of a row, whose sum is 0
        row_max = products.max(-1, keepdims=True)
        # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
        return self.scale * row_max, *self._sums(jnp.exp2(self.scale * (products - row_max)))

    def relative_to_bound(self, block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """As `relative_to_maximum`, without a pass for the maximum."""
        q, bound = block
        scores = self.scale * self._products(q) - bound
        return bound, *self._sums(_exp2_bfloat16(scores) if self.v.dtype == jnp.bfloat16 else jnp.exp2(scores))

    def _products(self, q: Float[Array, "rows K"]) -> Float32[Array, "rows S"]:
        products = jnp.matmul(q, self.columns, preferred_element_type=jnp.float32, precision=precision(q.dtype))
        products = jax.lax.optimization_barrier(products)
        if self.length is None:
            return products
        return jnp.where(jnp.arange(products.shape[-1]) < self.length, products, NEVER)

    def _sums(self, p: Float[Array, "rows S"]) -> tuple[Float32[Array, "rows 1"], Float32[Array, "rows K"]]:
        p, v = jax.lax.optimization_barrier(p), self.v
        pv = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=precision(v.dtype))
        return p.sum(-1, keepdims=True, dtype=jnp.float32), pv


def _exp2_bfloat16(x: Float32[Array, "*any"]) -> BFloat16[Array, "*any"]:
    """2^x for x up to 127, rounded; 0 from -127 down.

    A Taylor polynomial between -1/2 and 1/2, with relative error 5e-5, and the exponent added to the bits: less work
    than XLA's own with its rounding, and one pass over the scores.
    """
    x = jnp.maximum(x, -127)
    whole = jnp.round(x)
    rest, power = x - whole, jnp.float32(EXP2_COEFFICIENTS[0])
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = power * rest + coefficient
    bits = jax.lax.bitcast_convert_type(power, jnp.int32) + (whole.astype(jnp.int32) << 23)
    nearest = (bits + (1 << 15)) >> 16
    return jax.lax.bitcast_convert_type(nearest.astype(jnp.int16), jnp.bfloat16)
