"""What steers the denoiser, beside the latents and the timestep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.runtime.global_arrays import fetch

VIDEO_FEATURE = "video_latents"
"""The encoded clip that the loop starts from, among the results of the visual stages."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Conditioning:
    """What steers the denoiser: arrays with one row per video.

    text: features of the prompts, by name.
    negative_text: the same of the negative prompts; None runs without guidance.
    pictures: features of given pictures, by name; the same with and without the prompt.
    video: latents [B, T, h, w, C] of a given clip, scaled, with the extra latent frames, from which the loop starts.
    """

    text: Features
    negative_text: Features | None = None
    pictures: Features = field(default_factory=dict)
    video: Float[Any, "B T h w C"] | None = None

    @property
    def batch(self) -> int:
        """How many videos."""
        return len(next(iter(self.text.values())))

    @property
    def guided(self) -> bool:
        """Whether the denoiser sees each video twice, with the negative prompt and with the prompt."""
        return self.negative_text is not None

    def on_host(self) -> Conditioning:
        """The same as float32 NumPy arrays, as stage files hold them: one program for both ways."""
        return jax.tree.map(lambda x: fetch(x).astype(np.float32), self)
