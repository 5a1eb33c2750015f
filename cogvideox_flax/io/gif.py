"""GIFs: their blocks are parsed here, their pixels are decoded by PIL.

The blocks give the number of frames, their times and the comment without decoding any pixel.
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
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.pillow import open_picture
from cogvideox_flax.io.source import Frame, Frames, FrameStream, VideoInfo

_MAX_SIDE = 2**16 - 1  # the format's own
_EXTENSION, _IMAGE, _END = b"!", b",", b";"
_CONTROL, _COMMENT = b"\xf9", b"\xfe"


@dataclass(frozen=True)
class _Blocks:
    """delays: of each frame, in hundredths of a second."""

    height: int
    width: int
    delays: list[int]
    comment: bytes


class Gif:
    """A `VideoSource`."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def _blocks(self) -> _Blocks:
        try:
            with open_file(self.path) as file:
                return _read_blocks(file, self.path)
        except (struct.error, EOFError) as e:
            raise InputError(f"cannot read {self.path}: the GIF is cut short or damaged") from e
        except OSError as e:
            raise InputError(f"cannot read {self.path}: {e.strerror}") from e

    @property
    def info(self) -> VideoInfo:
        blocks = self._blocks
        hundredths = sum(blocks.delays)
        # and so does the mean rate, since a GIF merges equal consecutive frames into a longer one
        fps = 100 * len(blocks.delays) / hundredths if hundredths else 0.0
        return VideoInfo(len(blocks.delays), fps, blocks.height, blocks.width)

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        shape = (self.info.height, self.info.width, 3)  # `info` also checks that the blocks are complete
        left = limits.MAX_DECODE_SECONDS
        with open_picture(self.path, "GIF") as image:
            for i in indices:
                began = time.monotonic()
                while image.tell() < i:  # each frame is drawn over the one before
                    image.seek(image.tell() + 1)
                    if time.monotonic() - began > left:
                        raise InputError(
                            f"cannot read {self.path}: its frames to {i} take longer than "
                            f"{limits.MAX_DECODE_SECONDS:g} seconds to decode"
                        )
                frame = np.asarray(image.convert("RGB"))
                left -= time.monotonic() - began
                if frame.shape != shape:
                    raise InputError(f"cannot read {self.path}: frame {i} has another size than the GIF")
                yield i, frame

    def comment(self) -> str:
        return self._blocks.comment.decode(errors="replace")


def write_gif(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """256 colours per frame; times in hundredths of a second; equal consecutive frames are merged.

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
    first.save(path, "GIF", save_all=True, append_images=rest, duration=(10 * np.diff(times)).tolist(), loop=0)
    data = comment.encode()
    blocks = [data[i : i + 255] for i in range(0, len(data), 255)]
    with path.open("r+b") as file:  # after the frames, where a decoder of frames does not read it
        file.seek(-len(_END), os.SEEK_END)
        file.write(_EXTENSION + _COMMENT)
        file.writelines(bytes([len(block)]) + block for block in blocks)
        file.write(b"\0" + _END)


def _read_blocks(file: BinaryIO, path: Path) -> _Blocks:
    """Raises:
    EOFError, struct.error: the file ends inside a block, or has other bytes between blocks.
    InputError: it exceeds one of the limits.
    """
    width, height, flags = struct.unpack("<6xHHB2x", file.read(13))
    _skip_palette(file, flags)
    delays: list[int] = []
    comment = bytearray()
    delay = 0
    while (kind := file.read(1)) not in (_END, b""):  # some writers omit the end marker
        if kind == _EXTENSION:
            label = file.read(1)
            for number, data in enumerate(_sub_blocks(file)):
                if label == _CONTROL and number == 0:
                    (delay,) = struct.unpack("<xHx", data)
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
    return _Blocks(height, width, delays, bytes(comment))


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
