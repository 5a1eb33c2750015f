"""Files and directories that appear under their name only when they are complete.

What is being written has a name that no other writer has, and is locked for as long as its writer lives. A name of this
kind without a lock was left by a process that was killed; the next write beside it removes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cogvideox_flax.errors import InputError

_PARTIAL = re.compile(r"\.cogvideox-[0-9a-f]{16}\.partial(\..*)?")
_RENAME_EXCHANGE = 2  # of renameat2, <linux/fs.h>
_AT_FDCWD = -100


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[Path]:
    """A new, empty file beside `path` to write to. It becomes `path` if nothing goes wrong, and vanishes otherwise.

    Args:
        path: missing directories above it are made.
        mode: permissions, from which the process' umask takes away.
        sync: wait until the contents are on the disk, so that a power cut leaves the old file or the new one.

    Raises:
        InputError: it cannot be written.
    """
    with _errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        partial = path.with_name(_partial_name(path.suffix))
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with _owned(descriptor, partial.unlink):
            yield partial
            if sync:
                _sync(partial)
            os.replace(partial, path)
            if sync:
                _sync(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new, empty directory beside `path` to fill. It becomes `path` if nothing goes wrong, and vanishes otherwise.

    A directory that stands at `path` is exchanged for it in one step and then removed. The writer syncs the files.

    Raises:
        InputError: it cannot be written.
    """
    with _errors(path):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.absolute().parent)
        partial = path.absolute().with_name(_partial_name())
        partial.mkdir()
        with _owned(os.open(partial, os.O_RDONLY | os.O_DIRECTORY), lambda: shutil.rmtree(partial)):
            yield partial
            _put_in_place(partial, path)
            _sync(path.absolute().parent)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a whole UTF-8 file; errors as for `atomic_write`."""
    with atomic_write(path, mode=mode) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a whole JSON file; errors as for `atomic_write`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@cache
def _sweep(folder: Path) -> None:
    """`remove_orphans`, once per process."""
    remove_orphans(folder)


def remove_orphans(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder."""
    with suppress(OSError):  # a folder that may not be listed or written
        for entry in os.scandir(folder):
            if _PARTIAL.fullmatch(entry.name) and not entry.is_symlink() and (entry.is_file() or entry.is_dir()):
                _remove_if_orphan(Path(entry.path))


def _remove_if_orphan(path: Path) -> None:
    with suppress(OSError):  # locked by its writer, gone by now, or another user's
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def _partial_name(suffix: str = "") -> str:
    return f".cogvideox-{secrets.token_hex(8)}.partial{suffix}"


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise InputError(f"writing {path} failed: {reason}; free some space or choose another place") from e


@contextmanager
def _owned(descriptor: int, remove: Callable[[], None]) -> Iterator[None]:
    """Hold a partial file or directory locked; remove it if it is still there at the end."""
    try:
        with suppress(OSError):  # a file system without locks: nothing is removed as an orphan there either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        with suppress(OSError):
            remove()
        os.close(descriptor)


def _put_in_place(partial: Path, path: Path) -> None:
    if not os.path.lexists(path):
        partial.rename(path)
    elif _exchange(partial, path):
        shutil.rmtree(partial, ignore_errors=True)
    else:
        old = path.absolute().with_name(_partial_name())
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories in one step, where the system can."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(b))
    return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
