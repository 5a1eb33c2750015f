"""The memory of devices: needed by programs, free, and in use."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

GIB = 2**30


def bytes_needed(memory: Any) -> int:
    """Bytes on each device by a program's `memory_analysis()`: arguments, results and temporaries; a result in a
    donated argument's memory counts once."""
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
    """Bytes that programs may use on each of this host's devices; None if the devices do not report it."""
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()] if mesh is not None else []
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices or jax.local_devices()[:1]]
    return None if None in limits else min(limit for limit in limits if limit is not None)


def peak_memory() -> int | None:
    """The most bytes that this process had in use on one of its devices; None if they do not report it."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


def host_memory() -> int:
    """Bytes of this host's memory that can be used now, within the limit of its container."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [pages]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" where there is no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)


def describe_memory() -> str:
    """The memory in use on each of this host's devices, and the peak where the device reports it."""
    held: dict[Any, int] = defaultdict(int)
    seen = set()  # a sharded array and its shards are both live arrays
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
