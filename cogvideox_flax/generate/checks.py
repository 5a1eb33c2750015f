"""What a run asks for and cannot have, refused before any weights are converted or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.config import Config
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import is_finite_number, shown
from cogvideox_flax.models.cogvideox.autoencoder import Tiling
from cogvideox_flax.models.cogvideox.config import VAEConfig
from cogvideox_flax.models.cogvideox.sizes import Size, check_text_to_video
from cogvideox_flax.schedulers import Scheduler

DTYPES = ("bfloat16", "float32", "float16")


def check_prompts(
    prompt: str | Sequence[str], negative_prompt: str | Sequence[str] = ""
) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts as lists of equal length.

    Raises:
        InputError: no prompt, something that is not a string or not Unicode, or counts that do not agree.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
    if not prompts:
        raise InputError("the list of prompts is empty; give at least one prompt")
    for text in (*prompts, *negatives):
        if not isinstance(text, str):
            raise InputError(f"prompts must be strings; got {type(text).__name__}: {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the prompt {text!r} is not valid Unicode at character {e.start}; retype it") from e
    if len(negatives) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(negatives)} negative prompts; give one for all, or one each")
    return prompts, negatives


def check_sampling(guidance_scale: float, use_dynamic_cfg: bool | str, seed: int) -> None:
    """Refuse sampling options that could only give noise, or another run's noise.

    Raises:
        InputError: all faults in one message.
    """
    faults = []
    if not is_finite_number(guidance_scale):
        faults.append(
            f"guidance_scale is {shown(guidance_scale)}; expected a number (about 6 is usual, 1 is no guidance)"
        )
    if use_dynamic_cfg not in (False, True, "index"):
        faults.append(f"use_dynamic_cfg is {shown(use_dynamic_cfg)}; expected False, True or 'index'")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        faults.append(f"seed is {shown(seed)}; expected a whole number from 0 to {2**32 - 1}")
    if faults:
        raise InputError("\n".join(faults))


def check_dtype(config: Config, dtype: str, platform: str | None) -> None:
    """Refuse a dtype that a component or the devices cannot compute a run in.

    Args:
        platform: "cpu", "gpu" or "tpu"; None is JAX's default one, which is asked for only where it matters.

    Raises:
        InputError: unknown, float16 for a release that does not survive it, or float16 on TPUs.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    config.check_dtype(dtype)
    if dtype == "float16" and (platform or jax.default_backend()) == "tpu":
        raise InputError(
            "float16 is not served on TPUs, whose kernels compute in bfloat16 or float32; use one of these"
        )


def check_model(manifest: checkpoint.Manifest, where: object, dtype: str, mesh: Mesh | None) -> None:
    """Refuse a model that its configs alone rule out, before any of its weights are converted or loaded.

    Raises:
        InputError: not a complete text-to-video model, a dtype that it does not survive or its devices (those of the
            mesh, or JAX's own) do not serve, or a mesh that its weights do not divide over.
    """
    family, configs = manifest.model_family, manifest.configs
    if missing := [name for name in family.config_types if name not in configs]:
        raise InputError(f"{where} has no {' and no '.join(missing)} config; a run needs the whole checkpoint")
    check_dtype(configs[family.denoiser], dtype, None if mesh is None else mesh.devices.flat[0].platform)
    check_text_to_video(configs["transformer"], configs["vae"], where)
    try:
        family.check(configs)
    except InputError as e:
        raise InputError(f"{where} holds parts that do not belong together: {e}") from e
    if mesh is None:
        return
    for name in family.components:
        if (heads := getattr(configs[name], "heads", None)) is not None:
            sharding.check_heads(mesh, heads, name.replace("_", " "))
    for name, component in family.components.items():
        for parameter, leaf in checkpoint.parameters(manifest.abstract(name)).items():
            sharding.parameter_sharding(mesh, component.sharding, parameter, leaf.shape)


def check_tiling(config: VAEConfig) -> None:
    """Refuse the official tiling for a VAE whose official tiles do not add up.

    Raises:
        InputError: that is so; no released VAE is like that.
    """
    Tiling.official(config).check(config.spatial_compression)


def check_arrays(
    shape: tuple[int, ...],
    size: Size,
    steps: int,
    scheduler: Scheduler,
    latents: Float[Any, "B T h w C"] | None,
    noise: Float[Any, "N B T h w C"] | None,
) -> None:
    """Refuse initial latents, or noise for the sampler, that do not go with the run.

    Args:
        shape: [B, T, h, w, C] of the latents that are denoised.

    Raises:
        InputError: another shape, or noise for a sampler that draws none.
    """
    if latents is not None and tuple(latents.shape) != shape:
        extra = f", the {size.extra_latents} extra included" if size.extra_latents else ""
        raise InputError(f"latents must be [B, T, h, w, C] = {shape}{extra}; got {tuple(latents.shape)}")
    if noise is not None and not scheduler.needs_noise:
        raise InputError(f"noise is for samplers that draw some; {scheduler.config.kind} does not")
    if noise is not None and tuple(noise.shape) != (steps, *shape):
        raise InputError(f"noise must be [N, B, T, h, w, C] = {(steps, *shape)}; got {tuple(noise.shape)}")


def check_loop(compiled_loop: bool, callback: object | None) -> None:
    """Refuse a callback where all steps are one program.

    Raises:
        InputError: both are asked for.
    """
    if compiled_loop and callback is not None:
        raise InputError("a callback needs the step-by-step loop; leave compiled_loop off")
