"""Images as seen, in sRGB: a file, a PIL image, a sequence of numbered images.

A sequence is a directory of numbered files, a pattern (frames/%04d.png), or one PNG. PIL tries only the allowed
formats; exceptions of its decoders become an `InputError`.
"""

from __future__ import annotations

import itertools
import logging
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.errors import InputError
from cogvideox_flax.io import limits
from cogvideox_flax.io.atomic import atomic_directory, atomic_write
from cogvideox_flax.io.colours import HDR, ToBT709, say_converted, to_bt709
from cogvideox_flax.io.paths import read_head
from cogvideox_flax.io.source import PNG_SIGNATURE, Frame, Frames, FrameStream, VideoInfo, format_of

log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "HEIF")
"""PIL's names; HEIF is read where pillow-heif is installed."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".heic", ".heif")
"""Of the images in a folder that is a video."""
_TO_SDR = "cogvideox_flax to_sdr"
"""In `info` of an HDR image: what converts it."""
_PROFILE_STEPS = 9
_SAME = 2  # levels between a profile and sRGB that are rounding
_FEW_GREYS = {"L;2": 85, "L;4": 17}
"""PIL's names for 2 and 4 bits of grey -> the step between its levels, of 255."""

NUMBER = re.compile(r"%0?\d*d")
"""A pattern's number field."""
_DIGITS = re.compile(r"\d+")


def read_image(path: Path, *formats: str, ground: str = "white") -> Frame:
    """An image after the rotation that its file states; of a multi-picture JPEG or a TIFF the first one.

    Args:
        formats: those that are tried, all of `FORMATS` if none are named.
        ground: the colour of transparent parts.

    Raises:
        InputError: there is none, it is damaged, animated or of another format, or exceeds one of the `limits`.
    """
    if not path.is_file():
        raise InputError(f"there is no image {path}")
    with open_image(path, *(formats or FORMATS)) as image:
        # the images of an MPO, a multi-picture JPEG, are no animation: a preview, a depth map, another view
        if image.format not in ("MPO", "TIFF") and (count := getattr(image, "n_frames", 1)) > 1:
            raise InputError(f"{path} is animated, {count} frames; give one of them as an image, or it as a video")
        if to_sdr := image.info.get(_TO_SDR):
            say_converted(path, to_sdr.name)
        return to_rgb(image, ground)


def to_rgb(image: Image.Image, ground: str = "white") -> Frame:
    """The pixels of a PIL image in sRGB, after the rotation that its file states; of 16-bit grey the upper byte.

    Args:
        ground: the colour of transparent parts.

    Raises:
        ValueError: pixels that have no white level (modes I and F), or whose transparency PIL does not decode.
    """
    tiles = getattr(image, "tile", None)  # of a file that is not decoded yet
    stored, to_sdr = tiles[0][3] if tiles else None, image.info.get(_TO_SDR)
    image = ImageOps.exif_transpose(image)
    clear = image.info.get("transparency")
    if image.mode.startswith("I;16") or stored == "I;16B":
        image = _upper_byte(image, clear)
    elif image.mode in ("I", "F"):
        raise ValueError(f"its mode {image.mode} states no white level; give it in mode L or RGB, of 0 to 255")
    elif clear is not None and stored == "RGB;16B":
        raise ValueError("16-bit RGB with a transparent colour; save it in 8 bit, or with an alpha channel")
    elif clear is not None and stored in _FEW_GREYS:
        image.info["transparency"] = clear * _FEW_GREYS[stored]
    if image.has_transparency_data:
        image = image.convert("RGBA")
    image = _to_srgb(image, to_sdr)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, ground), image)
    return np.asarray(image.convert("RGB"))


def _to_srgb(image: Image.Image, to_sdr: ToBT709 | None) -> Image.Image:
    """The image converted from HDR, or from its colour profile, if it has another than sRGB."""
    if to_sdr is not None:
        sdr = Image.fromarray(to_sdr(np.asarray(image.convert("RGB")).astype(np.uint16) * 257))
        if image.mode == "RGBA":
            sdr.putalpha(image.getchannel("A"))
        return sdr
    profile = image.info.get("icc_profile")
    if not profile:
        return image
    colours = image if image.mode in ("L", "CMYK") else image.convert("RGB")
    try:
        transform = _srgb_transform(profile, colours.mode)
        converted = transform and transform.apply(colours)
    except (ImageCms.PyCMSError, ImportError, OSError, TypeError, ValueError) as e:
        log.warning("a colour profile that cannot be applied is left out: %s", e)
        return image
    if converted and image.mode == "RGBA":
        converted.putalpha(image.getchannel("A"))
    return converted or image


@lru_cache(maxsize=64)  # the images of a sequence share one
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From a profile to sRGB; None where it changes no colour, so that these images stay as they are."""
    relative, black = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
    srgb = ImageCms.createProfile("sRGB")
    transform = ImageCms.buildTransform(BytesIO(profile), srgb, mode, "RGB", relative, black)  # as browsers
    levels = np.rint(np.linspace(0, 255, _PROFILE_STEPS)).astype(np.uint8)
    grid = np.stack(np.meshgrid(*[levels] * 3), -1).reshape(1, -1, 3)
    probe = Image.fromarray(grid).convert(mode)
    change = np.asarray(transform.apply(probe)).astype(int) - np.asarray(probe.convert("RGB"))
    return None if np.abs(change).max() <= _SAME and mode != "CMYK" else transform


def _upper_byte(image: Image.Image, clear: int | None) -> Image.Image:
    """16-bit grey in 8 bit; the grey level `clear` is transparent. PIL's own conversion clips at 255."""
    levels = np.asarray(image)
    grey = Image.fromarray((levels >> 8).astype(np.uint8))
    if clear is not None:
        grey.putalpha(Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8)))
    return grey


@contextmanager
def decoding(name: str | Path) -> Iterator[None]:
    """Turn what PIL raises while it decodes `name` into an `InputError` of one line."""
    try:
        yield
    except InputError:
        raise
    except Image.DecompressionBombError as e:  # of sizes far beyond ours, before they can be asked for
        raise InputError(f"{name} has more than {limits.MAX_PIXELS:,} pixels; scale it to a smaller size first") from e
    # For damaged files PIL raises OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError,
    # OverflowError, DecompressionBombError and, with some flags of Python, warnings; the set is not documented.
    except Exception as e:
        text = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise InputError(f"cannot read {name}: {text}") from e


@contextmanager
def open_image(path: Path, *formats: str) -> Iterator[Image.Image]:
    """An image whose header is read and whose pixels are not decoded yet.

    Args:
        formats: those that are tried, such as "PNG".

    Raises:
        InputError: another format, a size that exceeds one of the `limits`, or damage found inside the `with` block.
    """
    if "HEIF" in formats and path.is_file() and format_of(path) == "heif":
        _register_heif(path)
    if not Image.OPEN.keys() >= set(formats):
        Image.init()
    readable = [name for name in formats if name in Image.OPEN]
    with decoding(path), _open(path, readable) as image:
        limits.check_size(path, image.height, image.width)
        if image.format in ("PNG", "AVIF", "HEIF") and (to_sdr := _hdr_of(path, image)):
            image.info[_TO_SDR] = to_sdr
        yield image


def _hdr_of(path: Path, image: Image.Image) -> ToBT709 | None:
    """What converts an HDR image, of 8 bits as PIL decodes it; None for others."""
    head = read_head(path, 2**16)
    found = _cicp(head) if head.startswith(PNG_SIGNATURE) else _nclx(head)
    # an SDR image with a gain map has a profile, or another nclx beside that of its HDR form
    if (
        not found
        or any(transfer not in HDR for _, transfer in found)
        or ("icc_profile" in image.info and image.format != "PNG")
    ):
        return None
    primaries, transfer = found[0]
    return to_bt709(transfer, primaries)


def _cicp(head: bytes) -> list[tuple[int, int]]:
    """Primaries and transfer function, numbered by H.273, that a PNG states before its pixels."""
    place = len(PNG_SIGNATURE)
    while len(head) >= place + 10 and (kind := head[place + 4 : place + 8]) != b"IDAT":
        if kind == b"cICP":
            return [(head[place + 8], head[place + 9])]
        place += int.from_bytes(head[place : place + 4], "big") + 12
    return []


def _nclx(head: bytes) -> list[tuple[int, int]]:
    """The same of an AVIF or HEIC, of each image in it that states them."""
    return [struct.unpack(">HH", found[1]) for found in re.finditer(rb"colrnclx(.{4})", head, re.DOTALL)]


def _open(path: Path, formats: list[str]) -> Image.Image:
    try:
        return Image.open(path, formats=formats)
    except UnidentifiedImageError as e:
        raise InputError(f"cannot read {path}: it is none of {', '.join(formats)}; convert it to PNG") from e


def _register_heif(path: Path) -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError as e:
        raise InputError(
            f"cannot read {path}: it is HEIC, which takes pillow-heif: pip install pillow-heif; or convert it to PNG"
        ) from e
    register_heif_opener()


def is_one_image(path: Path) -> bool:
    """Whether a file is an image of one of `FORMATS`, and not animated."""
    try:
        with open_image(path, *FORMATS) as image:
            return image.format in ("MPO", "TIFF") or not getattr(image, "is_animated", False)
    except InputError:
        return False


class ImageSequence:
    """A `VideoSource` of numbered images: see `sequence_files`.

    ground: the colour of transparent parts.
    """

    def __init__(self, path: Path, ground: str = "white"):
        self.path, self._ground = path, ground
        self.files = sequence_files(path)
        if not self.files:
            raise InputError(f"there are no frames {path}; expected numbered images, such as 0001.png or frame_1.jpg")

    @cached_property
    def info(self) -> VideoInfo:
        limits.check_count(self.path, len(self.files))
        sizes = {_read_size(file) for file in self.files}
        if len(sizes) > 1:
            named = ", ".join(f"{width}x{height}" for height, width in sorted(sizes)[:4])
            raise InputError(f"the frames {self.path} have different sizes: {named}")
        height, width, _ = self._read(0).shape  # as shown; a rotation may stand behind the pixels
        text = self._text("fps") or "0"
        try:
            fps = float(text)
        except ValueError as e:
            raise InputError(f"{self.files[0]} states {text[:40]!r} as its frames per second; expected a number") from e
        if fps != 0:
            limits.check_fps(self.files[0], fps)
        return VideoInfo(len(self.files), fps, height, width)

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, Frame]]:
        for i in indices:
            frame = self._read(i)
            if frame.shape != (self.info.height, self.info.width, 3):
                raise InputError(f"{self.files[i]} has another size than the frames beside it")
            yield i, frame

    def comment(self) -> str:
        return self._text("comment")

    def _read(self, i: int) -> Frame:
        _read_size(self.files[i])
        return read_image(self.files[i], ground=self._ground)

    def _text(self, name: str) -> str:
        """A text chunk of the first file, read without decoding its pixels."""
        _read_size(self.files[0])
        with open_image(self.files[0], *FORMATS) as image:
            text = image.info.get(name, "")
        return text if isinstance(text, str) else ""


def sequence_files(path: Path) -> list[Path]:
    """The files of a sequence of images, by number.

    Args:
        path: a pattern, such as frames/%04d.png; one image; or a directory of images that are named alike but for
            their numbers, such as frame_0001.png or img (1).JPG. Beside N.png others in it do not count.

    Raises:
        InputError: the directory cannot be read, or holds images of several names.
    """
    folder = path if path.is_dir() else path.parent
    before, *after = NUMBER.split(path.name)
    pattern = re.compile(re.escape(before) + "".join(r"(\d+)" + re.escape(part) for part in after))
    series: dict[str, list[Path]] = {}
    try:
        for file in folder.iterdir():
            is_image = file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
            if is_image and _DIGITS.search(file.stem) if path.is_dir() else pattern.fullmatch(file.name):
                series.setdefault((_DIGITS.sub("#", file.stem) + file.suffix).lower(), []).append(file)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    files = series.get("#.png") or [file for group in series.values() for file in group]
    if path.is_dir() and "#.png" not in series and len(series) > 1:
        names = ", ".join(f"{name} ({len(group)})" for name, group in sorted(series.items())[:4])
        raise InputError(f"{path} holds images of several names: {names}; name one sequence, as {path}/frame_%d.png")
    return sorted(files, key=lambda file: [int(number) for number in _DIGITS.findall(file.stem)])


def write_image(path: Path, frame: Frame, texts: dict[str, str], *, sync: bool = True) -> None:
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
        write_image(file_of(i), frame, texts, sync=i == len(frames) - 1)
    for i in itertools.takewhile(lambda i: file_of(i).is_file(), itertools.count(len(frames))):
        file_of(i).unlink()


def write_directory(path: Path, frames: Frames | FrameStream, fps: float, comment: str) -> None:
    """Write a new directory, then exchange it with an existing directory of frames."""
    with atomic_directory(path) as partial:
        write_sequence(partial / "%04d.png", frames, fps, comment)


def _read_size(path: Path) -> tuple[int, int]:
    """Height and width from the header of an image, before any rotation."""
    head = read_head(path, 24)
    if not head.startswith(PNG_SIGNATURE):
        with open_image(path, *FORMATS) as image:
            return image.height, image.width
    if len(head) < 24 or head[12:16] != b"IHDR":
        raise InputError(f"cannot read {path}: it is a PNG without a header")
    width, height = struct.unpack(">II", head[16:])
    limits.check_size(path, height, width)
    return height, width
