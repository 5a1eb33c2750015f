"""Norms of the video autoencoders, each with the SiLU that follows it.

They are memory-bound. The barriers below keep the compiler from writing intermediate results to memory: a float32 copy
of a bfloat16 clip, or a latent resized to full size.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from cogvideox_flax.nn.layers import Linear
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.resample import repeat_frames, repeat_space

_MIN_LENGTH = 1e-12
"""Of the pixels that `ChannelRMSNorm` divides by."""

_SUBLANES = 8  # rows of a TPU's register


class GroupNorm(nnx.Module):
    """Group norm over `B T H W C`, statistics over T, H, W and the channels of a group. scale, bias: [C]."""

    def __init__(self, channels: int, *, groups: int, eps: float):
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.groups = groups
        self.eps = eps

    def affine(
        self, x: Float[Array, "B T H W C"]
    ) -> tuple[Float[Array, "B T H W C"], Float[Array, "B 1 1 1 C"], Float[Array, "B 1 1 1 C"]]:
        """(x, a, b) such that the norm is x * a + b; a and b are float32.

        Statistics are float32 and take two passes: the mean, then the mean of the squared deviation. Barriers separate
        these passes and the caller's, so that each converts x to float32 on the fly.
        """
        mean = self._group_mean(x.astype(jnp.float32))
        x, mean = jax.lax.optimization_barrier((x, mean))
        variance = self._group_mean(jnp.square(x.astype(jnp.float32) - mean))
        a = jax.lax.rsqrt(variance + self.eps) * self.scale[...].astype(jnp.float32)
        b = self.bias[...].astype(jnp.float32) - mean * a
        return jax.lax.optimization_barrier((x, a, b))

    def _group_mean(self, x: Array) -> Array:
        """Mean of each channel's group, [B, 1, 1, 1, C]. Sums over T, H, W first, so that channels stay minor."""
        per_channel = x.mean((1, 2, 3), keepdims=True)
        per_group = per_channel.reshape(*per_channel.shape[:-1], self.groups, -1).mean(-1, keepdims=True)
        return jnp.repeat(per_group, x.shape[-1] // self.groups, -1).reshape(per_channel.shape)


class GroupNormSiLU(GroupNorm):
    """silu(norm(x)), rounded once."""

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H W C"]:
        x, a, b = self.affine(x)
        return jax.nn.silu(x.astype(jnp.float32) * a + b).astype(x.dtype)


class ChannelRMSNorm(nnx.Module):
    """x / |x| * sqrt(C) * scale over the channels of each pixel, in float32, rounded once. scale: [C].

    Source: diffusers `HunyuanVideo15RMS_norm`, which is torch's normalize.
    """

    def __init__(self, channels: int):
        self.scale = nnx.Param(jnp.ones(channels))

    def __call__(self, x: Float[Array, "B T H W C"], *, silu: bool = False) -> Float[Array, "B T H W C"]:
        """silu: followed by that."""
        wide = x.astype(jnp.float32)
        length = jnp.sqrt(jnp.square(wide).sum(-1, keepdims=True))
        y = wide / jnp.maximum(length, _MIN_LENGTH) * (x.shape[-1] ** 0.5 * self.scale[...].astype(jnp.float32))
        return (jax.nn.silu(y) if silu else y).astype(x.dtype)


class SpatialNormSiLU(nnx.Module):
    """silu(norm(x) * y(z) + b(z)), rounded once, where z is the latent resized to x, nearest.

    Source: MoVQ (arXiv 2209.09002); diffusers `CogVideoXSpatialNorm3D`. The maps y and b act on each pixel alone, so
    they commute with the resize and run on the latent at its own size.
    """

    def __init__(self, channels: int, latent_channels: int, *, groups: int, eps: float, rngs: nnx.Rngs):
        self.norm = GroupNorm(channels, groups=groups, eps=eps)
        self.y = Linear(latent_channels, channels, rngs=rngs)
        self.b = Linear(latent_channels, channels, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H W C"], z: Float[Array, "B t h w L"]) -> Float[Array, "B T H W C"]:
        """z: float32; H and W are multiples of h and w."""
        x, a, b = self.norm.affine(x)
        y = self.y(z)
        scale, shift = a * y, b * y + self.b(z)

        return by_platform(
            x,
            scale,
            shift,
            # splitting columns into groups smaller than a register costs a TPU four copies of x; repeating z is cheap
            tpu=partial(_modulate, split_columns=x.shape[3] // z.shape[3] % _SUBLANES == 0),
            default=partial(_modulate, split_columns=True),
        )


def _modulate(
    x: Float[Array, "B T H W C"],
    scale: Float32[Array, "B t h w C"],
    shift: Float32[Array, "B t h w C"],
    *,
    split_columns: bool,
) -> Float[Array, "B T H W C"]:
    """silu(x * scale + shift), the maps resized to x, nearest.

    x is reshaped so that the spatial resize is a broadcast over the pixels of each latent pixel; without
    `split_columns`, over rows only.
    """
    frames, height, width = x.shape[1:4]
    if not split_columns:
        scale, shift = (repeat_space(part, part.shape[2], width) for part in (scale, shift))
    h, w = scale.shape[2:4]
    scale, shift = (repeat_frames(part, frames)[:, :, :, None, :, None] for part in (scale, shift))
    split = x.reshape(x.shape[0], frames, h, height // h, w, width // w, x.shape[-1])
    split, scale, shift = jax.lax.optimization_barrier((split, scale, shift))
    return jax.nn.silu(split.astype(jnp.float32) * scale + shift).astype(x.dtype).reshape(x.shape)
