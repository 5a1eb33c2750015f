"""Files known by their contents: SHA-256, remembered for as long as a file's inode, size and times stay the same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.atomic import write_json, write_text
from cogvideox_flax.io.home import private_cache_dir
from cogvideox_flax.io.private import NotPrivateError, read_private
from cogvideox_flax.io.text import load_json

log = logging.getLogger(__name__)

MAX_REMEMBERED = 2000
"""Files that are remembered at most; those that were hashed longest ago are forgotten first."""

_SETTLED = 100_000_000
"""Nanoseconds. A file that changed less than this before it was read may change again within the clock's tick."""

_LOG_FROM_BYTES = 2**30
"""A line is logged before so many bytes are hashed, since that takes seconds."""

_FILE = "sha256.txt"  # a checksum of the rest, then JSON: device and inode -> size, times, digest
_CHECKSUM = "checksum"
_LOCK = threading.Lock()
_known: dict[str, list[Any]] | None = None


def content_hash(path: Path, *, remembered: bool = True) -> str:
    """SHA-256 of a file, in hexadecimal. It is read only if it may have changed since it was last.

    Args:
        remembered: False reads it in any case.

    Raises:
        CheckpointError: it cannot be read.
    """
    return content_hashes([path], remembered=remembered)[0]


def content_hashes(paths: Sequence[Path], *, remembered: bool = True) -> list[str]:
    """`content_hash` of each file, side by side."""
    try:
        facts = [os.stat(path) for path in paths]
        known = [_lookup(each) if remembered else None for each in facts]
        todo = [i for i, digest in enumerate(known) if digest is None]
        if (size := sum(facts[i].st_size for i in todo)) >= _LOG_FROM_BYTES:
            log.info("checking the contents of %.1f GiB in %s, once", size / 2**30, paths[todo[0]].parent)
        with ThreadPoolExecutor(max(1, min(len(todo), os.cpu_count() or 1))) as pool:
            found = list(pool.map(_hash, [paths[i] for i in todo]))
    except OSError as e:
        raise CheckpointError(f"cannot read {e.filename}: {e.strerror}") from e
    if todo:
        _remember({_key(stat): [*_times(stat), digest] for stat, digest, settled in found if settled})
    digests = iter(digest for _, digest, _ in found)
    return [digest or next(digests) for digest in known]


def fingerprint(*parts: Any) -> str:
    """A short name of JSON values, or of what JSON can hold: equal for equal parts, different for different ones."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object for a file, which `is_as_written` knows again."""
    return value | {_CHECKSUM: fingerprint(value)}


def is_as_written(value: dict[str, Any]) -> bool:
    """Whether a JSON object is what `with_checksum` made, or carries no checksum."""
    rest = {key: part for key, part in value.items() if key != _CHECKSUM}
    return value.get(_CHECKSUM) in (None, fingerprint(rest))


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object for `read_record`.

    Raises:
        InputError: it cannot be written.
    """
    write_json(path, with_checksum(value))


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object that `write_record` wrote, or that has no checksum.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
        ValueError: it is damaged, or edited.
    """
    value = load_json(path)
    if not isinstance(value, dict) or not is_as_written(value):
        raise ValueError("its checksum does not match")
    return value


def match_record(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """What a record holds; one that is missing is written with `value`.

    Raises:
        InputError: it is damaged, or cannot be read or written.
    """
    try:
        return read_record(path)
    except FileNotFoundError:
        write_record(path, value)
        return value
    except (OSError, ValueError) as e:
        raise InputError(
            f"{path} is damaged ({e}). If this is the run that was begun there, delete that file to go on"
        ) from e


def _hash(path: Path) -> tuple[os.stat_result, str, bool]:
    """The file's facts, its digest, and whether they belong together for certain."""
    start = time.time_ns()
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    settled = _times(before) == _times(after) and max(before.st_mtime_ns, before.st_ctime_ns) < start - _SETTLED
    return before, digest, settled


def _key(facts: os.stat_result) -> str:
    return f"{facts.st_dev}:{facts.st_ino}"


def _times(facts: os.stat_result) -> list[int]:
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def _lookup(facts: os.stat_result) -> str | None:
    *times, digest = _records().get(_key(facts), [None])
    return digest if times == _times(facts) else None


def _records() -> Mapping[str, list[Any]]:
    """What this process knows: what it found on disk when it first asked, and what it added."""
    global _known
    with _LOCK:
        if _known is None:
            _known = _read()
        return _known


def _read() -> dict[str, list[Any]]:
    try:
        checksum, _, text = read_private(private_cache_dir("contents") / _FILE).partition(b"\n")
        whole = checksum.decode() == hashlib.sha256(text).hexdigest()
        return json.loads(text) if whole else {}
    except (OSError, NotPrivateError, ValueError, InputError):
        return {}  # hashed again


def _remember(found: dict[str, list[Any]]) -> None:
    """Two processes that write at once lose one's additions, which are then hashed once more."""
    global _known
    with _LOCK:
        before = _read() | (_known or {})
        _known = {key: record for key, record in before.items() if key not in found} | found
        text = json.dumps(dict(list(_known.items())[-MAX_REMEMBERED:]))
        with suppress(OSError, NotPrivateError, InputError):  # a cache that cannot be written
            path = private_cache_dir("contents") / _FILE
            write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", mode=0o600)
