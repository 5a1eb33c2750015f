"""The format of a file, detected from its first bytes and never from its name.

By default ffmpeg tries all its demuxers on a file, and some of them (playlists, concat scripts) open other files and
addresses that the file names. So ffmpeg is always told which demuxer to use.
"""

from __future__ import annotations

from pathlib import Path

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import open_file

EXPECTED = "MP4, MOV, MKV, WebM, AVI or GIF"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ISO_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot"}  # QuickTime files may lack ftyp


def format_of(path: Path) -> str | None:
    """ "mov" (all ISO base media: MP4, MOV), "matroska" (MKV, WebM), "avi", "gif", "png" or None.

    Raises:
        InputError: the file cannot be opened.
    """
    try:
        with open_file(path) as file:
            head = file.read(12)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    if head[4:8] in _ISO_BOXES:
        return "mov"
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "avi"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith(PNG_SIGNATURE):
        return "png"
    return None
