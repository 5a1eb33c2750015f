"""A fingerprint of this package's source at the time of import.

A compiled program is cached under a fingerprint of its code. The imported code may differ from the files when something
is compiled: after an upgrade, or an edit during a download.
"""

from __future__ import annotations

import hashlib
import logging
import os
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parents[1]


def _state() -> dict[str, tuple[int, int, int, int]]:
    """Source file -> size, times and inode."""
    found = {}
    for folder, _, names in os.walk(_FOLDER):
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith((".py", ".json")) and not name.startswith(".") and os.path.exists(path):
                facts = os.stat(path)
                found[path] = facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino
    return found


_IMPORTED = _state()


def code_fingerprint() -> str | None:
    """SHA-256 of the source files; None if they have changed since the import, or there are none."""
    if not _IMPORTED:
        return None
    try:
        digest = _digest()
        if _state() == _IMPORTED:
            return digest
    except OSError:  # an upgrade in progress
        pass
    _log_changed()
    return None


@cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_IMPORTED):
        contents = Path(path).read_bytes()
        digest.update(f"{os.path.relpath(path, _FOLDER)} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()


@cache
def _log_changed() -> None:
    log.warning(
        "the files of cogvideox_flax have changed since this process started, so what it compiles is not kept; "
        "start it again"
    )
