"""Arrays on a mesh of one or several hosts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array


def fetch(x: Array | np.ndarray) -> np.ndarray:
    """The whole array, on every host."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """A pytree of arrays, whole on every device of the mesh: everything but weights, which is small."""
    if mesh is None:
        return jax.device_put(tree)
    everywhere = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(tree, everywhere)
    return jax.tree.map(lambda x: _put_on_all_hosts(x, everywhere), tree)


def _put_on_all_hosts(x: Any, everywhere: NamedSharding) -> Array:
    """x, which every host has alike, as one array over all of them."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, everywhere)  # a result of a program, which may have left it split
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put_on_all_hosts(jax.random.key_data(x), everywhere))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])
