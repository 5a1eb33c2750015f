"""Exact attention as a Pallas kernel for NVIDIA GPUs, compiled by Triton.

It supports what cuDNN's kernel does not: float32, every head size up to 128, and log_sum_exp for ring attention. A
program has one block of queries of one head and loops over tiles of keys with a running maximum. Keys past kv_len are
never attended: full tiles run without a mask, the last one with a mask. Softmax is base 2, in float32.

Sources: online softmax (arXiv 1805.02867), FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.attention import nvidia
from cogvideox_flax.attention.bounds import MASKED
from cogvideox_flax.attention.gradient import Static, with_plain_gradient
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision

NAME = "cogvideox_flash"

_Carry = tuple[Float32[Array, " q"], Float32[Array, " q"], Float32[Array, "q K"]]


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile (powers of 2, at least 16), warps per program, and stages of the key pipeline."""

    q: int
    kv: int
    warps: int
    stages: int

    @staticmethod
    def choose(dim: int, dtype: Any) -> Tiles:
        """Sizes that fit into the registers of an H100, as the compiler counts them; not tuned by measurements."""
        if jnp.dtype(dtype).itemsize > 2:
            return Tiles(64 if dim <= 64 else 32, 32, 8, 2)
        return Tiles(128, 64, 4, 3) if dim <= 64 else Tiles(128, 64, 8, 2)


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`.

    The gradient is that of the plain XLA form, which recomputes attention.

    Args:
        interpret: run on any device, slowly.

    Raises:
        InputError: no NVIDIA GPU, or too large heads, and not interpreted.
    """
    _check(q, interpret)
    lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32) if kv_len is None else kv_len
    return _attend(Static(None, interpret, with_lse=False), q, k, v, lengths)[0]


def attend_with_lse(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Attention and log_sum_exp; see `xla.attend_with_lse`. Errors as for `attend`."""
    _check(q, interpret)
    out, log_sum_exp = _attend(Static(None, interpret, with_lse=True), q, k, v, kv_len)
    return out, log_sum_exp


def _check(q: Array, interpret: bool) -> None:
    if not interpret and (reason := nvidia.why_not(q.shape[-1])):
        raise InputError(f"attention backend 'triton': {reason}. Take 'auto'")


@with_plain_gradient
def _attend(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[Array, ...]:
    """The result, and log_sum_exp if wanted."""
    batch, queries, heads, dim = q.shape
    tiles = Tiles.choose(dim, q.dtype)
    width = max(pl.next_power_of_2(dim), 16)
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % tiles.kv), (0, 0), (0, 0))) for x in (k, v))
    # programs that run at the same time are of one head, so its keys are read from memory once
    q_spec = pl.BlockSpec((None, tiles.q, None, width), lambda i, n, b: (b, i, n, 0))
    kv_spec = pl.BlockSpec((None, k.shape[1], None, width), lambda i, n, b: (b, 0, n, 0))
    lse_shape = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    lse_spec = pl.BlockSpec((None, None, tiles.q), lambda i, n, b: (b, n, i))
    pairs = batch * heads * queries * k.shape[1]
    out, *log_sum_exp = pl.pallas_call(
        partial(_kernel, tiles, queries, dim),
        out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32 if static.with_lse else q.dtype)]
        + [lse_shape] * static.with_lse,
        grid=(pl.cdiv(queries, tiles.q), heads, batch),
        in_specs=[pl.BlockSpec((1,), lambda i, n, b: (b,)), q_spec, kv_spec, kv_spec],
        out_specs=[q_spec] + [lse_spec] * static.with_lse,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * dim,
            transcendentals=pairs,
            bytes_accessed=2 * batch * heads * (queries + k.shape[1]) * dim * q.dtype.itemsize,
        ),
        interpret=static.interpret,
        name=NAME,
    )(kv_len, q, k, v)
    return out, *(lse.swapaxes(1, 2) for lse in log_sum_exp)


def _kernel(
    tiles: Tiles,
    queries: int,
    dim: int,
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    *lse_ref: Any,
) -> None:
    """One block of queries against all keys.

    Refs: length [1], q and out [q, width], k and v [S, width], and log_sum_exp [q] if requested. Rows past the last
    query and columns past the head size are neither read nor written.
    """
    start = pl.program_id(0) * tiles.q
    rows = start + jnp.arange(tiles.q)
    columns = (jnp.arange(q_ref.shape[-1]) < dim)[None]
    inside = (rows < queries)[:, None] & columns
    length = length_ref[0]
    q = plgpu.load(q_ref, mask=inside, other=0.0)
    exact = precision(q.dtype)
    scale = math.log2(math.e) / math.sqrt(dim)

    def add(j: Any, carry: _Carry, *, masked: bool) -> _Carry:
        running_max, row_sum, out = carry
        here = pl.ds(j * tiles.kv, tiles.kv)
        products = plgpu.dot(q, plgpu.load(k_ref.at[here, :], mask=columns, other=0.0), trans_b=True, precision=exact)
        if masked:
            key = (j * tiles.kv + jnp.arange(tiles.kv))[None]
            products = jnp.where(key < length, products, MASKED)
        new_max = jnp.maximum(running_max, products.max(1))
        # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
        p, rescale = jnp.exp2(scale * (products - new_max[:, None])), jnp.exp2(scale * (running_max - new_max))
        v = plgpu.load(v_ref.at[here, :], mask=columns, other=0.0)
        pv = plgpu.dot(p.astype(v.dtype), v, precision=exact)
        return new_max, rescale * row_sum + p.sum(1), rescale[:, None] * out + pv

    carry = (
        jnp.full(tiles.q, MASKED, jnp.float32),
        jnp.zeros(tiles.q, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    full_tiles = length // tiles.kv
    carry = jax.lax.fori_loop(0, full_tiles, partial(add, masked=False), carry)
    last = full_tiles, pl.cdiv(length, tiles.kv)
    running_max, row_sum, out = jax.lax.fori_loop(*last, partial(add, masked=True), carry)
    plgpu.store(out_ref, (out / row_sum[:, None]).astype(out_ref.dtype), mask=inside)
    for ref in lse_ref:
        plgpu.store(ref, scale * running_max + jnp.log2(row_sum), mask=rows < queries)
