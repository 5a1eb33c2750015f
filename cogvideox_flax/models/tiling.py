"""Encoding and decoding in overlapping tiles, blended where they overlap: less memory for large images.

The result differs from decoding without tiles: convolutions, norms and attention see one tile. Tile sizes and the order
of blending are the reference's, so the result equals the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError

HEIGHT, WIDTH = 2, 3
"""Axes of `B T H W C`."""


@dataclass(frozen=True)
class Tiling:
    """Size of a tile in pixels, and the fraction of it that overlaps the next tile.

    Source: diffusers `AutoencoderKLCogVideoX.enable_tiling`, `AutoencoderKLHunyuanVideo15.enable_tiling`.
    """

    height: int
    width: int
    overlap_height: float = 1 / 6
    overlap_width: float = 1 / 5

    def check(self, factor: int) -> None:
        """Refuse sizes whose tiles would not add up to the image. factor: pixels per latent pixel.

        Raises:
            InputError: a side is not a multiple of `factor`, an overlap is not in [0, 1), or the overlap is not an
                integer number of latent pixels.
        """
        faults = []
        for name, size, overlap in (
            ("height", self.height, self.overlap_height),
            ("width", self.width, self.overlap_width),
        ):
            if not 0 <= overlap < 1:
                faults.append(f"  overlap_{name}: got {overlap}, expected at least 0 and below 1")
            elif size < factor or size % factor:
                faults.append(f"  {name}: got {size} pixels, expected a positive multiple of {factor}")
            elif not _adds_up(size, overlap, factor):
                good = [s for s in range(factor, 2 * size + 16 * factor, factor) if _adds_up(s, overlap, factor)]
                nearest = min(good, key=lambda s: abs(s - size), default=None)
                advice = f"the nearest {name} that does is {nearest}" if nearest else "try another overlap"
                faults.append(
                    f"  {name}: got {size} pixels with overlap {overlap:.4g}, so tiles overlap by {size * overlap:.4g} "
                    f"pixels; expected a multiple of {factor}: {advice}"
                )
        if faults:
            raise InputError("tiles would not add up to the image:\n" + "\n".join(faults))

    def encode_layout(self, factor: int) -> TileLayout:
        """Tiles of a video, and of their encoding. Argument and errors as for `check`."""
        self.check(factor)
        return TileLayout(
            _axis(self.height, self.height // factor, self.overlap_height),
            _axis(self.width, self.width // factor, self.overlap_width),
        )

    def decode_layout(self, factor: int) -> TileLayout:
        """Tiles of a latent, and of their decoding. Argument and errors as for `check`."""
        self.check(factor)
        return TileLayout(
            _axis(self.height // factor, self.height, self.overlap_height),
            _axis(self.width // factor, self.width, self.overlap_width),
        )


class TileAxis(NamedTuple):
    """Tiles along height or width. Input: size and stride. Output: pixels of a tile that are blended with the tile
    before, and pixels that remain after cropping."""

    tile: int
    stride: int
    blend: int
    keep: int


def _axis(tile: int, out: int, overlap: float) -> TileAxis:
    return TileAxis(tile, stride=int(tile * (1 - overlap)), blend=int(out * overlap), keep=out - int(out * overlap))


def _adds_up(size: int, overlap: float, factor: int) -> bool:
    encode, decode = _axis(size, size // factor, overlap), _axis(size // factor, size, overlap)
    return 0 < encode.stride == factor * encode.keep and factor * decode.stride == decode.keep


class TileLayout(NamedTuple):
    height: TileAxis
    width: TileAxis

    def applies(self, x: Float[Array, "B T H W C"]) -> bool:
        """Whether x is larger than one tile."""
        return x.shape[HEIGHT] > self.height.tile or x.shape[WIDTH] > self.width.tile


def tiled(
    run: Callable[[Float[Array, "B T h w C"]], Array], x: Float[Array, "B T H W C"], layout: TileLayout
) -> Float[Array, "B T H W C"]:
    """Apply `run` to every tile of x and join the results.

    Tiles of equal shape run in a loop with one compiled body.
    """
    starts = [range(0, x.shape[axis], layout[axis - HEIGHT].stride) for axis in (HEIGHT, WIDTH)]
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in starts[0]:
        for j in starts[1]:
            shape = min(layout.height.tile, x.shape[HEIGHT] - i), min(layout.width.tile, x.shape[WIDTH] - j)
            groups.setdefault(shape, []).append((i, j))

    tiles: dict[tuple[int, int], Array] = {}
    for shape, corners in groups.items():
        done = jax.lax.map(lambda corner, shape=shape: run(_cut(x, corner, shape)), np.array(corners))
        tiles.update(zip(corners, done, strict=True))
    return _join([[tiles[i, j] for j in starts[1]] for i in starts[0]], layout)


def _cut(x: Array, corner: Array, shape: tuple[int, int]) -> Array:
    start = (0, 0, corner[0], corner[1], 0)
    return jax.lax.dynamic_slice(x, start, (*x.shape[:2], *shape, x.shape[-1]))


def _join(rows: list[list[Array]], layout: TileLayout) -> Array:
    """Blend every tile with the finished tiles above and left of it, then crop and concatenate."""
    for i, row in enumerate(rows):
        for j in range(len(row)):
            if i > 0:
                row[j] = _blend(rows[i - 1][j], row[j], layout.height.blend, HEIGHT)
            if j > 0:
                row[j] = _blend(row[j - 1], row[j], layout.width.blend, WIDTH)
    keep = (slice(None), slice(None), slice(layout.height.keep), slice(layout.width.keep))
    return jnp.concatenate([jnp.concatenate([tile[keep] for tile in row], WIDTH) for row in rows], HEIGHT)


def _blend(before: Array, tile: Array, extent: int, axis: int) -> Array:
    """Linear blend from the end of `before` to the start of `tile`, over `extent` pixels."""
    extent = min(before.shape[axis], tile.shape[axis], extent)
    if extent == 0:
        return tile
    weight = jnp.expand_dims(jnp.arange(extent) / extent, [d for d in range(tile.ndim) if d != axis])
    end = jax.lax.slice_in_dim(before, before.shape[axis] - extent, None, axis=axis).astype(jnp.float32)
    start = jax.lax.slice_in_dim(tile, 0, extent, axis=axis).astype(jnp.float32)
    seam = (end * (1 - weight) + start * weight).astype(tile.dtype)
    return jnp.concatenate([seam, jax.lax.slice_in_dim(tile, extent, None, axis=axis)], axis)


def check_clip(x: Array, name: str, channels: int, factor: int) -> None:
    """Refuse an array that is no clip, or whose sides are no multiples of `factor`. name: of what it is."""
    if x.ndim != 5 or x.shape[-1] != channels:
        raise InputError(
            f"the {name} has shape {x.shape}; expected [batch, frames, height, width, channels], {channels} channels"
        )
    if 0 in x.shape:
        raise InputError(f"the {name} is empty: shape {x.shape}")
    if x.shape[HEIGHT] % factor or x.shape[WIDTH] % factor:
        raise InputError(
            f"the {name} is {x.shape[HEIGHT]}x{x.shape[WIDTH]} (height x width); both must be multiples of {factor}: "
            "crop or resize it first"
        )


def run_clips(
    run: Callable[[Array], Array],
    x: Float[Array, "B T H W C"],
    layout: TileLayout | None,
    *,
    slicing: bool,
    factor: int,
    pad: bool = False,
) -> Float[Array, "B t h w D"]:
    """`run` on x: tile by tile if `layout` applies, else split over the devices.

    Args:
        slicing: clip by clip: the same result in less memory.
        factor, pad: as for `sharding.spatial_split`.
    """

    def whole(x: Array) -> Array:
        if layout is not None and layout.applies(x):
            return tiled(run, x, layout)
        with sharding.spatial_split(x, factor, pad=pad) as x:
            y = run(x)
            return y[:, :, : sharding.image_rows(y.shape[HEIGHT])]

    if not slicing:
        return whole(x)
    return jax.lax.map(lambda clip: whole(clip[None])[0], x)
