"""Room on the disk, looked at before work is begun."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cogvideox_flax.errors import InputError

MARGIN = 64 * 2**20
"""Bytes to leave free."""


def check_free_space(path: Path, nbytes: int) -> None:
    """Refuse to begin what the disk has no room for.

    Args:
        path: a file or directory to be written, there or not yet.
        nbytes: how much will be written there.

    Raises:
        InputError: less than that and a margin is free.
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
