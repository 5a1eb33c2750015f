"""Where this library keeps what it makes for later runs."""

from __future__ import annotations

import os
from pathlib import Path

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.private import NotPrivateError, make_private


def expand_user(text: str | Path) -> Path:
    """A path whose leading ~ or ~user stands for a home directory.

    Raises:
        InputError: there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise InputError(f"{text}: there is no home directory of that user; write the path out") from e


def cache_dir() -> Path:
    """Where converted checkpoints are kept: $COGVIDEOX_HOME, or cogvideox-flax in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("COGVIDEOX_HOME")
    return expand_user(home) if home else _own_cache_dir()


def private_cache_dir(name: str) -> Path:
    """A folder for what nobody else may change: below `cache_dir` if that is the user's alone, else in his own cache.

    Args:
        name: of the folder, which is made.

    Raises:
        NotPrivateError: other users can change both places.
        OSError: neither can be made.
    """
    places = dict.fromkeys((cache_dir(), _own_cache_dir()))
    for last, place in enumerate(places, 1):
        try:
            make_private(place / name)
            return place / name
        except (NotPrivateError, OSError):
            if last == len(places):
                raise
    raise AssertionError("no place")


def _own_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or expand_user("~/.cache")) / "cogvideox-flax"
