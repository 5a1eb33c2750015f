"""The mesh, and the two tables that say what lies where: logical axis -> mesh axis, parameter -> logical axes.

Mesh axes are dp (batch and the two halves of guidance), sp (tokens) and tp (heads and hidden units).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from cogvideox_flax.errors import InputError

log = logging.getLogger(__name__)

AXES = ("dp", "sp", "tp")

RULES: dict[str, str] = {"batch": "dp", "tokens": "sp", "heads": "tp", "hidden": "tp"}
"""Logical axis -> mesh axis."""

TOKEN_TILE = 128
"""Tokens of a device come in multiples of a TPU's lanes, along which they lie around an exchange; few of them, of 8."""

_REPLICATED: tuple[None, ...] = ()
Axes = tuple[str | None, ...]

PARAMS: dict[str, tuple[tuple[str, Axes], ...]] = {
    "transformer": (
        # with a LoRA, a linear map is the adapter's `base`, and the adapter's own a and b are split as its sides are
        (r"blocks\.attn\.[qkv]\.((base\.)?kernel|b)", (None, None, "heads")),
        (r"blocks\.attn\.[qkv]\.(base\.)?bias", (None, "heads")),
        (r"blocks\.attn\.out\.((base\.)?kernel|a)", (None, "heads", None)),
        (r"blocks\.mlp\.up\.((base\.)?kernel|b)", (None, None, "hidden")),
        (r"blocks\.mlp\.up\.(base\.)?bias", (None, "hidden")),
        (r"blocks\.mlp\.down\.((base\.)?kernel|a)", (None, "hidden", None)),
        (r"blocks\.(attn\.([qkv]\.a|out\.b)|mlp\.(up\.a|down\.b))", _REPLICATED),
        (r"blocks\.(attn\.out|mlp\.down)\.(base\.)?bias", _REPLICATED),
        (r"blocks\.(attn\.norm_[qk]|norm[12])\..*", _REPLICATED),
        (r"(patch_embed|text_proj|time_embedding|ofs_embedding|norm_final|norm_out|proj_out)\..*", _REPLICATED),
        (r"pos_embedding", _REPLICATED),
    ),
    "text_encoder": (
        (r"blocks\.attn\.[qkv]\.kernel", (None, None, "heads")),
        (r"blocks\.attn\.out\.kernel", (None, "heads", None)),
        (r"blocks\.mlp\.(gate|up)\.kernel", (None, None, "hidden")),
        (r"blocks\.mlp\.down\.kernel", (None, "hidden", None)),
        (r"position_bias", (None, "heads")),
        (r"embedding", (None, "hidden")),
        (r"blocks\.norm_(attn|mlp)\.scale|norm_out\.scale", _REPLICATED),
    ),
    "vae": ((r"(encoder|decoder)\..*", _REPLICATED),),
}
"""Component -> rows of (parameter name, logical axes); the first full match counts. No match is an error."""


def make_mesh(dp: int = 1, sp: int = 1, tp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first dp * sp * tp devices.

    Raises:
        InputError: a size below 1, or more devices asked for than there are.
    """
    devices = jax.devices() if devices is None else devices
    need = dp * sp * tp
    if min(dp, sp, tp) < 1 or need > len(devices):
        raise InputError(f"mesh dp={dp} sp={sp} tp={tp} needs {need} devices; there are {len(devices)}")
    kinds = (AxisType.Auto,) * 3
    if need < len(devices):  # a part of a slice has no topology that the order could follow
        return Mesh(np.array(devices[:need]).reshape(dp, sp, tp), AXES, axis_types=kinds)
    return jax.make_mesh((dp, sp, tp), AXES, axis_types=kinds, devices=devices)


def parse_mesh(text: str) -> tuple[int, int, int]:
    """'2,1,4' -> (2, 1, 4), the sizes of dp, sp, tp."""
    parts = text.split(",")
    if len(parts) != 3 or not all(p.strip().isdigit() for p in parts):
        raise InputError(f"mesh must be DP,SP,TP such as 2,1,4; got {text!r}")
    dp, sp, tp = map(int, parts)
    return dp, sp, tp


def parameter_axes(component: str, name: str) -> Axes:
    """Logical axes of one parameter.

    Raises:
        KeyError: no row of PARAMS matches; a new parameter needs a row, it is never replicated by accident.
    """
    for pattern, axes in PARAMS[component]:
        if re.fullmatch(pattern, name):
            return axes
    raise KeyError(f"no row of sharding.PARAMS[{component!r}] matches parameter {name!r}")


def parameter_sharding(mesh: Mesh, component: str, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where a parameter lies.

    Raises:
        InputError: an axis does not divide over the mesh, with the numbers.
    """
    return NamedSharding(mesh, _spec(mesh, parameter_axes(component, name), shape, f"parameter {component}.{name}"))


def _spec(mesh: Mesh | jax.sharding.AbstractMesh, axes: Axes, shape: tuple[int, ...], what: str) -> PartitionSpec:
    names = [RULES[axis] if axis else None for axis in axes]
    for size, name in zip(shape, names, strict=False):
        if name and size % mesh.shape[name]:
            raise InputError(
                f"{what} of shape {shape}: {size} does not divide over mesh axis {name} of size {mesh.shape[name]}"
            )
    return PartitionSpec(*names)


def check_batch(mesh: Mesh | None, batch: int) -> None:
    """Refuse a batch (prompts, twice with guidance) that does not divide over the mesh.

    Raises:
        InputError: with the numbers.
    """
    if mesh is not None:
        _spec(mesh, ("batch",), (batch,), "batch (prompts, twice with guidance)")


def check_heads(mesh: Mesh, heads: int, what: str) -> None:
    """Refuse attention heads that do not divide over the mesh: a head is never cut.

    Raises:
        InputError: with the numbers.
    """
    _spec(mesh, ("heads",), (heads,), f"attention heads of the {what}")


def named(mesh: Mesh, axes: Axes, shape: tuple[int, ...], what: str) -> NamedSharding:
    """Where an array of this shape lies whose axes have these logical names; `what` it is, for the error.

    Raises:
        InputError: an axis does not divide over the mesh, with the numbers.
    """
    return NamedSharding(mesh, _spec(mesh, axes, shape, what))


def constrain(x: Array, *axes: str | None) -> Array:
    """Say which logical axes an activation's axes are, when a mesh is in use (`jax.set_mesh`).

    Raises:
        InputError: an axis does not divide over the mesh, with the numbers.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = _spec(mesh, axes, x.shape, "array")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def pad_tokens(x: Float[Array, "B S ..."]) -> Float[Array, "B padded ..."]:
    """Zero rows behind the tokens until each device of sp has as many, in whole tiles; as it is without sp.

    Attention must be told how many tokens are real (`kv_len`), and whoever pads must cut.
    """
    parts = _devices("tokens")
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
    parts, heads = _devices("tokens"), q.shape[2] // _devices("heads")
    if heads % parts:
        _log_padded_heads(heads, parts)
    queries = q.shape[1]
    q, k, v = map(pad_tokens, (q, k, v))
    spec = _spec(mesh, ("batch", "tokens", "heads"), q.shape, "attention")
    # cut by whole tiles, which costs no copy of its own; f is told of the rest
    tiles = min(keys + -keys % TOKEN_TILE, k.shape[1])
    if tiles > keys and lengths is None:
        lengths = jnp.full(q.shape[0], keys, jnp.int32)

    def share(q: Array, k: Array, v: Array, lengths: Array | None) -> Array:
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


def _devices(axis: str) -> int:
    """Over how many devices the mesh in use splits a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[RULES[axis]]


def _pad(x: Array, axis: int, multiple: int) -> Array:
    """Zeros behind an axis until it is a multiple."""
    return jnp.pad(x, [(0, -size % multiple if i == axis else 0) for i, size in enumerate(x.shape)])


@cache
def _log_padded_heads(heads: int, parts: int) -> None:
    """Once per process: a model is traced many times."""
    padded = heads + -heads % parts
    log.info("%d heads do not divide over sp=%d: attention works on %d, zeros included", heads, parts, padded)
