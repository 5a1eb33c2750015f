"""Exact attention as a Pallas TPU kernel, for the long, full attention of video transformers.

The scores of a tile are K Q^T, keys along the sublanes and queries along the lanes, so that sums over keys are
additions of whole registers. Values are transposed too and V^T P gives the output: a head fills 64 sublanes instead of
half of 128 lanes. Softmax is base 2, in float32; scale and log2(e) are folded into the queries.

Keys past kv_len are never attended. Chunks and slices of attended keys run without a mask; the remaining keys run with
a mask, 128 at a time.

Softmax does not change when a constant is subtracted from all scores of a row, and float32 holds 2^-126 to 2^127, so
most heads need no running maximum. Each head runs in one of three modes, chosen from its queries, keys and values
(`_modes`). Scores here are base 2, and no score is larger than max |q| max |k| (Cauchy-Schwarz):

* bounded: nothing is subtracted. Scores are at most 100, no sum of values exceeds 2^126, and a million products that
  underflow change no channel visibly. Normalised queries and keys, such as CogVideoX's, run in this mode.
* shifted: each query's largest score among the first keys is subtracted. If the row sums of a chunk exceed 2^80, the
  chunk is computed again with a running maximum; above 2^60, all sums are scaled down. Scores are at most 2^17, so that
  a score differs by at most 1 between two products; values are below 2^40.
* online: a running maximum is subtracted, updated every 128 keys. All other heads run in this mode.

Scaled queries are rounded to their dtype, so in bfloat16 the error of a score is 2^-9 |q| |k|.

Sources: online softmax (arXiv 1805.02867), FlashAttention-2 (arXiv 2307.08691), splash attention in jax (the grid).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.attention import splash_backward, xla
from cogvideox_flax.attention.bounds import min_nonzero, norms
from cogvideox_flax.attention.gradient import Static, own_keys
from cogvideox_flax.attention.splash_kernel import BOUNDED, ONLINE, SHIFTED, SUBLANES, kernel, sparse_kernel
from cogvideox_flax.attention.tile_lists import TileLists
from cogvideox_flax.attention.tile_sizes import TileSizes, choose_tile_sizes, fit_key_block
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.remat import ATTENDED
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES, with_gradient_of

BOUND = 100.0
"""The largest score of a bounded head: 2^100 times a million keys fits float32, and so does 2^-100."""

LARGEST_SUM = 126.0
"""log2 of the largest sum of a bounded head's values."""

SHIFTED_BOUND = 2.0**17
"""The largest score of a shifted head."""

SHIFTED_VALUE = 2.0**40
"""Values of a shifted head are below this."""

NAME = "cogvideox_splash"

SPARSE_NAME = "cogvideox_sparse_splash"


def why_not(q: Float[Array, "B Q N K"]) -> str | None:
    """Why the kernel does not serve these queries, or None if it does."""
    # in float16, probabilities of bounded heads would overflow too
    return None if q.dtype in KERNEL_DTYPES else f"it computes in bfloat16 or float32; got {q.dtype}"


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B T M K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
    *,
    first_head: int | None = None,
    tile_sizes: TileSizes | None = None,
    interpret: bool = False,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`.

    The gradient is a kernel too, `attention.splash_backward`, from the result and log_sum_exp. These are named for
    policies of `jax.checkpoint`: `nn.remat.ATTENDED`.

    Args:
        q, k, v: bfloat16 or float32.
        first_head: if given, k may have more heads and more keys than v. Its N heads from this one on and its first S
            keys are attended; the kernel reads them where they lie, since cutting them out would copy them.
        tile_sizes: None takes them from the table that `python -m benchmarks.attention --search` writes.
        interpret: run on any device, slowly.

    Raises:
        InputError: another dtype, or tile sizes that do not nest or do not fit into fast memory.
    """
    lengths = jnp.full(q.shape[0], v.shape[1], jnp.int32) if kv_len is None else kv_len
    return _attend(Static(tile_sizes, interpret, with_lse=False, first_head=first_head), q, k, v, lengths)[0]


def attend_with_lse(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"],
    *,
    tile_sizes: TileSizes | None = None,
    interpret: bool = False,
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Attention and log_sum_exp; see `xla.attend_with_lse`. Errors as for `attend`."""
    static = Static(tile_sizes, interpret, with_lse=True, dtype=jnp.float32)
    out, log_sum_exp = _attend(static, q, k, v, kv_len)
    return out, log_sum_exp.swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[Array, ...]:
    """The result, and log_sum_exp [B, N, Q] if wanted."""
    return _results(static, q, k, v, kv_len)


def _forward(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[tuple[Array, ...], tuple]:
    results = _results(static._replace(with_lse=True), q, k, v, kv_len)
    out, log_sum_exp = map(checkpoint_name, results, ATTENDED)
    return (out, log_sum_exp)[: 1 + static.with_lse], (q, k, v, kv_len, out.astype(q.dtype), log_sum_exp)


def _backward(static: Static, saved: tuple[Array, ...], grads: tuple[Array, ...]) -> tuple[Array | None, ...]:
    q, all_k, v, kv_len, out, log_sum_exp = saved
    k, back = jax.vjp(lambda k: own_keys(k, v, static.first_head), all_k)
    batch, _, heads, dim = q.shape
    grad, *grad_lse = grads
    delta = (grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    for x in grad_lse:
        delta -= x / math.log(2)

    scaled = q.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(dim))
    q_columns, k_columns, v_columns, grad_columns = (
        _of_all_heads(_columns(x.astype(q.dtype), 1)) for x in (scaled, k, v, grad)
    )
    found = splash_backward.gradients(
        q_columns,
        k_columns,
        v_columns,
        kv_len.repeat(heads),
        _of_all_heads(log_sum_exp),
        grad_columns,
        _of_all_heads(delta),
        scale=1 / math.sqrt(dim),
        interpret=static.interpret,
    )
    dq, dk, dv = (x.reshape(batch, heads, *x.shape[1:])[:, :, :dim].transpose(0, 3, 1, 2) for x in found)
    return dq, *back(dk), dv, None


_attend.defvjp(_forward, _backward)


def _results(static: Static, q: Array, k: Array, v: Array, kv_len: Array) -> tuple[Array, ...]:
    """The result, and log_sum_exp [B, N, Q] if wanted."""
    if reason := why_not(q):
        raise InputError(f"attention backend 'splash': {reason}. Take 'auto', or another dtype")
    batch, queries, heads, dim = q.shape
    keys = v.shape[1]
    sizes = static.tile_sizes or choose_tile_sizes(queries, keys, dim, q.dtype, static.with_lse)
    sizes.check(keys, dim, q.dtype, static.with_lse)

    scaled = q.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(dim))
    # what lies past the last LANES attended keys is not read, so it need not exist
    multiple = LANES if keys >= sizes.kv else sizes.kv
    values = _columns(v, multiple)
    modes = _modes(scaled, own_keys(k, v, static.first_head), values, kv_len)
    scalars = kv_len.repeat(heads), modes, _rows(batch, heads, k.shape[2], static.first_head or 0)
    keys_and_values = _of_all_heads(_columns(k, multiple)).swapaxes(1, 2), _tiles(values)

    (count, width), *rest = query_parts(queries, sizes.q)
    columns = _of_all_heads(_columns(scaled.astype(q.dtype), LANES if rest else width))

    def call(columns: Array, count: int, width: int) -> list[Array]:
        """The kernel for the first `count` queries, in blocks of `width`."""
        cost = _cost(batch * heads, count, keys, dim, q.dtype.itemsize)
        block = static._replace(tile_sizes=replace(sizes, q=width))
        return _kernel_call(block, columns, count, keys, cost)(*scalars, columns, *keys_and_values)

    results = call(columns, count, width)
    for last in rest:  # written into the first result, which a concatenation would copy
        narrow = call(columns[..., count:], *last)
        results = [x.at[..., count:].set(y) for x, y in zip(results, narrow, strict=True)]
    out, *log_sum_exp = (x[..., :queries].reshape(batch, heads, -1, queries) for x in results)
    return out[:, :, :dim].transpose(0, 3, 1, 2), *(lse[:, :, 0] for lse in log_sum_exp)


@with_gradient_of(lambda settings, *args: xla.attend_to_listed(settings[0], *args))
def attend_to_listed(
    settings: tuple[int, bool],
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    lists: TileLists,
    kv_len: Int32[Array, " B"],
) -> Float[Array, "B Q N K"]:
    """See `sparse_tiles.attend_to_listed`. settings: tokens of a tile, a multiple of 128; whether it is interpreted.

    The gradient is that of the plain XLA form, which recomputes each tile.
    """
    (size, interpret), (batch, queries, heads, dim), keys = settings, q.shape, k.shape[1]
    sizes = fit_key_block(size, size, size, keys, dim, q.dtype, key_buffers=1)
    sizes.check(keys, dim, q.dtype, key_buffers=1)
    scaled = q.astype(jnp.float32) * (math.log2(math.e) / math.sqrt(dim))
    multiple = LANES if keys >= sizes.kv else sizes.kv
    values = _columns(v, multiple)
    modes = _modes(scaled, k, values, kv_len)
    modes = jnp.where(modes == SHIFTED, ONLINE, modes)  # the first keys need not be in a list
    columns = _of_all_heads(_columns(scaled.astype(q.dtype), size))

    # where each block of keys begins, and where its last whole tile ends, first in tiles and then in the lists
    ends = jnp.arange(1, pl.cdiv(keys, sizes.kv)) * (sizes.kv // size)
    ends = jnp.broadcast_to(jnp.append(ends, pl.cdiv(keys, size)), (batch, len(ends) + 1))
    whole = jnp.minimum(ends, kv_len[:, None] // size)
    places = lists.before(jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends, whole], 1))
    numbers = jnp.concatenate([places, lists.tiles], -1).reshape(batch * heads, queries // size, 1, -1)

    cost = _cost(batch * heads, queries, min(keys, lists.tiles.shape[-1] * size), dim, q.dtype.itemsize)
    static = Static(sizes, interpret, with_lse=False)
    call = _kernel_call(static, columns, queries, keys, cost, listed=numbers.shape[-1])
    keys_and_values = _of_all_heads(_columns(k, multiple)).swapaxes(1, 2), _tiles(values)
    scalars = kv_len.repeat(heads), modes, _rows(batch, heads, heads, 0)
    (out,) = call(*scalars, numbers, columns, *keys_and_values)
    return out[:, :dim].reshape(batch, heads, dim, queries).transpose(0, 3, 1, 2)


def query_parts(queries: int, block: int) -> list[tuple[int, int]]:
    """(queries, block) of each kernel call: a last block that would be mostly padding gets its own, narrower call."""
    full = queries // block * block
    rest = -(-(queries - full) // LANES) * LANES
    if full == 0 or rest > 0.75 * block:
        return [(queries, min(block, -(-queries // LANES) * LANES))]
    return [(full, block)] + ([(queries - full, rest)] if rest else [])


def _modes(
    scaled: Float32[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    values: Float[Array, "B N k s"],
    lengths: Int[Array, " B"],
) -> Int32[Array, " BN"]:
    """The mode of each head; see the top of this file. Keys past kv_len do not count.

    values: from `_columns`, so that one pass over v transposes it and finds its largest value.
    """
    real = jnp.arange(k.shape[1]) < lengths[:, None]
    bound = (norms(scaled).max(1) * jnp.where(real[..., None], norms(k), 0).max(1)).reshape(-1)
    real = jnp.arange(values.shape[-1]) < lengths[:, None]
    by_channel = _of_all_heads(jnp.where(real[:, None, None], jnp.abs(values), 0).max(-1))
    value = by_channel.max(-1).astype(jnp.float32)
    # a million underflowing products of 2^-bound and a value add up to at most 2^-26 of a channel's largest value
    bounded = bound <= BOUND + jnp.minimum(jnp.log2(min_nonzero(by_channel)), 0)
    bounded &= bound + jnp.log2(value) + math.log2(k.shape[1]) <= LARGEST_SUM
    shifted = (bound <= SHIFTED_BOUND) & (value < SHIFTED_VALUE)
    return jnp.where(bounded, BOUNDED, jnp.where(shifted, SHIFTED, ONLINE)).astype(jnp.int32)


def _cost(heads: int, queries: int, keys: int, dim: int, itemsize: int) -> pl.CostEstimate:
    pairs = heads * queries * keys
    return pl.CostEstimate(
        flops=4 * pairs * dim, transcendentals=pairs, bytes_accessed=2 * heads * (queries + keys) * dim * itemsize
    )


def _kernel_call(
    static: Static, q: Float[Array, "BN K Q"], count: int, keys: int, cost: pl.CostEstimate, *, listed: int = 0
) -> Callable[..., list]:
    """The kernel for the first `count` queries of this shape: a function of lengths, modes and rows of k [BN],
    q [BN, K, Q], k [BM, T, K] and v [BN, S / 128, K, 128]. It returns [BN, K, Q], of which the blocks of these queries
    are written, and with_lse: log_sum_exp [BN, 1, Q].

    listed: numbers of a list of slices, for `sparse_kernel`, which takes lists [BN, Q / q, 1, listed] before q.
    """
    (heads, dim, queries), sizes = q.shape, static.tile_sizes
    q_spec = pl.BlockSpec((1, dim, sizes.q), lambda n, i, j, *_: (n, 0, i))
    lse_spec = pl.BlockSpec((1, 1, sizes.q), lambda n, i, j, *_: (n, 0, i))
    lists = pl.BlockSpec((1, 1, 1, listed), lambda n, i, j, *_: (n, i, 0, 0), memory_space=pltpu.SMEM)
    # a list's few slices take less time than a fetch of all keys, so these stay for all queries of a head
    buffers = {"pipeline_mode": pl.Buffered(1)} if listed else {}
    return pl.pallas_call(
        partial(sparse_kernel if listed else kernel, sizes),
        out_shape=[jax.ShapeDtypeStruct(q.shape, static.dtype or q.dtype)]
        + [jax.ShapeDtypeStruct((heads, 1, queries), jnp.float32)] * static.with_lse,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(heads, pl.cdiv(count, sizes.q), pl.cdiv(keys, sizes.kv)),
            in_specs=[
                *[lists] * bool(listed),
                q_spec,
                pl.BlockSpec((1, sizes.kv, dim), lambda n, i, j, *refs: (refs[2][n], j, 0), **buffers),
                pl.BlockSpec((1, sizes.kv // LANES, dim, LANES), lambda n, i, j, *_: (n, j, 0, 0), **buffers),
            ],
            out_specs=[q_spec] + [lse_spec] * static.with_lse,
            scratch_shapes=[
                pltpu.VMEM((dim, sizes.q), jnp.float32),
                pltpu.VMEM((SUBLANES, sizes.q), jnp.float32),
                pltpu.VMEM((SUBLANES, sizes.q), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_limit(keys, dim, q.dtype, static.with_lse, key_buffers=1 if listed else 2),
        ),
        cost_estimate=cost,
        interpret=static.interpret,
        name=SPARSE_NAME if listed else NAME,
    )


def _rows(batch: int, heads: int, of_k: int, first: int) -> Int32[Array, " BN"]:
    """Where the keys of each head of q are among those of all heads of k."""
    return (of_k * jnp.arange(batch)[:, None] + first + jnp.arange(heads)).reshape(-1)


def _columns(x: Float[Array, "B S N K"], multiple: int) -> Float[Array, "B N k s"]:
    """One matrix per head, tokens along the lanes. Tokens are padded to the multiple, K to full registers."""
    tokens, dim = x.shape[1], x.shape[3]
    return jnp.pad(x.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, -dim % 64), (0, -tokens % multiple)))


def _of_all_heads(x: Float[Array, "B N ..."]) -> Float[Array, "BN ..."]:
    """Batch and heads in one axis. It comes last, since it would decide in which order XLA stores the axes of x."""
    return x.reshape(-1, *x.shape[2:])


def _tiles(x: Float[Array, "B N k s"]) -> Float[Array, "BN t k LANES"]:
    """Contiguous tiles of LANES columns, which are simple to address."""
    return _of_all_heads(x.reshape(*x.shape[:3], -1, LANES).swapaxes(2, 3))
