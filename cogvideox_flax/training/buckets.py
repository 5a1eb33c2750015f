"""Buckets: the sizes of the training clips. A clip is in one of them, the clips of a step are of one, and each has a
compiled step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cogvideox_flax.models.sizes import Size
from cogvideox_flax.training.clips import Clip


def bucket_of(clip: Clip, sizes: Sequence[Size]) -> int:
    """The bucket of a clip: the longest that it fills, of these that of the nearest aspect ratio, then the largest."""

    def order(bucket: int) -> tuple[float, ...]:
        size = sizes[bucket]
        stretch = abs(math.log(size.height * clip.width / (size.width * clip.height)))
        return -size.num_frames, round(stretch, 6), -size.height * size.width

    return min((i for i, size in enumerate(sizes) if size.num_frames <= clip.num_frames), key=order)


def turn_of(step: int, counts: Sequence[int], seed: int) -> tuple[int, int]:
    """The bucket whose turn it is in a step, and how many turns it had before.

    In a round of as many steps as there are clips, each bucket has a turn for each of its clips, in a new order.

    Args:
        step: from 0.
        counts: clips in each bucket.
    """
    round_, place = divmod(step, sum(counts))
    order = np.random.default_rng([seed, sum(counts), round_]).permutation(np.repeat(np.arange(len(counts)), counts))
    bucket = int(order[place])
    return bucket, round_ * counts[bucket] + int((order[:place] == bucket).sum())
