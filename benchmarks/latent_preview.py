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
from jaxtyping import Float32, UInt8

from benchmarks.linear_map import SPACE, TIME, fit_linear_map
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.preview import apply_linear_map
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_video, save_contact_sheet

ROOT = Path(__file__).resolve().parents[1]
LATENTS = "input_480x720_49f.latents.safetensors"
CLIP = "input_480x720_49f.mp4"
SHRINK = 2  # the sheet shows every second pixel each way

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
