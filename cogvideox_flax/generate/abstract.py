"""Arguments of programs as shapes with shardings: what is compiled before anything is loaded."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import Manifest


def abstract_weights(manifest: Manifest, component: str, dtype: str, mesh: Mesh | None) -> Any:
    """A component's module as shapes, in the dtype and where it will lie."""
    module = checkpoint.cast(manifest.abstract(component), dtype)
    if mesh is None:
        return module
    rows = manifest.model_family.components[component].sharding

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        where = sharding.parameter_sharding(mesh, rows, sharding.parameter_name(path), leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(place, module)


def shape_on(x: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """Whole on every device of the mesh."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
