"""Images and clips as inputs: which a checkpoint takes, how they are encoded, and where the transformer gets them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from cogvideox_flax.models.codec import LatentStatistics, encode, sample
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.hunyuan_video15.autoencoder import Autoencoder
from cogvideox_flax.models.hunyuan_video15.siglip import VisionConfig, VisionEncoder
from cogvideox_flax.models.model import VisualInput


def mean_latents(
    vae: Autoencoder,
    image: Float[Array, "B 1 H W 3"],
    noise: Float32[Array, "B 1 h w C"],
    *,
    tiled: bool,
    statistics: LatentStatistics,
) -> Float32[Array, "B 1 h w C"]:
    """The mode of the posterior, normalized. noise: not used."""
    return statistics.normalize(encode(vae, image, tiled=tiled)[0].astype(jnp.float32))


def image_features(
    encoder: VisionEncoder,
    image: Float[Array, "B 1 H W 3"],
    noise: Float32[Array, ...],
    *,
    tiled: bool,
    statistics: LatentStatistics,
) -> Float32[Array, "B I E"]:
    """SigLIP's features of an image in [-1, 1]. Other arguments: not used."""
    return encoder(image[:, 0]).astype(jnp.float32)


def visual_inputs(vision: VisionConfig | None, statistics: LatentStatistics) -> tuple[VisualInput, ...]:
    """A text-to-video checkpoint can start from a clip; image-to-video ones take the first frame, in two forms.

    vision: the image encoder's config, of image-to-video checkpoints.
    """
    of_latents: dict[str, Any] = {"component": "vae", "statistics": statistics}
    if vision is None:
        return (VisualInput(input="video", feature="video_latents", encode=sample, **of_latents),)
    of_image: dict[str, Any] = {"input": "image", "required": True, "noise": None}
    return (
        VisualInput(feature="image_latents", encode=mean_latents, **of_image, **of_latents),
        VisualInput(
            feature="image_embeds",
            component="image_encoder",
            encode=image_features,
            frame_size=(vision.image_size, vision.image_size),
            shape=(vision.tokens, vision.width),
            **of_image,
        ),
    )


def with_condition(latents: Float32[Array, "B T h w C"], features: Features) -> Float32[Array, "B T h w 2C+1"]:
    """The noisy latents, those of the first frame (zero elsewhere), and a mask that is 1 at the first frame.

    Text-to-video: the condition and the mask are zero, also of single clips, those whose `image_mask` is 0. Source:
    diffusers `prepare_cond_latents_and_mask`.
    """
    condition, mask = jnp.zeros_like(latents), jnp.zeros_like(latents[..., :1])
    if (image := features.get("image_latents")) is not None:
        condition = condition.at[:, :1].set(image.astype(latents.dtype))
        present = features.get("image_mask")
        mask = mask.at[:, :1].set(1 if present is None else present.astype(mask.dtype)[:, None, None, None, None])
    return jnp.concatenate([latents, condition, mask], -1)
