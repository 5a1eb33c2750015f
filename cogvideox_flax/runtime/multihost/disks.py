"""Whether the processes of a run share a disk."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

import jax

from cogvideox_flax.io.atomic import write_text
from cogvideox_flax.runtime.global_arrays import on_all
from cogvideox_flax.runtime.multihost import hosts

_FILE = "shared-by-all-hosts"
_WAIT_S = 5.0
"""Seconds that the other processes look for process 0's file: a network disk may show it late."""


def is_shared(folder: Path) -> bool:
    """Whether all processes, which must all call this, see in a folder what process 0 writes there.

    Raises:
        InputError: process 0 cannot write there.
    """
    if jax.process_count() == 1:
        return True
    path = folder / _FILE

    def write() -> str:
        token = secrets.token_hex(16)
        write_text(path, token)
        return token

    token, deadline = hosts.broadcast(write), time.monotonic() + _WAIT_S
    while not (is_seen := _read(path) == token) and time.monotonic() < deadline:
        time.sleep(0.1)
    is_seen = on_all(is_seen)
    if hosts.is_first():
        path.unlink(missing_ok=True)
    return is_seen


def _read(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        return path.read_text()
    return None
