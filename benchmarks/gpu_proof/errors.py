"""How far a result is from its reference, what rounding explains of that, and what counts as right.

Nothing here needs JAX or PyTorch, so that both sides are judged by the same lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

RMS_BAR, MAX_BAR = 2.0, 4.0
"""A 16-bit result may be so many times as far from its reference as rounding explains. The order of sums, which is a
kernel's own, moves where it rounds."""

EXACT_BAR = 1e-4
"""A float32 result may be so far from its reference at most, in standard deviations."""


class NotTried(Exception):
    """A row that cannot be tried here, and why; nothing is known of what it would have shown."""


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


def judged(found: dict[str, float], explained: dict[str, float] | None) -> dict[str, Any]:
    """The fields of a row: its errors, what explains them, and whether they are small enough.

    explained: the error of the reference after the roundings that no kernel can avoid; None where there is none to
        speak of, as in float32.
    """
    fields: dict[str, Any] = {"error_rms": found["rms"], "error_max": found["max"]}
    if explained is None:
        right = found["max"] <= EXACT_BAR
    else:
        fields |= {"explained_rms": explained["rms"], "explained_max": explained["max"]}
        right = found["rms"] <= RMS_BAR * explained["rms"] and found["max"] <= MAX_BAR * explained["max"]
    return fields | {"status": "ok" if right else "wrong"}  # not a number is never small enough


def pick(n: int, count: int, seed: int) -> np.ndarray:
    """The first, the last, one in the middle and random others of n, sorted: at most `count`."""
    if count >= n:
        return np.arange(n)
    ends = np.unique([0, n // 2, n - 1])
    rest = np.setdiff1d(np.arange(n), ends)
    return np.sort(np.concatenate([ends, np.random.default_rng(seed).permutation(rest)[: count - len(ends)]]))


def save(folder: str | None, name: str, **arrays: Any) -> None:
    """Keep arrays for another process of this run, whole or not at all."""
    if folder is not None:
        path = Path(folder) / f"{name}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)


def load(folder: str | None, name: str) -> dict[str, np.ndarray] | None:
    """What `save` kept; None where it kept nothing."""
    path = Path(folder or "") / f"{name}.npz"
    if folder is None or not path.is_file():
        return None
    with np.load(path) as file:
        return dict(file)
