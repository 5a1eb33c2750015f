"""Down- and upsampling of HunyuanVideo-1.5's VAE: pixels to channels and back, around a convolution, with shortcuts.

The first frame of a clip has no partner in time. Source: diffusers `HunyuanVideo15Downsample`,
`HunyuanVideo15Upsample`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax.nn.conv.causal_conv import CausalConv3d

Cache = Any


def to_channels(x: Float[Array, "B T H W C"], time: int) -> Float[Array, "B t h w D"]:
    """Blocks of `time` x 2 x 2 pixels as channels; the place in the block is slower than the channel."""
    batch, frames, height, width, channels = x.shape
    x = x.reshape(batch, frames // time, time, height // 2, 2, width // 2, 2, channels)
    return x.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(batch, frames // time, height // 2, width // 2, -1)


def to_pixels(x: Float[Array, "B t h w D"], time: int) -> Float[Array, "B T H W C"]:
    """The inverse of `to_channels`."""
    batch, frames, height, width, _ = x.shape
    x = x.reshape(batch, frames, height, width, time, 2, 2, -1).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return x.reshape(batch, frames * time, height * 2, width * 2, -1)


def mean_groups(x: Float[Array, "B T H W C"], channels: int) -> Float[Array, "B T H W c"]:
    """The mean of each group of neighbouring channels."""
    return x.reshape(*x.shape[:-1], channels, -1).mean(-1, dtype=jnp.float32).astype(x.dtype)


def repeat_channels(x: Float[Array, "B T H W c"], channels: int) -> Float[Array, "B T H W C"]:
    """Each channel several times, side by side."""
    return jnp.repeat(x, channels // x.shape[-1], -1)


class Downsample(nnx.Module):
    """Half the height and width, and with `temporal` half the frames but for the first one."""

    def __init__(self, in_channels: int, out_channels: int, *, temporal: bool, rngs: nnx.Rngs):
        self.conv = CausalConv3d(in_channels, out_channels // (8 if temporal else 4), repeat_edges=True, rngs=rngs)
        self.channels = out_channels
        self.temporal = temporal

    def __call__(self, x: Float[Array, "B T H W I"], cache: Cache) -> tuple[Float[Array, "B t h w O"], Cache]:
        """cache: None for the first frame of a clip, which comes alone."""
        y, new_cache = self.conv(x, cache)
        time = 2 if self.temporal and cache is not None else 1
        y = to_channels(y.astype(x.dtype), time)
        if self.temporal and cache is None:
            y = jnp.concatenate([y, y], -1)
        return y + mean_groups(to_channels(x, time), self.channels), new_cache


class Upsample(nnx.Module):
    """Twice the height and width, and with `temporal` twice the frames but for the first one."""

    def __init__(self, in_channels: int, out_channels: int, *, temporal: bool, rngs: nnx.Rngs):
        self.conv = CausalConv3d(in_channels, out_channels * (8 if temporal else 4), repeat_edges=True, rngs=rngs)
        self.channels = out_channels
        self.temporal = temporal

    def __call__(self, x: Float[Array, "B t h w I"], cache: Cache) -> tuple[Float[Array, "B T H W O"], Cache]:
        """cache: None for the first frame of a clip, which comes alone."""
        y, new_cache = self.conv(x, cache)
        time = 2 if self.temporal and cache is not None else 1
        y = to_pixels(y, time)[..., : self.channels]  # of the first frame, the half of its channels
        if self.temporal:
            return y + repeat_channels(to_pixels(x, time), self.channels), new_cache
        return y + to_pixels(repeat_channels(x, 4 * self.channels), 1), new_cache
