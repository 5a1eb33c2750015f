"""The least-squares map from latents to colours, of which `cogvideox_flax.generate.preview` applies the fitted ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Float32, UInt8

from cogvideox_flax.errors import InputError

SPACE = 8
"""Height and width of the block of pixels that a latent pixel stands for."""

TIME = 4
"""Video frames per latent frame, but for the first, which stands for one."""


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
