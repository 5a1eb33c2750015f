"""The decoder of the embedded model, trained further to forgive small errors of latents.

The transformer's latents of a clip differ from the encoder's, and a decoder that has seen only the encoder's draws the
difference as bent outlines. Here it sees both: a clip's latents with noise, and those that the transformer makes of
them when they are noised and denoised again. It should draw the clip of either. The latents do not change, so every
transformer trained on them gains.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Key

from cogvideox_flax.io.video import from_uint8
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.training.latent_cache import LatentCache, prepare
from cogvideox_flax.training.loop import METRICS_FILE
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Metrics
from cogvideox_flax.training.shuffle import shuffled_indices
from weights.toy_world import world
from weights.toy_world.make.diffusion import guided_velocity, make_tokenizer, sha256_of, write_checkpoint
from weights.toy_world.make.settings import (
    DECODER_BATCH,
    DECODER_CLIPS,
    DECODER_LOOP,
    FRAMES,
    L1_WEIGHT,
    LATENT_NOISE,
    NEAR_WEIGHT,
    ROLLOUT_STARTS,
    ROLLOUT_STEPS,
    SCHEDULER,
    SEED,
    SHARD,
    SIZE,
    TRANSFORMER,
    TWO_OBJECTS,
    Run,
)
from weights.toy_world.make.training import train_stage

CLIP_SEED = SEED + 11
CROWDED_EVERY = 8
"""One clip in so many is crowded, so that the decoder keeps drawing what the transformer never makes. It has no prompt,
and its latents are the encoder's."""
NEAR = 4
"""Pixels around a thing in which an error weighs more."""


def train_decoder(run: Run) -> Autoencoder:
    """Train the decoder of `run.base` for the latents of its transformer. The encoder does not change.

    Raises:
        InputError: the run has no base.
    """
    latents = prepare_rollouts(run)

    def batch(step: int) -> dict[str, np.ndarray]:
        indices = shuffled_indices(step, batch=DECODER_BATCH, count=DECODER_CLIPS, seed=CLIP_SEED)
        videos = np.stack([_video(int(i)) for i in indices])
        return latents.gather(indices) | {"video": from_uint8(videos), "near": near_things(videos)}

    params = {"vae": run.part("vae")}
    return train_stage(run, "decoder", DECODER_LOOP, params, loss=decoder_loss, batches=batch).trained["vae"]


def decoder_loss(
    params: dict[str, Autoencoder], _: None, batch: dict[str, Array], key: Key[Array, ""]
) -> tuple[Float32[Array, ""], Metrics]:
    """Squared and absolute error of the decoded clip, which weigh more near things. A `Loss` of the training loop.

    A clip's latents are the encoder's or, as often, the transformer's, with normal noise of a random deviation.
    """
    pick_key, level_key, noise_key = jax.random.split(key, 3)
    mean, made = (batch[name].astype(jnp.float32) for name in ("mean", "made"))
    shape = (len(mean), 1, 1, 1, 1)
    level = LATENT_NOISE * jax.random.uniform(level_key, shape)
    z = jnp.where(jax.random.bernoulli(pick_key, 0.5, shape), mean, made)
    z = z + level * jax.random.normal(noise_key, mean.shape)
    error = params["vae"].decode(z).astype(jnp.float32) - batch["video"]
    weights = 1 + NEAR_WEIGHT * batch["near"].astype(jnp.float32)[..., None]
    weights = weights / weights.mean()
    mse, l1 = (weights * jnp.square(error)).mean(), (weights * jnp.abs(error)).mean()
    psnr = 10 * jnp.log10(4 / jnp.square(error).mean((1, 2, 3, 4))).mean()
    return mse + L1_WEIGHT * l1, {"mse": mse, "l1": l1, "psnr": psnr}


def prepare_rollouts(run: Run) -> LatentCache:
    """The encoder's latents of clips, `mean`, and what the transformer makes of them, `made`."""
    vae, encoder, transformer = map(run.part, ("vae", "text_encoder", "transformer"))
    tokenizer, scheduler = make_tokenizer(run), DDIMScheduler(SCHEDULER)
    encode = jax.jit(lambda vae, video: vae.encode(video)[0])

    @jax.jit
    def step(transformer: Any, context: Any, plan: Any, i: Any, x: Any) -> Any:
        return scheduler.step(plan, i, guided_velocity(transformer, context, x, plan.timesteps[i]), x)[0]

    def compute(indices: range) -> dict[str, np.ndarray]:
        mean = np.asarray(encode(vae, from_uint8(np.stack([_video(i) for i in indices]))))
        prompts = [_prompt(i) for i in indices]
        context = encoder(np.concatenate([tokenizer([""] * len(prompts)), tokenizer(prompts)]))
        rng = np.random.default_rng([CLIP_SEED, indices.start])
        start = int(rng.integers(*ROLLOUT_STARTS))
        plan = jax.tree.map(jnp.asarray, scheduler.plan(ROLLOUT_STEPS))
        noise = jnp.asarray(rng.standard_normal(mean.shape), jnp.float32)
        x = scheduler.add_noise(jnp.asarray(mean), noise, plan.timesteps[start])
        for i in range(start, ROLLOUT_STEPS):
            x = step(transformer, context, plan, i, x)
        crowded = np.array([_is_crowded(i) for i in indices])[:, None, None, None, None]
        made = np.where(crowded, mean, x)
        return {"mean": mean.astype(np.float16), "made": made.astype(np.float16)}

    meta = {"seed": CLIP_SEED, "model": [sha256_of(part) for part in (vae, encoder, transformer)]}
    return prepare(run.folder / "rollouts", DECODER_CLIPS, compute, shard_size=SHARD, meta=meta)


def near_things(videos: Int[np.ndarray, "B F H W 3"]) -> Float[np.ndarray, "B F H W"]:
    """1 within `NEAR` pixels of a thing, 0 elsewhere: of clips without noise, whose corner pixel is background."""
    near = (videos != videos[:, :, :1, :1]).any(-1)
    for axis in (2, 3):
        padding = [(NEAR, NEAR) if a == axis else (0, 0) for a in range(near.ndim)]
        wide = np.pad(near, padding)
        near = np.stack([wide.take(range(i, i + near.shape[axis]), axis) for i in range(2 * NEAR + 1)]).any(0)
    return near.astype(np.float16)


def export_decoder(run: Run) -> None:
    """Write RUN/checkpoint-decoder, the base with the trained decoder, and plot the loss."""
    vae = jax.device_get(train_decoder(run))
    plot_metrics([run.folder / "decoder" / METRICS_FILE], ("mse", "l1"), run.folder / "training-decoder.png")
    modules = {"text_encoder": run.part("text_encoder"), "transformer": run.part("transformer"), "vae": vae}
    write_checkpoint(run, run.folder / "checkpoint-decoder", TRANSFORMER, modules, run.steps_before())


def _is_crowded(index: int) -> bool:
    return index % CROWDED_EVERY == CROWDED_EVERY - 1


def _video(index: int) -> Int[np.ndarray, "F H W 3"]:
    if _is_crowded(index):
        return world.crowded_clip(CLIP_SEED, index, FRAMES, SIZE)
    return _clip(index).video


def _prompt(index: int) -> str:
    return "" if _is_crowded(index) else _clip(index).prompt


_clip = partial(world.sample_clip, CLIP_SEED, split="train", frames=FRAMES, size=SIZE, two_objects=TWO_OBJECTS)
