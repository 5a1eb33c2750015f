"""Predictions of a checkpoint's transformer for a clip, noised to one timestep, with a given prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from cogvideox_flax.checkpoint import load_text_encoder, load_transformer, load_vae, read_manifest
from cogvideox_flax.schedulers import DDIMScheduler

BATCH = 32

Latents = Float[np.ndarray, "N T h w C"]


class Denoiser:
    """The parts of a checkpoint, in float32.

    noise: added to clips; the noise of clip n is the same in every call.
    """

    def __init__(self, model: Path):
        manifest = read_manifest(model)
        self._vae, self._encoder, self._transformer = (
            load(model, dtype="float32") for load in (load_vae, load_text_encoder, load_transformer)
        )
        self._tokenizer = manifest.model.make_tokenizer(model)
        self.scheduler = DDIMScheduler(manifest.configs["scheduler"])
        scale = manifest.configs["vae"].scaling_factor
        self._encode = jax.jit(lambda vae, video: scale * vae.encode(video)[0])

        def predict(encoder: Any, transformer: Any, z: Any, ids: Any, t: Any, noise: Any) -> Any:
            t = jnp.full(z.shape[0], t)
            return transformer(self.scheduler.add_noise(z, noise, t), encoder(ids), t)

        self._predict = jax.jit(predict)

    def latents(self, videos: Sequence[UInt8[np.ndarray, "F H W 3"]]) -> Latents:
        """Scaled latents, the transformer's input."""
        parts = (np.stack(videos[i : i + BATCH]).astype(np.float32) / 127.5 - 1 for i in range(0, len(videos), BATCH))
        return np.concatenate([self._encode(self._vae, part) for part in parts])

    def noise(self, latents: Latents) -> Latents:
        """Standard normal."""
        return np.asarray(jax.random.normal(jax.random.key(0), latents.shape))

    def velocity(self, latents: Latents, prompts: Sequence[str], t: int) -> Latents:
        """The transformer's prediction: v of each clip with its prompt, without guidance."""
        ids, noise = self._tokenizer(list(prompts)), self.noise(latents)
        places = (slice(i, i + BATCH) for i in range(0, len(latents), BATCH))
        return np.concatenate(
            [self._predict(self._encoder, self._transformer, latents[p], ids[p], t, noise[p]) for p in places]
        )

    def true_velocity(self, latents: Latents, t: int) -> Latents:
        """The exact v of the clip and its noise."""
        z, noise = jnp.asarray(latents), jnp.asarray(self.noise(latents))
        return np.asarray(self.scheduler.velocity(z, noise, jnp.full(len(z), t)))
