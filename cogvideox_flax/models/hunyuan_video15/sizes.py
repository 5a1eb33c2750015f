"""Sizes of HunyuanVideo-1.5: buckets by aspect ratio of about one area."""

from __future__ import annotations

from functools import lru_cache

NUM_FRAMES = 121
"""Of the training's longest clips, and the default."""

LANDSCAPE = 9, 16
"""Height and width of the default aspect ratio."""

MAX_RATIO = 4.0
"""The longest side of a bucket, in shortest sides."""


@lru_cache(maxsize=8)
def size_buckets(target: int, step: int) -> tuple[tuple[int, int], ...]:
    """(height, width) of all trained sizes, from tall to wide.

    For each aspect ratio up to 4 : 1, the largest image of whole steps with at most the area of a square of side
    `target`. Source: diffusers `generate_crop_size_list`.
    """
    area = round((target / step) ** 2)
    found, rows, columns = [], area, 1
    while rows > 0:
        if max(rows, columns) <= MAX_RATIO * min(rows, columns):
            found.append((rows * step, columns * step))
        if rows * (columns + 1) <= area:
            columns += 1
        else:
            rows -= 1
    return tuple(found)


def bucket_of(height: int, width: int, target: int, step: int) -> tuple[int, int]:
    """The (height, width) of the bucket for an image: the nearest ratio on the side of the square.

    Ratios of buckets are rounded to five decimals. Source: diffusers `get_closest_ratio`.
    """
    wanted = height / width
    ratios = {size: round(size[0] / size[1], 5) for size in size_buckets(target, step)}
    towards_square = [s for s, ratio in ratios.items() if (ratio <= wanted if wanted >= 1 else ratio >= wanted)]
    return min(towards_square, key=lambda size: abs(ratios[size] - wanted))
