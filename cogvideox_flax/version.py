"""The package's version, and the fingerprint of its source at the time of import.

A compiled program is cached under the fingerprint of its code. The imported code may differ from the files when
something is compiled: after an upgrade, or an edit during a download.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from functools import cache

log = logging.getLogger(__name__)

RESULTS = 3
"""Raised when the same inputs come to give other results: stage files, training states and prepared clips of earlier
versions are then made again."""

__version__ = "0.1.0"

_PACKAGE = os.path.dirname(__file__)


def _source_files() -> dict[str, tuple[int, int, int, int]]:
    """Source file -> size, times and inode."""
    found = {}
    for folder, _, names in os.walk(_PACKAGE):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith((".py", ".json")) and not name.startswith(".") and os.path.exists(path):
                facts = os.stat(path)
                found[path] = facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
    return found


_IMPORTED = _source_files()


def code_fingerprint() -> str | None:
    """SHA-256 of the source files; None if they have changed since the import, or there are none."""
    if not _IMPORTED:
        return None
    with suppress(OSError):  # an upgrade in progress
        digest = _digest()
        if _source_files() == _IMPORTED:
            return digest
    _log_changed()
    return None


@cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_IMPORTED):
        with open(path, "rb") as file:
            contents = file.read()
        digest.update(f"{os.path.relpath(path, _PACKAGE)} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()


@cache
def _log_changed() -> None:
    log.warning(
        "the files of cogvideox_flax have changed since this process started, so what it compiles is not kept; "
        "start it again"
    )
