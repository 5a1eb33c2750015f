"""The gradient of the splash kernel, as a Pallas TPU kernel: one pass over the keys, and five products for each block.

The forward kernel leaves its result O and L, the log_sum_exp of each query in base 2, so probabilities are recomputed
without a running maximum. With Q' the queries as it scales and rounds them, G the gradient of O and g that of L:

    P = 2^(Q' K^T - L)                      D = sum over channels of G O, less g / ln 2
    dV = P^T G     dZ = P (G V^T - D)       dK = ln 2 dZ^T Q'     dQ = dZ K / sqrt(head size)

All operands have channels along the sublanes and tokens along the lanes; blocks have keys along the sublanes and
queries along the lanes, so that keys and values, whose rows go through the matrix unit, are transposed once for each
block of them. The channels of a head fill a part of the matrix unit's rows, so the same products also subtract L and D
and mask keys: further channels of the queries have L, and those of the keys have -1. The kernel adds the latter where
it transposes keys and values.

The products before P and dZ have many rows for each matrix that the unit holds, and those after have only the channels
of a head: there the unit waits for the next matrix. So a block is computed in pieces, and the last three products of a
piece beside the first two of a later one, which hide that wait.

All queries of a head stay in fast memory with the sums of their gradients, to which each block of keys adds in place.
Where so many queries do not fit, they are split over several calls, each of which adds to the gradients of keys and
values of the one before. P and dZ are rounded to the dtype of the queries, and sums are float32.

Sources: FlashAttention-2 (arXiv 2307.08691), section 3.1.2; splash attention in jax has one pass too, with the sums for
the queries in main memory, once for each block of keys.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from cogvideox_flax.attention.bounds import MASKED
from cogvideox_flax.nn.layers import precision, round_up
from cogvideox_flax.nn.tpu import LANES

NAME = "cogvideox_splash_backward"

QUERIES, KEYS = 1280, 1024
"""The most tokens of a block: the last pieces of a block have no later one, so a large one is better, by the static
schedule for a v6e chip."""

FLOAT32_QUERIES = 512
"""The same in float32, whose products are six of bfloat16 each: more of them take minutes to compile."""

PIECE = 256
"""The queries and the keys of a piece: the sides of a v6e's matrix unit."""

LATER = 2
"""How many pieces later the last three products come, by the same schedule."""

PARTS = 3
"""Numbers of bfloat16 whose sum is one of float32."""

EXTRA = 16
"""Further channels, which fill a register in bfloat16: L or D in its parts, and the mask of the keys."""

VMEM, SPILLED = 60 * 2**20, 8 * 2**20
"""Bytes of fast memory that the kernel may use, of 64 MiB on a v5p chip; and of those, for what the compiler spills."""


@dataclass(frozen=True)
class Blocks:
    """In tokens.

    q: queries in one loop body.
    kv: keys in a block.
    queries: those of one call, whole blocks.
    calls: how many there are.
    """

    q: int
    kv: int
    queries: int
    calls: int

    @staticmethod
    def choose(queries: int, keys: int, dim: int, dtype: Any) -> Blocks:
        """As few calls as fast memory allows."""
        each, rows = jnp.dtype(dtype).itemsize, round_up(dim, 64)
        count = -(-queries // (QUERIES if each == 2 else FLOAT32_QUERIES))
        q, kv = round_up(-(-queries // count), PIECE), min(KEYS, round_up(keys, LANES))
        # two buffers of keys, values and their gradients, which may be float32; sums of the latter; attended keys;
        # transposed keys and values; scores of the pieces on the way
        of_block = kv * ((2 * 2 + 1) * each + 2 * (2 * 4 + 4)) * rows
        of_block += kv * 2 * each * round_up(rows + EXTRA, LANES) + (LATER + 1) * PIECE**2 * (2 * 4 + 2 * each)
        of_query = 2 * each * (rows + EXTRA) + (each + 4) * rows  # queries and G; dQ and its sum
        blocks = -(-queries // q)
        calls = -(-blocks // max((VMEM - SPILLED - of_block) // (of_query * q), 1))
        return Blocks(q, kv, q * -(-blocks // calls), calls)


def gradients(
    q: Float[Array, "BN K Q"],
    k: Float[Array, "BN K S"],
    v: Float[Array, "BN K S"],
    lengths: Int32[Array, " BN"],
    log_sum_exp: Float32[Array, "BN Q"],
    grad: Float[Array, "BN K Q"],
    delta: Float32[Array, "BN Q"],
    *,
    scale: float,
    interpret: bool,
) -> tuple[Float[Array, "BN K Q"], Float[Array, "BN K S"], Float[Array, "BN K S"]]:
    """The gradients of queries, keys and values.

    Args:
        q: scaled and rounded.
        lengths: attended keys of each head. What lies past them may be anything, NaN too.
        grad: of the result.
        delta: D; see the top of this file.
        scale: of the gradient of the queries, which were not scaled.
    """
    (heads, dim, queries), dtype = q.shape, q.dtype
    real_keys = k.shape[2]
    blocks = Blocks.choose(queries, real_keys, dim, dtype)
    ones = jnp.ones((heads, 1, queries), dtype)
    extended = partial(_extended, blocks.calls * blocks.queries)
    q, grad = extended(q, _in_parts(log_sum_exp, dtype), ones), extended(grad, _in_parts(delta, dtype), 0 * ones)
    if real_keys < blocks.kv:
        k, v = (_pad(x, blocks.kv) for x in (k, v))
    keys = k.shape[2]

    pairs = heads * blocks.queries * keys
    moved = heads * dim * (3 * blocks.queries + 4 * keys) * dtype.itemsize
    of_keys = pl.BlockSpec((1, dim, blocks.kv), lambda n, j, *_: (n, 0, j))
    written = min(queries, blocks.queries)

    def of_queries(rows: int, width: int, call: int) -> pl.BlockSpec:
        # one buffer is enough: a head takes far longer than a fetch
        return pl.BlockSpec((1, rows, width), lambda n, j, *_: (n, 0, call), pipeline_mode=pl.Buffered(1))

    dqs: list[Array] = []
    sums: list[Array] = []
    for call in range(blocks.calls):
        dq, *sums = pl.pallas_call(
            partial(_kernel, blocks, scale),
            out_shape=[jax.ShapeDtypeStruct((heads, dim, written), dtype)]
            + [jax.ShapeDtypeStruct((heads, dim, keys), jnp.float32 if blocks.calls > 1 else dtype)] * 2,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(heads, pl.cdiv(keys, blocks.kv)),
                in_specs=[*[of_queries(dim + EXTRA, blocks.queries, call)] * 2, *[of_keys] * (2 + len(sums))],
                out_specs=[of_queries(dim, written, 0), of_keys, of_keys],
                scratch_shapes=[
                    *(pltpu.VMEM((dim, n), jnp.float32) for n in (blocks.queries, blocks.kv, blocks.kv)),
                    pltpu.VMEM((dim, blocks.kv), dtype),
                    *[pltpu.VMEM((blocks.kv, dim + EXTRA), dtype)] * 2,
                ],
            ),
            input_output_aliases={5 + i: 1 + i for i in range(len(sums))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
            cost_estimate=pl.CostEstimate(flops=10 * pairs * dim, transcendentals=pairs, bytes_accessed=moved),
            interpret=interpret,
            name=NAME,
        )(lengths, q, grad, k, v, *sums)
        dqs.append(dq)
    dk, dv = (x[:, :, :real_keys].astype(dtype) for x in sums)
    return jnp.concatenate(dqs, 2)[:, :, :queries], dk, dv


def _kernel(
    blocks: Blocks,
    scale: float,
    length_ref: Any,
    q_ref: Any,
    grad_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
) -> None:
    """The grid is heads, blocks of keys.

    Refs: lengths [BN] in SMEM; q and grad [1, K + EXTRA, queries], k and v [1, K, kv]; dk and dv of the call before, if
    there is one; dq [1, K, queries or those that exist], dk and dv [1, K, kv]. Scratch: sums of these three; the
    attended k; the transposed k and v with further channels.
    """
    *sums, dq_ref, dk_ref, dv_ref, dq, dk, dv, k, k_rows, v_rows = refs
    j, dim = pl.program_id(1), dq.shape[0]
    left = length_ref[pl.program_id(0)] - j * blocks.kv

    @pl.when(j == 0)
    def _start() -> None:
        dq[...] = jnp.zeros_like(dq)

    dk[...] = jnp.zeros_like(dk)
    dv[...] = jnp.zeros_like(dv)
    k[...] = _attended(k_ref[0], left)
    k_rows[...] = _rows(k[...], left)
    v_rows[...] = _rows(_attended(v_ref[0], left), left)

    def scores(of_q: Any, of_k: Any) -> tuple[Array, Array]:
        """P and dZ, keys along the sublanes."""
        # L is above every score, but for rounding, which is large where scores are
        p = jnp.exp2(jnp.minimum(_dot(k_rows[of_k], q_ref[0, :, of_q], 1, 0), 0.0))
        dz = p * _dot(v_rows[of_k], grad_ref[0, :, of_q], 1, 0)
        return p.astype(k.dtype), dz.astype(k.dtype)

    def add(of_q: Any, of_k: Any, p: Array, dz: Array) -> None:
        dv[:, of_k] += _dot(grad_ref[0, :dim, of_q], p, 1, 1)
        dk[:, of_k] += _dot(q_ref[0, :dim, of_q], dz, 1, 1)
        dq[:, of_q] += _dot(k[:, of_k], dz, 1, 0)

    def add_block(i: Any, _: None, *, width: int) -> None:
        """Adds the pairs of block i of queries and the first keys of this block."""
        waiting: deque[tuple[Any, Any, Array, Array]] = deque()
        for query in range(0, blocks.q, PIECE):
            of_q = pl.ds(pl.multiple_of(i * blocks.q + query, LANES), PIECE)
            for key in range(0, width, PIECE):
                of_k = pl.ds(key, min(PIECE, width - key))
                waiting.append((of_q, of_k, *scores(of_q, of_k)))
                if len(waiting) > LATER:
                    add(*waiting.popleft())
        for piece in waiting:
            add(*piece)

    def add_all(width: int) -> None:
        jax.lax.fori_loop(0, blocks.queries // blocks.q, partial(add_block, width=width), None)

    half = round_up(blocks.kv // 2, LANES)
    pl.when(left > half)(partial(add_all, blocks.kv))
    pl.when((left > 0) & (left <= half))(partial(add_all, half))

    totals = [math.log(2) * dk[...], dv[...]]
    if sums:
        totals = [total + ref[0] for total, ref in zip(totals, sums, strict=True)]
    for ref, total in zip((dk_ref, dv_ref), totals, strict=True):
        ref[0] = total.astype(ref.dtype)

    @pl.when(j == pl.num_programs(1) - 1)
    def _finish() -> None:
        dq_ref[0] = (scale * dq[:, : dq_ref.shape[2]]).astype(dq_ref.dtype)


def _attended(x: Float[Array, "K kv"], left: Any) -> Float[Array, "K kv"]:
    """x, and zeros but for its first `left` tokens; float32 on the way, which every TPU selects from."""
    token = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(token < left, x.astype(jnp.float32), 0.0).astype(x.dtype)


def _rows(x: Float[Array, "K kv"], left: Any) -> Float[Array, "kv K+16"]:
    """The transposed keys or values with -1 for each part of L or D, and the mask of all but the first `left`."""
    row, token = (jax.lax.broadcasted_iota(jnp.int32, (EXTRA, x.shape[1]), axis) for axis in (0, 1))
    mask = jnp.where((row == PARTS) & (token >= left), MASKED, 0.0)
    return jnp.concatenate([x, jnp.where(row < PARTS, -1.0, mask).astype(x.dtype)], 0).T


def _extended(tokens: int, *channels: Float[Array, "BN _ S"]) -> Float[Array, "BN K+16 T"]:
    """All channels, and zeros in further ones and after the tokens; in one concatenation, which is one pass."""
    padded = [_pad(x, tokens) for x in channels]
    zeros = jnp.zeros_like(padded[0][:, : -sum(x.shape[1] for x in channels) % EXTRA])
    return jnp.concatenate([*padded, zeros], 1)


def _in_parts(x: Float32[Array, "BN Q"], dtype: Any) -> Float[Array, "BN 3 Q"]:
    """Numbers of the dtype whose sum is x."""
    info, parts = jnp.finfo(dtype), []
    for _ in range(PARTS):
        # a conversion there and back would be optimised away
        parts.append(jax.lax.reduce_precision(x, info.nexp, info.nmant))
        x = x - parts[-1]
    return jnp.stack(parts, 1).astype(dtype)


def _pad(x: Array, multiple: int) -> Array:
    """x with zeros after the tokens."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % multiple)))


def _dot(a: Float[Array, "m k"], b: Float[Array, "k n"], of_a: int, of_b: int) -> Float32[Array, "m n"]:
    """The product over these axes of both."""
    return jax.lax.dot_general(
        a, b, (((of_a,), (of_b,)), ((), ())), precision=precision(a.dtype), preferred_element_type=jnp.float32
    )
