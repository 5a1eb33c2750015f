"""SHA-256 of files, cached while a file's inode, size and times do not change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.atomic import write_json, write_text
from cogvideox_flax.io.paths import NotPrivateError, open_file, private_cache_dir
from cogvideox_flax.io.values import load_json

log = logging.getLogger(__name__)

MAX_RECORDS = 2000
"""Twice as many cached hashes are cut to this number; the oldest are dropped."""

_CLOCK_TICK_NS = 100_000_000
"""Nanoseconds. A file that changed less than this before it was read may change again without a new time stamp, so its
hash is not cached."""

_LOG_FROM_BYTES = 2**30
"""Hashing this many bytes takes seconds and is logged."""

_FILE = "sha256.txt"  # a line of JSON for each file: device and inode, size, times, digest
_CHECKSUM = "checksum"
_LOCK = threading.Lock()
_known: dict[str, list[Any]] | None = None


def content_hash(path: Path, *, cached: bool = True) -> str:
    """SHA-256 of a file, in hexadecimal. It is read only if it may have changed since its last hash.

    Args:
        cached: False always reads the file.

    Raises:
        CheckpointError: it cannot be read.
    """
    return content_hashes([path], cached=cached)[0]


def content_hashes(paths: Sequence[Path], *, cached: bool = True) -> list[str]:
    """`content_hash` of each file, computed in parallel."""
    try:
        facts = [os.stat(path) for path in paths]
        recorded = [_lookup(each) if cached else None for each in facts]
        todo = [i for i, digest in enumerate(recorded) if digest is None]
        if (size := sum(facts[i].st_size for i in todo)) >= _LOG_FROM_BYTES:
            log.info("checking the contents of %.1f GiB in %s, once", size / 2**30, paths[todo[0]].parent)
        with ThreadPoolExecutor(max(1, min(len(todo), os.cpu_count() or 1))) as pool:
            hashed = list(pool.map(_hash, [paths[i] for i in todo]))
    except OSError as e:
        raise CheckpointError(f"cannot read {e.filename}: {e.strerror}") from e
    if todo:
        _save_records({_key(stat): [*_times(stat), digest] for stat, digest, settled in hashed if settled})
    digests = iter(digest for _, digest, _ in hashed)
    return [digest or next(digests) for digest in recorded]


@dataclass(frozen=True)
class Contents:
    """The contents of an image or video when it was hashed, with which later reads are compared.

    path: its name, for messages: a file, or a directory or pattern of files.
    files: all that it is read from.
    hashes: SHA-256 of each file.
    """

    path: Path
    files: Sequence[Path]
    hashes: Sequence[str]

    @classmethod
    def of(cls, path: Path, files: Sequence[Path]) -> Contents:
        """The contents of the files now. Errors as for `content_hash`."""
        return cls(path, files, content_hashes(files))

    @property
    def sha256(self) -> str:
        """The file's SHA-256; of several files, that of their hashes."""
        return self.hashes[0] if len(self.hashes) == 1 else hashlib.sha256("".join(self.hashes).encode()).hexdigest()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which the files are read: what was read counts only if they are as they were hashed.

        Raises:
            InputError: they changed, before or while they were read. Other errors pass where they did not change.
        """
        try:
            yield
        except InputError:  # a file that is being replaced may look damaged
            self._check()
            raise
        self._check()

    def _check(self) -> None:
        if content_hashes(self.files) != self.hashes:
            raise InputError(f"{self.path} changed while this run was under way; start it again")


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON-compatible values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def with_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """The JSON object with a checksum that `is_as_written` compares."""
    return value | {_CHECKSUM: fingerprint(value)}


def is_as_written(value: dict[str, Any]) -> bool:
    """Whether a JSON object matches its checksum from `with_checksum`, or has none."""
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
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
        ValueError: it is damaged or was edited.
    """
    value = load_json(path)
    if not isinstance(value, dict) or not is_as_written(value):
        raise ValueError("its checksum does not match")
    return value


def match_record(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    """The contents of a record; a missing one is written with `value`.

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
    """The file's stat result, its digest, and whether the file certainly did not change while it was read."""
    start = time.time_ns()
    with open_file(path) as file:
        before = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    settled = _times(before) == _times(after) and max(before.st_mtime_ns, before.st_ctime_ns) < start - _CLOCK_TICK_NS
    return before, digest, settled


def _key(facts: os.stat_result) -> str:
    return f"{facts.st_dev}:{facts.st_ino}"


def _times(facts: os.stat_result) -> list[int]:
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]


def _lookup(facts: os.stat_result) -> str | None:
    *times, digest = _records().get(_key(facts), [None])
    return digest if times == _times(facts) else None


def _records() -> dict[str, list[Any]]:
    """The cached hashes: those on disk at the first call, and those that this process added."""
    global _known
    with _LOCK:
        if _known is None:
            _known = _read()
        return _known


def _read() -> dict[str, list[Any]]:
    """The latest record of each file; a file of many lines is written anew without the others."""
    records: dict[str, list[Any]] = {}
    with suppress(OSError, NotPrivateError, InputError):  # the files are hashed again
        path = private_cache_dir("contents") / _FILE
        lines = path.read_bytes().splitlines()
        for line in lines:
            with suppress(ValueError, TypeError, RecursionError):  # cut short, or of an older version
                key, *times, digest = json.loads(line)
                records[str(key)] = [*times, digest]
        if len(lines) > 2 * MAX_RECORDS:
            records = dict(list(records.items())[-MAX_RECORDS:])
            write_text(path, "".join(_line(*each) for each in records.items()), mode=0o600)
    return records


def _line(key: str, record: list[Any]) -> str:
    """A line with its end before it, so that one which was cut short does not spoil the next."""
    return "\n" + json.dumps([key, *record])


def _save_records(found: dict[str, list[Any]]) -> None:
    """Add hashes to the cache, also while other processes do."""
    known = _records()
    with _LOCK:
        known.update(found)
        with suppress(OSError, NotPrivateError):  # a cache that cannot be written
            path = private_cache_dir("contents") / _FILE
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write("".join(_line(*each) for each in found.items()))
