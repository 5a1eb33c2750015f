"""Pictures and clips as inputs: which a checkpoint takes, how they are encoded, and where the transformer gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.family import Configs, VisualStage
from cogvideox_flax.models.hunyuan_video15.autoencoder import Autoencoder
from cogvideox_flax.models.hunyuan_video15.siglip import VisionEncoder
from cogvideox_flax.models.posterior import encode, sample


def mean_latents(
    vae: Autoencoder, picture: Float[Array, "B 1 H W 3"], noise: Float32[Array, "B 1 h w C"], *, tiled: bool
) -> Float32[Array, "B 1 h w C"]:
    """The mode of the posterior, not scaled. noise: not used."""
    return encode(vae, picture, tiled=tiled)[0].astype(jnp.float32)


def image_features(
    encoder: VisionEncoder, picture: Float[Array, "B 1 H W 3"], noise: Float32[Array, ...], *, tiled: bool
) -> Float32[Array, "B I E"]:
    """SigLIP's features of a picture in [-1, 1]. noise, tiled: not used."""
    return encoder(picture[:, 0]).astype(jnp.float32)


def stages(configs: Configs) -> tuple[VisualStage, ...]:
    """A text-to-video checkpoint can start from a clip; image-to-video ones take the first frame, in two forms."""
    scale = configs["vae"].scaling_factor
    if "image_encoder" not in configs:
        return (VisualStage(input="video", feature="video_latents", component="vae", encode=sample, scale=scale),)
    vision = configs["image_encoder"]
    of_image: dict[str, Any] = {"input": "image", "required": True, "noise": None}
    return (
        VisualStage(feature="image_latents", component="vae", encode=mean_latents, scale=scale, **of_image),
        VisualStage(
            feature="image_embeds",
            component="image_encoder",
            encode=image_features,
            scale=1.0,
            frame_size=(vision.image_size, vision.image_size),
            shape=(vision.tokens, vision.width),
            **of_image,
        ),
    )


def check_inputs(configs: Configs, given: Sequence[str]) -> None:
    """Refuse inputs that a checkpoint does not take, or whose lack it does not survive.

    Raises:
        InputError: with what it takes.
    """
    is_image = "image_encoder" in configs
    kind, takes = ("an image-to-video", "image") if is_image else ("a text-to-video", "video")
    if is_image and "image" not in given:
        raise InputError(f"this is {kind} model; give it --image (image=)")
    if unknown := [name for name in given if name != takes]:
        raise InputError(f"this is {kind} model, which takes no {' and no '.join(unknown)}; it takes {takes}")


def with_condition(latents: Float32[Array, "B T h w C"], features: Features) -> Float32[Array, "B T h w 2C+1"]:
    """The noisy latents, those of the first frame (zero elsewhere), and a mask that is 1 at the first frame.

    Text-to-video: the condition and the mask are zero. Source: diffusers `prepare_cond_latents_and_mask`.
    """
    condition, mask = jnp.zeros_like(latents), jnp.zeros_like(latents[..., :1])
    if (image := features.get("image_latents")) is not None:
        condition = condition.at[:, :1].set(image.astype(latents.dtype))
        mask = mask.at[:, :1].set(1)
    return jnp.concatenate([latents, condition, mask], -1)
