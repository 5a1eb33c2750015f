"""Clips longer than the model's: denoised in overlapping windows of time, so that memory does not grow with the clip.

Source: MultiDiffusion (arXiv 2302.08113), along time, with the noise of FreeNoise (arXiv 2310.15169).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from cogvideox_flax.generate.predict.plain import At, Kept, Plain
from cogvideox_flax.generate.windows import Windows
from cogvideox_flax.models.denoiser import Denoiser, Features


@dataclass(frozen=True)
class Windowed:
    """The weighted mean of the predictions in windows, which are made one after the other.

    Features with a row per latent frame, such as those of a control clip, are cut alike.
    """

    inner: Plain
    windows: Windows

    def __call__(
        self, denoiser: Denoiser, latents: Float32[Array, "B T h w C"], features: Features, at: At, kept: Kept
    ) -> tuple[Float32[Array, "B T h w C"], Kept]:
        windows = self.windows

        def cut(x: Array, start: Int[Array, ""]) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, windows.length, 1)

        def add(total: Array, window: tuple[Array, Array]) -> tuple[Array, None]:
            start, weight = window
            own = {n: cut(x, start) if x.ndim == 5 and x.shape[1] == windows.frames else x for n, x in features.items()}
            prediction, _ = self.inner(denoiser, cut(latents, start), own, at, None)
            summed = cut(total, start) + weight[:, None, None, None] * prediction
            return jax.lax.dynamic_update_slice_in_dim(total, summed, start, 1), None

        each = jnp.asarray(windows.starts, jnp.int32), jnp.asarray(windows.weights)
        return jax.lax.scan(add, jnp.zeros_like(latents), each)[0], kept

    def noise(self, key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        """That of the first window, whose frames come again in the others: `Windows.noise_order`."""
        first = self.inner.noise(key, (shape[0], self.windows.length, *shape[2:]))
        return first[:, np.asarray(self.windows.noise_order)]
