"""PIL with the allowed formats only; exceptions of its decoders become an `InputError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import MAX_PIXELS, check_size


@contextmanager
def decoding(name: str | Path) -> Iterator[None]:
    """What PIL raises while it decodes `name`, as an `InputError` of one line."""
    try:
        yield
    except InputError:
        raise
    except Image.DecompressionBombError as e:  # of sizes far beyond ours, before they can be asked for
        raise InputError(f"{name} has more than {MAX_PIXELS:,} pixels; scale it to a smaller size first") from e
    # For damaged files PIL raises OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError,
    # OverflowError, DecompressionBombError and, with some flags of Python, warnings; the set is not documented.
    except Exception as e:
        text = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise InputError(f"cannot read {name}: {text}") from e


@contextmanager
def open_picture(path: Path, *formats: str) -> Iterator[Image.Image]:
    """A picture whose header is read and whose pixels are not decoded yet.

    Args:
        formats: those that are tried, such as "PNG".

    Raises:
        InputError: another format, a size that exceeds one of the `limits`, or damage found inside the `with` block.
    """
    with decoding(path), Image.open(path, formats=formats) as image:
        check_size(path, image.height, image.width)
        yield image
