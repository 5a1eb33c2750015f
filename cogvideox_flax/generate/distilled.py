"""Settings of models that were distilled to a few steps, from their family's table."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import read_manifest
from cogvideox_flax.checkpoint.manifest import is_native
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import GenerationRequest, parse_lora
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.lora import published_name
from cogvideox_flax.models.model import Distillation, Family, VideoModel

log = logging.getLogger(__name__)

SETTINGS = ("scheduler", "num_inference_steps", "timesteps", "guidance_scale", "use_dynamic_cfg")
"""The fields of a request that a distillation decides."""

STEPS = {"num_inference_steps", "timesteps"}
"""Of these, each decides the other."""

OFF = "off"


def with_distillation(request: GenerationRequest, model: VideoModel) -> GenerationRequest:
    """The request with the settings of the distillation that it names, where it gives no others.

    One that is not named, but is recognised by the name of an adapter's file, decides only where none of these settings
    was given, and only for the model that it was made of; a line says so.

    Raises:
        InputError: a distillation that is not known, or was not made of this model.
    """
    if request.distilled == OFF:
        return request
    asked = {name for name in SETTINGS if getattr(request, name) is not None}
    if request.distilled is not None:
        return _filled(request, _named(request.distilled, model), asked)
    for file in _adapter_files(request.lora):
        try:
            distillation = recognised(file, model)
        except InputError:  # no path, which is said where adapters are opened
            continue
        if distillation is None:
            continue
        if (others := _made_of_others(distillation, model)) is not None:
            log.info("%s: %s, whose own settings stay", file, others)
            continue
        if asked:
            log.info("%s is made for %s; --distilled %s takes these settings", file, distillation, distillation.name)
            return request
        log.info("%s: %s (--distilled off takes the model's own settings)", file, distillation)
        return _filled(request, distillation, asked)
    return request


def recognised(file: str | Path, model: Family) -> Distillation | None:
    """The distillation whose files have such names."""
    name = published_name(file)
    for each in model.distillations:
        if re.search(rf"(?<![a-z0-9])({each.files})(?![a-z0-9])", name, re.IGNORECASE):
            return each
    return None


def _named(name: Any, model: VideoModel) -> Distillation:
    distillations = {each.name: each for each in model.distillations}
    if name not in distillations:
        raise InputError(
            f"distilled is {short_repr(name)}; expected one of this model's family: {', '.join([*distillations, OFF])}"
        )
    if (others := _made_of_others(distillations[name], model)) is not None:
        raise InputError(f"{others}. Its settings can be given one by one: {_flags(distillations[name])}")
    return distillations[name]


def _made_of_others(found: Distillation, model: VideoModel) -> str | None:
    """What the distillation was made of, in words, where that is not this model; else None.

    A fine-tune counts as its release. Of a model without one, it is not known what a distillation makes of it.
    """
    name = _name_of(model)
    if name in found.releases:
        return None
    this = "of no release" if name is None else name
    return f"{found.name} was distilled of {' or '.join(found.releases)}; this model is {this}"


def _name_of(model: VideoModel) -> str | None:
    """The model's release, or the embedded model whose denoiser it has."""
    if model.release is not None:
        return model.release.name
    config = model.configs.get(model.denoiser)
    for name, folder in hub.EMBEDDED_MODELS.items():
        if name is not None and is_native(folder):
            manifest = read_manifest(folder, warn=False)
            if (manifest.family, manifest.configs[model.denoiser]) == (model.name, config):
                return name
    return None


def _flags(found: Distillation) -> str:
    """The settings as options of the command."""
    count = f"--steps {found.steps}"
    steps = count if found.timesteps is None else f"--timesteps {','.join(f'{t:.7g}' for t in found.timesteps)}"
    return f"--scheduler {found.scheduler} {steps} --guidance-scale {found.guidance_scale:g}"


def _filled(request: GenerationRequest, found: Distillation, given: set[str]) -> GenerationRequest:
    names = {*SETTINGS} - given - (STEPS if given & STEPS else set())
    return dataclasses.replace(request, **{name: getattr(found, name) for name in names})


def _adapter_files(adapters: Any) -> list[str]:
    """The names of files, of what may turn out not to be adapters."""
    files = []
    for each in adapters if isinstance(adapters, list | tuple) else [adapters]:
        record = parse_lora(os.fspath(each)) if isinstance(each, str | os.PathLike) else each
        if isinstance(record, Mapping) and isinstance(record.get("file"), str | os.PathLike):
            files.append(os.fspath(record["file"]))
    return files
