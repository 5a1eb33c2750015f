"""Files in the place of a download: a git-lfs pointer, or the web page of the file."""

from __future__ import annotations

from pathlib import Path

from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.paths import read_head

HEAD_BYTES = 512

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype", b"<html", b"<?xml")


def describe_stand_in(head: bytes) -> str | None:
    """Describe a pointer or page in the place of a file, and the way out; None if it is neither.

    Args:
        head: the first `HEAD_BYTES` of it.
    """
    if head.startswith(_POINTER):
        return "it is a git-lfs pointer, not the file itself; run `git lfs pull` in its repository"
    if head.lstrip().lower().startswith(_PAGES):
        return "it is a web page, not the file itself; download it again (on the hub, from /resolve/, not /blob/)"
    return None


def refuse_stand_in(path: Path) -> None:
    """Refuse a file that is a pointer or a page, with a CheckpointError."""
    if (found := describe_stand_in(read_head(path, HEAD_BYTES))) is not None:
        raise CheckpointError(f"cannot use {path}: {found}")
