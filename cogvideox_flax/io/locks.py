"""File locks. The kernel releases a lock when its process dies; the process removes the file when it is done."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cogvideox_flax.errors import InputError


@contextmanager
def file_lock(path: Path, *, busy: str | None) -> Iterator[None]:
    """Hold the lock file `path`, which is removed at the end.

    Args:
        path: in a directory that exists; a symbolic link is refused.
        busy: the error message if another process holds it; None: wait for it.

    Raises:
        InputError: another process holds it, or it cannot be created.
    """
    try:
        descriptor = acquire(path, wait=busy is None)
    except BlockingIOError as e:
        raise InputError(str(busy)) from e
    except OSError as e:
        raise InputError(
            f"cannot lock {path}: {e.strerror}; remove that file, or choose a place on a file system with locks"
        ) from e
    try:
        yield
    finally:
        release(path, descriptor)


def acquire(path: Path, *, wait: bool) -> int:
    """Lock the file `path`, created if missing, and return its descriptor for `release`.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
        OSError: it cannot be created or locked.
    """
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_at(path, descriptor):  # otherwise its holder removed it while this process waited
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def release(path: Path, descriptor: int) -> None:
    """Remove and unlock a lock file, in this order: a process that waits for the lock then sees that it is removed."""
    with suppress(OSError):
        if _is_at(path, descriptor):
            path.unlink()
    os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)  # NFS locks only files that are open for writing
    except PermissionError:
        if not os.path.lexists(path):
            raise
        return os.open(path, os.O_RDONLY | flags)  # another user's file: all file systems but NFS can lock it read-only


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
