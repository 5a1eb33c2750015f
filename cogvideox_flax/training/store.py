"""Training examples on disk: arrays computed once (latents, text features), written in shards, read at random.

A shard is written whole or not at all, so that an interrupted preparation goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from safetensors import safe_open
from safetensors.numpy import save_file

from cogvideox_flax.errors import InputError

Arrays = Mapping[str, np.ndarray]


class Store:
    """`count` examples in a folder: named arrays, each with the example first, cut into shards of `shard_size`.

    Attributes:
        meta: what the examples were made from; free to the caller.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        try:
            record = json.loads((folder / "store.json").read_text())
        except OSError as e:
            raise InputError(f"{folder} holds no prepared examples ({e.strerror}); prepare them first") from e
        self._count, self._shard_size, self.meta = record["count"], record["shard_size"], record["meta"]
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._count

    def gather(self, indices: Int[np.ndarray, " N"]) -> dict[str, np.ndarray]:
        """The examples of these indices, stacked."""
        rows = [self._row(int(i)) for i in indices]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, index: int) -> dict[str, np.ndarray]:
        shard, row = divmod(index, self._shard_size)
        if shard not in self._files:
            self._files[shard] = safe_open(_shard_path(self._folder, shard), framework="numpy")
        file = self._files[shard]
        return {name: file.get_slice(name)[row] for name in file.keys()}  # noqa: SIM118  (not a mapping)


def prepare(
    folder: Path,
    count: int,
    make: Callable[[range], Arrays],
    *,
    shard_size: int,
    meta: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Store:
    """Fill a folder with `count` examples, or with those that are still missing, and open it.

    Args:
        make: the arrays of a range of examples.
        meta: what the examples are made from. A folder with other examples is refused.
        progress: called with (examples there, count).

    Raises:
        InputError: the folder holds examples made from something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = json.loads(json.dumps({"count": count, "shard_size": shard_size, "meta": meta}))
    path = folder / "store.json"
    if path.exists() and (found := json.loads(path.read_text())) != record:
        differing = [k for k in {**found["meta"], **meta} if found["meta"].get(k) != record["meta"].get(k)]
        raise InputError(
            f"{folder} holds examples made from something else (differing: {', '.join(differing) or 'their number'}); "
            "delete the folder or name another"
        )
    path.write_text(json.dumps(record, indent=2) + "\n")
    for shard, start in enumerate(range(0, count, shard_size)):
        stop = min(start + shard_size, count)
        target = _shard_path(folder, shard)
        if not target.exists():
            partial = target.with_suffix(".partial")
            save_file({name: np.ascontiguousarray(value) for name, value in make(range(start, stop)).items()}, partial)
            os.replace(partial, target)
        if progress is not None:
            progress(stop, count)
    return Store(folder)


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"
