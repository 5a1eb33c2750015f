"""Exact attention as a Pallas kernel for NVIDIA GPUs, which Triton compiles: float32, bfloat16 or float16, any head
size to 128, windows, and parts of the keys, all of which cuDNN's kernel does not serve.

A program has one block of queries of one head and goes through the keys with a running maximum. Keys past their length
are never attended: blocks that all queries see in full run without a mask, and those at a ragged end, or in a window,
with one. Softmax is base 2, in float32.

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
from cogvideox_flax.attention.gradient import Static, with_plain_gradient
from cogvideox_flax.attention.masks import NEVER
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision

NAME = "cogvideox_flash"

_Carry = tuple[Float32[Array, " q"], Float32[Array, " q"], Float32[Array, "q K"]]


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile (powers of 2, 16 or more), warps of a program, and tiles of keys on their way."""

    q: int
    kv: int
    warps: int
    stages: int

    @staticmethod
    def choose(dim: int, dtype: Any) -> Tiles:
        """Sizes that fit into the registers, as the compiler for an H100 counts them; no time was measured."""
        if jnp.dtype(dtype).itemsize > 2:
            return Tiles(64 if dim <= 64 else 32, 32, 8, 2)
        return Tiles(128, 64, 4, 3) if dim <= 64 else Tiles(128, 64, 8, 2)


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
    *,
    window: tuple[int, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`.

    The gradient is that of the plain XLA form, computed anew.

    Args:
        interpret: run on any device, slowly.

    Raises:
        InputError: no NVIDIA GPU, or too large heads, and not interpreted.
    """
    _check(q, interpret)
    lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32) if kv_len is None else kv_len
    return _attend(Static(window, None, interpret, is_part=False), q, k, v, lengths)[0]


def attend_part(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Attention to some of the keys, and how much they weigh; see `xla.attend_part`. Errors as for `attend`."""
    _check(q, interpret)
    out, weight = _attend(Static(None, None, interpret, is_part=True), q, k, v, kv_len)
    return out, weight


def _check(q: Array, interpret: bool) -> None:
    if not interpret and (reason := nvidia.why_not(q.shape[-1])):
        raise InputError(f"attention backend 'triton': {reason}. Take 'auto'")


@with_plain_gradient
def _attend(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[Array, ...]:
    """The result, and of a part its weight."""
    batch, queries, heads, dim = q.shape
    tiles = Tiles.choose(dim, q.dtype)
    width = max(pl.next_power_of_2(dim), 16)
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % tiles.kv), (0, 0), (0, 0))) for x in (k, v))
    # programs that run at the same time are of one head, so its keys are read from memory once
    q_spec = pl.BlockSpec((None, tiles.q, None, width), lambda i, n, b: (b, i, n, 0))
    kv_spec = pl.BlockSpec((None, k.shape[1], None, width), lambda i, n, b: (b, 0, n, 0))
    weight = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    pairs = batch * heads * queries * k.shape[1]
    out, *weights = pl.pallas_call(
        partial(_kernel, tiles, static.window, queries, dim),
        out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32 if static.is_part else q.dtype)]
        + [weight] * static.is_part,
        grid=(pl.cdiv(queries, tiles.q), heads, batch),
        in_specs=[pl.BlockSpec((1,), lambda i, n, b: (b,)), q_spec, kv_spec, kv_spec],
        out_specs=[q_spec] + [pl.BlockSpec((None, None, tiles.q), lambda i, n, b: (b, n, i))] * static.is_part,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * dim,
            transcendentals=pairs,
            bytes_accessed=2 * batch * heads * (queries + k.shape[1]) * dim * q.dtype.itemsize,
        ),
        interpret=static.interpret,
        name=NAME,
    )(kv_len, q, k, v)
    return out, *(w.swapaxes(1, 2) for w in weights)


def _kernel(
    tiles: Tiles,
    window: tuple[int, int] | None,
    queries: int,
    dim: int,
    length_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    *weight_ref: Any,
) -> None:
    """One block of queries against all keys.

    Refs: length [1], q and out [q, width], k and v [S, width], and of a part weight [q]. What lies beyond the last
    query or beyond a head's own channels is neither read nor written.
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
            valid = key < length
            if window is not None:
                away = key - rows[:, None]
                valid = valid & (away >= -window[0]) & (away <= window[1])
            products = jnp.where(valid, products, NEVER)
        new_max = jnp.maximum(running_max, products.max(1))
        # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
        p, rescale = jnp.exp2(scale * (products - new_max[:, None])), jnp.exp2(scale * (running_max - new_max))
        v = plgpu.load(v_ref.at[here, :], mask=columns, other=0.0)
        pv = plgpu.dot(p.astype(v.dtype), v, precision=exact)
        return new_max, rescale * row_sum + p.sum(1), rescale[:, None] * out + pv

    carry = (
        jnp.full(tiles.q, NEVER, jnp.float32),
        jnp.zeros(tiles.q, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    # blocks [first, whole) are seen in full by all queries, [whole, last) in part
    first, whole, last = jnp.int32(0), length // tiles.kv, pl.cdiv(length, tiles.kv)
    if window is not None:
        first = whole = jnp.maximum(start - window[0], 0) // tiles.kv
        last = jnp.minimum(last, (start + tiles.q - 1 + window[1]) // tiles.kv + 1)
    carry = jax.lax.fori_loop(first, whole, partial(add, masked=False), carry)
    running_max, row_sum, out = jax.lax.fori_loop(whole, last, partial(add, masked=True), carry)
    row_sum = jnp.maximum(row_sum, 1e-30)  # of a query whose window holds no key
    plgpu.store(out_ref, (out / row_sum[:, None]).astype(out_ref.dtype), mask=inside)
    for ref in weight_ref:
        plgpu.store(ref, scale * running_max + jnp.log2(row_sum), mask=rows < queries)
