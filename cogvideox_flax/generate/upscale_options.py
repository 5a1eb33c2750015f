"""The options of upscaling: each once, with its default and its help."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cogvideox_flax.generate.request import option


def parse_tile(text: str) -> tuple[int, int]:
    """'480x720' -> (480, 720).

    Raises:
        ArgumentTypeError: it is something else.
    """
    height, found, width = text.lower().partition("x")
    if not (found and height.isdecimal() and width.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH, such as 512x512; got {text!r}")
    return int(height), int(width)


@dataclass(frozen=True, kw_only=True)
class UpscaleOptions:
    """How to upscale. The released model was trained for a scale of 4.

    tile: (height, width) in pixels.
    chunk: None stands for the whole clip, or what the release was trained on if that is less.
    The others say it in their help.
    """

    scale: int = option(4, "factor of both sides, 1 to 16; default: 4")
    tile: tuple[int, int] | None = option(
        None,
        "tiles of the result, multiples of 16 pixels; default: whole frames",
        parse=parse_tile,
        metavar="HxW",
    )
    overlap: int = option(32, "that neighbouring tiles share at least; default: 32", metavar="PIXELS")
    chunk: int | None = option(
        None, "8 n + 1, done at once; default: as many as the release was trained on", metavar="FRAMES"
    )
    chunk_overlap: int = option(8, "that neighbouring chunks share at least; default: 8", metavar="FRAMES")
    seed: int = option(0, "of the noise of the encoder's posterior, the same for each tile; default: 0")
    tiling: bool = option(False, "encode and decode in the VAE's own tiles too: less memory, slightly different")
