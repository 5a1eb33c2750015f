"""Resampling of frames and pixels of `B T H W C` by integer factors.

Repeats are broadcasts, not gathers, so that a sharded height or width stays sharded.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def repeat_space(x: Float[Array, "B T h w C"], height: int, width: int) -> Float[Array, "B T H W C"]:
    """Nearest resize to `height` x `width`, multiples of the current size."""
    return _repeat(_repeat(x, 2, height // x.shape[2]), 3, width // x.shape[3])


def repeat_frames(x: Float[Array, "B t H W C"], frames: int) -> Float[Array, "B T H W C"]:
    """Repeat each frame to get `frames` of them; if that is odd and above 1, the first frame stays single."""
    if frames == x.shape[1]:
        return x
    if frames % 2:
        return jnp.concatenate([x[:, :1], _repeat(x[:, 1:], 1, (frames - 1) // (x.shape[1] - 1))], 1)
    return _repeat(x, 1, frames // x.shape[1])


def double_frames(x: Float[Array, "B t H W C"]) -> Float[Array, "B T H W C"]:
    """1 -> 1, odd t -> 2 t - 1 (the first frame stays single), even t -> 2 t."""
    frames = x.shape[1]
    return x if frames == 1 else repeat_frames(x, 2 * frames - frames % 2)


def halve_frames(x: Float[Array, "B T H W C"]) -> Float[Array, "B t H W C"]:
    """Mean of pairs of frames; if T is odd, the first frame stays single. T -> ceil(T / 2)."""
    first, rest = x[:, : x.shape[1] % 2], x[:, x.shape[1] % 2 :]
    pairs = rest.reshape(x.shape[0], -1, 2, *x.shape[2:])
    return jnp.concatenate([first, pairs.mean(2, dtype=jnp.float32).astype(x.dtype)], 1)


def _repeat(x: Array, axis: int, times: int) -> Array:
    """Each entry along `axis`, `times` times over."""
    shape = x.shape
    x = jnp.expand_dims(x, axis + 1)
    x = jnp.broadcast_to(x, (*x.shape[: axis + 1], times, *x.shape[axis + 2 :]))
    return x.reshape(*shape[:axis], shape[axis] * times, *shape[axis + 1 :])
