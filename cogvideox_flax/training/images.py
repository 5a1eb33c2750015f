"""The condition of image-to-video training: the first frame of each clip, noised, encoded, and dropped at random.

Source: CogVideo's sat/ (`add_noise_to_first_frame`, `noised_image_dropout`), whose noise is drawn for each clip anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Key, UInt8

from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.model import VisualInput
from cogvideox_flax.models.sizes import Size

FRAME = "first_frame"
"""The name of the clips' first frames among the prepared arrays."""


def encoded_each_step(visual: VisualInput) -> bool:
    """Whether a feature of the image has noise, so that each step encodes the image anew; else it is prepared once."""
    return visual.noise is not None


def image_arrays(visual: Sequence[VisualInput], size: Size) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Name -> shape and dtype of what is prepared of the first frame of a clip."""
    _, _, *latent = size.latent_shape(1)
    arrays: dict[str, tuple[tuple[int, ...], Any]] = {
        each.feature: (each.shape or (1, *latent), np.float32) for each in visual if not encoded_each_step(each)
    }
    return arrays | ({FRAME: ((size.height, size.width, 3), np.uint8)} if len(arrays) < len(visual) else {})


def noised_frames(
    frames: UInt8[Array, "B H W 3"], noise: tuple[float, float] | None, key: Key[Array, ""]
) -> Float32[Array, "B 1 H W 3"]:
    """Images in [-1, 1] with normal noise in their pixels.

    noise: mean and standard deviation of the logarithm of the noise's own standard deviation, one for each image.
    """
    pixels = frames[:, None].astype(jnp.float32) / 127.5 - 1
    if noise is None:
        return pixels
    level_key, noise_key = jax.random.split(key)
    mean, std = noise
    sigma = jnp.exp(mean + std * jax.random.normal(level_key, (len(frames), 1, 1, 1, 1)))
    return pixels + sigma * jax.random.normal(noise_key, pixels.shape)


def image_features(
    visual: Sequence[VisualInput],
    batch: Mapping[str, Array],
    encoders: Mapping[str, Any],
    latent_shape: tuple[int, ...],
    noise: tuple[float, float] | None,
    dropout: float,
    key: Key[Array, ""],
) -> Features:
    """The denoiser's features of the clips' first frames; none for a model without images.

    Args:
        visual: the images that the model takes.
        batch: the first frames, and the features that were prepared.
        encoders: component -> module, of the features that are not.
        latent_shape: [B, 1, h, w, C] of the latents of an image.
        noise: as for `noised_frames`.
        dropout: share of clips whose image is dropped: zeros, and in `image_mask`.
    """
    if not visual:
        return {}
    frame_key, latent_key, drop_key = jax.random.split(key, 3)
    features = {each.feature: batch[each.feature] for each in visual if not encoded_each_step(each)}
    for each in visual:
        if encoded_each_step(each):
            frames = noised_frames(batch[FRAME], noise, frame_key)
            sample = jax.random.normal(latent_key, latent_shape)
            encoder = encoders[each.component]
            features[each.feature] = each.encode(encoder, frames, sample, tiled=False, statistics=each.statistics)
    if not dropout:
        return features
    has_image = ~jax.random.bernoulli(drop_key, dropout, latent_shape[:1])

    def drop(feature: Array) -> Array:
        return jnp.where(has_image.reshape(-1, *[1] * (feature.ndim - 1)), feature, 0)

    return {name: drop(feature) for name, feature in features.items()} | {"image_mask": has_image.astype(jnp.float32)}
