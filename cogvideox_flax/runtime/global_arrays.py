"""Arrays whose shards lie on several hosts: from and to host memory. With one process, plain copies."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from cogvideox_flax.runtime.multihost import hosts


def fetch(x: jax.Array | np.ndarray) -> np.ndarray:
    """The full array, on every host."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def fetch_on_first(tree: Any) -> Any:
    """A pytree with its arrays in full in the memory of process 0, one after the other; None on the others. With one
    process, the tree itself."""
    if jax.process_count() == 1:
        return tree
    first, (leaves, treedef) = hosts.is_first(), jax.tree.flatten(tree)
    kept = [value if first else None for value in map(fetch, leaves)]
    return jax.tree.unflatten(treedef, kept) if first else None


def put_from_first(arrays: dict[str, np.ndarray], like: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The inverse of `fetch_on_first`: process 0's arrays, by name, one after the other onto the devices of all.

    Args:
        arrays: what process 0 has; it is emptied on the way.
        like: name -> an array with the sharding that is wanted.
    """
    return {name: put(hosts.broadcast(partial(arrays.pop, name)), x.sharding) for name, x in like.items()}


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """A pytree of arrays, replicated on every device of the mesh: for small arrays, not for weights."""
    return put(tree, None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def put(tree: Any, sharding: Sharding | None) -> Any:
    """A pytree of arrays with this sharding; None: on the default device. The arrays are equal on every host, or are
    sharded over the hosts already."""
    if sharding is None or jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _put_one(x, sharding), tree)


def _put_one(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)  # a program's result, which may be sharded
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_put_one(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
