"""What a model sees beside the noisy latents in training: the first frame of the clip, a control clip, or the clip with
a part masked; nothing in text-to-video.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Key, UInt8

from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.model import VideoModel, VisualInput
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.training.masks import random_masks
from cogvideox_flax.training.objectives import sample_latents

FRAME, FRAMES = "first_frame", "frames"
"""Names of the clips' pixels among the prepared arrays."""

CONTROL_MEAN, CONTROL_STD = "control_mean", "control_std"
"""Names of the posterior of the control clips' latents among the prepared arrays."""

Noise = tuple[float, float]
"""Mean and standard deviation of the logarithm of sigma, the standard deviation of noise in pixels."""


@dataclass(frozen=True)
class Condition:
    """The condition of text-to-video: nothing. The others are its subclasses."""

    @property
    def record(self) -> dict[str, Any] | None:
        """What decides it, as JSON values."""
        return None

    @property
    def takes_noise(self) -> bool:
        """Whether noise is added to its pixels."""
        return False

    @property
    def encoders(self) -> set[str]:
        """The components that encode it in each step."""
        return set()

    def arrays(self, size: Size) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Name -> shape and dtype of what is prepared of a clip."""
        return {}

    def features(
        self, batch: Mapping[str, Array], encoders: Mapping[str, Any], shape: tuple[int, ...], key: Key[Array, ""]
    ) -> Features:
        """The denoiser's features.

        Args:
            batch: what is prepared, `arrays` among it.
            encoders: component -> module.
            shape: [B, T, h, w, C] of the clips' latents, with the extra ones.
        """
        return {}


@dataclass(frozen=True)
class FirstFrame(Condition):
    """The first frame, noised, encoded, and dropped at random.

    Source: CogVideo's sat/ (`add_noise_to_first_frame`, `noised_image_dropout`), whose noise is drawn for each clip.

    visual: the features of it that the model takes. One that has noise is encoded in each step, else it is prepared.
    noise: None: there is none.
    dropout: share of clips without it: zeros, and in `image_mask`.
    """

    visual: Sequence[VisualInput]
    noise: Noise | None
    dropout: float

    @property
    def record(self) -> dict[str, Any]:
        return {"noise": self.noise, "dropout": self.dropout}

    @property
    def takes_noise(self) -> bool:
        return any(visual.noise is not None for visual in self.visual)

    @property
    def encoders(self) -> set[str]:
        return {visual.component for visual in self.visual if visual.noise is not None}

    @property
    def prepared(self) -> list[VisualInput]:
        """The features that are encoded once."""
        return [visual for visual in self.visual if visual.noise is None]

    def arrays(self, size: Size) -> dict[str, tuple[tuple[int, ...], Any]]:
        _, _, *latent = size.latent_shape(1)
        arrays: dict[str, tuple[tuple[int, ...], Any]] = {
            visual.feature: (visual.shape or (1, *latent), np.float32) for visual in self.prepared
        }
        return arrays | ({FRAME: ((size.height, size.width, 3), np.uint8)} if self.encoders else {})

    def features(
        self, batch: Mapping[str, Array], encoders: Mapping[str, Any], shape: tuple[int, ...], key: Key[Array, ""]
    ) -> Features:
        frame_key, latent_key, drop_key = jax.random.split(key, 3)
        features = {visual.feature: batch[visual.feature] for visual in self.prepared}
        for visual in self.visual:
            if visual.noise is not None:
                frames = noised(batch[FRAME][:, None], self.noise, frame_key)
                sample = jax.random.normal(latent_key, (shape[0], 1, *shape[2:]))
                encoder, statistics = encoders[visual.component], visual.statistics
                features[visual.feature] = visual.encode(encoder, frames, sample, tiled=False, statistics=statistics)
        if not self.dropout:
            return features
        has_image = ~jax.random.bernoulli(drop_key, self.dropout, shape[:1])

        def drop(feature: Array) -> Array:
            return jnp.where(has_image.reshape(-1, *[1] * (feature.ndim - 1)), feature, 0)

        kept = {name: drop(feature) for name, feature in features.items()}
        return kept | {"image_mask": has_image.astype(jnp.float32)}


@dataclass(frozen=True)
class ControlClip(Condition):
    """A control clip, prepared as the clip is: each step draws latents from their posterior.

    Source: VideoX-Fun `scripts/cogvideox_fun/train_control.py`.
    """

    visual: VisualInput

    def arrays(self, size: Size) -> dict[str, tuple[tuple[int, ...], Any]]:
        return dict.fromkeys((CONTROL_MEAN, CONTROL_STD), (size.video_latent_shape(1)[1:], np.float16))

    def features(
        self, batch: Mapping[str, Array], encoders: Mapping[str, Any], shape: tuple[int, ...], key: Key[Array, ""]
    ) -> Features:
        mean, std = batch[CONTROL_MEAN], batch[CONTROL_STD]
        return {self.visual.feature: sample_latents(mean, std, key, self.visual.statistics, shape[1] - mean.shape[1])}


@dataclass(frozen=True)
class MaskedClip(Condition):
    """The clip with a random part masked, encoded in each step, with the mask.

    Source: VideoX-Fun `scripts/cogvideox_fun/train_lora.py`.

    noise: in what is not masked nor black; None: there is none.
    dropout: share of clips with zeros in place of the condition, of those that are masked all over.
    """

    visual: VisualInput
    noise: Noise | None
    dropout: float

    @property
    def record(self) -> dict[str, Any]:
        return {"noise": self.noise, "mask dropout": self.dropout}

    @property
    def takes_noise(self) -> bool:
        return self.visual.noise is not None

    @property
    def encoders(self) -> set[str]:
        return {self.visual.component}

    def arrays(self, size: Size) -> dict[str, tuple[tuple[int, ...], Any]]:
        return {FRAMES: ((size.num_frames, size.height, size.width, 3), np.uint8)}

    def features(
        self, batch: Mapping[str, Array], encoders: Mapping[str, Any], shape: tuple[int, ...], key: Key[Array, ""]
    ) -> Features:
        mask_key, frame_key, latent_key, drop_key = jax.random.split(key, 4)
        frames, visual = batch[FRAMES], self.visual
        mask = random_masks(mask_key, *frames.shape[:4])
        video = jnp.where(frames == 0, -1, noised(frames, self.noise, frame_key))
        assert visual.encode_masked is not None
        latents = visual.encode_masked(
            encoders[visual.component],
            video,
            mask[..., None],
            jax.random.normal(latent_key, shape),
            statistics=visual.statistics,
        )
        is_dropped = mask.all((1, 2, 3)) & jax.random.bernoulli(drop_key, self.dropout, shape[:1])
        return {visual.feature: jnp.where(is_dropped.reshape(-1, 1, 1, 1, 1), 0, latents)}


def condition_of(model: VideoModel, noise: Noise | None, dropout: float | None) -> Condition:
    """The condition of a model, as its releases were trained.

    Args:
        noise: of the pixels; None: the release's.
        dropout: of the image; None: the release's.
    """
    recipe = model.recipe
    noise = recipe.image_noise if noise is None else noise
    images = [visual for visual in model.visual if visual.input == "image"]
    controls = [visual for visual in model.visual if visual.input == "control_video"]
    if controls:
        return ControlClip(controls[0])
    if images and images[0].mask_channels:
        return MaskedClip(images[0], noise if images[0].noise else None, recipe.mask_dropout)
    if images:
        return FirstFrame(tuple(images), noise, recipe.image_dropout if dropout is None else dropout)
    return Condition()


def noised(frames: UInt8[Array, "B F H W 3"], noise: Noise | None, key: Key[Array, ""]) -> Float32[Array, "B F H W 3"]:
    """Pixels in [-1, 1] with normal noise, whose standard deviation is drawn for each clip."""
    pixels = frames.astype(jnp.float32) / 127.5 - 1
    if noise is None:
        return pixels
    level_key, noise_key = jax.random.split(key)
    mean, std = noise
    sigma = jnp.exp(mean + std * jax.random.normal(level_key, (len(frames), 1, 1, 1, 1)))
    return pixels + sigma * jax.random.normal(noise_key, pixels.shape)
