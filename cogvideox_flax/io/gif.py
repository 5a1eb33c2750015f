"""GIFs, read through PyAV, and animated WebP, read by PIL; both written by PIL.

Each image has a time of its own; the video is read at a constant rate, at which an image that is shown for longer is
repeated.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.containers import Container, Timeline
from cogvideox_flax.io.images import open_image, to_rgb
from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.source import Frame, Frames, FrameStream, VideoInfo

_MAX_SIDE = 2**16 - 1  # the format's own
_MAX_DELAY = 2**16 - 1  # hundredths of a second
_CONTROL = re.compile(rb"!\xf9\x04.(..)", re.DOTALL)  # the extension with an image's time
_RATE = b"!\xff\x0bCOGVIDEOFPS"
"""The extension with the rate as text, since images' times are rounded and equal ones are merged."""
_END = b";"
_NO_DELAY = 10  # hundredths of a second for which browsers show an image with a time of 0 or 1
_MAX_WEBP_SIDE = 2**14 - 1  # the format's own
_WEBP_QUALITY = 90  # of 0 to 100
_DESCRIPTION = 0x010E  # of Exif


class Gif(Container):
    """The frames of a GIF at a constant rate, as a `VideoSource`.

    ground: the colour of transparent parts.
    """

    def __init__(self, path: Path, ground: str = "white"):
        super().__init__(path, "gif", ground)

    @cached_property
    def _timeline(self) -> Timeline:
        fps, counts = _constant_rate(self._read_packets(_delay), self._stated_rate())
        limits.check_count(self.path, int(counts.sum()))
        _, _, height, width = self._read_first_frame()
        return Timeline(VideoInfo(int(counts.sum()), fps, height, width), np.cumsum(counts) - counts, None)

    @staticmethod
    def _holds_image(packet: Any) -> bool:
        data = bytes(packet)  # the last one may hold a comment alone
        return data.startswith(b"GIF") or _CONTROL.search(data) is not None

    def _stated_rate(self) -> float:
        """Frames per second as `write_gif` states it; 0 if it does not."""
        with open_file(self.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.rfind(_RATE) + len(_RATE)
            text = data[at + 1 : at + 1 + data[at]] if at >= len(_RATE) else b""
        try:
            fps = float(text)
        except ValueError:
            return 0.0
        return fps if limits.MIN_FPS <= fps <= limits.MAX_FPS else 0.0


def write_gif(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """256 colours per frame; times in hundredths of a second; equal consecutive frames are one image.

    Raises:
        InputError: a size or rate that the format does not support.
    """
    try:
        _write_images(path, "GIF", frames, fps, _MAX_SIDE, 100, comment=comment.encode())
    except OverflowError as e:
        raise InputError(
            f"a .gif shows an image for at most {_MAX_DELAY / 100:g} seconds, and equal consecutive frames are one "
            f"image; at {fps:g} frames per second these take longer. Save them as .mp4"
        ) from e
    rate = repr(float(fps)).encode()
    with path.open("r+b") as file:
        file.seek(-len(_END), os.SEEK_END)
        file.write(_RATE + bytes([len(rate)]) + rate + b"\0" + _END)


def _write_images(
    path: Path, form: str, frames: Frames | FrameStream, fps: float, most: int, ticks: int, **options: Any
) -> None:
    """Write an animation with sides up to `most`, whose times are whole ticks of a second."""
    if max(frames.shape[1:3]) > most or not limits.MIN_FPS <= fps <= limits.MAX_FPS:
        raise InputError(
            f"a .{form.lower()} holds frames of at most {most}x{most} at a positive rate; "
            f"got {frames.shape[2]}x{frames.shape[1]} at {fps:g} per second"
        )
    # the rounding errors do not accumulate: 8 per second is 12, 13, 12, 13, ... hundredths
    times = np.round(np.arange(len(frames) + 1) * ticks / fps).astype(int)
    first, *rest = (Image.fromarray(frame) for frame in frames)
    durations = (1000 // ticks * np.diff(times)).tolist()
    first.save(path, form, save_all=True, append_images=rest, duration=durations, loop=0, **options)


def _delay(packet: Any) -> int:
    """For how long an image is shown, in hundredths of a second."""
    control = _CONTROL.search(bytes(packet))
    return int.from_bytes(control[1], "little") if control else 0


def _constant_rate(delays: Sequence[int], stated: float = 0, ticks: int = 100) -> tuple[float, Int[np.ndarray, " P"]]:
    """A rate at which every image of an animation begins at its own time, to a tick.

    Args:
        delays: for how long each image is shown, in ticks.
        stated: frames per second; 0 if the file does not say.
        ticks: per second, 100 or more.

    Returns:
        Frames per second, 0 for one image without a time; and how many frames each image is.
    """
    if len(delays) == 1 and not any(delays):
        return 0.0, np.ones(1, int)
    if stated:
        times = np.cumsum(delays) * stated / ticks
        counts = np.diff(np.rint(times).astype(int), prepend=0)
        if counts.sum() == len(delays):  # none was merged; above 100 per second they may have equal times
            counts = np.ones(len(delays), int)
        if np.abs(np.cumsum(counts) - times).max() < stated / ticks:
            return stated, counts
    shown = np.asarray([delay if delay * 100 > ticks else _NO_DELAY * ticks // 100 for delay in delays])
    # Times of a constant rate are rounded, such as 12, 13, 12; where images were merged, the shortest tell the rate.
    counts = np.rint(shown / shown[shown <= shown.min() + 1].mean()).astype(int)
    period = shown.sum() / counts.sum()
    if np.abs(np.cumsum(counts) * period - np.cumsum(shown)).max() >= 1:
        period = np.gcd.reduce(shown)
        counts = shown // period
    return float(ticks / period), counts


class WebP:
    """The frames of a WebP at a constant rate, as a `VideoSource`. A still one is one frame.

    ground: the colour of transparent parts.
    """

    def __init__(self, path: Path, ground: str = "white"):
        self.path, self.files, self._ground = path, (path,), ground

    @cached_property
    def _timeline(self) -> Timeline:
        with open_image(self.path, "WEBP") as image:
            height, width = image.height, image.width
        delays = list(self._delays()) or [0]
        limits.check_count(self.path, len(delays))
        fps, counts = _constant_rate(delays, ticks=1000)
        limits.check_count(self.path, int(counts.sum()))
        return Timeline(VideoInfo(int(counts.sum()), fps, height, width), np.cumsum(counts) - counts, None)

    @property
    def info(self) -> VideoInfo:
        return self._timeline.info

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        shown = np.searchsorted(self._timeline.slots, indices, side="right") - 1
        with open_image(self.path, "WEBP") as image:
            for number, group in groupby(zip(shown.tolist(), indices, strict=True), key=itemgetter(0)):
                image.seek(number)
                frame = to_rgb(image, self._ground)
                for _, index in group:
                    yield index, frame

    def comment(self) -> str:
        with open_image(self.path, "WEBP") as image:
            return str(image.getexif().get(_DESCRIPTION, ""))

    def _delays(self) -> Iterator[int]:
        """For how long each image is shown, in thousandths of a second; none of a still one. Decodes nothing."""
        with open_file(self.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 12
            while at + 8 <= len(data):
                size = int.from_bytes(data[at + 4 : at + 8], "little")
                if data[at : at + 4] == b"ANMF":
                    yield int.from_bytes(data[at + 20 : at + 23], "little")
                at += 8 + size + size % 2


def write_webp(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """An animated WebP; times in thousandths of a second; the comment is its Exif description.

    Raises:
        InputError: a size or rate that the format does not support.
    """
    exif = Image.Exif()
    exif[_DESCRIPTION] = comment
    _write_images(path, "WEBP", frames, fps, _MAX_WEBP_SIDE, 1000, quality=_WEBP_QUALITY, exif=exif.tobytes())
