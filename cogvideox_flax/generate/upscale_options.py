"""The options of upscaling: each once, with its default and its help."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cogvideox_flax.generate.request import MAX_SEED, Range, option


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

    scale: int = option(4, "factor of both sides", range=Range(1, 16))
    tile: tuple[int, int] | None = option(
        None,
        "tiles of the result, multiples of 16 pixels",
        unset="whole frames",
        parse=parse_tile,
        metavar="HxW",
    )
    overlap: int = option(32, "pixels that neighbouring tiles share at least", range=Range(0), metavar="PIXELS")
    chunk: int | None = option(
        None, "8 n + 1 frames, done at once", unset="as many as the release was trained on", metavar="FRAMES"
    )
    chunk_overlap: int = option(8, "frames that neighbouring chunks share at least", range=Range(0), metavar="FRAMES")
    seed: int = option(
        0, "seed of the noise of the encoder's posterior, the same for each tile", range=Range(0, MAX_SEED)
    )
    tiling: bool = option(False, "encode and decode in the VAE's own tiles too: less memory, slightly different")
