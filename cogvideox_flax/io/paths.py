"""Names of files to write: whether they can be written, and how several are numbered."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from cogvideox_flax.errors import InputError


def check_writable(path: Path) -> None:
    """Refuse a name, of a file or directory that is there or not yet, under which nothing could be written.

    Raises:
        InputError: the name is impossible, or the nearest directory above that exists cannot be written.
    """
    parent = existing_parent(path)
    try:
        with suppress(FileNotFoundError):
            path.lstat()
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as e:
        raise InputError(f"cannot write {path}: {parent}: {e.strerror}; choose another place") from e


def existing_parent(path: Path) -> Path:
    """The nearest directory above `path` that is there already."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def item_paths(path: str | Path, count: int) -> list[Path]:
    """Where `count` videos go: `path` itself for one, else numbered: video-0.mp4, video-1.mp4, ..."""
    path = Path(path)
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]
