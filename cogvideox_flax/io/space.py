"""Free space on a disk, checked before work begins."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cogvideox_flax.errors import InputError

MARGIN = 64 * 2**20
"""Bytes to leave free."""


def check_free_space(path: Path, nbytes: int) -> None:
    """Refuse work for which the disk has too little space.

    Args:
        path: a file or directory to be written; it need not exist.
        nbytes: how many bytes will be written there.

    Raises:
        InputError: fewer bytes plus a margin are free.
    """
    free = free_bytes(path)
    if free < nbytes + MARGIN:
        raise InputError(
            f"{path} needs about {size_text(nbytes + MARGIN)}, and its disk has {size_text(free)} free; free some "
            "space or choose another place"
        )


def free_bytes(path: Path) -> int:
    """What is free on the disk of a file or directory, which need not exist."""
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.isdir(place))
    return shutil.disk_usage(folder).free


def size_text(nbytes: int) -> str:
    """For people."""
    mib = nbytes / 2**20
    return f"{round(mib, 1 if mib < 10 else None):g} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"
