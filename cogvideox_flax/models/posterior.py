"""Clips to latents: an encoder gives mean and log variance of a normal distribution, of which a sample is drawn."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

LOGVAR_RANGE = (-30.0, 20.0)


def mean_and_logvar(
    moments: Float[Array, "B T h w 2L"],
) -> tuple[Float[Array, "B T h w L"], Float[Array, "B T h w L"]]:
    """The two halves of an encoder's channels, logvar clamped to `LOGVAR_RANGE`."""
    mean, logvar = jnp.split(moments, 2, -1)
    return mean, logvar.clip(*LOGVAR_RANGE)


def encode(
    vae: Any, video: Float[Array, "B F H W 3"], *, tiled: bool = False
) -> tuple[Float[Array, "B T h w L"], Float[Array, "B T h w L"]]:
    """Mean and logvar of a video's latents, without the scaling factor; several videos one after the other.

    Args:
        vae: of any family.
        video: in [-1, 1].
        tiled: in the reference's overlapping tiles.
    """
    return vae.encode(video, tiling=vae.config.tiling if tiled else None, slicing=len(video) > 1)


def sample(
    vae: Any, video: Float[Array, "B F H W 3"], noise: Float32[Array, "B T h w L"], *, tiled: bool
) -> Float32[Array, "B T h w L"]:
    """Latents drawn with standard normal noise, not scaled. Other arguments as for `encode`."""
    mean, logvar = (x.astype(jnp.float32) for x in encode(vae, video, tiled=tiled))
    return mean + jnp.exp(0.5 * logvar) * noise
