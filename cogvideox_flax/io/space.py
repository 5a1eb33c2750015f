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
    folder = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.isdir(place))
    free = shutil.disk_usage(folder).free
    if free < nbytes + MARGIN:
        raise InputError(
            f"{path} needs about {_size(nbytes + MARGIN)}, and its disk has {_size(free)} free; free some space or "
            "choose another place"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"
