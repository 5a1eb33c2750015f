"""Loads components of a native checkpoint onto their devices."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint.manifest import Manifest, check_contents, read_manifest, weights_file
from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.arrays import dtype_name
from cogvideox_flax.io.tensor_file import TensorFile, aligned_empty
from cogvideox_flax.nn import quantized
from cogvideox_flax.sharding.devices import find_devices

READERS = 8
"""Layers of a parameter that are read and cast in parallel."""


def parameters(module: nnx.Module) -> dict[str, Any]:
    """Parameter name -> array, or shape for an abstract module."""
    leaves = jax.tree_util.tree_leaves_with_path(module)
    return {sharding.parameter_name(path): leaf for path, leaf in leaves}


def keep_dtype(parameters: dict[str, Any]) -> set[str]:
    """The names of the parameters that are never cast: quantized weights and their scales."""
    narrow = {name for name, leaf in parameters.items() if quantized.kind_of(leaf.dtype)}
    return narrow | {f"{name.rpartition('.')[0]}.scale" for name in narrow}


def cast(module: Any, dtype: str) -> Any:
    """An abstract module with the dtypes that it has when loaded in this dtype."""
    unchanged = keep_dtype(parameters(module))

    def one(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        return (
            leaf if sharding.parameter_name(path) in unchanged else jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype))
        )

    return jax.tree_util.tree_map_with_path(one, module)


def check_weights(native_dir: str | Path, component: str, manifest: Manifest) -> None:
    """Compare the weight file's header with the config: names, shapes, length. Reads no weights.

    Raises:
        CheckpointError: with all faults.
    """
    with _open(native_dir, component, manifest) as file:
        _check_shapes(file, manifest.abstract(component))


def load_component(name: str, native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Any:
    """A component by its name.

    Args:
        name: of a component of the checkpoint's family, such as "transformer".
        native_dir: a native checkpoint that holds the component.
        dtype: of weights and activations; None keeps what is stored.
        mesh: from `sharding.make_mesh`; weights are sharded by the component's rows. None: the default device.

    Raises:
        CheckpointError: no such component, or files that do not match their config.
        InputError: float16 for a release that overflows in it; a parameter that does not divide over the mesh.
    """
    module, arrays = _load(name, native_dir, None, dtype, mesh)
    return jax.tree.unflatten(jax.tree.structure(module), list(arrays.values()))


def load_parameters(
    name: str, native_dir: str | Path, names: Collection[str], dtype: Any = None, mesh: Mesh | None = None
) -> dict[str, jax.Array]:
    """Some parameters of a component, as `load_component` loads them; name -> array. Errors as there."""
    return _load(name, native_dir, names, dtype, mesh)[1]


def _load(
    component: str, native_dir: str | Path, names: Collection[str] | None, dtype: Any, mesh: Mesh | None
) -> tuple[nnx.Module, dict[str, jax.Array]]:
    """The abstract module of a component, and its parameters of these names; None: all."""
    manifest, arrays = read_manifest(native_dir, warn=False), {}
    with _open(native_dir, component, manifest) as file:
        module = manifest.abstract(component)
        _check_shapes(file, module)
        check_contents(native_dir, manifest, component)
        manifest.configs[component].check_dtype(dtype_name(dtype or manifest.weights[component]["dtype"]))
        rows, leaves = manifest.model.components[component].sharding, parameters(module)
        unchanged = keep_dtype(leaves)
        for name, leaf in leaves.items():
            if names is None or name in names:
                target = file.tensors[name].dtype if dtype is None or name in unchanged else np.dtype(dtype_name(dtype))
                placement = None if mesh is None else sharding.parameter_sharding(mesh, rows, name, leaf.shape)
                arrays[name] = _load_parameter(file, name, target, placement)
    return module, arrays


def load_text_encoder(native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Any:
    """The text encoder: ids int32 [B, L] -> [B, L, E]. Arguments and errors as for `load_component`."""
    return load_component("text_encoder", native_dir, dtype, mesh)


def load_transformer(native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Any:
    """The 3D transformer: (latents [B, T, h, w, C], context [B, L, E], timestep, ofs) -> float32 [B, T, h, w, C].

    Arguments and errors as for `load_component`.
    """
    return load_component("transformer", native_dir, dtype, mesh)


def load_vae(native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Any:
    """The video VAE, with `encode` and `decode`. Arguments and errors as for `load_component`."""
    return load_component("vae", native_dir, dtype, mesh)


def _open(native_dir: str | Path, component: str, manifest: Manifest) -> TensorFile:
    if component not in manifest.weights or component not in manifest.configs:
        has = ", ".join(manifest.weights) or "no component"
        raise CheckpointError(
            f"{native_dir} has no {component} (it holds {has}). "
            f"Convert one with `cogvideox convert SRC {native_dir} --component {component}`."
        )
    return TensorFile(weights_file(native_dir, component))


def _check_shapes(file: TensorFile, module: nnx.Module) -> None:
    wanted = {name: leaf.shape for name, leaf in parameters(module).items()}
    found = {name: info.shape for name, info in file.tensors.items()}
    faults = [f"  missing  {name}" for name in wanted if name not in found]
    faults += [f"  unused   {name}" for name in found if name not in wanted]
    faults += [
        f"  shape    {name}: got {found[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise CheckpointError(
            f"{file.path} does not match its config.json ({len(faults)} faults); convert it again\n" + "\n".join(faults)
        )


def _load_parameter(file: TensorFile, name: str, dtype: np.dtype, placement: jax.sharding.Sharding | None) -> jax.Array:
    """Loads one parameter onto its devices. Host memory: at most one copy in the target dtype, and a few rows.

    A CPU uses the memory-mapped file if the dtype is the stored one. Otherwise rows of the leading axis are read and
    cast one by one, layers in parallel, and each shard takes only its own columns.
    """
    shape = file.tensors[name].shape
    if placement is None and file.tensors[name].dtype == dtype and find_devices()[0].platform == "cpu":
        pages = file.mapped(name)
        if pages is not None:
            return jax.device_put(pages, may_alias=True)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        if len(shape) < 2:
            return file.read(name).astype(dtype, copy=False)[index]
        if file.tensors[name].dtype == dtype and all(s == slice(None) for s in index):
            return file.read(name)
        rows = range(shape[0])[index[0]]
        sizes = [len(range(n)[s]) for n, s in zip(shape, index, strict=True)]
        out = aligned_empty(tuple(sizes), dtype)

        def fill(i: int) -> None:
            out[i] = file.read(name, rows[i])[index[1:]]

        if len(shape) > 2:
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(fill, range(len(rows))))
        else:  # rows are words or channels, too small for a thread each
            for i in range(len(rows)):
                fill(i)
        return out

    if placement is None:
        return jax.device_put(shard((slice(None),) * len(shape)), may_alias=True)
    return jax.make_array_from_callback(shape, placement, lambda index: shard(index or ()))
