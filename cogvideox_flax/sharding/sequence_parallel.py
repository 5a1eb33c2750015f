"""Sequence parallelism: tokens are split everywhere but in attention, which takes some heads of all tokens.

Where there are too few heads for that, groups of devices exchange heads, and keys and values go round the groups in a
ring.
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
"""Tokens of a device come in multiples of a TPU's lanes, along which they lie around an exchange; few of them, of 8."""

WASTE = 1 / 8
"""Share of heads of zeros up to which all devices exchange heads."""

_Ring = tuple[Array, Array, Array, Array, Array]
"""Keys, values, and of the parts so far: the sum of each result times 2^(weight - running_max), running_max itself, and
row_sum, the sum of 2^(weight - running_max)."""

_NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)  # the weight of no keys: below that of any, differences finite


def pad_tokens(x: Float[Array, "B S ..."]) -> Float[Array, "B padded ..."]:
    """Zero rows behind the tokens until each device of sp has as many, in whole tiles; as it is without sp.

    Attention must be told how many tokens are real (`kv_len`), and whoever pads must cut.
    """
    parts = devices_of("tokens")
    tile = TOKEN_TILE if x.shape[1] >= 8 * parts * TOKEN_TILE else 8
    return _pad(x, 1, parts * tile) if parts > 1 else x


def over_heads(
    f: Callable[..., Array],
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: int | Int[Array, " B"] | None,
    part: Callable[..., tuple[Array, Array]] | None = None,
) -> Float[Array, "B Q N K"]:
    """Run attention f on each device's share: batch over dp, heads over tp and sp, the tokens of a head all together.

    Everywhere else sp splits tokens, so q, k, v and the result are exchanged between the devices of sp: four
    all-to-alls, each of one tensor (DeepSpeed-Ulysses, arXiv 2309.14509). Any number of tokens is served, and any
    number of heads that divides over tp: tokens are padded by rows that f never sees as keys, and heads that do not
    divide over sp by heads of zeros, which cost time and change nothing. Where they would cost much, heads are
    exchanged by so many devices as they divide over, and keys and values go round (ring attention, arXiv 2310.01889;
    both at once, arXiv 2405.07719).

    Args:
        f: f(q, k, v, lengths) with lengths int32 [B] or None.
        kv_len: how many keys are attended. An int cuts them before f; an array is for f, as its `lengths`.
        part: part(q, k, v, lengths) is f's result for some of the keys, float32, and their weight, as
            `attention.xla.attend_part`; None if f has no such form: then heads are padded.

    Raises:
        InputError: batch or heads do not divide over their mesh axes, with the numbers.
    """
    mesh = jax.sharding.get_abstract_mesh()
    keys, lengths = (kv_len, None) if isinstance(kv_len, int) else (k.shape[1], kv_len)
    if mesh.empty or mesh.size == 1:
        return f(q, k[:, :keys], v[:, :keys], lengths)
    parts, heads = devices_of("tokens"), q.shape[2] // devices_of("heads")
    group = group_of(heads, parts) if part is not None else parts
    _log_heads(heads, parts, group)
    queries = q.shape[1]
    q, k, v = map(pad_tokens, (q, k, v))
    spec = spec_of(mesh, ("batch", "tokens", "heads"), q.shape, "attention")
    # cut by whole tiles, which costs no copy of its own; f is told of the rest
    tiles = min(keys + -keys % TOKEN_TILE, k.shape[1])
    if lengths is None and (tiles > keys or group < parts):
        lengths = jnp.full(q.shape[0], keys, jnp.int32)

    def share(q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
        if parts == 1:
            return f(q, k[:, :tiles], v[:, :tiles], lengths)
        q, k, v = (_tokens_to_heads(_pad(x, 2, group), group, parts) for x in (q, k, v))
        if group < parts:
            assert part is not None and lengths is not None
            out = _ring(part, q, k, v, lengths, group, parts)
        else:
            out = f(q, k[:, :tiles], v[:, :tiles], lengths)
        return _heads_to_tokens(out, group, parts)[:, :, :heads]

    in_specs = (spec, spec, spec, PartitionSpec(spec[0]))
    return jax.shard_map(share, in_specs=in_specs, out_specs=spec, check_vma=False)(q, k, v, lengths)[:, :queries]


def group_of(heads: int, parts: int) -> int:
    """How many of the devices of sp exchange heads among themselves: all, if few heads of zeros make that possible."""
    if -heads % parts <= heads * WASTE:
        return parts
    return math.gcd(heads, parts)


def _ring(
    part: Callable[..., tuple[Array, Array]],
    q: Float[Array, "B S n K"],
    k: Float[Array, "B S n K"],
    v: Float[Array, "B S n K"],
    lengths: Int[Array, " B"],
    group: int,
    parts: int,
) -> Float[Array, "B S n K"]:
    """Attention of a group's queries to its own keys, and then to those of each other group as they come by."""
    around, size = parts // group, k.shape[1]
    here = jax.lax.axis_index(RULES["tokens"]) // group

    def seen(step: Int[Array, ""] | int, k: Array, v: Array) -> tuple[Array, Array]:
        real = jnp.clip(lengths - (here - step) % around * size, 0, size)
        out, weight = part(q, k, v, jnp.maximum(real, 1))
        some = real[:, None, None] > 0  # else what was attended is padding, of which not even a zero times may count
        return jnp.where(some[..., None], out, 0), jnp.where(some, weight, _NOTHING)

    def add(step: Int[Array, ""] | int, carry: _Ring) -> tuple[Array, Array, Array]:
        k, v, out, running_max, row_sum = carry
        part_out, weight = seen(step, k, v)
        new_max = jnp.maximum(running_max, weight)
        rescale, share = jnp.exp2(running_max - new_max), jnp.exp2(weight - new_max)
        out = out * rescale[..., None] + part_out * share[..., None]
        return out, new_max, row_sum * rescale + share

    def pass_on(x: Array) -> Array:
        return jax.lax.ppermute(x, RULES["tokens"], [(i, (i + group) % parts) for i in range(parts)])

    def turn(carry: _Ring, step: Int[Array, ""]) -> tuple[_Ring, None]:
        coming = pass_on(carry[0]), pass_on(carry[1])  # while this device computes
        return (*coming, *add(step, carry)), None

    rows = q.shape[:3]
    start = jnp.zeros(q.shape, jnp.float32), jnp.full(rows, _NOTHING), jnp.zeros(rows, jnp.float32)
    carry, _ = jax.lax.scan(turn, (k, v, *start), jnp.arange(around - 1))
    out, _, row_sum = add(around - 1, carry)
    return (out / row_sum[..., None]).astype(q.dtype)


def _tokens_to_heads(x: Float[Array, "B s N K"], group: int, parts: int) -> Float[Array, "B S n K"]:
    """From a device's tokens with all heads to its group's tokens with a part of the heads.

    What goes to one device lies together before the exchange: it takes a fifth less traffic on a TPU than leaving the
    transposes to `all_to_all`, by the compiler's count.
    """
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, tokens, group, heads // group, dim).transpose(2, 0, 3, 1, 4)
    return _exchange(x, group, parts).transpose(1, 0, 3, 2, 4).reshape(batch, group * tokens, heads // group, dim)


def _heads_to_tokens(x: Float[Array, "B S n K"], group: int, parts: int) -> Float[Array, "B s N K"]:
    """The inverse of `_tokens_to_heads`."""
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, group, tokens // group, heads, dim).transpose(1, 0, 3, 2, 4)
    return _exchange(x, group, parts).transpose(1, 3, 0, 2, 4).reshape(batch, tokens // group, group * heads, dim)


def _exchange(x: Float[Array, "group ..."], group: int, parts: int) -> Float[Array, "group ..."]:
    """Row i goes to device i of the group, which are neighbours."""
    if group == 1:
        return x
    groups = [list(range(first, first + group)) for first in range(0, parts, group)] if group < parts else None
    return jax.lax.all_to_all(x, RULES["tokens"], split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    """Zeros behind an axis until it is a multiple."""
    return jnp.pad(x, [(0, -size % multiple if i == axis else 0) for i, size in enumerate(x.shape)])


@cache
def _log_heads(heads: int, parts: int, group: int) -> None:
    """Once per process: a model is traced many times."""
    if group < parts:
        log.info("%d heads do not divide over sp=%d: %d devices exchange them, keys go round", heads, parts, group)
    elif heads % parts:
        padded = heads + -heads % parts
        log.info("%d heads do not divide over sp=%d: attention works on %d, zeros included", heads, parts, padded)
