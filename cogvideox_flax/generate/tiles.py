"""Windows of one size that cover an axis, the weights with which they are blended, and bilinear enlargement."""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Float32, Num


def window_starts(length: int, window: int, overlap: int) -> list[int]:
    """Where windows of one size begin that cover 0 to `length`, evenly spread, neighbours overlapping by `overlap` or
    more.

    Args:
        window: 1 to length.
        overlap: 0 to window - 1.
    """
    count = 1 if window == length else -(-(length - overlap) // (window - overlap))
    return [i * (length - window) // max(count - 1, 1) for i in range(count)]


def window_weights(length: int, window: int, overlap: int) -> Float32[np.ndarray, "N window"]:
    """The weight of each position of each window of `window_starts`: linear across an overlap; over all windows that
    hold a position, the weights add up to 1. A single window's are exactly 1."""
    starts = window_starts(length, window, overlap)
    weights = np.ones((len(starts), window))
    for i, (first, second) in enumerate(itertools.pairwise(starts)):
        shared = first + window - second
        ramp = (np.arange(shared) + 0.5) / shared
        weights[i + 1, :shared] = np.minimum(weights[i + 1, :shared], ramp)
        weights[i, window - shared :] = np.minimum(weights[i, window - shared :], ramp[::-1])
    total = np.zeros(length)
    for start, own in zip(starts, weights, strict=True):
        total[start : start + window] += own
    each = [own / total[start : start + window] for start, own in zip(starts, weights, strict=True)]
    return np.stack(each).astype(np.float32)


def enlarge(
    frames: Num[np.ndarray, "F H W 3"], scale: int, rows: slice, columns: slice
) -> Float32[np.ndarray, "F h w 3"]:
    """A window of frames enlarged bilinearly, without the rest of them.

    Source: torch `interpolate`, mode "bilinear", align_corners=False.

    Args:
        scale: the factor of both sides.
        rows, columns: of the enlarged frames.
    """
    result = frames
    for axis, part in ((1, rows), (2, columns)):
        size = frames.shape[axis]
        position = np.maximum((np.arange(part.start, part.stop) + 0.5) / scale - 0.5, 0)
        before = np.minimum(position.astype(int), size - 1)
        after = np.minimum(before + 1, size - 1)
        share = np.expand_dims((position - before).astype(np.float32), [a for a in range(4) if a != axis])
        result = np.take(result, before, axis) * (1 - share) + np.take(result, after, axis) * share
    return result
