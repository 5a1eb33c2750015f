"""Checks of the values of a request."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.clips import FITS
from cogvideox_flax.io.limits import MAX_WRITTEN_FPS
from cogvideox_flax.io.values import is_count, is_finite_number, shown

if TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.request import GenerationRequest, ResolvedRequest
    from cogvideox_flax.models.family import ModelFamily, Size
    from cogvideox_flax.schedulers import Scheduler

OUTPUT_TYPES = ("uint8", "float", "latent")

MAX_SEED = 2**32 - 1

MAX_VIDEOS = 10_000
"""Videos of one request."""


class Faults:
    """Collects errors, to raise them together."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        try:
            yield
        except InputError as e:
            self._found.append(e)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_all(self) -> None:
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise InputError("\n".join(map(str, self._found)))


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


def check_num_videos(num_videos: int) -> None:
    """Refuse a number of videos per prompt that is out of range.

    Raises:
        InputError: it is.
    """
    if not is_count(num_videos, MAX_VIDEOS):
        raise InputError(f"num_videos is {shown(num_videos)}; expected a whole number from 1 to {MAX_VIDEOS}")


def check_fps(fps: int | None) -> None:
    """Refuse a frame rate that no video is written at; None is the release's.

    Raises:
        InputError: it is none.
    """
    if fps is not None and not is_count(fps, MAX_WRITTEN_FPS):
        raise InputError(f"fps is {shown(fps)}; expected a whole number from 1 to {MAX_WRITTEN_FPS} frames per second")


def parse_lora(text: str) -> dict[str, Any]:
    """'my.safetensors:0.8' -> file and scale; a colon that no number follows is part of the name."""
    file, _, scale = text.rpartition(":")
    try:
        return {"file": file, "scale": float(scale)} if file else {"file": text, "scale": 1.0}
    except ValueError:
        return {"file": text, "scale": 1.0}


def fixed_settings(request: GenerationRequest, family: ModelFamily, faults: Faults) -> dict[str, Any]:
    """The fields that the request's sampler fixes, with their values.

    Args:
        faults: where other values of the request go, and the lack of a clip that the sampler starts from.
    """
    named = family.samplers.get(request.scheduler) if isinstance(request.scheduler, str) else request.scheduler
    if named is None or not named.fixed:  # an unknown name is refused where the sampler is made
        return {}
    given = {name: getattr(request, name) for name in named.fixed}
    lacks_video = named.needs_video and request.video is None
    with faults.caught():
        if wrong := [name for name, value in given.items() if value is not None and value != named.fixed[name]]:
            needed = ", ".join(f"{name} {named.fixed[name]} (got {shown(given[name])})" for name in wrong)
            raise InputError(f"the {named.kind} sampler needs {needed}; leave these out, or take another scheduler")
    with faults.caught():
        if lacks_video:
            raise InputError(f"the {named.kind} sampler starts from a clip; give --video, or take another scheduler")
    return {name: value for name, value in named.fixed.items() if not (lacks_video and name == "strength")}


def describe_adapter(adapter: Any, manifest: Manifest) -> dict[str, Any]:
    """An adapter's `LoRARecord`, from what a user gives."""
    from cogvideox_flax.lora import describe_lora

    record = parse_lora(os.fspath(adapter)) if isinstance(adapter, str | os.PathLike) else adapter
    if not isinstance(record, Mapping) or "file" not in record:
        raise InputError(f"lora holds {shown(adapter)}; expected a file, 'FILE:SCALE', or a record with file and scale")
    family = manifest.model_family
    if kind := manifest.quantized(family.lora.component):
        raise InputError(f"adapters go with weights as they were trained; those of this model are {kind}")
    return dict(
        describe_lora(family, record["file"], record.get("scale", 1.0), manifest.configs[family.lora.component])
    )


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_values(request: ResolvedRequest) -> None:
    """Refuse values that no model takes, or that do not go together.

    Raises:
        InputError: all faults in one message.
    """
    faults = []
    if not is_finite_number(request.guidance_scale):
        faults.append(
            f"guidance_scale is {shown(request.guidance_scale)}; expected a number (about 6 is usual, 1 is no guidance)"
        )
    if request.use_dynamic_cfg not in (False, True, "index"):
        faults.append(f"use_dynamic_cfg is {shown(request.use_dynamic_cfg)}; expected False, True or 'index'")
    for check, value in ((check_num_videos, request.num_videos), (check_fps, request.fps)):
        try:
            check(value)
        except InputError as e:
            faults.append(str(e))
    following = request.num_videos - 1 if is_count(request.num_videos, MAX_VIDEOS) else 0
    if not is_whole(request.seed) or not 0 <= request.seed <= MAX_SEED - following:
        less = f" less the {following} that follow" if following else ""
        faults.append(f"seed is {shown(request.seed)}; expected a whole number from 0 to {MAX_SEED}{less}")
    if request.output_type not in OUTPUT_TYPES:
        faults.append(f"unknown output_type {request.output_type!r}; known are {', '.join(OUTPUT_TYPES)}")
    if request.one_program and request.output_type == "latent":
        faults.append('one program ends in frames; leave one_program off for output_type "latent"')
    if request.fit not in FITS:
        faults.append(f"fit is {shown(request.fit)}; expected {' or '.join(FITS)}")
    if request.image_scale is not None and not (is_finite_number(request.image_scale) and request.image_scale > 0):
        faults.append(f"image_scale is {shown(request.image_scale)}; expected a number above 0")
    if request.image_scale is not None and request.image is None:
        faults.append("image_scale is a factor of an image's latents; give an image, or leave it out")
    if request.num_videos != 1 and (request.latents is not None or request.noise is not None):
        faults.append("num_videos draws noise of several seeds; leave it at 1 where latents or noise are given")
    if faults:
        raise InputError("\n".join(faults))


def check_arrays(request: ResolvedRequest, size: Size, sampler: Scheduler) -> None:
    """Refuse initial latents, or noise for the sampler, that do not go with the run.

    Raises:
        InputError: another shape, or noise for a sampler that takes none.
    """
    shape = size.latent_shape(request.batch)
    if request.latents is not None and tuple(request.latents.shape) != shape:
        extra = f", the {size.extra_latents} extra included" if size.extra_latents else ""
        raise InputError(f"latents must be [B, T, h, w, C] = {shape}{extra}; got {tuple(request.latents.shape)}")
    if request.noise is None:
        return
    if not sampler.needs_noise:
        raise InputError(f"noise is for samplers that draw some; {sampler.config.kind} does not")
    expected = (request.num_inference_steps - request.first_step, *shape)
    if tuple(request.noise.shape) != expected:
        raise InputError(f"noise must be [N, B, T, h, w, C] = {expected}; got {tuple(request.noise.shape)}")
