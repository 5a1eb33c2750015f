"""PIL with the allowed formats only; exceptions of its decoders become an `InputError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import MAX_PIXELS, check_size
from cogvideox_flax.io.source import Frame


@contextmanager
def open_picture(path: Path, *formats: str) -> Iterator[Image.Image]:
    """A picture whose header is read and whose pixels are not decoded yet.

    Args:
        formats: those that are tried, such as "PNG".

    Raises:
        InputError: another format, a size above `MAX_PIXELS`, or damage found inside the `with` block.
    """
    try:
        with Image.open(path, formats=formats) as image:
            check_size(path, image.height, image.width)
            yield image
    except InputError:
        raise
    except Image.DecompressionBombError as e:  # of sizes far beyond ours, before they can be asked for
        raise InputError(f"{path} has more than {MAX_PIXELS:,} pixels; scale it to a smaller size first") from e
    # For damaged files PIL raises OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError,
    # OverflowError, DecompressionBombError and, with some flags of Python, warnings; the set is not documented.
    except Exception as e:
        text = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise InputError(f"cannot read {path}: {text}") from e


def to_rgb(image: Image.Image) -> Frame:
    """The pixels of a picture; of 16-bit grey the upper byte, where PIL's own conversion clips at 255."""
    if image.mode.startswith("I"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, -1)
    return np.asarray(image.convert("RGB"))
