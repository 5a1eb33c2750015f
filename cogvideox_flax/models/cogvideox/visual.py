"""Pictures and clips as inputs: which a checkpoint takes, how they are encoded, and where the transformer gets them."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.tiling import Tiling
from cogvideox_flax.models.family import Configs, Features, VisualStage


def encode(
    vae: Autoencoder, video: Float[Array, "B F H W 3"], *, tiled: bool = False
) -> tuple[Float[Array, "B T h w C"], Float[Array, "B T h w C"]]:
    """Mean and logvar of a video's latents, without the scaling factor."""
    tiling = Tiling.official(vae.config) if tiled else None
    return vae.encode(video, tiling=tiling, slicing=len(video) > 1)


def sample(
    vae: Autoencoder, video: Float[Array, "B F H W 3"], noise: Float32[Array, "B T h w C"], *, tiled: bool
) -> Float32[Array, "B T h w C"]:
    """A sample of the posterior, not scaled."""
    mean, logvar = (x.astype(jnp.float32) for x in encode(vae, video, tiled=tiled))
    return mean + jnp.exp(0.5 * logvar) * noise


def stages(configs: Configs) -> tuple[VisualStage, ...]:
    """What a checkpoint takes beside prompts."""
    vae, kind = configs["vae"], configs["transformer"].takes
    of_clip = {"component": "vae", "encode": sample, "scale": vae.scaling_factor}
    # the inverted scale is the picture's alone
    of_picture = of_clip | {"scale": 1 / vae.scaling_factor if vae.invert_scale_latents else vae.scaling_factor}
    if kind == "image":
        return (
            VisualStage(input="image", feature="image_latents", required=True, **of_picture),
            VisualStage(input="last_image", feature="last_image_latents", **of_picture),
        )
    if kind == "control":
        return (VisualStage(input="control_video", feature="control_latents", required=True, sampled=False, **of_clip),)
    return (VisualStage(input="video", feature="video_latents", **of_clip),)


def check_inputs(configs: Configs, given: Sequence[str]) -> None:
    """Refuse inputs that a checkpoint does not take, or whose lack it does not survive.

    Raises:
        InputError: with what it takes.
    """
    known, takes = stages(configs), configs["transformer"].takes
    kind = {"text": "a text-to-video model", "image": "an image-to-video model", "control": "a control model"}[takes]
    if missing := [stage.input for stage in known if stage.required and stage.input not in given]:
        options = " and ".join(f"--{name.replace('_', '-')} ({name}=)" for name in missing)
        raise InputError(f"this is {kind}; give it {options}")
    names = [stage.input for stage in known]
    if unknown := [name for name in given if name not in names]:
        raise InputError(f"this is {kind}, which takes no {' and no '.join(unknown)}; it takes {', '.join(names)}")


def with_visual(latents: Float32[Array, "B T h w C"], features: Features) -> Float32[Array, "B T h w D"]:
    """The noisy latents, and beside them those of a control clip; or of the first (and last) frame, zero elsewhere.

    Source: diffusers `CogVideoXImageToVideoPipeline`, `CogVideoXFunControlPipeline`. 1.5 has an extra latent frame at
    the start, which is the picture's place too.
    """
    if (control := features.get("control_latents")) is not None:
        return jnp.concatenate([latents, control.astype(latents.dtype)], -1)
    if (image := features.get("image_latents")) is None:
        return latents
    beside = jnp.zeros_like(latents).at[:, :1].set(image.astype(latents.dtype))
    if (last := features.get("last_image_latents")) is not None:
        beside = beside.at[:, -1:].set(last.astype(latents.dtype))
    return jnp.concatenate([latents, beside], -1)
