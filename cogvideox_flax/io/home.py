"""The cache directories of this library."""

from __future__ import annotations

import os
from pathlib import Path

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import check_kind
from cogvideox_flax.io.private import NotPrivateError, make_private


def expand_user(text: str | Path) -> Path:
    """A path whose leading ~ or ~user stands for a home directory.

    Raises:
        InputError: there is no such user; or the path is empty, not UTF-8 text, or that of a pipe, a socket or a
            device.
    """
    if not str(text):
        raise InputError("a path is empty; give the name of a file or directory")
    if "\0" in str(text) or not _is_utf8(str(text)):
        raise InputError(f"the path {str(text)!r} is not UTF-8 text; rename it")
    try:
        path = Path(text).expanduser()
    except RuntimeError as e:
        raise InputError(f"{text}: there is no home directory of that user; write the path out") from e
    check_kind(path)
    return path


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a file name with surrogate escapes
        return False
    return True


def cache_dir() -> Path:
    """The directory of converted checkpoints: $COGVIDEOX_HOME, or cogvideox-flax in $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("COGVIDEOX_HOME")
    return expand_user(home) if home else _own_cache_dir()


def private_cache_dir(name: str) -> Path:
    """`name` in `cache_dir()` if only the user can write there, else in ~/.cache/cogvideox-flax. Created if missing.

    Raises:
        NotPrivateError: other users can change both directories.
        OSError, InputError: neither can be created.
    """
    folder = cache_dir() / name
    try:
        make_private(folder)
    except (NotPrivateError, OSError):
        folder = _own_cache_dir() / name
        make_private(folder)
    return folder


def _own_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or expand_user("~/.cache")) / "cogvideox-flax"
