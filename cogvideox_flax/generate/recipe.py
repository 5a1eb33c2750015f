"""The recipe that is stored with a video or its latents: all that decides it. Written, read, and turned back into a
request."""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float32

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.freshness import UNREPEATABLE
from cogvideox_flax.generate.media import MEDIA, describe_media
from cogvideox_flax.generate.request import GenerationRequest, json_type, recorded
from cogvideox_flax.io.npz import read_npz
from cogvideox_flax.io.values import shown, typed
from cogvideox_flax.io.video import read_metadata
from cogvideox_flax.version import __version__

log = logging.getLogger(__name__)

PER_ITEM = ("prompt", "negative_prompt", "seed", "row", "steps_done")
"""What the items of a result may differ in."""

SHORT = 12
"""Digits of a fingerprint in a recipe."""

_PROGRAM = "cogvideox-flax"


class MediaRecord(TypedDict):
    """An image or clip in the settings of a recipe."""

    file: str
    sha256: str


class Recipe(TypedDict, total=False):
    """The types of what a recipe states; lists where its items differ. Of the settings, `fields_of` checks more."""

    prompt: str | list[str]
    negative_prompt: str | list[str]
    seed: int | list[int] | None
    row: int | list[int]
    steps_done: int | list[int | None] | None
    release: str
    version: str
    settings: dict
    checkpoint: str | dict
    seconds: float


def recipe(
    made_of: Mapping[str, Any], manifest: Manifest, name: str, fingerprints: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What is stored with a video, of every front end alike: all that decides it; a list where its items differ.

    Args:
        made_of: of `freshness.request_values`, as far as it is known; and what else belongs to the settings.
        name: of the model, where its architecture is none of a release.
        fingerprints: of the model's parts; None: not known.

    Returns:
        prompt, negative_prompt, seed, release, checkpoint (part -> the first digits of its fingerprint), version and
        settings; of videos that were not made as each alone also `row`, which of the batch's rows each was; of videos
        that a callback stopped `steps_done`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(GenerationRequest)}
    settings = {
        key: value
        for key, value in made_of.items()
        if key not in (*PER_ITEM, *MEDIA) and value not in (None, [], defaults.get(key))
    }
    prompts = {key: made_of[key] for key in ("prompt", "negative_prompt")}
    more = {name: made_of[name] for name in ("row", "steps_done") if made_of.get(name) is not None}
    return {
        **{key: texts if len(texts) > 1 else texts[0] for key, texts in prompts.items()},
        "seed": made_of.get("seed"),
        **more,
        "release": manifest.release.name if manifest.release else name,
        **({} if fingerprints is None else {"checkpoint": short_fingerprints(fingerprints)}),
        "version": f"{_PROGRAM} {__version__}",
        "settings": settings | describe_media(made_of),
    }


def decoded_recipe(
    latents: Mapping[str, Any], fingerprints: Mapping[str, str], decoder: str, *, dtype: str, fps: int, tiling: bool
) -> dict[str, Any]:
    """The recipe of a video whose latents were made before.

    Args:
        latents: their recipe.
        fingerprints: of the parts of the model that decoded them.
        decoder: the part that did.
        dtype: that it did it in.
    """
    settings = {name: value for name, value in latents.get("settings", {}).items() if name != "tiling"}
    settings |= {"fps": fps} | ({"tiling": True} if tiling else {})
    if settings.setdefault("dtype", dtype) != dtype:
        settings["decode_dtype"] = dtype
    made_with = latents.get("checkpoint")
    if isinstance(made_with, dict):
        made_with = made_with | short_fingerprints({decoder: fingerprints[decoder]})
    checkpoint = {} if made_with is None else {"checkpoint": made_with}
    return {**latents, **checkpoint, "settings": settings}


def short_fingerprints(fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Part of a model -> the first digits of its fingerprint, as recipes hold them."""
    return {part: value[:SHORT] for part, value in fingerprints.items()}


def item_of(recipe: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The recipe of one item of a result."""
    return {key: value[i] if isinstance(value, list) else value for key, value in recipe.items()}


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe in a video, a folder of PNGs or an npz of latents; {} where this library wrote none.

    Raises:
        InputError: it cannot be read, or is none of these; a value of another type than in `Recipe`.
    """
    found = _read_npz(path) if path.suffix.lower() == ".npz" else read_metadata(path)
    if not str(found.get("version", "")).startswith(_PROGRAM):
        return {}
    return found | _typed(path, typing.get_type_hints(Recipe), found)


def _typed(path: Path, kinds: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a recipe that have a type here, as these types."""
    found = {}
    for name, value in values.items():
        try:
            if name in kinds:
                found[name] = typed(kinds[name], value)
        except ValueError as e:
            raise InputError(f"{path} states {name} {shown(value)}; expected {e}. Its recipe cannot be used") from e
    return found


def _read_npz(path: Path) -> dict[str, Any]:
    arrays = read_npz(path, ["metadata"])
    try:
        found = json.loads(str(arrays["metadata"])) if arrays else {}
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is damaged, or is no npz of latents: its metadata is no JSON") from e
    return found if isinstance(found, dict) else {}


def read_latents_npz(path: Path, count: int, channels: int) -> Float32[np.ndarray, "B T h w C"]:
    """The latents of an npz that `result.save_latents` wrote.

    Args:
        count: of its prompts.
        channels: of the latents that the decoder takes.

    Raises:
        InputError: it cannot be read, or holds none of this shape, or NaN or infinity.
    """
    latents = read_npz(path, ["latents"]).get("latents", np.zeros(0))
    if latents.ndim != 5 or 0 in latents.shape or (len(latents), latents.shape[4]) != (count, channels):
        raise InputError(f"{path}: latents are {list(latents.shape)}, expected [{count}, T, h, w, {channels}]")
    if latents.dtype.kind != "f":
        raise InputError(f"{path}: latents are {latents.dtype}, expected floating-point numbers")
    latents = latents.astype(np.float32)
    if not np.isfinite(latents).all():
        raise InputError(f"{path}: the latents hold NaN or infinity; make them again")
    return latents


def fields_of(recipe: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of the request that made it, and its `dtype`; images, clips and adapters as records with `file` and
    `sha256`. What else the recipe holds is left out with a warning.

    Args:
        recipe: of `read_recipe`.
        path: where it was read, for messages.

    Raises:
        InputError: a value of another type than the field's.
    """
    kinds: dict[str, Any] = {name: json_type(name) for name in recorded("encode", "denoise", "decode")}
    kinds |= dict.fromkeys(MEDIA, list[MediaRecord])
    kinds |= dict.fromkeys(("prompt", "negative_prompt"), str | list[str]) | {"dtype": str}
    per_item = {name: recipe[name] for name in ("prompt", "negative_prompt", "seed") if name in recipe}
    given = per_item | recipe.get("settings", {})
    if other := [name for name in given if name not in (*kinds, *UNREPEATABLE)]:
        log.warning("%s states %s, which is no option of a run; it is left out", path, ", ".join(other))
    found = _typed(path, kinds, given)
    if "prompt" not in found:
        raise InputError(f"{path} states no prompt; its recipe cannot be used")
    return found
