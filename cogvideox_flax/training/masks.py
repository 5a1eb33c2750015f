"""Random masks of clips, for the training of inpainting models: what is 1 is made anew.

Source: VideoX-Fun `videox_fun/data/utils.py`, `get_random_mask`: its kinds, their probabilities and ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key

KINDS = {
    "rectangle": 0.05,  # in all frames
    "everything": 0.2,
    "end": 0.2,  # all but the first 1 to 4 frames
    "middle": 0.2,  # all but 1 to 4 frames at both ends
    "rectangle in time": 0.05,  # from a frame of the first half to one of the second
    "pixels": 0.05,  # each with probability 1/2
    "blocks": 0.05,  # in up to half of the frames, one each
    "ellipse": 0.1,  # in the first frame alone
    "circle": 0.05,  # in the first frame alone
    "frames": 0.05,  # each with probability 1/2
}
"""Kind -> its probability."""

KINDS_OF_IMAGES = {"rectangle": 0.2, "everything": 0.7, "ellipse": 0.05, "circle": 0.05}
"""The same for clips of one frame."""


def random_masks(key: Key[Array, ""], batch: int, frames: int, height: int, width: int) -> Bool[Array, "B F H W"]:
    """A mask for each clip of a batch. Heights and widths are at least 8 pixels."""
    return jax.vmap(partial(_random_mask, frames=frames, height=height, width=width))(jax.random.split(key, batch))


def _random_mask(key: Key[Array, ""], frames: int, height: int, width: int) -> Bool[Array, "F H W"]:
    """What is masked: some frames, and in them some rows and columns, an ellipse, or random pixels. All of these are
    drawn; those that are not of the mask's kind are then everything.
    """
    kind_key, time_key, box_key, block_key, ellipse_key, pixel_key = jax.random.split(key, 6)
    shares = KINDS if frames > 1 else KINDS_OF_IMAGES
    odds = jnp.array([shares.get(name, 0.0) for name in KINDS])
    kind = jax.random.choice(kind_key, len(KINDS), p=odds)

    def is_kind(*names: str) -> Bool[Array, ""]:
        return jnp.isin(kind, jnp.array([list(KINDS).index(name) for name in names]))

    in_box, in_block = is_kind("rectangle", "rectangle in time"), is_kind("blocks")
    rows, columns = _rectangle(box_key, height, width)
    block_rows, block_columns = _blocks(block_key, frames, height, width)
    rows, columns = ((x | ~in_box) & (b | ~in_block) for x, b in ((rows, block_rows), (columns, block_columns)))
    ellipse = _ellipse(ellipse_key, height, width, is_kind("circle")) | ~is_kind("ellipse", "circle")
    pixels = jax.random.bernoulli(pixel_key, 0.5, (frames, height, width)) | ~is_kind("pixels")
    masked = _frames(time_key, frames, is_kind)
    return masked[:, None, None] & rows[:, :, None] & columns[:, None, :] & ellipse & pixels


def _frames(key: Key[Array, ""], frames: int, is_kind: Callable[..., Bool[Array, ""]]) -> Bool[Array, " F"]:
    """The frames in which something is masked."""
    ends_key, first_key, last_key, count_key, order_key, each_key = jax.random.split(key, 6)
    t = jnp.arange(frames)
    kept = jax.random.randint(ends_key, (), 1, 5)
    first = jax.random.randint(first_key, (), 0, frames // 2)
    last = jax.random.randint(last_key, (), frames // 2, frames)
    count = jax.random.randint(count_key, (), 1, max(frames // 2, 1) + 1)
    cases = {
        "end": t >= kept,
        "middle": (t >= kept) & (t < frames - kept),
        "rectangle in time": (t >= first) & (t < last),
        "blocks": jax.random.permutation(order_key, frames) < count,
        "ellipse": t == 0,
        "circle": t == 0,
        "frames": jax.random.bernoulli(each_key, 0.5, (frames,)),
    }
    return jnp.stack([masked | ~is_kind(name) for name, masked in cases.items()]).all(0)


def _rectangle(key: Key[Array, ""], height: int, width: int) -> tuple[Bool[Array, "1 H"], Bool[Array, "1 W"]]:
    """The rows and columns of a rectangle of a quarter to three quarters of both sides around any pixel; what lies
    outside is cut off."""

    def span(key: Key[Array, ""], length: int) -> Bool[Array, "1 L"]:
        centre_key, size_key = jax.random.split(key)
        centre = jax.random.randint(centre_key, (), 0, length)
        half = jax.random.randint(size_key, (), length // 4, length // 4 * 3) // 2
        at = jnp.arange(length)[None]
        return (at >= centre - half) & (at < centre + half)

    row_key, column_key = jax.random.split(key)
    return span(row_key, height), span(column_key, width)


def _blocks(key: Key[Array, ""], frames: int, height: int, width: int) -> tuple[Bool[Array, "F H"], Bool[Array, "F W"]]:
    """The rows and columns of a rectangle in each frame, of up to a quarter of both sides and inside of the frame."""

    def spans(key: Key[Array, ""], length: int) -> Bool[Array, "F L"]:
        size_key, start_key = jax.random.split(key)
        size = jax.random.randint(size_key, (frames, 1), 1, length // 4 + 1)
        start = jax.random.randint(start_key, (frames, 1), 0, length - size + 1)
        at = jnp.arange(length)
        return (at >= start) & (at < start + size)

    row_key, column_key = jax.random.split(key)
    return spans(row_key, height), spans(column_key, width)


def _ellipse(key: Key[Array, ""], height: int, width: int, round_: Bool[Array, ""]) -> Bool[Array, "H W"]:
    """The inside of an ellipse, or of a circle, around any pixel. Half axes: 1/8 to 1/4 of the shorter side."""
    y_key, x_key, axes_key = jax.random.split(key, 3)
    y = jnp.arange(height)[:, None] - jax.random.randint(y_key, (), 0, height)
    x = jnp.arange(width) - jax.random.randint(x_key, (), 0, width)
    side = min(height, width)
    a, b = jax.random.randint(axes_key, (2,), side // 8, side // 4)
    in_ellipse = jnp.square(y) / jnp.square(b) + jnp.square(x) / jnp.square(a) < 1
    return jnp.where(round_, jnp.square(y) + jnp.square(x) < jnp.square(a), in_ellipse)
