"""Checks of paths that a user gives, and the numbering of several outputs."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from cogvideox_flax.errors import InputError

_SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OPEN_PIPES = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Of the shell, such as <(...): their writers are there, so that reading ends."""


def check_kind(path: Path) -> None:
    """Refuse what is neither a file nor a directory: reading it may never end, and writing would replace it.

    Raises:
        InputError: a named pipe, a socket or a device.
    """
    if str(path).startswith(_OPEN_PIPES):
        return
    with suppress(OSError):  # reported where the path is used
        if (kind := _SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode))) is not None:
            raise InputError(f"{path} is {kind}; expected a file or a directory")


def open_descriptor(path: Path) -> int:
    """Open a file for reading. Unlike `os.open`, does not wait for the writer of a named pipe.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if (kind := _SPECIAL.get(stat.S_IFMT(os.fstat(descriptor).st_mode))) is not None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return descriptor


def open_file(path: Path) -> BufferedReader:
    """A file object of `open_descriptor`."""
    return open(path, "rb", opener=lambda *_: open_descriptor(path))


def check_name(path: Path) -> None:
    """Refuse an output path that ends in no name, such as "." or "/".

    Raises:
        InputError: it does.
    """
    if path.name in ("", ".."):
        raise InputError(f"{path} has no name of its own; give the name of a file or of a directory to write")


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, whether it exists or not.

    Raises:
        InputError: the name is not possible, or that of a pipe, a socket or a device; or the nearest existing parent
            directory is not writable.
    """
    check_kind(path)
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
    """The paths of `count` videos: `path` itself for one, else numbered: video-0.mp4, video-1.mp4, ...

    Raises:
        InputError: the path ends in no name.
    """
    path = Path(path)
    check_name(path)
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(count)]
