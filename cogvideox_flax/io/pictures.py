"""One picture from a file: PNG, JPEG or WebP, as seen, in RGB."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageOps

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.pillow import open_picture, to_rgb
from cogvideox_flax.io.source import Frame

FORMATS = ("PNG", "JPEG", "WEBP")


def read_picture(path: Path) -> Frame:
    """A picture after the rotation that its file states; transparent parts are white.

    Raises:
        InputError: there is none, it is damaged, animated or of another format, or has more than `MAX_PIXELS`.
    """
    if not path.is_file():
        raise InputError(f"there is no picture {path}")
    with open_picture(path, *FORMATS) as image:
        if (count := getattr(image, "n_frames", 1)) > 1:
            raise InputError(f"{path} is animated, {count} frames; give one of them as a picture, or it as a video")
        return on_white(ImageOps.exif_transpose(image))


def on_white(image: Image.Image) -> Frame:
    """The pixels of a PIL image, transparent parts white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return to_rgb(image)
