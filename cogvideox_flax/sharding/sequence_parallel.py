"""Sequence parallelism: sp splits tokens, except in attention, where it splits heads (Ulysses).

Where heads do not divide over sp, devices exchange heads within groups, and keys and values circulate between the
groups (ring attention).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from cogvideox_flax.sharding.tables import RULES, devices_of, spec_of

log = logging.getLogger(__name__)

TOKEN_TILE = 128
"""The number of tokens on a device is a multiple of a TPU's lanes, along which an all-to-all stores them; a multiple
of 8 for short sequences."""

MAX_ZERO_HEADS = 1 / 8
"""The largest share of zero heads, relative to the real ones, with which all devices of sp exchange heads."""

_RingState = tuple[Array, Array, Array, Array, Array]
"""Keys and values; the sum of out * 2^(log_sum_exp - running_max) over the parts so far; running_max; and row_sum, the
sum of 2^(log_sum_exp - running_max)."""

JointQKV = tuple[Float[Array, "B L N K"], Float[Array, "B L N K"], Float[Array, "B L N K"]]
"""Queries, keys and values of tokens that are attended together with others."""

_LSE_OF_NO_KEYS = -0.7 * float(jnp.finfo(jnp.float32).max)  # below any other; differences are finite


def pad_tokens(x: Float[Array, "B S ..."], *, in_tiles: bool = False) -> Float[Array, "B padded ..."]:
    """x padded with zero tokens at the end, so that it divides over sp in tiles; x itself without sp, unless in_tiles.

    The caller passes the number of real tokens to attention (`q_len`, `kv_len`) and removes the padding.
    """
    parts = devices_of("tokens")
    return _pad(x, 1, parts * _tile_of(x.shape[1] / parts)) if parts > 1 or in_tiles else x


def _tile_of(tokens: float) -> int:
    """The tile of a device's tokens: their number is padded to a multiple of it."""
    return TOKEN_TILE if tokens >= 8 * TOKEN_TILE else 8


def sequence_parallel_attention(
    attend: Callable[..., Array],
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: int | Int[Array, " B"] | None,
    attend_with_lse: Callable[..., tuple[Array, Array]] | None = None,
    *,
    q_len: int | None = None,
    in_tiles: bool = False,
) -> Float[Array, "B Q N K"]:
    """Attention with the batch split over dp, heads over tp and sp, and all tokens of a head on one device.

    Everywhere else sp splits tokens, so q, k, v and the result are exchanged between the devices of sp, each by an
    all-to-all (DeepSpeed-Ulysses, arXiv 2309.14509). A long result takes several: some heads are exchanged while the
    next are attended, and only the last exchange is waited for. Tokens are padded by tokens that are never attended;
    heads that do not divide over sp are padded by zero heads, which cost time and do not change the result. Where too
    many zero heads would be needed, devices exchange heads in groups whose size divides the heads, and keys and values
    circulate between the groups (ring attention, arXiv 2310.01889; both combined, arXiv 2405.07719).

    Args:
        attend: attend(q, k, v, lengths, first_head=None) with lengths int32 [B] or None, on one device; first_head as
            for `attention.splash.attend`.
        kv_len: how many keys are attended. An int truncates k and v: on several devices to whole tiles, of which
            `lengths` masks the rest.
        attend_with_lse: attend_with_lse(q, k, v, lengths) returns the result for some of the keys in float32 and their
            log_sum_exp, as `attention.xla.attend_with_lse`. None: no ring attention, only zero heads.
        q_len: how many queries are attended; None: all. The result for those past it is 0, or that of attention.
        in_tiles: truncate k and v to whole tiles on one device too: a TPU would copy all keys to cut off a part of one.

    Raises:
        InputError: batch or heads do not divide over their mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    alone, queries = mesh.empty or mesh.size == 1, q.shape[1]
    keys, lengths = (kv_len, None) if isinstance(kv_len, int) else (k.shape[1], kv_len)
    if not alone:
        q, k, v = map(pad_tokens, (q, k, v))
    tiles = keys if alone and not in_tiles else min(keys + -keys % TOKEN_TILE, k.shape[1])
    if lengths is None and tiles > keys:
        lengths = jnp.full(q.shape[0], keys, jnp.int32)
    if alone:
        return attend(q, k[:, :tiles], v[:, :tiles], lengths)
    parts, heads = devices_of("tokens"), q.shape[2] // devices_of("heads")
    group = ulysses_group(heads, parts) if attend_with_lse is not None else parts
    _log_heads(heads, parts, group)
    spec = spec_of(mesh, ("batch", "tokens", "heads"), q.shape, "attention")
    q_len = queries if q_len is None else q_len
    q_tiles = min(q_len + -q_len % TOKEN_TILE, q.shape[1])
    if lengths is None and group < parts:
        lengths = jnp.full(q.shape[0], keys, jnp.int32)

    def local_attention(q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
        if parts == 1:
            return attend(q, k[:, :tiles], v[:, :tiles], lengths)
        q, k, v = (_tokens_to_heads(_pad(x, 2, group), group, parts) for x in (q, k, v))
        if group < parts:
            assert attend_with_lse is not None and lengths is not None
            outs = [_ring_attention(attend_with_lse, q, k, v, lengths, group, parts)]
        else:
            size, turns = q.shape[1], _heads_at_a_time(q.shape[2], q.shape[1] // parts, 4)

            def attend_some(some: slice) -> Array:
                out = attend(q[:, :q_tiles, some], k, v[:, :tiles, some], lengths, first_head=some.start)
                return _pad(out, 1, size)

            outs = list(map(attend_some, turns))
        return _heads_to_tokens(outs, group, parts)[:, :, :heads]

    in_specs = (spec, spec, spec, PartitionSpec(spec[0]))
    return jax.shard_map(local_attention, in_specs=in_specs, out_specs=spec, check_vma=False)(q, k, v, lengths)[
        :, :queries
    ]


def joint_attention(
    attend: Callable[..., Array],
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    joint: JointQKV,
    kv_len: int | None,
    joint_len: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B Q N K"], Float[Array, "B L N K"]]:
    """`sequence_parallel_attention` of long and few joint tokens together, without a ring.

    sp splits the long tokens; the joint ones, such as a prompt's, are on every device of sp, which takes its own heads
    of them. So the long sequence is exchanged as without them and never resharded.

    Args:
        joint: queries, keys and values of the joint tokens.
        kv_len: how many of the long keys are attended; None: all.
        joint_len: how many of the joint keys; None: all.

    Returns:
        The result for q, and for the joint queries. Errors as for `sequence_parallel_attention`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    queries, keys, few = q.shape[1], k.shape[1] if kv_len is None else kv_len, joint[0].shape[1]
    lengths = None if joint_len is None else keys + joint_len

    def attend_all(pieces: list[list[Array]], joint: JointQKV, lengths: Array | None) -> Array:
        """Attention of queries, keys and values, each in pieces of equal length and followed by the joint ones."""
        counts, in_tiles = (queries, keys, keys), lengths is not None  # lengths mask the padding
        both = [_in_one_sequence(*xs, in_tiles) for xs in zip(pieces, joint, counts, strict=True)]
        # the barrier: what attention asks of them, such as norms, is computed from these arrays, not from their parts
        return attend(*jax.lax.optimization_barrier(both), lengths)

    if mesh.empty or mesh.size == 1:
        out = attend_all([[q], [k], [v]], joint, lengths)
        return out[:, :queries], out[:, queries : queries + few]
    parts, heads = devices_of("tokens"), q.shape[2] // devices_of("heads")
    _log_heads(heads, parts, parts)
    q, k, v = map(pad_tokens, (q, k, v))
    spec = spec_of(mesh, ("batch", "tokens", "heads"), q.shape, "attention")
    few_spec = PartitionSpec(spec[0], None, spec[2])

    def local_attention(q: Array, k: Array, v: Array, joint: JointQKV, lengths: Array | None) -> tuple[Array, Array]:
        size = q.shape[1]
        if parts == 1:
            out = attend_all([[q], [k], [v]], joint, lengths)
            return out[:, :size], out[:, queries : queries + few]
        all_heads = [[y.swapaxes(1, 2) for y in _some_heads(_pad(x, 2, parts), parts, parts)] for x in (q, k, v)]
        own = [_own_heads(x, parts) for x in joint]
        outs = []
        for some in _heads_at_a_time(own[0].shape[2], size, 2):  # the joint stream runs beside the last exchange
            few_q, few_k, few_v = (x[:, :, some] for x in own)
            outs.append(attend_all([[y[:, :, some] for y in ys] for ys in all_heads], (few_q, few_k, few_v), lengths))
        few_out = jnp.concatenate([out[:, queries : queries + few] for out in outs], 2)
        few_out = jax.lax.all_gather(few_out, RULES["tokens"], axis=2, tiled=True)
        out = _heads_to_tokens([_pad(out[:, : parts * size], 1, parts * size) for out in outs], parts, parts)
        return out[:, :, :heads], few_out[:, :, :heads]

    in_specs = (spec, spec, spec, (few_spec,) * 3, PartitionSpec(spec[0]))
    run = jax.shard_map(local_attention, in_specs=in_specs, out_specs=(spec, few_spec), check_vma=False)
    out, few_out = run(q, k, v, joint, lengths)
    return out[:, :queries], few_out


def _in_one_sequence(
    pieces: list[Float[Array, "B s N K"]], joint: Float[Array, "B L N K"], count: int, in_tiles: bool
) -> Float[Array, "B S N K"]:
    """The first `count` tokens of the pieces, then the joint ones; in_tiles: then zeros to the end of a tile."""
    size, end = pieces[0].shape[1], count + joint.shape[1]
    found = [x[:, : count - i * size] for i, x in enumerate(pieces) if i * size < count]
    padding = jnp.zeros((joint.shape[0], -end % _tile_of(end) if in_tiles else 0, *joint.shape[2:]), joint.dtype)
    return jnp.concatenate([*found, joint, padding], 1)  # at once: a TPU writes each result to memory


def _own_heads(x: Float[Array, "B L N K"], parts: int) -> Float[Array, "B L n K"]:
    """This device's share of the heads of tokens that are on every device of sp."""
    x = _pad(x, 2, parts)
    count = x.shape[2] // parts
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(RULES["tokens"]) * count, count, 2)


def ulysses_group(heads: int, parts: int) -> int:
    """The number of sp devices that exchange heads with each other: all, if few zero heads are needed for that."""
    if -heads % parts <= heads * MAX_ZERO_HEADS:
        return parts
    return math.gcd(heads, parts)


def _ring_attention(
    attend_with_lse: Callable[..., tuple[Array, Array]],
    q: Float[Array, "B S n K"],
    k: Float[Array, "B S n K"],
    v: Float[Array, "B S n K"],
    lengths: Int[Array, " B"],
    group: int,
    parts: int,
) -> Float[Array, "B S n K"]:
    """Attention of a group's queries to its own keys, then to the keys of every other group as they arrive."""
    groups, size = parts // group, k.shape[1]
    here = jax.lax.axis_index(RULES["tokens"]) // group

    def attend_part(step: Int[Array, ""] | int, k: Array, v: Array) -> tuple[Array, Array]:
        real = jnp.clip(lengths - (here - step) % groups * size, 0, size)
        out, log_sum_exp = attend_with_lse(q, k, v, jnp.maximum(real, 1))
        has_keys = real[:, None, None] > 0  # otherwise the result is of padding and may not be finite
        return jnp.where(has_keys[..., None], out, 0), jnp.where(has_keys, log_sum_exp, _LSE_OF_NO_KEYS)

    def add(step: Int[Array, ""] | int, carry: _RingState) -> tuple[Array, Array, Array]:
        k, v, out, running_max, row_sum = carry
        part_out, log_sum_exp = attend_part(step, k, v)
        new_max = jnp.maximum(running_max, log_sum_exp)
        rescale, part_sum = jnp.exp2(running_max - new_max), jnp.exp2(log_sum_exp - new_max)
        out = out * rescale[..., None] + part_out * part_sum[..., None]
        return out, new_max, row_sum * rescale + part_sum

    def send_to_next(x: Array) -> Array:
        return jax.lax.ppermute(x, RULES["tokens"], [(i, (i + group) % parts) for i in range(parts)])

    def ring_step(carry: _RingState, step: Int[Array, ""]) -> tuple[_RingState, None]:
        received = send_to_next(carry[0]), send_to_next(carry[1])  # overlaps with the computation
        return (*received, *add(step, carry)), None

    rows = q.shape[:3]
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(rows, _LSE_OF_NO_KEYS), jnp.zeros(rows, jnp.float32)
    carry, _ = jax.lax.scan(ring_step, (k, v, *start), jnp.arange(groups - 1))
    out, _, row_sum = add(groups - 1, carry)
    return (out / row_sum[..., None]).astype(q.dtype)


def _some_heads(x: Float[Array, "B s N K"], group: int, parts: int) -> Float[Array, "group B n s K"]:
    """From a device's own tokens with all heads to some of the heads of the tokens of each device of its group.

    Data for one device is made contiguous before the all-to-all: by the compiler's count, a TPU then moves a fifth less
    than when `all_to_all` transposes.
    """
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, tokens, group, heads // group, dim).transpose(2, 0, 3, 1, 4)
    return _exchange(x, group, parts)


def _tokens_to_heads(x: Float[Array, "B s N K"], group: int, parts: int) -> Float[Array, "B S n K"]:
    """`_some_heads`, with the tokens of all devices in one."""
    batch, tokens, heads, dim = x.shape
    x = _some_heads(x, group, parts).transpose(1, 0, 3, 2, 4)
    return x.reshape(batch, group * tokens, heads // group, dim)


def _heads_at_a_time(heads: int, tokens: int, turns: int) -> list[slice]:
    """Split a device's heads into turns, where it has many tokens; else one turn, since the exchange is short."""
    turns = 1 if _tile_of(tokens) < TOKEN_TILE else min(heads, turns)
    return [slice(heads * i // turns, heads * (i + 1) // turns) for i in range(turns)]


def _heads_to_tokens(xs: list[Float[Array, "B S n K"]], group: int, parts: int) -> Float[Array, "B s N K"]:
    """The inverse of `_tokens_to_heads`, of an array whose heads are in pieces: an all-to-all for each."""
    received = []
    for x in xs:
        batch, tokens, heads, dim = x.shape
        x = x.reshape(batch, group, tokens // group, heads, dim).transpose(1, 0, 3, 2, 4)
        received.append(_exchange(x, group, parts))
    y = jnp.concatenate(received, 2).transpose(1, 3, 0, 2, 4)
    return y.reshape(*y.shape[:2], -1, y.shape[-1])


def _exchange(x: Float[Array, "group ..."], group: int, parts: int) -> Float[Array, "group ..."]:
    """Row i goes to device i of the group; the devices of a group are neighbours."""
    if group == 1:
        return x
    groups = [list(range(first, first + group)) for first in range(0, parts, group)] if group < parts else None
    return jax.lax.all_to_all(x, RULES["tokens"], split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    """x with zeros at the end of an axis, so that its size is a multiple."""
    return jnp.pad(x, [(0, -size % multiple if i == axis else 0) for i, size in enumerate(x.shape)])


@cache
def _log_heads(heads: int, parts: int, group: int) -> None:
    """Logs once per process: a model is traced many times."""
    if group < parts:
        log.info("%d heads do not divide over sp=%d: groups of %d devices, ring attention", heads, parts, group)
    elif heads % parts:
        padded = heads + -heads % parts
        log.info("%d heads do not divide over sp=%d: padded to %d by zero heads", heads, parts, padded)
