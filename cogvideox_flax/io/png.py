"""Sequences of PNGs: a directory of numbered files, a pattern (frames/%04d.png), or one picture."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.atomic import atomic_directory, atomic_write
from cogvideox_flax.io.formats import PNG_SIGNATURE
from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.pictures import read_picture
from cogvideox_flax.io.pillow import open_picture
from cogvideox_flax.io.source import Frame, Frames, FrameStream, VideoInfo

NUMBER = re.compile(r"%0?\d*d")
"""A pattern's number field."""


class PngSequence:
    """A `VideoSource`.

    ground: the colour of transparent parts.
    """

    def __init__(self, path: Path, ground: str = "white"):
        self.path, self._ground = path, ground
        self._files = sequence_files(path)
        if not self._files:
            raise InputError(f"there are no frames {path}")

    @property
    def files(self) -> Sequence[Path]:
        return self._files

    @cached_property
    def info(self) -> VideoInfo:
        limits.check_count(self.path, len(self._files))
        sizes = {_read_size(file) for file in self._files}
        if len(sizes) > 1:
            named = ", ".join(f"{width}x{height}" for height, width in sorted(sizes)[:4])
            raise InputError(f"the frames {self.path} have different sizes: {named}")
        height, width, _ = self._read(0).shape  # as shown; a rotation may stand behind the pixels
        text = self._text("fps") or "0"
        try:
            fps = float(text)
        except ValueError as e:
            raise InputError(
                f"{self._files[0]} states {text[:40]!r} as its frames per second; expected a number"
            ) from e
        if fps != 0:
            limits.check_fps(self._files[0], fps)
        return VideoInfo(len(self._files), fps, height, width)

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        for i in indices:
            frame = self._read(i)
            if frame.shape != (self.info.height, self.info.width, 3):
                raise InputError(f"{self._files[i]} has another size than the frames beside it")
            yield i, frame

    def comment(self) -> str:
        return self._text("comment")

    def _read(self, i: int) -> Frame:
        _read_size(self._files[i])
        return read_picture(self._files[i], "PNG", ground=self._ground)

    def _text(self, name: str) -> str:
        """A text chunk of the first file, read without decoding its pixels."""
        _read_size(self._files[0])
        with open_picture(self._files[0], "PNG") as image:
            text = image.info.get(name, "")
        return text if isinstance(text, str) else ""


def sequence_files(path: Path) -> list[Path]:
    """The files of a PNG sequence (or one picture), by number.

    Raises:
        InputError: the directory cannot be read.
    """
    if path.is_dir():
        path = path / "%d.png"
    before, *after = NUMBER.split(path.name)
    pattern = re.compile(re.escape(before) + "".join(r"(\d+)" + re.escape(part) for part in after))
    try:
        found = [(match, p) for p in path.parent.iterdir() if (match := pattern.fullmatch(p.name))]
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    return [p for _, p in sorted(found, key=lambda item: [int(number) for number in item[0].groups()])]


def write_picture(path: Path, frame: Frame, texts: dict[str, str], *, sync: bool = True) -> None:
    """One PNG with some named texts; sync and errors as for `atomic_write`."""
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    with atomic_write(path, sync=sync) as partial:
        Image.fromarray(frame).save(partial, format="PNG", pnginfo=info)


def write_sequence(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """A PNG for each frame, numbered from 0. Remaining frames of an earlier, longer sequence are removed.

    Args:
        path: with one number field.
        fps: 0 if there is no rate.
    """
    field = NUMBER.findall(path.name)[0]
    texts = {"comment": comment} | ({"fps": str(fps)} if fps else {})

    def file_of(i: int) -> Path:
        return path.with_name(path.name.replace(field, field % i))

    for i, frame in enumerate(frames):
        write_picture(file_of(i), frame, texts, sync=i == len(frames) - 1)
    for i in itertools.takewhile(lambda i: file_of(i).is_file(), itertools.count(len(frames))):
        file_of(i).unlink()


def write_directory(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """Write a new directory, then exchange it with an existing directory of frames."""
    with atomic_directory(path) as partial:
        write_sequence(partial / "%04d.png", frames, fps, comment)


def _read_size(path: Path) -> tuple[int, int]:
    """Height and width from the header of a PNG, before any rotation."""
    try:
        with open_file(path) as file:
            head = file.read(24)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    if len(head) < 24 or not head.startswith(PNG_SIGNATURE) or head[12:16] != b"IHDR":
        raise InputError(f"cannot read {path}: its first bytes are not those of a PNG")
    width, height = struct.unpack(">II", head[16:])
    limits.check_size(path, height, width)
    return height, width
