"""Training examples on disk: arrays computed once (latents, text features), written in shards, read at random.

A shard is written whole or not at all, so that an interrupted preparation goes on where it stopped. Beside it stands
what it was made from and the hash of its contents, so that a damaged one is made again.
"""

from __future__ import annotations

import json
import logging
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

log = logging.getLogger(__name__)

RECORD_FILE = "store.json"
Arrays = Mapping[str, np.ndarray]


class Store:
    """`count` examples in a folder: named arrays, each with the example first, cut into shards of `shard_size`.

    Attributes:
        meta: what the examples were made from; free to the caller.
    """

    def __init__(self, folder: Path):
        record = _read_record(folder)
        if record is None:
            raise InputError(f"{folder} holds no prepared examples; prepare them first")
        self._folder = folder
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
    record = json.loads(json.dumps({"count": count, "shard_size": shard_size, "meta": meta}))
    found = _read_record(folder)
    if found is not None and found != record:
        differing = [k for k in {**found["meta"], **meta} if found["meta"].get(k) != record["meta"].get(k)]
        raise InputError(
            f"{folder} holds examples made from something else (differing: {', '.join(differing) or 'their number'}); "
            "delete the folder or name another"
        )
    if found is None:
        write_record(folder / RECORD_FILE, record)
    made_from = fingerprint(record)
    for shard, start in enumerate(range(0, count, shard_size)):
        stop = min(start + shard_size, count)
        target = _shard_path(folder, shard)
        if not _is_fresh(target, made_from):
            arrays = {name: np.ascontiguousarray(value) for name, value in make(range(start, stop)).items()}
            with atomic_write(target) as partial:
                save_file(arrays, partial)
                write_text(_note_of(target), f"{made_from} {content_hash(partial)}")
        if progress is not None:
            progress(stop, count)
    return Store(folder)


def _read_record(folder: Path) -> dict[str, Any] | None:
    """What a folder of examples says of itself; None if there is nothing, or nothing whole."""
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
    """Whether a shard is there, made from this, and holds what was written."""
    if not shard.exists():
        return False
    try:
        if _note_of(shard).read_text() == f"{made_from} {content_hash(shard)}":
            return True
    except (OSError, UnicodeDecodeError, CheckpointError):
        pass
    log.warning("%s is damaged, or made from something else; its examples are prepared again", shard)
    return False


def _note_of(shard: Path) -> Path:
    """The file with what a shard was made from and the hash of its contents."""
    return shard.with_suffix(".sha256")


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"
