"""Windows of one size that cover an axis, the weights with which they are blended, and bilinear enlargement."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Num


@dataclass(frozen=True)
class Windows:
    """Windows of one size that cover an axis, evenly spread.

    length: of the axis.
    size: of a window, 1 to length.
    overlap: of two neighbours, at least; 0 to size - 1.
    """

    length: int
    size: int
    overlap: int

    @property
    def starts(self) -> list[int]:
        """Where each begins."""
        last = self.length - self.size
        count = 1 if last == 0 else -(-(self.length - self.overlap) // (self.size - self.overlap))
        return [i * last // max(count - 1, 1) for i in range(count)]

    @property
    def weights(self) -> Float32[np.ndarray, "N size"]:
        """Of each position of each window: linear across an overlap; over all windows that hold a position, they add up
        to 1. A single window's are exactly 1."""
        starts, size = self.starts, self.size
        weights = np.ones((len(starts), size))
        for i, (first, second) in enumerate(itertools.pairwise(starts)):
            shared = first + size - second
            ramp = (np.arange(shared) + 0.5) / shared
            weights[i + 1, :shared] = np.minimum(weights[i + 1, :shared], ramp)
            weights[i, size - shared :] = np.minimum(weights[i, size - shared :], ramp[::-1])
        total = np.zeros(self.length)
        for start, own in zip(starts, weights, strict=True):
            total[start : start + size] += own
        each = [own / total[start : start + size] for start, own in zip(starts, weights, strict=True)]
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
