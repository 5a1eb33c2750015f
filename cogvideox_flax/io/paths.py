"""Checks of output paths, and the numbering of several outputs."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from cogvideox_flax.errors import InputError


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, whether it exists or not.

    Raises:
        InputError: the name is not possible, or the nearest existing parent directory is not writable.
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
    """The nearest directory above `path` that exists."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def item_paths(path: str | Path, count: int) -> list[Path]:
    """The paths of `count` videos: `path` itself for one, else numbered: video-0.mp4, video-1.mp4, ..."""
    path = Path(path)
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]
