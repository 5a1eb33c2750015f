"""What decides a result. Recipes, the keys of kept results and a queue's comparison are made of these values alone."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.request import GenerationRequest, Stage, recorded
from cogvideox_flax.generate.run import Run

UNREPEATABLE = ("arrays", "noise_schedule", "steps_done", "decode_dtype")
"""Values that no option of a run gives: SHA-256 of arrays, a scheduler object that is not the checkpoint's, how many
steps a callback let pass, and the dtype of decoding where that is another one."""

ENCODER_ARRAYS = ("text_features", "encoder_noise")
"""Fields of the request that hold arrays for the encoders, by name."""

DENOISER_ARRAYS = ("latents", "noise")
"""Fields of the request that hold an array for the denoising loop."""


def request_values(run: Run) -> dict[str, Any]:
    """Return everything that decides the videos of a run but for the model and the dtype.

    Returns:
        Field of the request -> its value, as JSON has it but for images and clips, which are `Media`; the scheduler
        by its kind. Where Python gave them, also `arrays`, name -> SHA-256, and `noise_schedule`, what is known of a
        scheduler that is not the checkpoint's.
    """
    names = ("prompt", *recorded("encode", "denoise", "decode"))
    values = {name: plain(getattr(run.request, name)) for name in names}
    values["scheduler"] = run.scheduler.kind
    if (schedule := _noise_schedule(run)) is not None:
        values["noise_schedule"] = schedule
    if arrays := _arrays(run.request):
        values["arrays"] = arrays
    return values


def _noise_schedule(run: Run) -> dict[str, Any] | None:
    """What is known of a scheduler object that is not one of the checkpoint's; None for these."""
    model, scheduler = run.model, run.scheduler
    if model.schedulers.get(scheduler.kind) is type(scheduler):
        config = scheduler.config.to_dict()
        return None if config == model.scheduler(scheduler.kind).config.to_dict() else config
    return scheduler.identity or {"class": f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"}


def plain(value: Any) -> Any:
    """The value as JSON has it: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


def _arrays(request: GenerationRequest) -> dict[str, str]:
    """Name -> SHA-256 of each array that the request holds."""
    arrays = {name: getattr(request, name) for name in DENOISER_ARRAYS}
    for field in ENCODER_ARRAYS:
        arrays |= {f"{field}.{name}": x for name, x in (getattr(request, field) or {}).items()}
    return {name: array_hash(x) for name, x in arrays.items() if x is not None}


def array_hash(x: Any) -> str:
    """SHA-256 of an array's shape and of its values in float32."""
    values = np.ascontiguousarray(x, np.float32)
    return hashlib.sha256(json.dumps(values.shape).encode() + values.tobytes()).hexdigest()


def deciding(values: Mapping[str, Any], *stages: Stage) -> dict[str, Any]:
    """What of a request's values decides the results of these stages, as JSON values: images and clips by their
    contents, wherever they lie.

    Args:
        values: from `request_values`, or `store.read_settings`.
    """
    decisive: dict[str, Any] = {name: plain(values.get(name)) for name in ("prompt", *recorded(*stages))}
    decisive |= {name: [media.sha256 for media in decisive[name]] for name in MEDIA if decisive.get(name)}
    arrays = values.get("arrays") or {}
    if "denoise" in stages:
        decisive["noise_schedule"] = values.get("noise_schedule")
    else:
        arrays = {name: digest for name, digest in arrays.items() if name.startswith(ENCODER_ARRAYS)}
    return decisive | {"arrays": arrays or None}


def unhashed(run: Run) -> dict[str, Any]:
    """Part of a key that no other key has, where something that decides the latents cannot be hashed; else {}."""
    return {"unhashed": secrets.token_hex(8)} if "class" in (_noise_schedule(run) or {}) else {}
