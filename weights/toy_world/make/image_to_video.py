"""The embedded image-to-video model: the embedded model, trained further with a first frame as an input.

As in CogVideoX's image-to-video releases, the latents of the first frame are 16 more input channels of the transformer,
zero in all other latent frames. Text encoder and autoencoder stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Key

from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.training.config import LoopConfig
from cogvideox_flax.training.latent_cache import LatentCache
from cogvideox_flax.training.loop import METRICS_FILE
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Metrics, drop_captions, sample_latents, velocity_loss
from cogvideox_flax.training.step import TrainState
from weights.toy_world.make.autoencoder import train_vae, world_clips
from weights.toy_world.make.diffusion import encode_clips, make_batches, prepare_latents, write_checkpoint
from weights.toy_world.make.objectives import focus
from weights.toy_world.make.settings import (
    CAPTION_DROPOUT,
    CLIP_SEED,
    DIFFUSION_OPTIMIZER,
    SCHEDULER,
    SEED,
    STATISTICS,
    TRANSFORMER,
    VAE,
    Phase,
    Run,
)
from weights.toy_world.make.training import train_stage

IMAGE_TRANSFORMER = replace(TRANSFORMER, in_channels=TRANSFORMER.in_channels + VAE.latent_channels)
LOOP = LoopConfig(
    steps=2400,
    seed=SEED + 10,
    ema_decay=0.998,
    optimizer=replace(DIFFUSION_OPTIMIZER, learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=100),
)
PHASE = Phase("image-to-video", LOOP, LOOP.steps, focus(0.3, 0.9, 0.8), corners=20.0, small_squares=2)
"""The image shows what the things look like, so that the prompt decides their motion alone. That happens at higher
noise levels than the shapes of text to video."""
NOISE_LOG_MEAN, NOISE_LOG_STD = -3.0, 0.5
"""Of the standard deviation of noise that is added to the first frame's latents. The releases' training adds as much to
its pixels (arXiv 2408.06072, section 2), so that the model does not rely on details."""


def prepare_first_frames(run: Run) -> LatentCache:
    """The latents of the training clips' first frames, each encoded alone as in inference."""
    return encode_clips(run, "first-frames", lambda indices: world_clips(indices, CLIP_SEED)[:, :1])


def image_to_video_loss(
    params: dict[str, Any], frozen: dict[str, Any], batch: dict[str, Array], key: Key[Array, ""]
) -> tuple[Float32[Array, ""], Metrics]:
    """v-prediction with prompt and first frame. A `Loss` of the training loop."""
    sample_key, drop_key, noise_key, image_key, level_key = jax.random.split(key, 5)
    latents = sample_latents(batch["mean"], batch["std"], sample_key, STATISTICS)
    spread = jnp.exp(NOISE_LOG_MEAN + NOISE_LOG_STD * jax.random.normal(level_key, (len(latents), 1, 1, 1, 1)))
    image = sample_latents(
        batch["image_mean"], jnp.hypot(batch["image_std"].astype(jnp.float32), spread), image_key, STATISTICS
    )
    ids = drop_captions(batch["ids"], frozen["empty"], CAPTION_DROPOUT, drop_key)
    features = {"prompt_embeds": frozen["text_encoder"](ids), "image_latents": image}

    def denoiser(x: Float[Array, "B T h w C"], t: Array) -> Float32[Array, "B T h w C"]:
        return CogVideoX.predict(params["transformer"], x, features, t, remat=True)

    weights = 1 + PHASE.corners * batch["corners"].astype(jnp.float32)
    return velocity_loss(denoiser, latents, noise_key, DDIMScheduler(SCHEDULER), PHASE.density, weights)


def widen(transformer: Transformer) -> Transformer:
    """The same transformer with the image's input channels, whose weights are 0: at first it computes the same."""
    wide = Transformer(IMAGE_TRANSFORMER, rngs=nnx.Rngs(0))
    values = nnx.to_pure_dict(nnx.state(transformer))
    kernel = values["patch_embed"]["kernel"]  # [rows * columns * C, D], channels fastest
    patch = kernel.reshape(-1, TRANSFORMER.in_channels, kernel.shape[-1])
    zeros = jnp.zeros((len(patch), VAE.latent_channels, kernel.shape[-1]), kernel.dtype)
    values["patch_embed"]["kernel"] = jnp.concatenate([patch, zeros], 1).reshape(-1, kernel.shape[-1])
    state = nnx.state(wide)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(wide, state)
    return wide


def train_image_to_video(run: Run) -> TrainState:
    """Train the transformer of `run.base` with first frames.

    Raises:
        InputError: the run has no base.
    """
    params = {"transformer": widen(run.part("transformer"))}
    latents, frames = prepare_latents(run), prepare_first_frames(run)
    make_batch, empty = make_batches(run, PHASE)

    def batch(step: int) -> dict[str, np.ndarray]:
        indices, rest = make_batch(step)
        image = {f"image_{name}": value for name, value in frames.gather(indices).items()}
        return latents.gather(indices) | image | rest

    frozen = {"empty": empty, "text_encoder": run.part("text_encoder")}
    how: Any = {"loss": image_to_video_loss, "frozen": frozen, "batches": batch, "recorded": PHASE.recorded()}
    return train_stage(run, PHASE.name, PHASE.config, params, **how)


def export_image_to_video(run: Run) -> None:
    """Write the averaged weights as RUN/checkpoint-image-to-video, and plot the loss."""
    state = train_image_to_video(run)
    metrics = [run.folder / PHASE.name / METRICS_FILE]
    plot_metrics(metrics, ("loss", "loss_noisy", "loss_clean"), run.folder / "training-image-to-video.png")
    others = {"text_encoder": run.part("text_encoder"), "vae": jax.device_get(train_vae(run))}
    modules = jax.device_get(state.trained) | others
    steps = run.steps_before() + PHASE.steps
    write_checkpoint(run, run.folder / "checkpoint-image-to-video", IMAGE_TRANSFORMER, modules, steps)
