"""The mesh and the sharding tables: logical axis -> mesh axis here, parameter -> logical axes in each family's rows.

Over several TPU slices, the outer part of dp is a mesh axis of its own: the batch is split over both, and only sums and
gathers over the batch leave a slice.

Weights are split over tp. On a mesh made with `fsdp`, large weights are also split over dp and sp, along the axis that
the rows call "stored"; a layer's weights are gathered when it computes (`layer_weights`), as in ZeRO-3 (arXiv
1910.02054).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.sharding.devices import find_devices

AXES = ("dp", "sp", "tp")

FSDP = "fsdp"
"""A mesh axis of size 1, which marks a mesh whose weights are split over dp and sp too."""

SLICE = "slice"
"""The mesh axis of TPU slices, which the slower network of the data centre connects; only on meshes over several."""

RULES: dict[str, str] = {"batch": "dp", "tokens": "sp", "heads": "tp", "hidden": "tp"}
"""Logical axis -> mesh axis, for activations and for weights during computation."""

STORED = ("sp", "dp")
"""The mesh axes of the logical axis "stored" on an FSDP mesh, until a layer's weights are gathered. "heads stored" is
split as "heads", and each part of it as "stored"."""

MeshShape = tuple[int, int, int] | tuple[int, int, int, bool]
"""dp, sp, tp, and whether weights are split over dp and sp (FSDP)."""

T = TypeVar("T")

Axes = tuple[str | None, ...]
"""The logical axis of each axis of an array; trailing axes that are left out are not split."""

REPLICATED: Axes = ()

ParameterRows = tuple[tuple[str, Axes], ...]
"""Rows of (parameter name, a regular expression; logical axes); the first full match counts. No match is an error."""


def make_mesh(
    dp: int = 1,
    sp: int = 1,
    tp: int = 1,
    fsdp: bool = False,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over the first dp * sp * tp devices. Over several TPU slices it has one more axis, `SLICE`, outside of dp,
    and its axis dp is that of one slice.

    Args:
        fsdp: split large weights over dp and sp as well (fully sharded data parallelism). Each device then holds
            1 / (dp * sp * tp) of them, and a layer's weights are gathered whenever it computes.

    Raises:
        InputError: a size below 1, more devices than there are, or sp or tp over several slices.
    """
    devices = find_devices() if devices is None else devices
    need = dp * sp * tp
    if min(dp, sp, tp) < 1 or need > len(devices):
        raise InputError(f"mesh dp={dp} sp={sp} tp={tp} needs {need} devices; there are {len(devices)}")
    names, shape = (AXES, (dp, sp, tp)) if not fsdp else ((*AXES, FSDP), (dp, sp, tp, 1))
    kinds = (AxisType.Auto,) * len(shape)
    if (slices := slice_count(devices[:need])) > 1:
        return _mesh_over_slices(names, shape, slices, devices[:need])
    if need < len(devices):  # part of a slice: no topology to order the devices by
        return Mesh(np.array(devices[:need]).reshape(shape), names, axis_types=kinds)
    try:
        return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    except NotImplementedError:  # a mesh axis longer than any axis of the slice
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(ordered, names, axis_types=kinds)


def slice_count(devices: Sequence[jax.Device]) -> int:
    """The number of TPU slices that devices are of; 1 for other devices."""
    return len({getattr(device, "slice_index", 0) if device.platform == "tpu" else 0 for device in devices})


def _mesh_over_slices(names: tuple[str, ...], shape: tuple[int, ...], slices: int, devices: Sequence[Any]) -> Mesh:
    """The mesh of `make_mesh` whose dp is split into slices and what is inside one."""
    dp, sp, tp = shape[:3]
    sizes = Counter(device.slice_index for device in devices)
    if dp % slices or len(set(sizes.values())) > 1:
        count = min(sizes.values())  # of the devices of a slice
        tp_inside = tp if count % tp == 0 else 1
        work = [
            f"{slices * count // (n * tp_inside)},{n},{tp_inside}"
            for n in range(1, count + 1)
            if count % (n * tp_inside) == 0
        ]
        raise InputError(
            f"mesh dp={dp} sp={sp} tp={tp} does not fit {slices} slices with {', '.join(map(str, sizes.values()))} of "
            "its devices: sp and tp stay inside a slice, and dp is as large in each; expected one of " + "; ".join(work)
        )
    inside, outside = (1, dp // slices, *shape[1:]), (slices, *[1] * len(shape))
    ordered = mesh_utils.create_hybrid_device_mesh(inside, outside, devices, allow_split_physical_axes=True)
    return Mesh(ordered, (SLICE, *names), axis_types=(AxisType.Auto,) * ordered.ndim)


def parse_mesh(text: str) -> MeshShape:
    """'2,1,4' -> (2, 1, 4), the sizes of dp, sp, tp; '2,4,1,fsdp' -> (2, 4, 1, True): arguments of `make_mesh`."""
    sizes, comma, word = text.rpartition(",") if text.strip().endswith(FSDP) else (text, "", "")
    parts = sizes.split(",")
    numbers = all(re.fullmatch("[0-9]{1,9}", p.strip()) for p in parts)
    if len(parts) != 3 or not numbers or word.strip() not in ("", FSDP):
        raise InputError(f"mesh must be DP,SP,TP such as 2,1,4, or DP,SP,TP,{FSDP}; got {text!r}")
    dp, sp, tp = map(int, parts)
    return (dp, sp, tp, True) if comma else (dp, sp, tp)


def mesh_of(text: str | None, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """The mesh of a text as for `parse_mesh`; None for one device."""
    return None if text is None else make_mesh(*parse_mesh(text), devices=devices)


def describe_mesh(mesh: MeshShape) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(map(str, mesh[:3])) + (f",{FSDP}" if mesh[3:] == (True,) else "")


def block_rows(blocks: str) -> ParameterRows:
    """The rows of attention and MLP in a transformer's stacked blocks, whose path is `blocks`.

    With a LoRA, a linear map is the adapter's `base`; the adapter's a and b have the logical axes of its input and
    output.
    """
    rows: ParameterRows = (
        (r"attn\.[qkv]\.(base\.)?kernel", (None, "stored", "heads")),
        (r"attn\.[qkv]\.b", (None, None, "heads")),
        (r"attn\.[qkv]\.(base\.)?(bias|scale)", (None, "heads")),
        (r"attn\.out\.(base\.)?kernel", (None, "heads stored")),
        (r"attn\.out\.a", (None, "heads", None)),
        (r"mlp\.up\.(base\.)?kernel", (None, "stored", "hidden")),
        (r"mlp\.up\.b", (None, None, "hidden")),
        (r"mlp\.up\.(base\.)?(bias|scale)", (None, "hidden")),
        (r"mlp\.down\.(base\.)?kernel", (None, "hidden stored")),
        (r"mlp\.down\.a", (None, "hidden", None)),
        (r"attn\.([qkv]\.a|out\.b)|mlp\.(up\.a|down\.b)", REPLICATED),
        (r"(attn\.out|mlp\.down)\.(base\.)?(bias|scale)", REPLICATED),
        (r"attn\.norm_[qk]\..*", REPLICATED),
    )
    return tuple((rf"{blocks}\.({pattern})", axes) for pattern, axes in rows)


def parameter_axes(rows: ParameterRows, name: str) -> Axes:
    """Logical axes of one parameter.

    Raises:
        KeyError: no row matches. A new parameter needs a row; it is never replicated silently.
    """
    for pattern, axes in rows:
        if re.fullmatch(pattern, name):
            return axes
    raise KeyError(f"no sharding row matches parameter {name!r}")


def parameter_sharding(mesh: Mesh, rows: ParameterRows, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of a parameter.

    Raises:
        InputError: an axis does not divide over the mesh.
    """
    return NamedSharding(mesh, spec_of(mesh, parameter_axes(rows, name), shape, f"parameter {name}"))


@partial(jax.tree_util.register_dataclass, data_fields=("value",), meta_fields=("dtype",))
@dataclass(frozen=True)
class Rounded:
    """A float32 weight of a component's `blocks` that computes in another dtype: `layer_weights` rounds it."""

    value: Float32[Array, ...]
    dtype: Any


def layer_weights(rows: ParameterRows, layer: T) -> T:
    """One layer of a component's `blocks`, on an FSDP mesh gathered over dp and sp.

    Used in the body of the scan over layers, so that only one or two layers are gathered at any time. The gradient of
    what is gathered is summed in float32 and split again, over one mesh axis after the other. `Rounded` weights stay
    float32 numbers, so that their gradients are; they are gathered in the dtype in which they compute.
    """
    gathers = FSDP in jax.sharding.get_abstract_mesh().axis_names

    def weight(path: jax.tree_util.KeyPath, leaf: Array | Rounded) -> Array:
        x, dtype = (leaf.value if isinstance(leaf, Rounded) else leaf), leaf.dtype
        if not gathers:
            return x if x.dtype == dtype else _rounded(dtype, x)
        return _gathered(parameter_axes(rows, f"blocks.{parameter_name(path)}")[1:], dtype, x)

    return jax.tree_util.tree_map_with_path(weight, layer, is_leaf=lambda leaf: isinstance(leaf, Rounded))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axes: Axes, dtype: Any, x: Array) -> Array:
    rounded = jax.lax.with_sharding_constraint(x.astype(dtype), _placement(axes, len(STORED)))
    return jax.lax.with_sharding_constraint(rounded, _placement(axes, 0)).astype(x.dtype)


def _scattered(axes: Axes, dtype: Any, _: None, grad: Array) -> tuple[Array]:
    """Without these constraints it would be that of what is gathered: a sum that every device has all of.

    They are of one mesh axis after the other, since libtpu 0.0.42 reduces and scatters over a row of chips, but over a
    grid of more than 8 computes the whole sum.
    """
    total = grad.astype(jnp.float32)
    for n in range(1, len(STORED) + 1):
        total = jax.lax.with_sharding_constraint(total, _placement(axes, n))
    return (total.astype(grad.dtype),)


_gathered.defvjp(lambda axes, dtype, x: (_gathered(axes, dtype, x), None), _scattered)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(dtype: Any, x: Array) -> Array:
    """The gradient is not rounded. The barrier keeps the compiler from leaving out both conversions."""
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


_rounded.defvjp(lambda dtype, x: (_rounded(dtype, x), None), lambda dtype, _, grad: (grad,))


def _placement(axes: Axes, n: int) -> NamedSharding:
    """The sharding on the current mesh if "stored" were the first n axes of `STORED`."""
    mesh, left_out = jax.sharding.get_abstract_mesh(), STORED[n:]
    names = [tuple(name for name in mesh_axes(mesh.axis_names, axis) if name not in left_out) for axis in axes]
    return NamedSharding(mesh, PartitionSpec(*map(_spec_entry, names)))


def parameter_name(path: jax.tree_util.KeyPath) -> str:
    """('blocks', 'attn', 'q', 'kernel', 'value') -> 'blocks.attn.q.kernel'."""
    parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    return ".".join(parts[:-1] if parts[-1] == "value" else parts)


def spec_of(mesh: Mesh | jax.sharding.AbstractMesh, axes: Axes, shape: tuple[int, ...], what: str) -> PartitionSpec:
    """The mesh axes of an array with this shape and these logical axes. what: the array's name in the error.

    Raises:
        InputError: an axis does not divide over the mesh.
    """
    names = [mesh_axes(mesh.axis_names, axis) for axis in axes]
    for size, name in zip(shape, names, strict=False):
        parts = math.prod(mesh.shape[n] for n in name)
        if size % parts:
            raise InputError(
                f"{what} of shape {shape}: {size} does not divide over mesh axis {' x '.join(name)} of size {parts}"
            )
    return PartitionSpec(*map(_spec_entry, names))


def _spec_entry(names: tuple[str, ...]) -> Any:
    return names if len(names) > 1 else names[0] if names else None


def dividing_spec(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """The part of a spec that an array with this shape can have: the axes that it has, where they divide."""

    def parts(names: Any) -> int:
        return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ()))

    return PartitionSpec(
        *(names if size % parts(names) == 0 else None for size, names in zip(shape, spec, strict=False))
    )


def mesh_axes(names: Collection[str], axis: str | None) -> tuple[str, ...]:
    """The axes, of those of a mesh with these names, over which a logical axis is split."""
    if axis is None:
        return ()
    if axis.endswith("stored"):
        return (*mesh_axes(names, axis.removesuffix("stored").strip() or None), *(STORED if FSDP in names else ()))
    if axis == "batch" and SLICE in names:
        return SLICE, RULES[axis]
    return (RULES[axis],)


def on_each_shard(f: Callable[..., Array], axes: Sequence[Axes], result: Axes) -> Callable[..., Array]:
    """f on each device's part of its arguments, which have these logical axes; `result` are those of what it returns.

    For what the compiler cannot split itself, such as a TPU kernel. What is returned raises InputError if an argument
    does not divide over the mesh.
    """

    def run(*args: Array) -> Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return f(*args)
        specs = tuple(spec_of(mesh, names, x.shape, "array") for names, x in zip(axes, args, strict=True))
        out = PartitionSpec(*(_spec_entry(mesh_axes(mesh.axis_names, name)) for name in result))
        return jax.shard_map(f, in_specs=specs, out_specs=out, check_vma=False)(*args)

    return run


def check_batch(mesh: Mesh | None, batch: int) -> None:
    """Refuse a batch (prompts, twice with guidance) that does not divide over the mesh."""
    if mesh is not None:
        spec_of(mesh, ("batch",), (batch,), "batch (prompts, twice with guidance)")


def check_heads(mesh: Mesh, heads: int, what: str) -> None:
    """Refuse attention heads that do not divide over the mesh: a head is never split."""
    spec_of(mesh, ("heads",), (heads,), f"attention heads of the {what}")


def named(mesh: Mesh, axes: Axes, shape: tuple[int, ...], what: str) -> NamedSharding:
    """The sharding of an array with this shape and these logical axes. what: the array's name in the error.

    Raises:
        InputError: an axis does not divide over the mesh.
    """
    return NamedSharding(mesh, spec_of(mesh, axes, shape, what))


def constrain(x: Array, *axes: str | None) -> Array:
    """Constrain an activation's sharding by its logical axes; x itself without a mesh (`jax.set_mesh`).

    Raises:
        InputError: an axis does not divide over the mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec = spec_of(mesh, axes, x.shape, "array")
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def split_tokens(x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Tokens as they are everywhere but in attention: split over devices."""
    return constrain(x, "batch", "tokens", None)


def devices_of(axis: str, mesh: Mesh | None = None) -> int:
    """The number of devices over which a mesh splits a logical axis; default: the current one, 1 if there is none."""
    on = mesh or jax.sharding.get_abstract_mesh()
    return 1 if on.empty else math.prod(on.shape[name] for name in mesh_axes(on.axis_names, axis))
