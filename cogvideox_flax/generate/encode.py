"""Encoding: prompts to features, images and clips to latents; and `Conditioning`, which is all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, UInt8

from cogvideox_flax.models.codec import LatentStatistics
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.runtime.compile import Program
from cogvideox_flax.runtime.global_arrays import fetch

VIDEO_FEATURE = "video_latents"
"""The encoded clip that the loop starts from, among the visual features."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Conditioning:
    """What steers the denoiser: arrays with one row per video.

    text: features of the prompts, by name.
    negative_text: the same of the negative prompts; None runs without guidance.
    visual: features of images, clips and masks, by name; both halves of guidance see them.
    video: latents [B, T, h, w, C] of a given clip, scaled, with the extra latent frames, from which the loop starts.
    """

    text: Features
    negative_text: Features | None = None
    visual: Features = field(default_factory=dict)
    video: Float[Any, "B T h w C"] | None = None

    def __repr__(self) -> str:
        parts = {**self.text, **self.visual} | ({} if self.video is None else {"video": self.video})
        arrays = ", ".join(f"{name} {list(getattr(value, 'shape', ()))}" for name, value in parts.items())
        return f"<Conditioning {'with' if self.guided else 'without'} guidance: {arrays}>"

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


NEGATIVE = "negative_"
"""Before the name of a text feature: of the negative prompt."""


def text_features(features: Mapping[str, Any]) -> dict[str, Features]:
    """The fields of a `Conditioning` that text features are, by their names.

    features: such as `prompt_embeds`, and `negative_prompt_embeds` where there are any.
    """
    arrays = {name: np.asarray(x, np.float32) for name, x in features.items()}
    text = {name: x for name, x in arrays.items() if not name.startswith(NEGATIVE)}
    others = {name.removeprefix(NEGATIVE): x for name, x in arrays.items() if name.startswith(NEGATIVE)}
    return {"text": text} | ({"negative_text": others} if others else {})


@dataclass(frozen=True)
class EncodeText(Program):
    """Tokens to features.

    component: its name in the checkpoint.
    encode: of the model's `TextInput`.
    """

    component: str
    encode: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.component.replace("_", " ")

    def __call__(self, model: Any, tokens: Any) -> Features:
        return self.encode(model, tokens)


@dataclass(frozen=True)
class EncodeVisual(Program):
    """Frames of images or clips to normalized latents, and whether all of it is finite.

    input: the field of the request.
    encode, statistics: of the model's `VisualInput`.
    extra_latents: copies of the first latent frame that are put before it.
    """

    input: str
    encode: Callable[..., Any]
    statistics: LatentStatistics
    extra_latents: int
    tiled: bool

    fast_compile = True

    @property
    def name(self) -> str:
        return f"{self.input.replace('_', ' ')} encoder"

    def __call__(
        self, model: Any, frames: UInt8[Array, "B F H W C"], noise: Float32[Array, "B T h w C"]
    ) -> tuple[Float32[Array, "B T h w C"], Bool[Array, ""]]:
        """frames, noise: as the input's `encode` takes them, but for the range."""
        video = frames.astype(jnp.float32) / 127.5 - 1
        latents = self.encode(model, video, noise, tiled=self.tiled, statistics=self.statistics)
        # the extra frames are copies of the first, as in fine-tuning
        latents = jnp.concatenate([*[latents[:, :1]] * self.extra_latents, latents], 1)
        return latents, jnp.isfinite(latents).all()
