"""PIL with one allowed format at a time; exceptions of its decoders become an `InputError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import check_size


@contextmanager
def open_picture(path: Path, picture_format: str) -> Iterator[Image.Image]:
    """A picture whose header is read and whose pixels are not decoded yet.

    Args:
        picture_format: the only format that is tried: "PNG" or "GIF".

    Raises:
        InputError: another format, a size above `MAX_PIXELS`, or damage found inside the `with` block.
    """
    try:
        with Image.open(path, formats=(picture_format,)) as image:
            check_size(path, image.height, image.width)
            yield image
    except InputError:
        raise
    # For damaged files PIL raises OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError,
    # OverflowError, DecompressionBombError and, with some flags of Python, warnings; the set is not documented.
    except Exception as e:
        text = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise InputError(f"cannot read {path}: {text}") from e
