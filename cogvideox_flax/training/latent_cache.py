"""Latents and text features of the training clips on disk: computed once, written in shards, read at random.

A shard is written atomically, so that an interrupted preparation continues with the next one. A note beside it holds
the fingerprint of what it was made from and the hash of its contents; a damaged shard is computed again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from safetensors import safe_open
from safetensors.numpy import save_file

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.atomic import atomic_write, write_text
from cogvideox_flax.io.contents import content_hash, fingerprint, read_record, write_record
from cogvideox_flax.io.paths import read_text
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)

RECORD_FILE = "store.json"
Arrays = Mapping[str, np.ndarray]


class LatentCache:
    """`count` examples in a folder: named arrays, the example first, in shards of `shard_size` examples.

    Open one with `prepare`.
    """

    def __init__(self, folder: Path, count: int, shard_size: int):
        self._folder, self._count, self._shard_size = folder, count, shard_size
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
    folder: Path, count: int, compute: Callable[[range], Arrays], *, shard_size: int, meta: dict[str, Any]
) -> LatentCache:
    """Compute the examples that a folder does not hold yet, and open it. On several hosts it is process 0's folder.

    Args:
        count: examples in all.
        compute: the arrays of a range of examples; called on all hosts.
        meta: what the examples are made from, as JSON values.

    Raises:
        InputError: the folder holds examples made from something else.
    """
    record = json.loads(json.dumps({"count": count, "shard_size": shard_size, "meta": meta}))
    made_from = fingerprint(record)
    shards = [_shard_path(folder, shard) for shard in range(math.ceil(count / shard_size))]

    @hosts.broadcast_result
    def find_missing() -> list[int]:
        _match_record(folder, record)
        return [i for i, shard in enumerate(shards) if not _is_fresh(shard, made_from)]

    for i in find_missing():
        stop = min((i + 1) * shard_size, count)
        _write_shard(shards[i], compute(range(i * shard_size, stop)), made_from)
        log.info("%s: %d of %d examples prepared", folder.name, stop, count)
    return LatentCache(folder, count, shard_size)


@hosts.on_process_0
def _write_shard(shard: Path, arrays: Arrays, made_from: str) -> None:
    with atomic_write(shard) as partial:
        save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, partial)
        write_text(_note_path(shard), f"{made_from} {content_hash(partial)}")


def _match_record(folder: Path, record: dict[str, Any]) -> None:
    """Write the record of a folder of examples, or refuse a folder with another one."""
    found = _read_record(folder)
    if found is None:
        write_record(folder / RECORD_FILE, record)
    elif found != record:
        theirs, ours = found["meta"], record["meta"]
        differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        raise InputError(
            f"{folder} holds examples made from something else (differing: {', '.join(differing) or 'their number'}); "
            "delete the folder or name another"
        )


def _read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder of examples; None if it is missing or damaged."""
    path = folder / RECORD_FILE
    try:
        record = read_record(path)
        return {name: record[name] for name in ("count", "shard_size", "meta")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as e:
        log.warning("%s is damaged (%s) and is written again", path, e)
        return None


def _is_fresh(shard: Path, made_from: str) -> bool:
    """Whether a shard is there, made from this, and undamaged."""
    if not shard.exists():
        return False
    try:
        if read_text(_note_path(shard)) == f"{made_from} {content_hash(shard)}":
            return True
    except (OSError, UnicodeDecodeError, CheckpointError):
        pass
    log.warning("%s is damaged, or made from something else; its examples are prepared again", shard)
    return False


def _note_path(shard: Path) -> Path:
    return shard.with_suffix(".sha256")


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"
