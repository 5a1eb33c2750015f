"""What decides a result, and the recipe that states it.

A recipe is stored with a video or its latents, read, and turned back into a request. Recipes, the keys of kept results
and a queue's comparison are made of the same values.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import logging
import secrets
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Float32

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import MEDIA, describe_media
from cogvideox_flax.generate.request import GenerationRequest, Stage, json_type, recorded
from cogvideox_flax.generate.resolve import plain
from cogvideox_flax.generate.run import Run
from cogvideox_flax.io.contents import content_hash
from cogvideox_flax.io.npz import read_npz
from cogvideox_flax.io.values import short_repr, typed
from cogvideox_flax.io.video import HashedVideo, read_metadata
from cogvideox_flax.lora import EMBEDDED_ADAPTERS, FILE_NAME, published_name
from cogvideox_flax.version import __version__

log = logging.getLogger(__name__)

PER_ITEM = ("prompt", "negative_prompt", "seed", "row", "steps_done")
"""What the items of a result may differ in."""

SHORT = 12
"""Digits of a fingerprint in a recipe."""

_PROGRAM = "cogvideox-flax"

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


# --- recipes


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
        made_of: of `request_values`, as far as it is known; and what else belongs to the settings.
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
        "settings": with_names(settings | describe_media(made_of)),
    }


def with_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe, with names in place of the user's paths of images, clips and adapters."""
    embedded = {str(folder / FILE_NAME): name for name, folder in EMBEDDED_ADAPTERS.items()}

    def name_of(kind: str, file: str) -> str:
        return Path(file).name if kind in MEDIA else embedded.get(file) or published_name(file)

    found = dict(settings)
    for kind in found.keys() & {*MEDIA, "lora"}:
        found[kind] = [{**record, "file": name_of(kind, record["file"])} for record in found[kind]]
    return found


def find_recorded_media(record: Mapping[str, Any], video: Path) -> Path | None:
    """The image or clip of a recipe, by its hash; None: it is not here.

    It is looked for under its name (earlier versions recorded the path), in the current folder and beside the video.
    """
    file = Path(record["file"])
    for path in (file, Path.cwd() / file.name, video.absolute().parent / file.name):
        with suppress(OSError, InputError):
            if path.is_file() or path.is_dir():
                sha256 = content_hash(path) if path.is_file() else HashedVideo(path).contents.sha256
                if sha256 == record["sha256"]:
                    return path
    return None


def find_recorded_adapter(record: Mapping[str, Any], video: Path) -> Path | None:
    """The file of a recipe's adapter, by its hash; None: it is not here.

    It is looked for under its name (earlier versions recorded the path), among the adapters of the package, in the
    hub's cache, and among all adapters in the current folder and beside the video.
    """
    sha256 = record.get("sha256")
    if not isinstance(sha256, str) or not sha256:
        return None
    for path in _adapter_candidates(Path(record["file"]), video.absolute().parent):
        with suppress(OSError, InputError):
            if path.is_file() and content_hash(path).startswith(sha256):
                return path
    return None


def _adapter_candidates(name: Path, beside: Path) -> Iterator[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE  # here, since huggingface_hub takes long to import

    folders = [Path.cwd(), beside]
    for path in (name, *(folder / each for folder in folders for each in (name, name.name))):
        yield path / FILE_NAME if path.is_dir() else path
    yield from (folder / FILE_NAME for folder in EMBEDDED_ADAPTERS.values())
    yield from sorted(Path(HF_HUB_CACHE).glob(f"models--*/snapshots/*/**/{glob.escape(name.name)}"))
    if not name.suffix:  # the name of a repository or of a folder
        yield from sorted(Path(HF_HUB_CACHE).glob(f"models--*{glob.escape(name.name)}/snapshots/*/{FILE_NAME}"))
    for folder in folders:
        yield from sorted(folder.glob("[!.]*.safetensors"))


def decoded_recipe(
    latents: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    decoder: str,
    *,
    dtype: str,
    fps: int,
    tiling: bool,
    crf: int | None,
) -> dict[str, Any]:
    """The recipe of a video whose latents were made before.

    Args:
        latents: their recipe.
        fingerprints: of the parts of the model that decoded them.
        decoder: the part that did.
        dtype: that it did it in.
    """
    settings = {name: value for name, value in latents.get("settings", {}).items() if name != "tiling"}
    settings |= {"fps": fps} | ({"tiling": True} if tiling else {}) | ({} if crf is None else {"crf": crf})
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
    result = {}
    for name, value in values.items():
        try:
            if name in kinds:
                result[name] = typed(kinds[name], value)
        except ValueError as e:
            raise InputError(
                f"{path} states {name} {short_repr(value)}; expected {e}. Its recipe cannot be used"
            ) from e
    return result


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
