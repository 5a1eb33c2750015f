"""The mesh, and the two tables that say what lies where: logical axis -> mesh axis, parameter -> logical axes.

Weights are split over tp. On a mesh made with `shard_weights`, the large ones also are over dp and sp, along what the
table calls "stored"; a layer's are gathered when it computes (`layer_weights`), as in ZeRO-3 (arXiv 1910.02054).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from cogvideox_flax.errors import InputError

AXES = ("dp", "sp", "tp")

SHARDED = "sharded"
"""A mesh axis of size 1, by which all who see a mesh know that its weights are split over dp and sp too."""

RULES: dict[str, str] = {"batch": "dp", "tokens": "sp", "heads": "tp", "hidden": "tp"}
"""Logical axis -> mesh axis, of what is computed with."""

STORED = ("dp", "sp")
"""The mesh axes of the logical axis "stored", where weights are sharded: none of a layer's once they are gathered."""

MeshShape = tuple[int, int, int] | tuple[int, int, int, bool]
"""dp, sp, tp, and whether weights are sharded over dp and sp."""

T = TypeVar("T")

_REPLICATED: tuple[None, ...] = ()
Axes = tuple[str | None, ...]

PARAMS: dict[str, tuple[tuple[str, Axes], ...]] = {
    "transformer": (
        # with a LoRA, a linear map is the adapter's `base`, and the adapter's own a and b are split as its sides are
        (r"blocks\.attn\.[qkv]\.(base\.)?kernel", (None, "stored", "heads")),
        (r"blocks\.attn\.[qkv]\.b", (None, None, "heads")),
        (r"blocks\.attn\.[qkv]\.((base\.)?bias|scale)", (None, "heads")),
        (r"blocks\.attn\.out\.(base\.)?kernel", (None, "heads", "stored")),
        (r"blocks\.attn\.out\.a", (None, "heads", None)),
        (r"blocks\.mlp\.up\.(base\.)?kernel", (None, "stored", "hidden")),
        (r"blocks\.mlp\.up\.b", (None, None, "hidden")),
        (r"blocks\.mlp\.up\.((base\.)?bias|scale)", (None, "hidden")),
        (r"blocks\.mlp\.down\.(base\.)?kernel", (None, "hidden", "stored")),
        (r"blocks\.mlp\.down\.a", (None, "hidden", None)),
        (r"blocks\.norm[12]\.linear\.kernel", (None, "stored", None)),
        (r"blocks\.(attn\.([qkv]\.a|out\.b)|mlp\.(up\.a|down\.b))", _REPLICATED),
        (r"blocks\.(attn\.out|mlp\.down)\.((base\.)?bias|scale)", _REPLICATED),
        (r"blocks\.(attn\.norm_[qk]|norm[12])\..*", _REPLICATED),
        (r"(patch_embed|text_proj|time_embedding|ofs_embedding|norm_final|norm_out|proj_out)\..*", _REPLICATED),
        (r"pos_embedding", _REPLICATED),
    ),
    "text_encoder": (
        (r"blocks\.attn\.[qkv]\.weight", (None, "heads", "stored")),
        (r"blocks\.attn\.out\.weight", (None, "stored", "heads")),
        (r"blocks\.mlp\.(gate|up)\.weight", (None, "hidden", "stored")),
        (r"blocks\.mlp\.down\.weight", (None, "stored", "hidden")),
        # scales are of quantized weights, one per output
        (r"blocks\.attn\.[qkv]\.scale", (None, "heads")),
        (r"blocks\.mlp\.(gate|up)\.scale", (None, "hidden")),
        (r"blocks\.(attn\.out|mlp\.down)\.scale", _REPLICATED),
        (r"position_bias", (None, "heads")),
        (r"embedding", (None, "hidden")),
        (r"blocks\.norm_(attn|mlp)\.scale|norm_out\.scale", _REPLICATED),
    ),
    "vae": ((r"(encoder|decoder)\..*", _REPLICATED),),
}
"""Component -> rows of (parameter name, logical axes); the first full match counts. No match is an error."""


def make_mesh(
    dp: int = 1,
    sp: int = 1,
    tp: int = 1,
    shard_weights: bool = False,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over the first dp * sp * tp devices.

    Args:
        shard_weights: split large weights over dp and sp as well. Each device then holds 1 / (dp * sp * tp) of them,
            and each layer's travel whenever it computes.

    Raises:
        InputError: a size below 1, or more devices asked for than there are.
    """
    devices = jax.devices() if devices is None else devices
    need = dp * sp * tp
    if min(dp, sp, tp) < 1 or need > len(devices):
        raise InputError(f"mesh dp={dp} sp={sp} tp={tp} needs {need} devices; there are {len(devices)}")
    names, shape = (AXES, (dp, sp, tp)) if not shard_weights else ((*AXES, SHARDED), (dp, sp, tp, 1))
    kinds = (AxisType.Auto,) * len(shape)
    if need < len(devices):  # a part of a slice has no topology that the order could follow
        return Mesh(np.array(devices[:need]).reshape(shape), names, axis_types=kinds)
    try:
        return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    except NotImplementedError:  # an axis longer than the slice is along any of its own
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(ordered, names, axis_types=kinds)


def parse_mesh(text: str) -> MeshShape:
    """'2,1,4' -> (2, 1, 4), the sizes of dp, sp, tp; '2,4,1,sharded' -> (2, 4, 1, True). As `make_mesh` takes them."""
    sizes, comma, word = text.rpartition(",") if text.strip().endswith(SHARDED) else (text, "", "")
    parts = sizes.split(",")
    if len(parts) != 3 or not all(p.strip().isdigit() for p in parts) or word.strip() not in ("", SHARDED):
        raise InputError(f"mesh must be DP,SP,TP such as 2,1,4, or DP,SP,TP,{SHARDED}; got {text!r}")
    dp, sp, tp = map(int, parts)
    return (dp, sp, tp, True) if comma else (dp, sp, tp)


def describe_mesh(mesh: MeshShape) -> str:
    """As `parse_mesh` reads it."""
    return ",".join(map(str, mesh[:3])) + (f",{SHARDED}" if mesh[3:] == (True,) else "")


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
    return NamedSharding(mesh, spec_of(mesh, parameter_axes(component, name), shape, f"parameter {component}.{name}"))


def layer_weights(component: str, layer: T) -> T:
    """One layer of the component's blocks as it computes: where weights are sharded, gathered over dp and sp.

    For the body of the scan over layers, so that no more than a layer or two is whole at any time.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if SHARDED not in mesh.axis_names:
        return layer

    def gather(path: jax.tree_util.KeyPath, leaf: Array) -> Array:
        axes = parameter_axes(component, f"blocks.{parameter_name(path)}")[1:]
        return constrain(leaf, *(None if axis == "stored" else axis for axis in axes))

    return jax.tree_util.tree_map_with_path(gather, layer)


def parameter_name(path: jax.tree_util.KeyPath) -> str:
    """('blocks', 'attn', 'q', 'kernel', 'value') -> 'blocks.attn.q.kernel'."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    return ".".join(parts[:-1] if parts[-1] == "value" else parts)


def spec_of(mesh: Mesh | jax.sharding.AbstractMesh, axes: Axes, shape: tuple[int, ...], what: str) -> PartitionSpec:
    """Mesh axes of an array of this shape whose axes have these logical names; `what` it is, for the error.

    Raises:
        InputError: an axis does not divide over the mesh, with the numbers.
    """
    names = [_mesh_axes(mesh, axis) for axis in axes]
    for size, name in zip(shape, names, strict=False):
        parts = math.prod(mesh.shape[n] for n in name)
        if size % parts:
            raise InputError(
                f"{what} of shape {shape}: {size} does not divide over mesh axis {' x '.join(name)} of size {parts}"
            )
    return PartitionSpec(*(name if len(name) > 1 else name[0] if name else None for name in names))


def _mesh_axes(mesh: Any, axis: str | None) -> tuple[str, ...]:
    if axis == "stored":
        return STORED if SHARDED in mesh.axis_names else ()
    return (RULES[axis],) if axis else ()


def check_batch(mesh: Mesh | None, batch: int) -> None:
    """Refuse a batch (prompts, twice with guidance) that does not divide over the mesh.

    Raises:
        InputError: with the numbers.
    """
    if mesh is not None:
        spec_of(mesh, ("batch",), (batch,), "batch (prompts, twice with guidance)")


def check_heads(mesh: Mesh, heads: int, what: str) -> None:
    """Refuse attention heads that do not divide over the mesh: a head is never cut.

    Raises:
        InputError: with the numbers.
    """
    spec_of(mesh, ("heads",), (heads,), f"attention heads of the {what}")


def named(mesh: Mesh, axes: Axes, shape: tuple[int, ...], what: str) -> NamedSharding:
    """Where an array of this shape lies whose axes have these logical names; `what` it is, for the error.

    Raises:
        InputError: an axis does not divide over the mesh, with the numbers.
    """
    return NamedSharding(mesh, spec_of(mesh, axes, shape, what))


def constrain(x: Array, *axes: str | None) -> Array:
    """Say which logical axes an activation's axes are, when a mesh is in use (`jax.set_mesh`).

    Raises:
        InputError: an axis does not divide over the mesh, with the numbers.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = spec_of(mesh, axes, x.shape, "array")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def devices_of(axis: str) -> int:
    """Over how many devices the mesh in use splits a logical axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[RULES[axis]]
