"""Atomic writes: files and directories that appear under their name only when they are complete.

A partial file has a unique name and a lock file beside it, which its writer holds. A lock file that no process holds
was left by a killed process: the next write in that directory removes it and its partial file.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cogvideox_flax.errors import BusyError, InputError

_LOCK = re.compile(r"\.cogvideox-[0-9a-f]{16}\.lock")
_RENAME_EXCHANGE = 2  # of renameat2, <linux/fs.h>
_AT_FDCWD = -100


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[Path]:
    """Yield a new, empty file beside `path`. On success it is renamed to `path`; on an error it is removed.

    Args:
        path: missing parent directories are created. A symbolic link is replaced.
        mode: permissions, before the process' umask.
        sync: wait until the contents are on the disk, so that a power cut leaves the old file or the new one.

    Raises:
        InputError: it cannot be written.
    """
    with _errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path.parent, path.suffix) as partial:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
            yield partial
            if sync:
                sync_file(partial)
            os.replace(partial, path)
            if sync:
                _sync_directory(path.parent)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a new, empty directory beside `path`. On success it is renamed to `path`; on an error it is removed.

    An existing directory at `path`, or at the target of a symbolic link, is exchanged atomically and then removed. The
    caller syncs the files.

    Raises:
        InputError: it cannot be written.
    """
    path = path.resolve()
    with _errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path.parent) as partial:
            partial.mkdir()
            yield partial
            _move_into_place(partial, path)
            _sync_directory(path.parent)


def write_text(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Write a whole UTF-8 file; errors as for `atomic_write`."""
    with atomic_write(path, mode=mode) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a whole JSON file; errors as for `atomic_write`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def _partial(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Yields a unique, locked path in a folder; what is left there at the end is removed."""
    _remove_orphans_once(folder)
    lock = folder / f".cogvideox-{secrets.token_hex(8)}.lock"
    path = lock.with_suffix(f".partial{suffix}")
    descriptor = None
    with suppress(OSError):  # a file system without locks: orphans are not removed there
        descriptor = _acquire(lock, wait=True)  # `remove_orphans` in another process may hold it for a moment
    try:
        yield path
    finally:
        with suppress(OSError):
            _remove(path)
            if descriptor is None:
                lock.unlink(missing_ok=True)
        if descriptor is not None:
            _release(lock, descriptor)


def remove_orphans(folder: Path) -> None:
    """Remove the partial files of killed processes from a folder."""
    with suppress(OSError):  # a folder that may not be listed or written
        for entry in os.scandir(folder):
            if _LOCK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_orphan(Path(entry.path))


_remove_orphans_once = cache(remove_orphans)
"""Once per process and folder."""


def _remove_orphan(lock: Path) -> None:
    try:
        descriptor = _acquire(lock, wait=False)
    except OSError:  # held by its writer, removed meanwhile, or owned by another user
        return
    try:
        for path in lock.parent.glob(f"{lock.stem}.partial*"):
            _remove(path)
    except OSError:  # owned by another user: keep the lock file too
        os.close(descriptor)
    else:
        _release(lock, descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise InputError(f"writing {path} failed: {reason}; free some space or choose another place") from e


def _move_into_place(partial: Path, path: Path) -> None:
    if not os.path.lexists(path):
        partial.rename(path)
    elif _exchange(partial, path):
        shutil.rmtree(partial, ignore_errors=True)
    else:
        old = partial.with_suffix(".replaced")  # not removed by `remove_orphans`: for a moment this is the only copy
        path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories atomically; False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(b))
    return False


def _sync_directory(path: Path) -> None:
    try:
        sync_file(path)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync files only
            raise


def sync_file(path: Path) -> None:
    """Wait until a file's contents are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, *, busy: str | None) -> Iterator[None]:
    """Hold the lock file `path`, which is removed at the end.

    Args:
        path: in a directory that exists; a symbolic link is refused.
        busy: the error message if another process holds it; None: wait for it.

    Raises:
        BusyError: another process holds it.
        InputError: it cannot be created.
    """
    try:
        descriptor = _acquire(path, wait=busy is None)
    except BlockingIOError as e:
        raise BusyError(str(busy)) from e
    except OSError as e:
        raise InputError(
            f"cannot lock {path}: {e.strerror}; remove that file, or choose a place on a file system with locks"
        ) from e
    try:
        yield
    finally:
        _release(path, descriptor)


def _acquire(path: Path, *, wait: bool) -> int:
    """Lock the file `path`, created if missing, and return its descriptor for `_release`."""
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


def _release(path: Path, descriptor: int) -> None:
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
