"""Sequence parallelism: tokens are split everywhere but in attention, which takes some heads of all tokens."""

from __future__ import annotations

import logging
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
) -> Float[Array, "B Q N K"]:
    """Run attention f on each device's share: batch over dp, heads over tp and sp, the tokens of a head all together.

    Everywhere else sp splits tokens, so q, k, v and the result are exchanged between the devices of sp: four
    all-to-alls, each of one tensor (DeepSpeed-Ulysses, arXiv 2309.14509). Any number of tokens is served, and any
    number of heads that divides over tp: tokens are padded by rows that f never sees as keys, and heads that do not
    divide over sp by heads of zeros, which cost time and change nothing.

    Args:
        f: f(q, k, v, lengths) with lengths int32 [B] or None.
        kv_len: how many keys are attended. An int cuts them before f; an array is for f, as its `lengths`.

    Raises:
        InputError: batch or heads do not divide over their mesh axes, with the numbers.
    """
    mesh = jax.sharding.get_abstract_mesh()
    keys, lengths = (kv_len, None) if isinstance(kv_len, int) else (k.shape[1], kv_len)
    if mesh.empty or mesh.size == 1:
        return f(q, k[:, :keys], v[:, :keys], lengths)
    parts, heads = devices_of("tokens"), q.shape[2] // devices_of("heads")
    if heads % parts:
        _log_padded_heads(heads, parts)
    queries = q.shape[1]
    q, k, v = map(pad_tokens, (q, k, v))
    spec = spec_of(mesh, ("batch", "tokens", "heads"), q.shape, "attention")
    # cut by whole tiles, which costs no copy of its own; f is told of the rest
    tiles = min(keys + -keys % TOKEN_TILE, k.shape[1])
    if tiles > keys and lengths is None:
        lengths = jnp.full(q.shape[0], keys, jnp.int32)

    def share(q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
        if parts == 1:
            return f(q, k[:, :tiles], v[:, :tiles], lengths)
        q, k, v = (_tokens_to_heads(_pad(x, 2, parts), parts) for x in (q, k, v))
        return _heads_to_tokens(f(q, k[:, :tiles], v[:, :tiles], lengths), parts)[:, :, :heads]

    in_specs = (spec, spec, spec, PartitionSpec(spec[0]))
    return jax.shard_map(share, in_specs=in_specs, out_specs=spec, check_vma=False)(q, k, v, lengths)[:, :queries]


def _tokens_to_heads(x: Float[Array, "B s N K"], parts: int) -> Float[Array, "B S n K"]:
    """From a part of the tokens with all heads to all tokens with a part of the heads.

    What goes to one device lies together before the exchange: it takes a fifth less traffic on a TPU than leaving the
    transposes to `all_to_all`, by the compiler's count.
    """
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, tokens, parts, heads // parts, dim).transpose(2, 0, 3, 1, 4)
    x = jax.lax.all_to_all(x, RULES["tokens"], split_axis=0, concat_axis=0, tiled=True)
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, parts * tokens, heads // parts, dim)


def _heads_to_tokens(x: Float[Array, "B S n K"], parts: int) -> Float[Array, "B s N K"]:
    """The inverse of `_tokens_to_heads`."""
    batch, tokens, heads, dim = x.shape
    x = x.reshape(batch, parts, tokens // parts, heads, dim).transpose(1, 0, 3, 2, 4)
    x = jax.lax.all_to_all(x, RULES["tokens"], split_axis=0, concat_axis=0, tiled=True)
    return x.transpose(1, 3, 0, 2, 4).reshape(batch, tokens // parts, parts * heads, dim)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    """Zeros behind an axis until it is a multiple."""
    return jnp.pad(x, [(0, -size % multiple if i == axis else 0) for i, size in enumerate(x.shape)])


@cache
def _log_padded_heads(heads: int, parts: int) -> None:
    """Once per process: a model is traced many times."""
    padded = heads + -heads % parts
    log.info("%d heads do not divide over sp=%d: attention works on %d, zeros included", heads, parts, padded)
