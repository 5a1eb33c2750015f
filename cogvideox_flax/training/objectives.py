"""What training minimises: v-prediction for the transformer, reconstruction with KL for the autoencoder.

Source: CogVideoX (arXiv 2408.06072), sections 2.1 and 2.3; v-prediction (arXiv 2202.00512); VAE (arXiv 1312.6114).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, Shaped

from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.training.metrics import Mean

Metrics = dict[str, Float32[Array, ""] | Mean]
Denoiser = Callable[[Float[Array, "B T H W C"], Int32[Array, " B"]], Float32[Array, "B T H W C"]]


@dataclass(frozen=True)
class Focus:
    """Timesteps to draw more often: `share` of the draws fall in [low, high), the rest evenly outside.

    low, high: as shares of the whole range, 0 the clean end.
    """

    low: float
    high: float
    share: float

    def __post_init__(self) -> None:
        if not (0 <= self.low < self.high <= 1 and 0 < self.share <= 1 and (self.high - self.low < 1)):
            raise ValueError(f"a focus needs 0 <= low < high <= 1, less than the whole, and 0 < share <= 1; got {self}")

    def __call__(self, u: Float[Array, " B"]) -> Float[Array, " B"]:
        """Uniform draws in [0, 1) to draws of this density."""
        below = (1 - self.share) * self.low / (self.low + 1 - self.high)
        return jnp.interp(u, jnp.array([0, below, below + self.share, 1]), jnp.array([0, self.low, self.high, 1]))


def v_prediction(
    denoiser: Denoiser,
    latents: Float[Array, "B T H W C"],
    key: Key[Array, ""],
    config: SchedulerConfig,
    focus: Focus | None = None,
    weights: Float[Array, "B T H W"] | None = None,
) -> tuple[Float32[Array, ""], Metrics]:
    """Mean squared error of v at random timesteps of the shifted, zero-terminal-SNR schedule.

    v = sqrt(abar) noise - sqrt(1 - abar) x0. Weighting the error of x0 by 1 / (1 - abar), as the released training
    code does, is the same number: the error of x0 is sqrt(1 - abar) times that of v.

    Args:
        denoiser: (noised latents, timesteps) -> v; the transformer with its text bound.
        latents: clean, scaled as the sampler sees them.
        key: of the noise and the timesteps.
        config: the schedule; its whole range of timesteps is drawn from, once per stratum of a batch.
        focus: where to draw more densely; None draws evenly, as the released training code does.
        weights: of the squared errors of each latent pixel, relative to each other; None weighs all the same.

    Returns:
        The loss, and its mean over the noisier and the cleaner half of the timesteps, of which a small batch may have
        none.
    """
    batch = latents.shape[0]
    noise_key, time_key, order_key = jax.random.split(key, 3)
    scheduler = DDIMScheduler(config)
    # One timestep from each of `batch` equal ranges, in random order: less variance than independent draws.
    strata = (jnp.arange(batch) + jax.random.uniform(time_key, (batch,))) / batch
    strata = strata if focus is None else focus(strata)
    t = jax.random.permutation(order_key, (strata * config.num_train_timesteps).astype(jnp.int32))
    t = t.clip(0, config.num_train_timesteps - 1)

    latents = latents.astype(jnp.float32)
    noise = jax.random.normal(noise_key, latents.shape)
    error = denoiser(scheduler.add_noise(latents, noise, t), t) - scheduler.velocity(latents, noise, t)
    squares = jnp.square(error).mean(4)
    per_clip = (squares if weights is None else squares * (weights / weights.mean())).mean((1, 2, 3))
    noisy = t >= config.num_train_timesteps // 2

    def mean_where(mask: Bool[Array, " B"]) -> Mean:
        return Mean(jnp.where(mask, per_clip, 0).sum(), mask.sum().astype(jnp.float32))

    return per_clip.mean(), {"loss_noisy": mean_where(noisy), "loss_clean": mean_where(~noisy)}


def sample_latents(
    mean: Float[Array, "B t h w C"],
    std: Float[Array, "B t h w C"],
    key: Key[Array, ""],
    scaling_factor: float,
    extra: int = 0,
) -> Float32[Array, "B T h w C"]:
    """Latents as the transformer sees them: posterior samples times the scaling factor, whatever the release
    (`invert_scale_latents` is about the image of image-to-video), with the first frame `extra` times more in front.

    Source: the released fine-tuning code, which fills up to `patch_size_t` this way.
    """
    mean, std = mean.astype(jnp.float32), std.astype(jnp.float32)
    latents = scaling_factor * (mean + std * jax.random.normal(key, mean.shape))
    return jnp.concatenate([*[latents[:, :1]] * extra, latents], 1)


def drop_captions(
    captions: Shaped[Array, "B ..."], empty: Shaped[Array, ...], rate: float, key: Key[Array, ""]
) -> Shaped[Array, "B ..."]:
    """Replace captions by the empty one at random, so that the model learns the unconditional half of guidance.

    Args:
        captions: token ids [B, L] or text features [B, L, E]; `empty` is one row of the same kind, of the empty prompt.
        rate: the share of captions to drop, 0 to 1.
    """
    dropped = jax.random.bernoulli(key, rate, captions.shape[:1])
    return jnp.where(dropped.reshape(-1, *[1] * (captions.ndim - 1)), empty, captions)


def reconstruction(
    vae: Autoencoder,
    video: Float[Array, "B F H W 3"],
    key: Key[Array, ""],
    *,
    kl_weight: float,
    l1_weight: float,
) -> tuple[Float32[Array, ""], Metrics]:
    """Mean squared error plus `l1_weight` times the absolute error plus `kl_weight` times the KL divergence.

    The clip goes through the public encode and decode, in their causal chunks, as at inference. All three terms are
    means over their elements: pixels and channels, or latent elements.

    Args:
        video: in [-1, 1].
        key: of the latent sample.

    Returns:
        The loss, and its terms, the PSNR in dB and the mean standard deviation of the posterior.
    """
    mean, logvar = (part.astype(jnp.float32) for part in vae.encode(video))
    std = jnp.exp(0.5 * logvar)
    z = mean + std * jax.random.normal(key, mean.shape)
    error = vae.decode(z).astype(jnp.float32) - video.astype(jnp.float32)
    mse, l1 = jnp.square(error).mean(), jnp.abs(error).mean()
    kl = 0.5 * (jnp.square(mean) + jnp.exp(logvar) - 1 - logvar).mean()
    psnr = 10 * jnp.log10(4 / jnp.square(error).mean((1, 2, 3, 4))).mean()
    metrics: Metrics = {"mse": mse, "l1": l1, "kl": kl, "psnr": psnr, "posterior_std": std.mean()}
    return mse + l1_weight * l1 + kl_weight * kl, metrics
