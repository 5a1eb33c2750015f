"""The interface of every kind of video file; the format of a file, detected from its first bytes and never its name.

By default ffmpeg tries all its demuxers on a file, and some of them (playlists, concat scripts) open other files and
addresses that the file names. So ffmpeg is always told which demuxer to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt8
from numpy.typing import DTypeLike

from cogvideox_flax.io.paths import read_head

Frame = UInt8[np.ndarray, "H W 3"]
Frames = UInt8[np.ndarray, "F H W 3"]
EXPECTED = "MP4, MOV, MKV, WebM, AVI, MPEG-TS, MPG, FLV, WMV, OGV, DV, GIF or animated WebP"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_ISO_BOXES = {b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip", b"pnot"}  # QuickTime files may lack ftyp
_ISO_IMAGES = {b"avif": "avif", b"heic": "heif", b"heix": "heif", b"heim": "heif", b"heis": "heif", b"mif1": "heif"}
"""Brands of ISO base media that are images."""
_SIGNATURES = {
    b"\x1a\x45\xdf\xa3": "matroska",
    b"FLV\x01": "flv",
    b"\x00\x00\x01\xba": "mpeg",
    b"\x00\x00\x01\xb3": "mpegvideo",
    bytes.fromhex("3026b2758e66cf11"): "asf",
    b"OggS": "ogg",
    b"\x1f\x07\x00\x3f": "dv",
    b"\x1f\x07\x00\xbf": "dv",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    PNG_SIGNATURE: "png",
}
DEMUXERS = ("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "flv", "asf", "ogg", "dv")
"""FFmpeg's, with which a file of that format is read."""
_TS_PACKET, _TS_SYNC = 188, 0x47


@dataclass(frozen=True)
class FrameStream:
    """Frames that are made while they are read, a part at a time; each reading makes them again.

    shape, dtype: of all frames, [F, H, W, 3].
    parts: starts an iterator over [n, H, W, 3], in order; together all frames.
    """

    shape: tuple[int, ...]
    parts: Callable[[], Iterator[np.ndarray]]
    dtype: DTypeLike = np.uint8

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Frame]:
        for part in self.parts():
            yield from part


@dataclass(frozen=True)
class VideoInfo:
    """A video's properties.

    num_frames: at the constant rate `fps`.
    fps: frames per second; 0 for a PNG sequence without a rate.
    height, width: pixels of every frame as shown: square pixels, after the rotation that the file states.
    """

    num_frames: int
    fps: float
    height: int
    width: int


class VideoSource(Protocol):
    """Frames of one size, read by their index."""

    @property
    def info(self) -> VideoInfo:
        """Raises:
        InputError: damaged, or above one of the `limits`.
        """

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        """Some frames, one in memory at a time.

        Args:
            indices: increasing, each in [0, info.num_frames).

        Yields:
            Each index with its frame, in order. If decoding from the middle fails, all frames are yielded again from
            the first index: the last frame for an index is the valid one.

        Raises:
            InputError: one of them cannot be decoded.
        """


class StoredVideo(VideoSource, Protocol):
    """An existing video file or PNG sequence; opening it decodes nothing."""

    @property
    def files(self) -> Sequence[Path]:
        """The files that the video is read from."""

    def comment(self) -> str:
        """The text that `save_video` stored; "" if there is none.

        Raises:
            InputError: the file cannot be read, or holds more than `MAX_METADATA_BYTES` of text.
        """


def format_of(path: Path) -> str | None:
    """One of `DEMUXERS`, such as "mov" (all ISO base media: MP4, MOV) and "matroska" (MKV, WebM); "gif", "webp", "png",
    "avif", "heif"; or None, of other images too.

    Raises:
        InputError: the file cannot be opened.
    """
    head = read_head(path, 3 * _TS_PACKET)
    if head[4:8] in _ISO_BOXES:
        return _ISO_IMAGES.get(head[8:12], "mov")
    if head.startswith(b"RIFF"):
        return {b"AVI ": "avi", b"WEBP": "webp"}.get(head[8:12])
    if len(head) == 3 * _TS_PACKET and set(head[::_TS_PACKET]) == {_TS_SYNC}:
        return "mpegts"
    return next((name for signature, name in _SIGNATURES.items() if head.startswith(signature)), None)
