"""A released latent beside its clip: tests the layout in which the library reads latents, and draws a preview.

    python -m benchmarks.latent_preview [--data ../shared/data/latents] [--out benchmarks/results]

The released autoencoder's own encoding of a clip (B C T H W) is mapped linearly to the clip's colours, once as the
library reads it and once for each of several wrong layouts. r_squared is the quality of each fit. A linear map cannot
detect the order of channels. Prints JSON and writes it, with the map, beside a contact sheet: the clip's frames 0, 4,
8, ... above, the latent's preview below. The encoder's input was in [0, 1], so the map is for latents of that range,
not for the pipeline's latents of video in [-1, 1].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, UInt8

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.preview import apply_linear_map
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_video, save_contact_sheet

ROOT = Path(__file__).resolve().parents[1]
LATENTS = "input_480x720_49f.latents.safetensors"
CLIP = "input_480x720_49f.mp4"
SHRINK = 2  # the sheet shows every second pixel each way

SPACE = 8
"""Height and width of the block of pixels that a latent pixel stands for."""
TIME = 4
"""Video frames per latent frame, but for the first, which stands for one."""

Latents = Float32[np.ndarray, "T h w C"]
Frames = UInt8[np.ndarray, "F H W 3"]


def read(data: Path) -> tuple[Latents, Frames]:
    """The latent of one clip, as the encoder's raw output, and the clip."""
    with TensorFile(data / LATENTS) as file:
        latents = file.read("latents").astype(np.float32)  # B C T H W
    return latents[0].transpose(1, 2, 3, 0), read_video(data / CLIP)[0]


def readings(latents: Latents, frames: Frames) -> dict[str, tuple[Latents, Frames]]:
    """Name -> latents and the frames taken to belong to them. Only the first reading and its crop are right."""
    side = min(latents.shape[1:3])
    square, square_frames = latents[:, :side, :side], frames[:, : SPACE * side, : SPACE * side]
    return {
        "right": (latents, frames),
        "width_flipped": (latents[:, :, ::-1], frames),
        "height_flipped": (latents[:, ::-1], frames),
        "two_latent_frames_early": (latents[:-2], frames[2 * TIME :]),
        "two_latent_frames_late": (latents[2:], frames[: -2 * TIME]),
        "not_causal": (latents[:-1], frames[TIME - 1 : -1]),  # latent t stands for frames 4t to 4t+3
        "time_reversed": (latents[::-1], frames),
        "square_crop": (square, square_frames),
        "square_crop_height_and_width_swapped": (square.swapaxes(1, 2), square_frames),
    }


def fit_linear_map(
    latents: Float[np.ndarray, "T h w C"], frames: UInt8[np.ndarray, "F 8*h 8*w 3"]
) -> tuple[Float32[np.ndarray, "C+1 3"], float]:
    """The least-squares map from a clip's latent to its frames, averaged to the latent's grid.

    Frames belong together as the causal autoencoder has them: frame 0 to latent 0, frames 4t-3 to 4t to latent t.

    Args:
        latents: one clip's; any float dtype.
        frames: F = 4 (T - 1) + 1.

    Returns:
        weights: one row per channel, then the offset; colours count from 0 to 255.
        r_squared: the share of the averaged frames' variance about their mean colour that the map explains, at most 1.

    Raises:
        InputError: shapes that do not belong together, NaN or infinity, or frames of a single colour.
    """
    if latents.ndim != 4:
        raise InputError(f"latents must be [T, h, w, C]; got {list(latents.shape)}")
    t, h, w, channels = latents.shape
    expected = TIME * (t - 1) + 1, SPACE * h, SPACE * w, 3
    if frames.dtype != np.uint8 or frames.shape != expected:
        raise InputError(
            f"latents {list(latents.shape)} belong to frames uint8 {list(expected)}; "
            f"got {frames.dtype} {list(frames.shape)}"
        )
    if not np.isfinite(latents).all():
        raise InputError("the latents hold NaN or infinity; no map can be fitted")
    x = np.ones((t * h * w, channels + 1))
    x[:, :-1] = latents.reshape(-1, channels)
    y = to_grid(frames).reshape(-1, 3)
    total = np.square(y - y.mean(0)).sum()
    if total == 0:
        raise InputError("the frames have a single colour; no map can be fitted")
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    return weights.astype(np.float32), float(1 - np.square(y - x @ weights).sum() / total)


def to_grid(frames: UInt8[np.ndarray, "F H W 3"]) -> Float[np.ndarray, "T h w 3"]:
    """Average frames over the block of pixels, and the frames, of each latent pixel."""
    f, height, width, _ = frames.shape
    cut = frames.reshape(f, height // SPACE, SPACE, width // SPACE, SPACE, 3)
    blocks = cut.sum(2, dtype=np.uint16).sum(3, dtype=np.uint16) / SPACE**2  # six times as fast as mean((2, 4))
    later = blocks[1:].reshape(-1, TIME, *blocks.shape[1:]).mean(1)
    return np.concatenate([blocks[:1], later])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latent_preview", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "latents", metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    args = parser.parse_args()
    try:
        latents, frames = read(args.data)
        fits = {name: fit_linear_map(*pair) for name, pair in readings(latents, frames).items()}
        weights = fits["right"][0]
        preview = apply_linear_map(latents, weights).repeat(SPACE // SHRINK, 1).repeat(SPACE // SHRINK, 2)
        sheet = args.out / "latent_preview.png"
        save_contact_sheet(sheet, np.concatenate([frames[::TIME, ::SHRINK, ::SHRINK], preview]), columns=len(latents))
    except InputError as e:
        parser.error(str(e))
    result = {
        "latents": str(args.data / LATENTS),
        "shape": list(latents.shape),
        "r_squared": {name: round(r_squared, 4) for name, (_, r_squared) in fits.items()},
        "sheet": str(sheet),
    }
    print(json.dumps(result, indent=2))
    (args.out / "latent_preview.json").write_text(json.dumps(result | {"weights": weights.tolist()}, indent=2))


if __name__ == "__main__":
    main()
