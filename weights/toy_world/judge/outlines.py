"""How well a thing of one frame fits each ideal shape.

A shape is laid over the thing's soft coverage and fitted: its centre, its radius and the softness of its edge. What
remains is the difference of the outlines, so a square with round corners or a circle with a tip is told from a true
one in every frame, while place, size and blur are left to other measures.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from jaxtyping import Float, Float32

from weights.toy_world.world import AREAS, SHAPES, signed_distance

REACH = 1.9
"""Half the side of the window around a thing, in radii of the circle of its area. A triangle's tips are at 1.56."""
SOFTEST = 6.0
"""Widest edge, in pixels."""
ROUNDS = 20

_MOVES = np.array([move for i, s in product(range(4), (1, -1)) for move in [s * np.eye(4, dtype=np.float32)[i]]])
_FIRST_STEP = np.array([1.0, 1.0, 0.08, 0.6], np.float32)  # x and y in pixels, log radius, edge in pixels


def window(radius: float) -> int:
    """Pixels from the middle of a window to its edge, for a thing with the area of a circle of this radius (pixels)."""
    return int(np.ceil(REACH * radius))


def fit_shapes(
    cover: Float32[np.ndarray, "N P P"], centres: Float[np.ndarray, "N 2"], radii: Float[np.ndarray, " N"]
) -> Float[np.ndarray, "N S"]:
    """Intersection over union of each thing with the best fit of each of `SHAPES`.

    Args:
        cover: the share of each pixel that the thing covers, 0 to 1, in windows of one size.
        centres: of the thing, as (x, y) in pixels of its window; the middle of the first pixel is 0.5.
        radii: of the circles of equal area, in pixels.
    """
    return np.stack([_fit(cover, centres, radii * np.sqrt(np.pi / AREAS[shape]), shape) for shape in SHAPES], 1)


def _fit(
    cover: Float32[np.ndarray, "N P P"], centres: Float[np.ndarray, "N 2"], radii: Float[np.ndarray, " N"], shape: str
) -> Float[np.ndarray, " N"]:
    """Pattern search (Hooke and Jeeves, 1961) from the thing's centre and area; halved steps when none helps."""
    count = len(cover)
    best = np.column_stack([centres, np.log(radii), np.full(count, 1.5)]).astype(np.float32)
    step = np.tile(_FIRST_STEP, (count, 1))
    found = _overlap(cover, best[:, None], shape)[:, 0]
    for _ in range(ROUNDS):
        tried = best[:, None] + _MOVES * step[:, None]  # N 8 4
        tried[..., 3] = tried[..., 3].clip(1, SOFTEST)
        result = _overlap(cover, tried, shape)
        at = result.argmax(1)
        better = result[np.arange(count), at] > found
        best = np.where(better[:, None], tried[np.arange(count), at], best)
        found = np.where(better, result[np.arange(count), at], found)
        step = np.where(better[:, None], step, step / 2)
    return found


def _overlap(
    cover: Float32[np.ndarray, "N P P"], fits: Float32[np.ndarray, "N K 4"], shape: str
) -> Float32[np.ndarray, "N K"]:
    at = (np.arange(cover.shape[-1]) + 0.5).astype(np.float32)
    x, y, log_radius, edge = (fits[..., i, None, None] for i in range(4))
    distance = signed_distance(shape, at - x, at[:, None] - y, np.exp(log_radius))
    ideal = np.clip(0.5 - distance / edge, 0, 1)
    thing = cover[:, None]
    return np.minimum(ideal, thing).sum((2, 3)) / np.maximum(np.maximum(ideal, thing).sum((2, 3)), 1e-6)
