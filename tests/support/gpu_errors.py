"""The error of a result against its reference, the error of rounding alone, and the limits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

RMS_BAR, MAX_BAR = 2.0, 4.0
"""Largest error of a 16-bit result, in units of the rounding error: root mean square, and maximum. Above 1, since each
kernel sums in its own order and so rounds differently."""

EXACT_BAR = 1e-4
"""Largest error of a float32 result, in standard deviations of its reference."""


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


def fault(found: dict[str, float], rounding: dict[str, float] | None) -> str | None:
    """What is wrong with an error; None if it is within its limit.

    rounding: the error of the reference after the roundings that no kernel can avoid; None in float32, where
        `EXACT_BAR` holds.
    """
    rms, most = (EXACT_BAR, EXACT_BAR) if rounding is None else (RMS_BAR * rounding["rms"], MAX_BAR * rounding["max"])
    if found["rms"] <= rms and found["max"] <= most:  # NaN is never small enough
        return None
    return f"error {found['rms']:.1e} rms, {found['max']:.1e} at most; limits {rms:.1e} and {most:.1e}"


def why_no_memory(gib: float) -> str | None:
    """Why something of this size cannot be tried in the memory that JAX may take; None on a CPU, and if it fits."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", float("inf")) / 2**30
    return f"it needs about {gib:.0f} GiB; JAX may take {limit:.0f}" if gib > limit else None


def sample_indices(n: int, count: int, seed: int) -> np.ndarray:
    """At most `count` indices below n, sorted: the first, the middle, the last, and random others."""
    if count >= n:
        return np.arange(n)
    ends = np.unique([0, n // 2, n - 1])
    if count < 3:
        return ends[:count]
    rest = np.setdiff1d(np.arange(n), ends)
    return np.sort(np.concatenate([ends, np.random.default_rng(seed).permutation(rest)[: count - len(ends)]]))


def compiled(f: Callable[..., Any], *args: Any, repeat: int = 3) -> tuple[Any, str, dict[str, float]]:
    """The result of f, to be jitted; its compiled text; seconds of the compile and, the median, of later runs."""
    start = time.perf_counter()
    program = jax.jit(f).lower(*args).compile()
    compile_s = time.perf_counter() - start
    out, times = jax.block_until_ready(program(*args)), []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return out, program.as_text() or "", {"compile_s": compile_s, "seconds": statistics.median(times)}
