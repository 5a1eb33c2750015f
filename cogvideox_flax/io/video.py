"""Reading and writing videos: MP4, WebM, GIF, WebP, PNG sequences, contact sheets, with the run's metadata inside.

The output path gives the format: `.mp4`; `.webm`; `.gif`; `.webp`; `.png` with a number field
(`frames/%04d.png`); no suffix, a directory of PNGs. The format of an input file is detected from its contents. Files
are written atomically.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.io.containers import Container, has_sound, write_mp4, write_webm
from cogvideox_flax.io.contents import Contents
from cogvideox_flax.io.gif import Gif, WebP, write_gif, write_webp
from cogvideox_flax.io.images import (
    NUMBER,
    SUFFIXES,
    ImageSequence,
    write_directory,
    write_image,
    write_sequence,
)
from cogvideox_flax.io.paths import check_name, check_writable, expand_user
from cogvideox_flax.io.source import DEMUXERS, EXPECTED, Frame, Frames, FrameStream, StoredVideo, VideoInfo, format_of

log = logging.getLogger(__name__)

FORMATS = ".mp4, .webm, .gif, .webp, .png with a number field (frames/%04d.png), or no suffix for a directory of PNGs"
_SHEET_GAP = 2


def to_uint8(video: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """[-1, 1] to 0..255: clipped, rounded half to even, as the reference's `VideoProcessor` does."""
    return jnp.round(255 * jnp.clip(video.astype(jnp.float32) / 2 + 0.5, 0, 1)).astype(jnp.uint8)


def from_uint8(video: UInt8[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """0..255 to [-1, 1], the VAE's input range, on the host."""
    return video.astype(np.float32) / 127.5 - 1


def check_output_path(path: str | Path) -> None:
    """Refuse a path that `save_video` cannot write, before any work is done.

    Raises:
        InputError: unknown format, other files at the path, the directory is not writable, or PyAV is missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    check_name(path)
    check_writable(path)
    if path.is_dir():
        if suffix and suffix in _WRITERS:
            raise InputError(f"{path} is a directory; give the name of a file to write")
        if others := [p.name for p in path.iterdir() if not re.fullmatch(r"\d+\.png", p.name)]:
            raise InputError(
                f"{path} holds other files ({', '.join(sorted(others)[:3])}); "
                "give a file name, or a new or empty directory for the frames"
            )
    elif suffix not in _WRITERS:
        raise InputError(f"cannot tell the format of {path} from its suffix {path.suffix!r}; known are {FORMATS}")
    elif not suffix and path.exists():
        raise InputError(f"{path} is a file; a path without a suffix is a directory of frames. Known are {FORMATS}")
    elif suffix == ".png" and len(NUMBER.findall(path.name)) != 1:
        raise InputError(f"{path} names one image; known are {FORMATS}")
    if suffix in (".mp4", ".webm") and find_spec("av") is None:
        raise InputError(
            f"PyAV, which writes {suffix}, is not installed: pip install av; or save as .gif or as a directory of PNGs"
        )


def save_video(
    path: str | Path,
    frames: Frames | FrameStream,
    fps: float,
    metadata: dict[str, Any] | None = None,
    *,
    crf: int | None = None,
    sound: Path | None = None,
) -> None:
    """Write one video, atomically. Missing directories are created.

    An mp4 is H.264, a webm VP9, both in yuv420p, BT.709; yuv420p needs even sizes, so an odd height or width grows by
    one repeated line. A gif has 256 colours per frame, times in hundredths of a second, and equal consecutive frames as
    one image, which reading repeats.

    Args:
        path: its suffix chooses the format, see `FORMATS`.
        frames: uint8; or a stream of them, of which an mp4, a webm or PNGs hold one part in memory.
        fps: frames per second.
        metadata: JSON values, stored in the file (in each file of a PNG sequence) for `read_metadata`. More than
            `MAX_METADATA_BYTES` of JSON are not stored, with a warning.
        crf: quality of an mp4, 0 (lossless) to 51; None: 17. Other formats have none, which is logged.
        sound: a video that begins with these frames. Its sound is copied into an mp4 or webm as far as the frames last;
            where the format does not take it, a line says so.

    Raises:
        InputError: frames of another shape or dtype, a path that `check_output_path` refuses, a size or rate that the
            format does not support, or the disk is full.
    """
    path = Path(path)
    frames = frames if isinstance(frames, FrameStream) else _check_frames(frames)
    check_output_path(path)
    comment = json.dumps(metadata or {})
    if len(comment) > limits.MAX_METADATA_BYTES:
        log.warning("%s is saved without its metadata: %s bytes, too many", path, f"{len(comment):,}")
        comment = "{}"
    suffix, how = "" if path.is_dir() else path.suffix.lower(), dict[str, Any]()
    if crf is not None and suffix == ".mp4":
        how["crf"] = crf
    elif crf is not None:
        log.warning("%s is written without crf %d, which is of .mp4", path, crf)
    if sound is not None and has_sound(sound):
        if suffix in (".mp4", ".webm"):
            how["sound"] = sound
        else:
            log.warning("%s holds no sound: that of %s is left out", path, sound)
    # each PNG of a sequence is written atomically by itself
    with nullcontext(path) if suffix in ("", ".png") else atomic_write(path) as unfinished:
        _WRITERS[suffix](unfinished, frames, fps, comment, **how)


def save_contact_sheet(path: str | Path, frames: Frames, columns: int | None = None) -> None:
    """All frames in one PNG, row by row; about square unless `columns` is given.

    Raises:
        InputError: frames of another shape or dtype, not a .png, or the file cannot be written.
    """
    path, frames = Path(path), _check_frames(frames)
    if path.suffix.lower() != ".png":
        raise InputError(f"a contact sheet is a .png; got {path}")
    count, height, width, _ = frames.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    cells = np.full((rows * columns, height + _SHEET_GAP, width + _SHEET_GAP, 3), 255, np.uint8)
    cells[:count, :height, :width] = frames
    sheet = np.concatenate([np.concatenate(row, 1) for row in np.split(cells, rows)])
    write_image(path, sheet[:-_SHEET_GAP, :-_SHEET_GAP], {})


def open_video(path: str | Path, ground: str = "white") -> StoredVideo:
    """Open a video for reading frames. Nothing is decoded yet.

    Args:
        path: a file of one of the formats `EXPECTED`, detected from its contents; or a sequence of images, as in
            `ImageSequence`.
        ground: the colour of transparent parts.

    Raises:
        InputError: there is no such video, or its contents have another format.
    """
    path = expand_user(path)
    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".png" or (suffix in SUFFIXES and NUMBER.search(path.name)):
        return ImageSequence(path, ground)
    if not path.is_file():
        raise InputError(f"there is no video {path}")
    kind = format_of(path)
    if kind == "gif":
        return Gif(path, ground)
    if kind == "webp":
        return WebP(path, ground)
    if kind in DEMUXERS:
        return Container(path, kind, ground)
    if kind == "png":
        raise InputError(f"cannot read {path}: it is a PNG; give it the suffix .png to read it as an image")
    raise InputError(
        f"cannot read {path}: its contents are none of {EXPECTED}, whatever its name says; convert it to MP4"
    )


class HashedVideo:
    """A `VideoSource` with the hash of its contents: reading frames of other contents is an error.

    Args:
        path, ground: see `open_video`, whose errors it has.
    """

    def __init__(self, path: str | Path, ground: str = "white"):
        self._source = open_video(path, ground)
        self.contents = Contents.of(Path(path), self._source.files)  # before `info` is read from them

    @property
    def info(self) -> VideoInfo:
        return self._source.info

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        with self.contents.reading():
            yield from self._source.frames(indices)


def read_video(path: str | Path) -> tuple[Frames, float]:
    """All frames of a video, and frames per second (0 for a PNG sequence without a rate).

    A video with a variable rate is read at a constant rate: frames are repeated or dropped, as in a player.

    Args:
        path: see `open_video`.

    Raises:
        InputError: there is no such video, it cannot be decoded, or its frames are more than `MAX_DECODED_BYTES`.
    """
    source = open_video(path)
    info = source.info
    limits.check_decoded_bytes(Path(path), info.num_frames, info.height, info.width)
    frames = np.empty((info.num_frames, info.height, info.width, 3), np.uint8)
    for i, frame in source.frames(range(info.num_frames)):
        frames[i] = frame
    return frames, info.fps


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata that `save_video` stored in a file or PNG sequence; {} for other files.

    Raises:
        InputError: there is no such file, or it is not a video or image.
    """
    try:
        metadata = json.loads(open_video(path).comment())
    except InputError:
        raise
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _check_frames(frames: Frames) -> Frames:
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise InputError(f"frames must be uint8 [F, H, W, 3]; got {frames.dtype} {list(frames.shape)}")
    return frames


_WRITERS: dict[str, Callable[..., None]] = {
    ".mp4": write_mp4,
    ".webm": write_webm,
    ".gif": write_gif,
    ".webp": write_webp,
    ".png": write_sequence,
    "": write_directory,
}
