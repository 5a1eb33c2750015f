"""Exact attention as a Pallas kernel for NVIDIA GPUs, compiled by Triton.

It supports what cuDNN's kernel does not: float32, every head size up to 128, log_sum_exp for ring attention, and lists
of slices of the keys for sparse attention. A program has one block of queries of one head and loops over tiles of keys
with a running maximum. Keys past kv_len are never attended: full tiles run without a mask, the last ones with a mask.
Softmax is base 2, in float32.

Sources: online softmax (arXiv 1805.02867), FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.attention import nvidia, xla
from cogvideox_flax.attention.bounds import MASKED
from cogvideox_flax.attention.gradient import Static, with_plain_gradient
from cogvideox_flax.attention.tile_lists import TileLists
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import precision
from cogvideox_flax.nn.tpu import with_gradient_of

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:  # JAX has announced that a version without it will come
    plgpu = None  # type: ignore[assignment]

NAME, SPARSE_NAME = "cogvideox_flash", "cogvideox_flash_sparse"

LISTED = 128
"""A tile of a list is a multiple of this many tokens, which the sizes of `Tiles` divide."""

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
        """In 16 bit the fastest on an H200 of some 14 sizes; in float32 not tuned, but without spilled registers."""
        if jnp.dtype(dtype).itemsize > 2:
            return Tiles(64 if dim <= 64 else 32, 32, 8, 2)
        return Tiles(64, 128, 4, 2) if dim <= 64 else Tiles(128, 64, 4, 2)


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
    out, log_sum_exp = _attend(Static(None, interpret, with_lse=True, dtype=jnp.float32), q, k, v, kv_len)
    return out, log_sum_exp


def is_fast(q: Float[Array, "B Q N K"]) -> bool:
    """Whether this kernel can run here and be faster than XLA: not in float32, where it uses no tensor cores."""
    return q.dtype.itemsize == 2 and why_not(q) is None


def why_not(q: Float[Array, "B Q N K"]) -> str | None:
    """Why this kernel cannot attend with these queries here, or None if it can."""
    if plgpu is None:
        return f"JAX {jax.__version__} compiles no Pallas kernels with Triton"
    return nvidia.why_not(q.shape[-1])


def _check(q: Array, interpret: bool) -> None:
    if (not interpret or plgpu is None) and (reason := why_not(q)):
        raise InputError(f"attention backend 'triton': {reason}. Take 'auto'")


@with_plain_gradient
def _attend(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[Array, ...]:
    """The result, and log_sum_exp if wanted."""
    batch, queries, heads, dim = q.shape
    tiles = Tiles.choose(dim, q.dtype)
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % tiles.kv), (0, 0), (0, 0))) for x in (k, v))
    length_spec, q_spec, kv_spec = _specs(tiles, dim, k.shape[1])
    lse_shape = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    lse_spec = pl.BlockSpec((None, None, tiles.q), lambda i, n, b: (b, n, i))
    out, *log_sum_exp = pl.pallas_call(
        partial(_kernel, tiles, queries, dim),
        out_shape=[jax.ShapeDtypeStruct(q.shape, static.dtype or q.dtype)] + [lse_shape] * static.with_lse,
        grid=(pl.cdiv(queries, tiles.q), heads, batch),
        in_specs=[length_spec, q_spec, kv_spec, kv_spec],
        out_specs=[q_spec] + [lse_spec] * static.with_lse,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=_cost(q, k.shape[1]),
        interpret=static.interpret,
        name=NAME,
    )(kv_len, q, k, v)
    return out, *(lse.swapaxes(1, 2) for lse in log_sum_exp)


@with_gradient_of(lambda settings, *args: xla.attend_to_listed(settings[0], *args))
def attend_to_listed(
    settings: tuple[int, bool],
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    lists: TileLists,
    kv_len: Int32[Array, " B"],
) -> Float[Array, "B Q N K"]:
    """See `sparse_tiles.attend_to_listed`. settings: tokens of a tile, a multiple of LISTED; if it is interpreted."""
    (size, interpret), (batch, queries, heads, dim) = settings, q.shape
    sizes = Tiles.choose(dim, q.dtype)
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0))) for x in (k, v))
    # how many of a list's tiles are attended whole, and how many in part or whole
    bounds = lists.before(jnp.stack([kv_len // size, pl.cdiv(kv_len, size)], 1))
    numbers = jnp.concatenate([bounds, lists.tiles], -1)
    length_spec, q_spec, kv_spec = _specs(sizes, dim, k.shape[1])
    list_spec = pl.BlockSpec((None, None, None, numbers.shape[-1]), lambda i, n, b: (b, n, i * sizes.q // size, 0))
    return pl.pallas_call(
        partial(_listed_kernel, sizes, size, dim),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(queries // sizes.q, heads, batch),
        in_specs=[length_spec, list_spec, q_spec, kv_spec, kv_spec],
        out_specs=q_spec,
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        cost_estimate=_cost(q, min(k.shape[1], lists.tiles.shape[-1] * size)),
        interpret=interpret,
        name=SPARSE_NAME,
    )(kv_len, numbers, q, k, v)


def _specs(tiles: Tiles, dim: int, keys: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Of the length, of a block of queries and of all keys of a head, for a grid of blocks, heads and batch: programs
    that run at the same time are of one head, so its keys are read from memory once."""
    width = max(pl.next_power_of_2(dim), 16)
    length = pl.BlockSpec((1,), lambda i, n, b: (b,))
    q = pl.BlockSpec((None, tiles.q, None, width), lambda i, n, b: (b, i, n, 0))
    return length, q, pl.BlockSpec((None, keys, None, width), lambda i, n, b: (b, 0, n, 0))


def _cost(q: Float[Array, "B Q N K"], keys: int) -> pl.CostEstimate:
    """keys: how many a query attends to, at most."""
    batch, queries, heads, dim = q.shape
    pairs = batch * heads * queries * keys
    moved = 2 * batch * heads * (queries + keys) * dim * q.dtype.itemsize
    return pl.CostEstimate(flops=4 * pairs * dim, transcendentals=pairs, bytes_accessed=moved)


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
    rows = pl.program_id(0) * tiles.q + jnp.arange(tiles.q)
    columns = jnp.arange(q_ref.shape[-1]) < dim
    inside = (rows < queries)[:, None] & columns
    q, length = plgpu.load(q_ref, mask=inside, other=0.0), length_ref[0]
    bounds = length // tiles.kv, pl.cdiv(length, tiles.kv)
    out, log_sum_exp = _attend_block(tiles.kv, dim, q, k_ref, v_ref, length, lambda j: j * tiles.kv, *bounds)
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=inside)
    for ref in lse_ref:
        plgpu.store(ref, log_sum_exp, mask=rows < queries)


def _listed_kernel(
    tiles: Tiles, size: int, dim: int, length_ref: Any, list_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any
) -> None:
    """`_kernel` against a list of slices of the keys, each of `size`.

    list: how many slices end before the length, how many begin before it, and their numbers in ascending order.
    """
    columns = (jnp.arange(q_ref.shape[-1]) < dim)[None]
    q, each = plgpu.load(q_ref, mask=columns, other=0.0), jnp.int32(size // tiles.kv)

    def tile_at(j: Any) -> Any:  # by lax: what jnp makes of // and % is not lowered by every version of JAX
        return list_ref[2 + jax.lax.div(j, each)] * size + jax.lax.rem(j, each) * tiles.kv

    bounds = list_ref[0] * each, list_ref[1] * each
    out, _ = _attend_block(tiles.kv, dim, q, k_ref, v_ref, length_ref[0], tile_at, *bounds)
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=columns)


def _attend_block(
    width: int,
    dim: int,
    q: Array,
    k_ref: Any,
    v_ref: Any,
    length: Any,
    tile_at: Callable[[Any], Any],
    whole: Any,
    end: Any,
) -> tuple[Float32[Array, "q K"], Float32[Array, " q"]]:
    """The result and log_sum_exp of a block of queries.

    Args:
        width: of a tile of keys.
        tile_at: where a tile of keys begins, by its number.
        whole, end: tiles before the first are attended entirely; those from there to the second up to `length`.
    """
    columns = (jnp.arange(q.shape[-1]) < dim)[None]
    exact = precision(q.dtype)
    scale = math.log2(math.e) / math.sqrt(dim)

    def add(j: Any, carry: _Carry, *, masked: bool) -> _Carry:
        running_max, row_sum, out = carry
        start = tile_at(j)
        here = pl.ds(start, width)
        products = plgpu.dot(q, plgpu.load(k_ref.at[here, :], mask=columns, other=0.0), trans_b=True, precision=exact)
        if masked:
            products = jnp.where((start + jnp.arange(width))[None] < length, products, MASKED)
        new_max = jnp.maximum(running_max, products.max(1))
        # scaled after the subtraction: a fused scale * product - maximum rounds the maximum and not the product
        p, rescale = jnp.exp2(scale * (products - new_max[:, None])), jnp.exp2(scale * (running_max - new_max))
        v = plgpu.load(v_ref.at[here, :], mask=columns, other=0.0)
        pv = plgpu.dot(p.astype(v.dtype), v, precision=exact)
        return new_max, rescale * row_sum + p.sum(1), rescale[:, None] * out + pv

    carry = jnp.full(len(q), MASKED, jnp.float32), jnp.zeros(len(q), jnp.float32), jnp.zeros(q.shape, jnp.float32)
    carry = jax.lax.fori_loop(0, whole, partial(add, masked=False), carry)
    running_max, row_sum, out = jax.lax.fori_loop(whole, end, partial(add, masked=True), carry)
    return out / row_sum[:, None], scale * running_max + jnp.log2(row_sum)
