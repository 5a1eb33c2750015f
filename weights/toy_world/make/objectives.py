"""Objectives of the embedded model's training: the autoencoder's loss, and a density of timesteps.

Source: CogVideoX (arXiv 2408.06072), section 2.1; VAE (arXiv 1312.6114).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Key

from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.training.objectives import Metrics


@dataclass(frozen=True)
class TimestepDensity:
    """A piecewise constant density of timesteps: `shares[i]` of them are in [edges[i], edges[i + 1]).

    edges: as shares of the full range, from 0, the clean end, to 1.
    shares: of the timesteps; their sum is 1.
    """

    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in pairwise(self.edges))
        whole = self.edges[0] == 0 and self.edges[-1] == 1 and math.isclose(sum(self.shares), 1)
        if not (rises and whole and len(self.edges) == len(self.shares) + 1 and min(self.shares) >= 0):
            raise ValueError(f"expected edges that rise from 0 to 1, and a share for each interval; got {self}")

    def __call__(self, u: Float[Array, " B"]) -> Float[Array, " B"]:
        """The inverse cumulative distribution: uniform numbers in [0, 1) become samples of this density."""
        return jnp.interp(u, jnp.array([0, *accumulate(self.shares)]), jnp.array(self.edges))


def focus(low: float, high: float, share: float) -> TimestepDensity:
    """The density with `share` of the timesteps in [low, high), the rest evenly outside."""
    if not 0 < low < high < 1:
        raise ValueError(f"expected 0 < low < high < 1; got {low} and {high}")
    outside = (1 - share) / (low + 1 - high)
    return TimestepDensity((0.0, low, high, 1.0), (outside * low, share, outside * (1 - high)))


def reconstruction(
    vae: Autoencoder, video: Float[Array, "B F H W 3"], key: Key[Array, ""], *, kl_weight: float, l1_weight: float
) -> tuple[Float32[Array, ""], Metrics]:
    """Mean squared error plus `l1_weight` times the absolute error plus `kl_weight` times the KL divergence.

    The clip goes through the public encode and decode, with their causal chunks, as in inference. Each term is a mean
    over its elements: pixels and channels, or latent elements.

    Args:
        video: in [-1, 1].
        key: of the latent sample.

    Returns:
        The loss; its terms, the PSNR in dB and the posterior's mean standard deviation.
    """
    mean, logvar = (x.astype(jnp.float32) for x in vae.encode(video))
    std = jnp.exp(0.5 * logvar)
    z = mean + std * jax.random.normal(key, mean.shape)
    error = vae.decode(z).astype(jnp.float32) - video.astype(jnp.float32)
    mse, l1 = jnp.square(error).mean(), jnp.abs(error).mean()
    kl = 0.5 * (jnp.square(mean) + jnp.exp(logvar) - 1 - logvar).mean()
    psnr = 10 * jnp.log10(4 / jnp.square(error).mean((1, 2, 3, 4))).mean()
    metrics: Metrics = {"mse": mse, "l1": l1, "kl": kl, "psnr": psnr, "posterior_std": std.mean()}
    return mse + l1_weight * l1 + kl_weight * kl, metrics
