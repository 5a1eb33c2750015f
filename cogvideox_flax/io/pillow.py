"""PIL, given only one format at a time, and with the exceptions of its decoders turned into an `InputError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import check_size


@contextmanager
def open_picture(path: Path, picture_format: str) -> Iterator[Image.Image]:
    """A picture whose header was read and whose pixels are not decoded yet.

    Args:
        picture_format: the only one that is tried: "PNG" or "GIF".

    Raises:
        InputError: another format, a size beyond `MAX_PIXELS`, or damage that shows in the `with` block.
    """
    try:
        with Image.open(path, formats=(picture_format,)) as image:
            check_size(path, image.height, image.width)
            yield image
    except InputError:
        raise
    # For damaged files PIL raises OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError,
    # OverflowError, DecompressionBombError and, as Python is started, warnings: there is no list of them.
    except Exception as e:
        text = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise InputError(f"cannot read {path}: {text}") from e
