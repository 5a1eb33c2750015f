"""The programs that encode: prompts to features, pictures and clips to latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt8

from cogvideox_flax.generate.decoding import Function
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.runtime.compile import Program


@dataclass(frozen=True)
class EncodeText(Program):
    """Tokens to features.

    component: its name in the checkpoint.
    encode: of the family's `TextStage`.
    """

    component: str
    encode: Function

    @property
    def name(self) -> str:
        return self.component.replace("_", " ")

    def __call__(self, model: Any, tokens: Any) -> Features:
        return self.encode(model, tokens)


@dataclass(frozen=True)
class EncodeVisual(Program):
    """Frames of pictures or clips to scaled latents, and whether all of it is finite.

    input: the field of the request.
    encode: of the family's `VisualStage`.
    extra_latents: copies of the first latent frame that are put before it.
    """

    input: str
    encode: Function
    scale: float
    extra_latents: int
    tiled: bool

    fast_compile = True

    @property
    def name(self) -> str:
        return f"{self.input.replace('_', ' ')} encoder"

    def __call__(
        self, model: Any, frames: UInt8[Array, "B F H W C"], noise: Float32[Array, "B T h w C"]
    ) -> tuple[Float32[Array, "B T h w C"], Bool[Array, ""]]:
        """frames, noise: as the stage's `encode` takes them, but for the range."""
        latents = self.scale * self.encode(model, frames.astype(jnp.float32) / 127.5 - 1, noise, tiled=self.tiled)
        # the extra frames are copies of the first, as in fine-tuning
        latents = jnp.concatenate([*[latents[:, :1]] * self.extra_latents, latents], 1)
        return latents, jnp.isfinite(latents).all()
