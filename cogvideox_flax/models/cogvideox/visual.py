"""Images and clips as inputs: which a checkpoint takes, how they are encoded, and where the transformer gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.codec import LatentStatistics, encode, sample
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.model import VisualInput

INPUTS = {
    "text": ("a text-to-video model", ("video",)),
    "image": ("an image-to-video model", ("image", "last_image")),
    "control": ("a control model", ("control_video",)),
    "inpaint": ("an inpainting model", ("image", "last_image", "video", "mask_video")),
}
"""What a transformer takes -> its name, and the inputs that go with it."""

INPAINT_NOISE = 0.0563
"""The standard deviation of the noise in the masked video of models that were trained with some, as in VideoX-Fun."""


def shrink_mask(mask: Float32[Array, "B F H W C"], latents: tuple[int, int, int]) -> Float32[Array, "B T h w C"]:
    """A mask in the size (T, h, w) of latents, linear: the first frame alone, then the others.

    Source: VideoX-Fun `resize_mask`, which is F.interpolate without antialiasing.
    """
    frames, height, width = latents

    def resize(x: Float32[Array, "B F H W C"], count: int) -> Float32[Array, "B T h w C"]:
        shape = (x.shape[0], count, height, width, x.shape[-1])
        return jax.image.resize(x, shape, "linear", antialias=False)

    first = resize(mask[:, :1], 1)
    return jnp.concatenate([first, resize(mask[:, 1:], frames - 1)], 1) if frames > 1 else first


def masked_latents(
    vae: Autoencoder,
    video: Float32[Array, "B F H W 4"],
    noise: Float32[Array, ...],
    *,
    tiled: bool,
    statistics: LatentStatistics,
) -> Float32[Array, "B T h w C+1"]:
    """The kept part of a video: 1 - mask in the size of the latents, then the mean of the latents; both normalized.

    Args:
        video: pixels in [-1, 1], then the mask: above 0 is made anew, which the VAE sees as black.
        noise: not used.

    Returns:
        Zeros for a video that is made anew all over.
    """
    mask = video[..., 3:] > 0
    mean = encode(vae, jnp.where(mask, -1, video[..., :3]), tiled=tiled)[0].astype(jnp.float32)
    kept = _with_mask(mask, statistics.normalize(mean), statistics)
    return jnp.where(mask.all((1, 2, 3, 4), keepdims=True), 0, kept)


def noisy_masked_latents(
    vae: Autoencoder,
    video: Float32[Array, "B F H W 4"],
    noise: Float32[Array, "B F H W 3"],
    *,
    tiled: bool,
    statistics: LatentStatistics,
) -> Float32[Array, "B T h w C+1"]:
    """`masked_latents`, with some noise in all pixels that are not black.

    Source: VideoX-Fun `add_noise_to_reference_video`.
    """
    pixels, mask = video[..., :3], video[..., 3:]
    pixels = pixels + jnp.where(pixels == -1, 0, INPAINT_NOISE * noise)
    return masked_latents(vae, jnp.concatenate([pixels, mask], -1), noise, tiled=tiled, statistics=statistics)


def masked_samples(
    vae: Autoencoder,
    video: Float32[Array, "B F H W 3"],
    mask: Bool[Array, "B F H W 1"],
    noise: Float32[Array, "B T h w C"],
    *,
    statistics: LatentStatistics,
) -> Float32[Array, "B T h w C+1"]:
    """The kept part of a video in training, where latents are drawn with `noise`: as `masked_latents`, but a video that
    is made anew all over is the latents of a black one, with a mask of 0.

    Source: VideoX-Fun `scripts/cogvideox_fun/train_lora.py`.
    """
    latents = sample(vae, jnp.where(mask, -1, video), noise, tiled=False, statistics=statistics)
    return _with_mask(mask, latents, statistics)


def _with_mask(
    mask: Bool[Array, "B F H W 1"], latents: Float32[Array, "B T h w C"], statistics: LatentStatistics
) -> Float32[Array, "B T h w C+1"]:
    """1 - mask in the size of the latents, normalized as they are, and the latents."""
    _, frames, rows, columns, _ = latents.shape
    kept = shrink_mask(1 - mask.astype(jnp.float32), (frames, rows, columns))
    return jnp.concatenate([statistics.normalize(kept), latents], -1)


def visual_inputs(
    transformer: TransformerConfig, vae: VAEConfig, statistics: LatentStatistics
) -> tuple[VisualInput, ...]:
    """The images and clips that a checkpoint takes."""
    kind = transformer.takes
    of_clip: dict[str, Any] = {"component": "vae", "encode": sample, "statistics": statistics}
    of_image = dict(of_clip)
    if vae.invert_scale_latents:  # of the image alone
        of_image["statistics"] = LatentStatistics(1 / vae.scaling_factor)
    if kind == "image":
        return (
            VisualInput(input="image", feature="image_latents", required=True, **of_image),
            VisualInput(input="last_image", feature="last_image_latents", **of_image),
        )
    if kind == "control":
        return (VisualInput(input="control_video", feature="control_latents", required=True, noise=None, **of_clip),)
    if kind == "inpaint":
        noisy = transformer.add_noise_in_inpaint_model
        encoder, noise = (noisy_masked_latents, "frames") if noisy else (masked_latents, None)
        masked = of_clip | {"feature": "inpaint_latents", "encode": encoder, "noise": noise, "mask_channels": 1}
        masked["encode_masked"] = masked_samples
        return (
            VisualInput(input="image", **masked),
            VisualInput(input="mask_video", **masked),
            VisualInput(input="video", feature="video_latents", **of_clip),
        )
    return (VisualInput(input="video", feature="video_latents", **of_clip),)


def check_masked(given: Sequence[str]) -> None:
    """Refuse inputs of an inpainting model that do not go together."""
    if "image" in given and "video" in given:
        raise InputError("image and video are both given; give --image to start from an image, or --video for a clip")
    for name, needed in (("mask_video", "video"), ("last_image", "image")):
        if name in given and needed not in given:
            raise InputError(
                f"{name} goes with {needed}; give --{needed} ({needed}=) too, or leave {name.replace('_', '-')} out"
            )


def with_visual(
    latents: Float32[Array, "B T h w C"], features: Features, config: TransformerConfig
) -> Float32[Array, "B T h w D"]:
    """The noisy latents, and beside them those of a control clip; or of the first (and last) frame, zero elsewhere; or
    the mask and the masked video, zero where there are none.

    Source: diffusers `CogVideoXImageToVideoPipeline`, `CogVideoXFunControlPipeline`; VideoX-Fun
    `CogVideoXFunInpaintPipeline`. 1.5 has an extra latent frame at the start, which is the image's place too.
    """
    if config.takes == "inpaint":
        kept = features.get("inpaint_latents")
        if kept is None:
            kept = jnp.zeros((*latents.shape[:-1], config.in_channels - config.out_channels))
        return jnp.concatenate([latents, kept.astype(latents.dtype)], -1)
    if (control := features.get("control_latents")) is not None:
        return jnp.concatenate([latents, control.astype(latents.dtype)], -1)
    if (image := features.get("image_latents")) is None:
        return latents
    beside = jnp.zeros_like(latents).at[:, :1].set(image.astype(latents.dtype))
    if (last := features.get("last_image_latents")) is not None:
        beside = beside.at[:, -1:].set(last.astype(latents.dtype))
    return jnp.concatenate([latents, beside], -1)
