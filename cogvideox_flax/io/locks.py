"""One process at a time: a lock file beside what it protects, which leaves with its holder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cogvideox_flax.errors import InputError


@contextmanager
def file_lock(path: Path, *, busy: str | None) -> Iterator[None]:
    """Hold the lock file `path`, which is removed at the end. The kernel lets go of it when its holder dies.

    Args:
        path: in a directory that exists; a symbolic link is refused.
        busy: what to say where another process holds it; None: wait for it.

    Raises:
        InputError: another process holds it, or it cannot be made.
    """
    descriptor = _acquire(path, busy)
    try:
        yield
    finally:
        # removed while it is held: whoever opened this very file meanwhile sees that it has no name, and opens anew
        with suppress(OSError):
            if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path, busy: str | None) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as e:
            raise InputError(
                f"cannot make the lock file {path}: {e.strerror}; remove it or choose another place"
            ) from e
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy is not None else 0))
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError as e:
            os.close(descriptor)
            raise InputError(str(busy)) from e
        except OSError as e:
            os.close(descriptor)
            raise InputError(f"cannot lock {path}: {e.strerror}; choose a place on a file system with locks") from e
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
