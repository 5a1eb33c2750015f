"""Running an autoencoder over a clip chunk by chunk, with a cache from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Chunk = Callable[[Array, Any], tuple[Array, Any]]
"""(chunk, cache of the chunk before; None for the first) -> (result, cache)."""


def chunk_sizes(n: int, size: int) -> list[int]:
    """n frames in chunks of `size`, with the remainder in the first: 13, 2 -> 3, 2, 2, 2, 2, 2."""
    later = max(n // size, 1) - 1
    return [n - later * size] + [size] * later


def sizes_after_first(n: int, size: int) -> list[int]:
    """The first frame alone, the others in chunks of `size`, with the remainder in the last: 6, 2 -> 1, 2, 2, 1.

    Source: VideoX-Fun `AutoencoderKLCogVideoX._decode`.
    """
    later, rest = divmod(n - 1, size)
    return [1] + [size] * later + ([rest] if rest else [])


def in_chunks(part: Chunk, x: Float[Array, "B T H W C"], sizes: Sequence[int]) -> Float[Array, "B t h w D"]:
    """Run `part` on a whole clip, chunk by chunk with its cache.

    The first chunk has no cache and its own length; those that follow are equal and scanned, and the last may be
    shorter. So a clip of any length needs at most three compiled bodies.

    Args:
        sizes: the frames of each chunk.
    """
    first, *later = sizes
    last = later.pop() if later and later[-1] != later[0] else 0
    y, cache = part(x[:, :first], None)
    done = [y]
    if later:
        middle = x[:, first : x.shape[1] - last].reshape(x.shape[0], len(later), later[0], *x.shape[2:])
        cache, ys = jax.lax.scan(lambda cache, chunk: part(chunk, cache)[::-1], cache, jnp.moveaxis(middle, 1, 0))
        done.append(jnp.moveaxis(ys, 0, 1).reshape(y.shape[0], -1, *y.shape[2:]))
    if last:
        done.append(part(x[:, -last:], cache)[0])
    return jnp.concatenate(done, 1) if len(done) > 1 else y


def run_levels(levels: Sequence[Any], x: Array, caches: Sequence[Any], *z: Array) -> tuple[Array, list[Any]]:
    """One level of an autoencoder after the other, each with its cache; z: what all of them take besides."""
    new_caches = []
    for level, cache in zip(levels, caches, strict=True):
        x, cache = level(x, cache, *z)
        new_caches.append(cache)
    return x, new_caches
