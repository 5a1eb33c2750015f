"""GIFs: their blocks are parsed here, their pixels are decoded by PIL.

The blocks give the pictures' times and the comment without decoding any pixel. Each picture has a time of its own; the
video is read at a constant rate, at which a picture that is shown for longer is repeated.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.pictures import open_picture, to_rgb
from cogvideox_flax.io.source import Frame, Frames, FrameStream, VideoInfo

_MAX_SIDE = 2**16 - 1  # the format's own
_MAX_DELAY = 2**16 - 1  # hundredths of a second
_EXTENSION, _IMAGE, _END = b"!", b",", b";"
_CONTROL, _COMMENT, _APPLICATION = b"\xf9", b"\xfe", b"\xff"
_RATE = b"COGVIDEOFPS"  # of `write_gif`: the rate as text, since pictures' times are rounded and equal ones are merged
_NO_DELAY = 10  # hundredths of a second for which players show a picture without a time of its own


@dataclass(frozen=True)
class _Blocks:
    """delays: for how long each picture is shown, in hundredths of a second. fps: as `write_gif` states it; 0: it is
    not stated."""

    height: int
    width: int
    delays: list[int]
    fps: float
    comment: bytes


class Gif:
    """A `VideoSource`.

    ground: the colour of transparent parts.
    """

    def __init__(self, path: Path, ground: str = "white"):
        self.path, self.files, self._ground = path, (path,), ground

    @cached_property
    def _blocks(self) -> _Blocks:
        try:
            with open_file(self.path) as file:
                return _read_blocks(file, self.path)
        except (struct.error, EOFError) as e:
            raise InputError(f"cannot read {self.path}: the GIF is cut short or damaged") from e
        except OSError as e:
            raise InputError(f"cannot read {self.path}: {e.strerror}") from e

    @cached_property
    def _timeline(self) -> tuple[VideoInfo, Int[np.ndarray, " F"]]:
        """The video at its constant rate, and the picture that each of its frames is."""
        blocks = self._blocks
        fps, counts = _constant_rate(blocks.delays, blocks.fps)
        limits.check_count(self.path, int(counts.sum()))
        pictures = np.repeat(np.arange(len(counts)), counts)
        return VideoInfo(len(pictures), fps, blocks.height, blocks.width), pictures

    @property
    def info(self) -> VideoInfo:
        return self._timeline[0]

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        info, pictures = self._timeline  # which also checks that the blocks are complete
        left = limits.MAX_DECODE_SECONDS
        with open_picture(self.path, "GIF") as image:
            for i in indices:
                began = time.monotonic()
                while image.tell() < pictures[i]:  # each picture is drawn over the one before
                    image.seek(image.tell() + 1)
                    if time.monotonic() - began > left:
                        raise InputError(
                            f"cannot read {self.path}: its frames to {i} take longer than "
                            f"{limits.MAX_DECODE_SECONDS:g} seconds to decode"
                        )
                frame = to_rgb(image, self._ground)
                left -= time.monotonic() - began
                if frame.shape != (info.height, info.width, 3):
                    raise InputError(f"cannot read {self.path}: frame {i} has another size than the GIF")
                yield i, frame

    def comment(self) -> str:
        return self._blocks.comment.decode(errors="replace")


def write_gif(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """256 colours per frame; times in hundredths of a second; equal consecutive frames are one picture.

    Raises:
        InputError: a size or rate that the format does not support.
    """
    if max(frames.shape[1:3]) > _MAX_SIDE or not limits.MIN_FPS <= fps <= limits.MAX_FPS:
        raise InputError(
            f"a .gif holds frames of at most {_MAX_SIDE}x{_MAX_SIDE} at a positive rate; "
            f"got {frames.shape[2]}x{frames.shape[1]} at {fps:g} per second"
        )
    # Integer hundredths of a second whose rounding errors do not accumulate: 8 per second is 12, 13, 12, 13, ...
    times = np.round(np.arange(len(frames) + 1) * 100 / fps).astype(int)
    first, *rest = (Image.fromarray(frame) for frame in frames)
    try:
        first.save(path, "GIF", save_all=True, append_images=rest, duration=(10 * np.diff(times)).tolist(), loop=0)
    except OverflowError as e:
        raise InputError(
            f"a .gif shows a picture for at most {_MAX_DELAY / 100:g} seconds, and equal consecutive frames are one "
            f"picture; at {fps:g} frames per second these take longer. Save them as .mp4"
        ) from e
    rate, data = repr(float(fps)).encode(), comment.encode()
    blocks = [data[i : i + 255] for i in range(0, len(data), 255)]
    with path.open("r+b") as file:  # after the frames, where a decoder of frames does not read it
        file.seek(-len(_END), os.SEEK_END)
        file.write(_EXTENSION + _APPLICATION + bytes([len(_RATE)]) + _RATE)
        file.write(bytes([len(rate)]) + rate + b"\0" + _EXTENSION + _COMMENT)
        file.writelines(bytes([len(block)]) + block for block in blocks)
        file.write(b"\0" + _END)


def _constant_rate(delays: Sequence[int], stated: float) -> tuple[float, Int[np.ndarray, " P"]]:
    """A rate at which every picture of a GIF begins at its own time, to a hundredth of a second.

    Args:
        delays: for how long each picture is shown, in hundredths of a second.
        stated: frames per second; 0 if the file does not say.

    Returns:
        Frames per second, 0 if the file has no times; and how many frames each picture is.
    """
    if not any(delays):
        return 0.0, np.ones(len(delays), int)
    if stated:
        times = np.cumsum(delays) * stated / 100
        counts = np.diff(np.rint(times).astype(int), prepend=0)
        if counts.sum() == len(delays):  # none was merged; above 100 per second they may have equal times
            counts = np.ones(len(delays), int)
        if np.abs(np.cumsum(counts) - times).max() < stated / 100:
            return stated, counts
    shown = np.asarray([delay or _NO_DELAY for delay in delays])
    # Times of a constant rate are rounded, such as 12, 13, 12; where pictures were merged, the shortest tell the rate.
    counts = np.rint(shown / shown[shown <= shown.min() + 1].mean()).astype(int)
    period = shown.sum() / counts.sum()
    if np.abs(np.cumsum(counts) * period - np.cumsum(shown)).max() >= 1:
        period = np.gcd.reduce(shown)
        counts = shown // period
    return float(100 / period), counts


def _read_blocks(file: BinaryIO, path: Path) -> _Blocks:
    """Raises:
    EOFError, struct.error: the file ends inside a block, or has other bytes between blocks.
    InputError: it exceeds one of the limits.
    """
    width, height, flags = struct.unpack("<6xHHB2x", file.read(13))
    _skip_palette(file, flags)
    delays: list[int] = []
    comment = bytearray()
    application, rate = b"", b""
    delay = 0
    while (kind := file.read(1)) not in (_END, b""):  # some writers omit the end marker
        if kind == _EXTENSION:
            label = file.read(1)
            for number, data in enumerate(_sub_blocks(file)):
                if label == _CONTROL and number == 0:
                    (delay,) = struct.unpack("<xHx", data)
                elif label == _APPLICATION and number == 0:
                    application = data
                elif label == _APPLICATION and number == 1 and application == _RATE:
                    rate = data
                elif label == _COMMENT:
                    comment += data
                    if len(comment) > limits.MAX_METADATA_BYTES:
                        raise InputError(f"{path} holds more than {limits.MAX_METADATA_BYTES:,} bytes of comments")
        elif kind == _IMAGE:
            left, top, across, down, flags = struct.unpack("<HHHHB", file.read(9))
            if not delays:  # some writers give only the first frame's size
                width, height = max(width, left + across), max(height, top + down)
                limits.check_size(path, height, width)
            elif left + across > width or top + down > height:
                raise InputError(f"cannot read {path}: frame {len(delays)} reaches beyond {width}x{height}")
            _skip_palette(file, flags)
            if not file.read(1):
                raise EOFError
            for _ in _sub_blocks(file):
                pass
            delays.append(delay)
            delay = 0
        elif kind != b"\0":
            raise EOFError
    limits.check_count(path, len(delays))
    return _Blocks(height, width, delays, _parse_rate(rate), bytes(comment))


def _parse_rate(text: bytes) -> float:
    """Frames per second; 0 for what is no rate."""
    try:
        fps = float(text)
    except ValueError:
        return 0.0
    return fps if limits.MIN_FPS <= fps <= limits.MAX_FPS else 0.0


def _skip_palette(file: BinaryIO, flags: int) -> None:
    if flags & 0x80:
        file.seek(3 << (flags & 7) + 1, os.SEEK_CUR)


def _sub_blocks(file: BinaryIO) -> Iterator[bytes]:
    while size := file.read(1):
        if size == b"\0":
            return
        data = file.read(size[0])
        if len(data) < size[0]:
            break
        yield data
    raise EOFError
