"""PSNR and SSIM between two clips."""

from __future__ import annotations

from math import inf, log10

import numpy as np
from jaxtyping import Float, UInt8

RANGE = 255.0
_WINDOW = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2)  # Gaussian, 11 wide
_WINDOW = _WINDOW / _WINDOW.sum()

Frames = UInt8[np.ndarray, "F H W 3"]


def psnr(a: Frames, b: Frames) -> float:
    """Peak signal-to-noise ratio over the whole clip, in dB; infinite for equal clips."""
    error = float(((a.astype(np.float64) - b) ** 2).mean())
    return 10 * log10(RANGE**2 / error) if error else inf


def ssim(a: Frames, b: Frames) -> float:
    """Structural similarity (Wang et al., 2004), the mean over frames, channels and all windows that fit.

    Gaussian window 11 wide, sigma 1.5; K1 = 0.01, K2 = 0.03. At least 11 x 11 pixels.
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _filter(x), _filter(y)
    var_x = _filter(x * x) - mean_x**2
    var_y = _filter(y * y) - mean_y**2
    cov = _filter(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * RANGE) ** 2, (0.03 * RANGE) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    structure = (2 * cov + c2) / (var_x + var_y + c2)
    return float((luminance * structure).mean())


def _filter(x: Float[np.ndarray, "F H W C"]) -> Float[np.ndarray, "F h w C"]:
    """Weighted means over all windows that fit."""
    height, width = (size - len(_WINDOW) + 1 for size in x.shape[1:3])
    x = sum((w * x[:, i : i + height] for i, w in enumerate(_WINDOW)), np.zeros(()))
    return sum((w * x[:, :, i : i + width] for i, w in enumerate(_WINDOW)), np.zeros(()))
