"""Files and directories that appear under their name only when they are complete.

What is being written has a unique name, and a lock file beside it for as long as its writer lives. A lock file that
nobody holds was left by a process that was killed: the next write in that directory removes it and what it stood for.
"""

from __future__ import annotations

import ctypes
import errno
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

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.locks import acquire, release

_LOCK = re.compile(r"\.cogvideox-[0-9a-f]{16}\.lock")
_RENAME_EXCHANGE = 2  # of renameat2, <linux/fs.h>
_AT_FDCWD = -100


@contextmanager
def atomic_write(path: Path, *, mode: int = 0o666, sync: bool = True) -> Iterator[Path]:
    """A new, empty file beside `path` to write to. It becomes `path` if nothing goes wrong, and vanishes otherwise.

    Args:
        path: missing directories above it are made. A symbolic link is replaced.
        mode: permissions, from which the process' umask takes away.
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
    """A new, empty directory beside `path` to fill. It becomes `path` if nothing goes wrong, and vanishes otherwise.

    A directory that stands at `path`, or where a symbolic link leads, is exchanged for it in one step and then removed.
    The writer syncs the files.

    Raises:
        InputError: it cannot be written.
    """
    path = path.resolve()
    with _errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _partial(path.parent) as partial:
            partial.mkdir()
            yield partial
            _put_in_place(partial, path)
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
    """A unique name in a folder, under a lock; what is still there at the end is removed."""
    _sweep(folder)
    lock = folder / f".cogvideox-{secrets.token_hex(8)}.lock"
    path = lock.with_suffix(f".partial{suffix}")
    descriptor = None
    with suppress(OSError):  # a file system without locks: nothing is removed as an orphan there either
        descriptor = acquire(lock, wait=True)  # a process that sweeps may hold it for a moment
    try:
        yield path
    finally:
        with suppress(OSError):
            _remove(path)
            if descriptor is None:
                lock.unlink(missing_ok=True)
        if descriptor is not None:
            release(lock, descriptor)


@cache
def _sweep(folder: Path) -> None:
    """`remove_orphans`, once per process."""
    remove_orphans(folder)


def remove_orphans(folder: Path) -> None:
    """Remove what killed processes left unfinished in a folder."""
    with suppress(OSError):  # a folder that may not be listed or written
        for entry in os.scandir(folder):
            if _LOCK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_orphan(Path(entry.path))


def _remove_orphan(lock: Path) -> None:
    try:
        descriptor = acquire(lock, wait=False)
    except OSError:  # held by its writer, gone by now, or another user's
        return
    try:
        for path in lock.parent.glob(f"{lock.stem}.partial*"):
            _remove(path)
    except OSError:  # another user's: the lock file stays with it
        os.close(descriptor)
    else:
        release(lock, descriptor)


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


def _put_in_place(partial: Path, path: Path) -> None:
    if not os.path.lexists(path):
        partial.rename(path)
    elif _exchange(partial, path):
        shutil.rmtree(partial, ignore_errors=True)
    else:
        old = partial.with_suffix(".replaced")  # not removed as an orphan: for a moment it is all there is
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
