"""The error of a result against its reference, the error of rounding alone, and the limits.

Nothing here needs JAX or PyTorch, so that the same code judges both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

RMS_BAR, MAX_BAR = 2.0, 4.0
"""Largest error of a 16-bit result, in units of the rounding error: root mean square, and maximum. Above 1, since each
kernel sums in its own order and so rounds differently."""

EXACT_BAR = 1e-4
"""Largest error of a float32 result, in standard deviations of its reference."""

BF16_BAR = 0.1
"""Largest root mean square difference of two models' outputs in 16 bit, in standard deviations. It finds gross faults:
two unrelated outputs differ by 1.4, rounding through all layers by a few hundredths at most. Small faults are found by
the rows of both sides in float32, with `EXACT_BAR`."""


class NotTried(Exception):
    """A row that cannot be tried here, with the reason."""


def error(found: Any, reference: Any, axes: tuple[int, ...] | None = None) -> dict[str, float]:
    """Root mean square and largest difference, in standard deviations of the reference.

    Args:
        axes: over which the standard deviation is taken; None for all. Heads, say, may differ in scale.
    """
    found, reference = np.asarray(found, np.float64), np.asarray(reference, np.float64)
    if found.shape != reference.shape:
        raise ValueError(f"a result of {found.shape} is not one of {reference.shape}")
    off = np.abs(found - reference) / reference.std(axes, keepdims=True)
    return {"rms": float(np.sqrt(np.square(off).mean())), "max": float(off.max())}


def verdict(found: dict[str, float], rounding_error: dict[str, float] | None) -> dict[str, Any]:
    """The fields of a row: its errors, the rounding error, and the status that follows.

    rounding_error: the error of the reference after the roundings that no kernel can avoid; None in float32, where
        `EXACT_BAR` holds.
    """
    fields: dict[str, Any] = {"error_rms": found["rms"], "error_max": found["max"]}
    if rounding_error is None:
        right = found["max"] <= EXACT_BAR
    else:
        fields |= {"rounding_rms": rounding_error["rms"], "rounding_max": rounding_error["max"]}
        right = found["rms"] <= RMS_BAR * rounding_error["rms"] and found["max"] <= MAX_BAR * rounding_error["max"]
    return fields | {"status": "ok" if right else "wrong"}  # NaN is never small enough


def sample_indices(n: int, count: int, seed: int) -> np.ndarray:
    """At most `count` indices below n, sorted: the first, the middle, the last, and random others."""
    if count >= n:
        return np.arange(n)
    ends = np.unique([0, n // 2, n - 1])
    if count < 3:
        return ends[:count]
    rest = np.setdiff1d(np.arange(n), ends)
    return np.sort(np.concatenate([ends, np.random.default_rng(seed).permutation(rest)[: count - len(ends)]]))


def save(folder: str | None, name: str, **arrays: Any) -> None:
    """Save arrays for another process of this run, atomically."""
    if folder is not None:
        path = Path(folder) / f"{name}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)


def load(folder: str | None, name: str) -> dict[str, np.ndarray] | None:
    """The arrays that `save` wrote; None if there are none."""
    path = Path(folder or "") / f"{name}.npz"
    if folder is None or not path.is_file():
        return None
    with np.load(path) as file:
        return dict(file)
