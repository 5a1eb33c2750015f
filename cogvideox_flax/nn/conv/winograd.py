"""Winograd's convolution for CPUs: four products for each output instead of nine, in float32.

Winograd's F(2x2, 3x3) (Lavin and Gray, arXiv 1509.09308): a tile of 2x2 outputs depends on 4x4 inputs; sixteen sums and
differences of these are multiplied by sums of the kernel's taps, and the products are added up to the four outputs.
All factors are 1 or 1/2, so rounding errors are about those of the plain sum. The sixteen products are matrix products
over the tiles of a strip of the image, with the taps in time as channels.

Fewer products but more memory traffic: this is faster with many channels.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.nn.layers import precision
from cogvideox_flax.sharding import Padding

CHANNELS = 128
"""Minimum channels, in and out: on two cores it is 1.2 times faster at 128, 1.5 times at 256, 1.8 times at 512."""

OUTPUTS = 1024
"""Minimum pixels of all frames: the sums of the kernel's taps are computed once per call."""

TILES = range(64, 1281)
"""Tiles of a strip: enough for an efficient matrix product, few enough for the cache."""

PRODUCTS = 4, 9
"""Products per output: (Winograd, plain convolution)."""

SCOPE = "winograd"
"""Named scope of its products in a jaxpr."""

Strip = Float[Array, "B 1 h W O"]


def strip_rows(shape: tuple[int, ...], in_channels: int) -> int | None:
    """Rows of a strip of a result `B T H W O`; None where a plain convolution is better."""
    batch, frames, height, width, out_channels = shape
    if min(in_channels, out_channels) < CHANNELS or frames * height * width < OUTPUTS or height % 2 or width % 2:
        return None
    tile_rows = (n for n in range(1, height // 2 + 1) if height // 2 % n == 0 and n * batch * width // 2 in TILES)
    return max((2 * n for n in tile_rows), default=None)


def convolve(
    x: Float[Array, "B T+kt-1 H W I"],
    kernel: Float[Array, "kt 3 3 I O"],
    start: Float[Array, "B T H W O"],
    finish: Callable[[Strip, Strip], Strip],
    *,
    rows: int,
    padding: Padding,
) -> Float[Array, "B T H W O"]:
    """The convolution, valid in time, zero-padded in space, summed in float32.

    Args:
        start: the result is written over it.
        finish: finish(sums, before) returns a strip of the result from its float32 sums and the same strip of `start`.
        rows: of a strip, from `strip_rows`.
    """
    batch, frames, height = start.shape[:3]
    x = jnp.pad(x, ((0, 0), (0, 0), *padding, (0, 0)))
    weights = [taps.reshape(-1, taps.shape[-1]) for taps in _both_axes(_transform_taps, kernel.astype(jnp.float32))]

    def product(a: Array, b: Array) -> Array:
        with jax.named_scope(SCOPE):
            y = jnp.matmul(a.reshape(-1, a.shape[-1]), b, precision=precision(b.dtype))
        return y.reshape(*a.shape[:-1], -1)

    def write_strip(s: Int[Array, ""], y: Array) -> Array:
        seen = jax.lax.dynamic_slice_in_dim(x, s * rows, rows + 2, 2)

        def write_frame(t: Int[Array, ""], y: Array) -> Array:
            # strips are the outer loop: consecutive frames read the same inputs, which stay in the cache
            taps = [jax.lax.dynamic_index_in_dim(seen, t + i, 1, keepdims=False) for i in range(len(kernel))]
            inputs = _both_axes(_transform_inputs, jnp.concatenate(taps, -1).astype(jnp.float32))
            sums = _outputs([product(*pair) for pair in zip(inputs, weights, strict=True)])
            at = (0, t, s * rows, 0, 0)
            before = jax.lax.dynamic_slice(y, at, (batch, 1, rows, *y.shape[3:]))
            return jax.lax.dynamic_update_slice(y, finish(sums[:, None], before), at)

        return jax.lax.fori_loop(0, frames, write_frame, y)

    return jax.lax.fori_loop(0, height // rows, write_strip, start)


def _both_axes(transform: Callable[[Array, int], list[Array]], x: Array) -> list[Array]:
    """The sixteen transforms along axes 1 and 2, height and width."""
    return [y for rows in transform(x, 1) for y in transform(rows, 2)]


def _transform_taps(kernel: Array, axis: int) -> list[Array]:
    a, b, c = jnp.split(kernel, 3, axis)
    return [a, (a + b + c) / 2, (a - b + c) / 2, c]


def _transform_inputs(x: Array, axis: int) -> list[Array]:
    a, b, c, d = (jax.lax.slice_in_dim(x, i, x.shape[axis] - 3 + i, 2, axis) for i in range(4))
    return [a - c, b + c, c - b, b - d]


def _outputs(products: list[Float32[Array, "B r c O"]]) -> Float32[Array, "B 2r 2c O"]:
    """The four outputs of every tile, in place."""
    across = [_sum_products(products[i : i + 4]) for i in range(0, 16, 4)]
    tiles = jnp.stack([jnp.stack(_sum_products(column), 2) for column in map(list, zip(*across, strict=True))], 4)
    batch, rows, _, columns, _, channels = tiles.shape
    return tiles.reshape(batch, 2 * rows, 2 * columns, channels)


def _sum_products(p: list[Array]) -> list[Array]:
    return [p[0] + p[1] + p[2], p[1] - p[2] - p[3]]
