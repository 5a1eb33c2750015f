"""The objective of the denoiser: its velocity on noised latents, with captions dropped at random.

Source: CogVideoX (arXiv 2408.06072), section 2.3; v-prediction (arXiv 2202.00512).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, Num, PyTree, Shaped

from cogvideox_flax.models.codec import LatentStatistics
from cogvideox_flax.schedulers import Scheduler
from cogvideox_flax.training.metrics import Mean

Metrics = dict[str, Float32[Array, ""] | Mean]
Denoiser = Callable[[Float[Array, "B T H W C"], Num[Array, " B"]], Float32[Array, "B T H W C"]]


def velocity_loss(
    denoiser: Denoiser,
    latents: Float[Array, "B T H W C"],
    key: Key[Array, ""],
    scheduler: Scheduler,
    timestep_warp: Callable[[Float32[Array, " B"]], Float32[Array, " B"]] | None = None,
    weights: Float[Array, "B T H W"] | None = None,
    min_snr: float | None = None,
) -> tuple[Float32[Array, ""], Metrics]:
    """Mean squared error of the velocity at random timesteps of a noise schedule.

    CogVideoX's velocity is v = sqrt(abar) noise - sqrt(1 - abar) x0. Weighting the error of x0 by 1 / (1 - abar), as
    the released training code does, is the same number: the error of x0 is sqrt(1 - abar) times that of v.

    Args:
        denoiser: (noised latents, timesteps) -> velocity; the model with its text bound.
        latents: clean, scaled as the scheduler sees them.
        key: of the noise and the timesteps.
        scheduler: of the noise schedule. Timesteps are stratified: one from each of B equal parts of the whole range.
        timestep_warp: uniform numbers in [0, 1) -> the timesteps' shares of the whole range, such as a `TimestepLaw`;
            None samples uniformly.
        weights: relative weights of the squared errors of the latent pixels; None: all the same.
        min_snr: weight clips by `min_snr_weight` with this bound, on a diffusion schedule; None: all the same.

    Returns:
        The loss, and `loss_noisy` and `loss_clean`: its means over the noisier and the cleaner half of the timesteps.
        A small batch may have no timestep in one of them.
    """
    batch = latents.shape[0]
    noise_key, time_key, permutation_key = jax.random.split(key, 3)
    # Stratified timesteps have less variance than independent ones.
    u = (jnp.arange(batch) + jax.random.uniform(time_key, (batch,))) / batch
    u = u if timestep_warp is None else timestep_warp(u)
    t = jax.random.permutation(permutation_key, scheduler.training_timesteps(u))

    latents = latents.astype(jnp.float32)
    noise = jax.random.normal(noise_key, latents.shape)
    error = denoiser(scheduler.add_noise(latents, noise, t), t) - scheduler.velocity(latents, noise, t)
    squares = jnp.square(error).mean(4)
    per_clip = (squares if weights is None else squares * (weights / weights.mean())).mean((1, 2, 3))
    if min_snr is not None:
        per_clip = per_clip * min_snr_weight(scheduler, t, min_snr)
    noisy = t >= scheduler.num_train_timesteps // 2

    def mean_where(mask: Bool[Array, " B"]) -> Mean:
        return Mean(jnp.where(mask, per_clip, 0).sum(), mask.sum().astype(jnp.float32))

    return per_clip.mean(), {"loss_noisy": mean_where(noisy), "loss_clean": mean_where(~noisy)}


def min_snr_weight(scheduler: Any, timesteps: Int32[Array, " B"], bound: float) -> Float32[Array, " B"]:
    """min(SNR, bound) / (SNR + 1), where SNR = abar / (1 - abar): the weight of a squared error of the velocity.

    Source: min-SNR (arXiv 2303.09556), which bounds the weight SNR of the squared error of x0.
    """
    abar = jnp.asarray(scheduler.alphas_cumprod, jnp.float32)[timesteps]
    return jnp.minimum(abar, bound * (1 - abar))


def sample_latents(
    mean: Float[Array, "B t h w C"],
    std: Float[Array, "B t h w C"],
    key: Key[Array, ""],
    statistics: LatentStatistics,
    extra: int = 0,
) -> Float32[Array, "B T h w C"]:
    """Latents as the transformer sees them: samples of the VAE's posterior, normalized.

    Every release multiplies by the scaling factor; `invert_scale_latents` is only about the image of image-to-video.

    Args:
        extra: how many copies of the first latent frame stand before it. Source: the released fine-tuning code, which
            makes the number of frames a multiple of `patch_size_t` this way.
    """
    mean, std = mean.astype(jnp.float32), std.astype(jnp.float32)
    latents = statistics.normalize(mean + std * jax.random.normal(key, mean.shape))
    return jnp.concatenate([*[latents[:, :1]] * extra, latents], 1)


def drop_captions(
    captions: PyTree[Shaped[Array, "B ..."]], empty: PyTree[Shaped[Array, ...]], rate: float, key: Key[Array, ""]
) -> PyTree[Shaped[Array, "B ..."]]:
    """Replace captions by the empty one at random, which trains the unconditional half of guidance.

    Args:
        captions: token ids [B, L], or text features [B, ...] by name.
        empty: the same of the empty prompt, without the batch axis.
        rate: the share of captions to drop, 0 to 1.
    """
    dropped = jax.random.bernoulli(key, rate, jax.tree.leaves(captions)[0].shape[:1])

    def replace(caption: Shaped[Array, "B ..."], empty: Shaped[Array, ...]) -> Shaped[Array, "B ..."]:
        return jnp.where(dropped.reshape(-1, *[1] * (caption.ndim - 1)), empty, caption)

    return jax.tree.map(replace, captions, empty)
