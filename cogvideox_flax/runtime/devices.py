"""The memory of devices: what programs need, what is free, what is held."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

GIB = 2**30


def bytes_needed(memory: Any) -> int:
    """On each device, of a program's `memory_analysis()`: arguments, results and temporaries, where a result that takes
    an argument's place counts once."""
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return whole - memory.alias_size_in_bytes


def bytes_per_device(tree: Any) -> int:
    """Bytes on each device of a pytree of arrays or shapes with their shardings."""

    def one(leaf: Any) -> int:
        where = getattr(leaf, "sharding", None)
        shape = where.shard_shape(leaf.shape) if where is not None else leaf.shape
        return math.prod(shape) * jnp.dtype(leaf.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def memory_limit(mesh: Mesh | None) -> int | None:
    """Bytes that programs may use on each of this host's devices; None where the devices do not say."""
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()] if mesh is not None else []
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices or jax.local_devices()[:1]]
    return None if None in limits else min(limit for limit in limits if limit is not None)


def describe_memory() -> str:
    """What each of this host's devices holds now, and held at most where it tells."""
    held: dict[Any, int] = defaultdict(int)
    seen = set()  # an array over several devices and its parts are live arrays both
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffer = shard.device, shard.data.unsafe_buffer_pointer()
            if buffer not in seen:
                seen.add(buffer)
                held[shard.device] += shard.data.nbytes
    parts = []
    for device in sorted(held, key=lambda d: d.id):
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        most = f", {peak / GIB:.3f} at most" if peak is not None else ""
        parts.append(f"{device} {held[device] / GIB:.3f} GiB{most}")
    return "; ".join(parts) or "no arrays"
