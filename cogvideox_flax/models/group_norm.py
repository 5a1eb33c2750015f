"""Norms of the video autoencoder: group norm, and group norm modulated by the latent that is being decoded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax.layers import Linear
from cogvideox_flax.models.resample import repeat_frames, repeat_space


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
        """x, a and b (float32) such that the norm is x * a + b.

        The passes over x (mean, squared deviation, application) are kept apart by barriers: otherwise the compiler
        shares one float32 copy of a bfloat16 clip between them.
        """
        mean = self._group_mean(x.astype(jnp.float32))
        x, mean = jax.lax.optimization_barrier((x, mean))
        variance = self._group_mean(jnp.square(x.astype(jnp.float32) - mean))
        a = jax.lax.rsqrt(variance + self.eps) * self.scale[...].astype(jnp.float32)
        b = self.bias[...].astype(jnp.float32) - mean * a
        return jax.lax.optimization_barrier((x, a, b))

    def _group_mean(self, x: Array) -> Array:
        """Mean per group, repeated for each of its channels: [B, 1, 1, 1, C]. Channels stay minor in the big sum."""
        per_channel = x.mean((1, 2, 3), keepdims=True)
        per_group = per_channel.reshape(*per_channel.shape[:-1], self.groups, -1).mean(-1, keepdims=True)
        return jnp.broadcast_to(per_group, (*per_group.shape[:-1], x.shape[-1] // self.groups)).reshape(
            per_channel.shape
        )

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H W C"]:
        """The norm in float32, unrounded: meant to fuse into what follows, which rounds."""
        x, a, b = self.affine(x)
        return x.astype(jnp.float32) * a + b


class SpatialNorm(nnx.Module):
    """Group norm whose result is scaled by y(z) and shifted by b(z), z the latent at its own, lower resolution.

    Source: MoVQ (arXiv 2209.09002); diffusers `CogVideoXSpatialNorm3D`, which resizes z first. The two maps act on
    each pixel alone, so they commute with a nearest resize and run on the small latent here.
    """

    def __init__(self, channels: int, latent_channels: int, *, groups: int, eps: float, rngs: nnx.Rngs):
        self.norm = GroupNorm(channels, groups=groups, eps=eps)
        self.y = Linear(latent_channels, channels, rngs=rngs)
        self.b = Linear(latent_channels, channels, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H W C"], z: Float[Array, "B t h w L"]) -> Float[Array, "B T H W C"]:
        """z: float32. Returns float32, unrounded, as `GroupNorm` does."""
        x, a, b = self.norm.affine(x)
        y = self.y(z)
        scale, shift = a * y, b * y + self.b(z)
        return x.astype(jnp.float32) * _resize(scale, x.shape) + _resize(shift, x.shape)


def _resize(z: Array, shape: tuple[int, ...]) -> Array:
    _, frames, height, width, _ = shape
    return repeat_space(repeat_frames(z, frames), height, width)
