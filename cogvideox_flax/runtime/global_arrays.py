"""Arrays whose shards lie on several hosts: from and to host memory. With one process, plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from cogvideox_flax.runtime.multihost import hosts

Shard = tuple[list[int], np.ndarray]
"""Where it begins on each axis of the whole array, and its values."""


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


def copy_own_shards(arrays: dict[str, jax.Array]) -> dict[str, list[Shard]]:
    """The shards of arrays in this process' memory, each of which one process has; not changed by a donation."""
    shards = {name: [s for s in x.addressable_shards if s.replica_id == 0] for name, x in arrays.items()}
    for shard in (shard for those in shards.values() for shard in those):
        shard.data.copy_to_host_async()
    return {name: [(_starts(shard.index), _host_copy(shard.data)) for shard in those] for name, those in shards.items()}


def gather_on_first(
    shards: dict[str, list[Shard]], shapes: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray] | None:
    """Arrays in full in the memory of process 0; None on the others, which send theirs. All processes call it, and may
    do so in a thread.

    Args:
        shards: from `copy_own_shards`; emptied on the way.
        shapes: name -> shape and dtype of the array.
    """
    if not hosts.is_first():
        for name in list(shards):
            for starts, part in shards.pop(name):
                hosts.send_to_first([name, starts, part])
        return None
    arrays = {name: np.empty(x.shape, x.dtype) for name, x in shapes.items()}
    missing = sum(x.size for x in arrays.values())

    def place(name: str, starts: Sequence[int], part: np.ndarray) -> int:
        where = tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))
        arrays[name][where] = part
        return part.size

    for name in list(shards):
        missing -= sum(place(name, starts, part) for starts, part in shards.pop(name))
    while missing:
        missing -= place(*hosts.receive_on_first())
    return arrays


def _starts(index: tuple[slice, ...]) -> list[int]:
    return [part.start or 0 for part in index]


def _host_copy(x: jax.Array) -> np.ndarray:
    return np.array(x) if x.platform() == "cpu" else np.asarray(x)  # on a CPU, asarray shares the array's memory


def put_from_first(arrays: dict[str, np.ndarray], like: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Arrays of process 0, by name, one after the other onto the devices of all.

    Args:
        arrays: what process 0 has; it is emptied on the way.
        like: name -> an array with the sharding that is wanted.
    """
    return {name: put(hosts.broadcast(partial(arrays.pop, name)), x.sharding) for name, x in like.items()}


def on_all(here: bool) -> bool:
    """Whether something holds on all processes, which must call this in the same order."""
    return here if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(here)).all())


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
