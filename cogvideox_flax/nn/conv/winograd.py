"""3x3 convolutions of pictures with four products an output instead of nine, in float32, for CPUs.

Winograd's F(2x2, 3x3) (Lavin and Gray, arXiv 1509.09308): a tile of 2x2 outputs sees 4x4 inputs; sixteen sums and
differences of those are each multiplied with a sum of the kernel's taps, and the products are added up to the four
outputs. All factors are 1 or 1/2, so that it rounds about as the plain sum does. The sixteen are matrix products over
the tiles of a strip of the picture, the taps in time side by side as channels.

It takes memory traffic for products, which pays where there are many channels.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.nn.layers import precision
from cogvideox_flax.sharding import Padding

CHANNELS = 128
"""From so many on, in and out, it is faster: on two cores 1.2 times at 128, 1.5 times at 256, 1.8 times at 512."""

OUTPUTS = 1024
"""Pixels of all frames from which on the sums of the kernel's taps are worth making."""

TILES = range(64, 1281)
"""How many go into a strip: enough for a matrix product, few enough for the cache."""

PRODUCTS = 4, 9
"""An output has so many here, and so many in the plain sum."""

SCOPE = "winograd"
"""The name by which its products are known in a jaxpr."""

Strip = Float[Array, "B 1 h W O"]


def strip_of(shape: tuple[int, ...], in_channels: int) -> int | None:
    """How many rows of a result `B T H W O` are best made at once; None where a plain convolution is better."""
    batch, frames, height, width, out_channels = shape
    if min(in_channels, out_channels) < CHANNELS or frames * height * width < OUTPUTS or height % 2 or width % 2:
        return None
    rows = (n for n in range(1, height // 2 + 1) if height // 2 % n == 0 and n * batch * width // 2 in TILES)
    return max((2 * n for n in rows), default=None)


def convolve(
    x: Float[Array, "B T+kt-1 H W I"],
    kernel: Float[Array, "kt 3 3 I O"],
    start: Float[Array, "B T H W O"],
    finish: Callable[[Strip, Strip], Strip],
    *,
    strip: int,
    padding: Padding,
) -> Float[Array, "B T H W O"]:
    """The convolution, valid in time, with these zeros around the pictures, summed in float32.

    Args:
        start: the result is written over it.
        finish: from the sums of a strip, float32, and what `start` holds there, the strip of the result.
        strip: rows, from `strip_of`.
    """

    batch, frames, height = start.shape[:3]
    x = jnp.pad(x, ((0, 0), (0, 0), *padding, (0, 0)))
    weights = [taps.reshape(-1, taps.shape[-1]) for taps in _both(_of_taps, kernel.astype(jnp.float32))]

    def product(a: Array, b: Array) -> Array:
        with jax.named_scope(SCOPE):
            y = jnp.matmul(a.reshape(-1, a.shape[-1]), b, precision=precision(b.dtype))
        return y.reshape(*a.shape[:-1], -1)

    def put_strip(s: Int[Array, ""], y: Array) -> Array:
        seen = jax.lax.dynamic_slice_in_dim(x, s * strip, strip + 2, 2)

        def put_frame(t: Int[Array, ""], y: Array) -> Array:
            # in this order: the frames of a strip, which see each other, are in the cache
            taps = [jax.lax.dynamic_index_in_dim(seen, t + i, 1, keepdims=False) for i in range(len(kernel))]
            inputs = _both(_of_inputs, jnp.concatenate(taps, -1).astype(jnp.float32))
            sums = _outputs([product(*pair) for pair in zip(inputs, weights, strict=True)])
            at = (0, t, s * strip, 0, 0)
            before = jax.lax.dynamic_slice(y, at, (batch, 1, strip, *y.shape[3:]))
            return jax.lax.dynamic_update_slice(y, finish(sums[:, None], before), at)

        return jax.lax.fori_loop(0, frames, put_frame, y)

    return jax.lax.fori_loop(0, height // strip, put_strip, start)


def _both(transform: Callable[[Array, int], list[Array]], x: Array) -> list[Array]:
    """Along both axes of the picture, 1 and 2: sixteen."""
    return [both for one in transform(x, 1) for both in transform(one, 2)]


def _of_taps(kernel: Array, axis: int) -> list[Array]:
    a, b, c = jnp.split(kernel, 3, axis)
    return [a, (a + b + c) / 2, (a - b + c) / 2, c]


def _of_inputs(x: Array, axis: int) -> list[Array]:
    a, b, c, d = (jax.lax.slice_in_dim(x, i, x.shape[axis] - 3 + i, 2, axis) for i in range(4))
    return [a - c, b + c, c - b, b - d]


def _outputs(products: list[Float32[Array, "B r c O"]]) -> Float32[Array, "B 2r 2c O"]:
    """The four outputs of every tile in their places."""
    across = [_of_products(products[i : i + 4]) for i in range(0, 16, 4)]
    tiles = jnp.stack([jnp.stack(_of_products(column), 2) for column in map(list, zip(*across, strict=True))], 4)
    batch, rows, _, columns, _, channels = tiles.shape
    return tiles.reshape(batch, 2 * rows, 2 * columns, channels)


def _of_products(p: list[Array]) -> list[Array]:
    return [p[0] + p[1] + p[2], p[1] - p[2] - p[3]]
