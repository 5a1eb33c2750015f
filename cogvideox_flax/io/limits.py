"""Limits on the cost of reading one file. Each limit is checked before the cost arises."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from cogvideox_flax.errors import InputError

T = TypeVar("T")

MAX_PIXELS = 2**25
"""Pixels of a frame or image: a little more than 8K video (7680x4320)."""
MAX_SIDE = 2**16 - 1
"""Pixels of a side of a frame or image: those of a JPEG or GIF. Memory to resize an image grows with its sides."""
MAX_FRAMES = 1_000_000
"""Frames of a video: 9 hours at 30 per second."""
MIN_FPS, MAX_FPS = 1e-3, 1e5
"""Frames per second that a file may state."""
MAX_WRITTEN_FPS = 1000
"""Frames per second of a video that a run writes."""
MAX_CRF = 51
"""Of H.264; 0 is lossless."""
MAX_DECODED_BYTES = 4 * 2**30
"""Bytes of a whole decoded video, as `read_video` returns it."""
MAX_ARRAY_BYTES = 4 * 2**30
"""Bytes of an array in an npz file."""
MAX_METADATA_BYTES = 16 * 2**20
"""Bytes of text stored in a video beside its frames."""
MAX_DECODE_SECONDS = 600.0
"""Seconds that decoding may take per request."""
DECODER_THREADS = 4
"""Threads of a decoder; each needs memory for its own frames."""


def check_size(path: Path, height: int, width: int) -> None:
    """Refuse a frame or image whose header states no pixels, more than `MAX_PIXELS`, or a side above `MAX_SIDE`."""
    if not 0 < height * width <= MAX_PIXELS:
        raise InputError(
            f"{path}: a frame of {width}x{height} has {height * width:,} pixels; "
            f"expected 1 to {MAX_PIXELS:,}. Scale it to a smaller size first"
        )
    if (side := max(height, width)) > MAX_SIDE:
        raise InputError(
            f"{path}: a frame of {width}x{height} has a side of {side:,} pixels; "
            f"expected at most {MAX_SIDE:,}. Crop it first"
        )


def check_count(path: Path, num_frames: int) -> None:
    """Refuse a video without frames, or with more than `MAX_FRAMES`."""
    if not num_frames:
        raise InputError(f"{path} holds no frames")
    if num_frames > MAX_FRAMES:
        raise InputError(
            f"{path} holds {num_frames:,} frames; at most {MAX_FRAMES:,} are read. Cut it into shorter videos"
        )


def check_fps(path: Path, fps: float) -> None:
    """Refuse a video with less than `MIN_FPS` or more than `MAX_FPS` frames per second, or without a number of them."""
    if not MIN_FPS <= fps <= MAX_FPS:
        raise InputError(f"{path} states {fps:g} frames per second; expected {MIN_FPS:g} to {MAX_FPS:g}")


def check_decoded_bytes(path: Path, num_frames: int, height: int, width: int) -> None:
    """Refuse to decode a whole video of more than `MAX_DECODED_BYTES` in uint8."""
    nbytes = num_frames * height * width * 3
    if nbytes > MAX_DECODED_BYTES:
        raise InputError(
            f"{path}: {num_frames:,} frames of {width}x{height} are {nbytes / 2**30:.1f} GiB once decoded; "
            f"at most {MAX_DECODED_BYTES / 2**30:g} GiB are read at once. Cut it shorter or scale it to a smaller size"
        )


def timed(path: Path, frames: Iterator[T]) -> Iterator[T]:
    """Yield the frames, and limit the time that it takes to decode them.

    Raises:
        InputError: they take longer than `MAX_DECODE_SECONDS` to decode.
    """
    left = MAX_DECODE_SECONDS
    while True:
        began = time.monotonic()
        frame = next(frames, None)
        left -= time.monotonic() - began
        if frame is None:
            return
        if left < 0:
            raise InputError(f"{path}: its frames take longer than {MAX_DECODE_SECONDS:g} seconds to decode")
        yield frame
