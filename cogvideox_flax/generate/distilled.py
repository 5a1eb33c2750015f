"""Settings of models that were distilled to a few steps, from their family's table."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import GenerationRequest, parse_lora
from cogvideox_flax.io.values import shown
from cogvideox_flax.models.model import Distillation, VideoModel

log = logging.getLogger(__name__)

SETTINGS = ("scheduler", "num_inference_steps", "timesteps", "guidance_scale", "use_dynamic_cfg")
"""The fields of a request that a distillation decides."""

OFF = "off"


def with_distillation(request: GenerationRequest, model: VideoModel) -> GenerationRequest:
    """The request with the settings of the distillation that it names, where it gives no others.

    One that is not named, but is recognised by the name of an adapter's file, decides only where none of these settings
    was given; a line says so.

    Raises:
        InputError: a distillation that is not known, or was made of another model.
    """
    if request.distilled == OFF:
        return request
    given = {name for name in SETTINGS if getattr(request, name) is not None}
    if request.distilled is not None:
        return _filled(request, _named(request.distilled, model), given)
    for file in _adapter_files(request.lora):
        if (found := recognised(file, model)) is None:
            continue
        if given:
            log.info("%s is made for %s; --distilled %s takes these settings", file, found, found.name)
            return request
        log.info("%s: %s (--distilled off takes the model's own settings)", file, found)
        return _filled(request, found, given)
    return request


def recognised(file: str | Path, model: type[VideoModel] | VideoModel) -> Distillation | None:
    """The distillation whose files have such names."""
    path = str(file)
    return next((each for each in model.distillations if re.search(each.files, path, re.IGNORECASE)), None)


def _named(name: Any, model: VideoModel) -> Distillation:
    known = {each.name: each for each in model.distillations}
    if name not in known:
        raise InputError(f"distilled is {shown(name)}; expected one of this model's family: {', '.join([*known, OFF])}")
    found = known[name]
    if model.release is not None and model.release.name not in found.releases:
        made_of = " or ".join(found.releases) or "another model"
        raise InputError(
            f"{name} was distilled of {made_of}; this model is {model.release.name}. Its settings "
            "can be given one by one"
        )
    return found


def _filled(request: GenerationRequest, found: Distillation, given: set[str]) -> GenerationRequest:
    settings: dict[str, Any] = {
        "scheduler": found.scheduler,
        "num_inference_steps": found.num_inference_steps,
        "timesteps": found.timesteps,
        "guidance_scale": found.guidance_scale,
        "use_dynamic_cfg": False,
    }
    if given & {"num_inference_steps", "timesteps"}:  # each decides the other
        del settings["num_inference_steps"], settings["timesteps"]
    return dataclasses.replace(request, **{name: value for name, value in settings.items() if name not in given})


def _adapter_files(adapters: Any) -> list[str]:
    """The names of files, of what may turn out not to be adapters."""
    files = []
    for each in adapters if isinstance(adapters, list | tuple) else [adapters]:
        record = parse_lora(os.fspath(each)) if isinstance(each, str | os.PathLike) else each
        if isinstance(record, Mapping) and isinstance(record.get("file"), str | os.PathLike):
            files.append(os.fspath(record["file"]))
    return files
