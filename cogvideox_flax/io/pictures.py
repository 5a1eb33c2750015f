"""Pictures as seen, in RGB: from a file (PNG, JPEG or WebP) or a PIL image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.pillow import open_picture
from cogvideox_flax.io.source import Frame

FORMATS = ("PNG", "JPEG", "WEBP")
_FEW_GREYS = {"L;2": 85, "L;4": 17}
"""PIL's names for 2 and 4 bits of grey -> the step between its levels, of 255."""


def read_picture(path: Path, *formats: str, ground: str = "white") -> Frame:
    """A picture after the rotation that its file states; of a multi-picture JPEG the first one.

    Args:
        formats: those that are tried, all of `FORMATS` if none are named.
        ground: the colour of transparent parts.

    Raises:
        InputError: there is none, it is damaged, animated or of another format, or exceeds one of the `limits`.
    """
    if not path.is_file():
        raise InputError(f"there is no picture {path}")
    with open_picture(path, *(formats or FORMATS)) as image:
        # the pictures of an MPO, a multi-picture JPEG, are no animation: a preview, a depth map, another view
        if image.format != "MPO" and (count := getattr(image, "n_frames", 1)) > 1:
            raise InputError(
                f"{path} is animated, {count} frames; give one of them as a picture, or it as a video, converted to MP4"
            )
        return to_rgb(image, ground)


def to_rgb(image: Image.Image, ground: str = "white") -> Frame:
    """The pixels of a PIL image after the rotation that its file states; of 16-bit grey the upper byte.

    Args:
        ground: the colour of transparent parts.

    Raises:
        ValueError: pixels that have no white level (modes I and F), or whose transparency PIL does not decode.
    """
    tiles = getattr(image, "tile", None)  # of a file that is not decoded yet
    stored = tiles[0][3] if tiles else None
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
        image = Image.alpha_composite(Image.new("RGBA", image.size, ground), image)
    return np.asarray(image.convert("RGB"))


def _upper_byte(image: Image.Image, clear: int | None) -> Image.Image:
    """16-bit grey in 8 bit; the grey level `clear` is transparent. PIL's own conversion clips at 255."""
    levels = np.asarray(image)
    grey = Image.fromarray((levels >> 8).astype(np.uint8))
    if clear is not None:
        grey.putalpha(Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8)))
    return grey
