"""From options to a decision: which model runs where, and what it is asked for. All of it is checked before anything is
converted or loaded.

On several hosts process 0 alone reads options, files and images, and decides; the others take over what it decided.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import store
from cogvideox_flax.generate.distilled import SETTINGS, STEPS
from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.preview import Preview
from cogvideox_flax.generate.queue import read_lines
from cogvideox_flax.generate.recipe import (
    UNREPEATABLE,
    fields_of,
    find_recorded_adapter,
    find_recorded_media,
    read_recipe,
    short_fingerprints,
)
from cogvideox_flax.generate.request import STEP_CACHES, GenerationRequest, check_option, options
from cogvideox_flax.generate.resolve import check_model, check_prompts, check_run, resolve
from cogvideox_flax.generate.result import fill, is_template
from cogvideox_flax.generate.run import Run
from cogvideox_flax.generate.store import check_folder, request_json, request_of_json, space_needed
from cogvideox_flax.io.paths import (
    check_name,
    check_writable,
    expand_user,
    item_paths,
    read_text,
)
from cogvideox_flax.plan import chip_of_device, suitable_layouts
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.profiling import ProfilingOptions
from cogvideox_flax.sharding import describe_mesh, mesh_of, slice_count

log = logging.getLogger("cogvideox_flax")

COMMAND_FILE = "command.json"
"""In a folder of stages whose name the command chose: what was asked for."""

EMBEDDED = "embedded"
"""The name under which a run remembers that it used the embedded checkpoint."""


@dataclass(frozen=True)
class Prepared:
    """What process 0 decided.

    runs: what the model is asked for; on the other processes empty, which resolve `requests` themselves.
    requests: of these runs, as JSON values.
    more: what else all processes need: JSON values and arrays.
    recipe: on process 0, which writes, what the output stores, as far as it is known.
    """

    choice: ModelChoice
    runs: Sequence[Run] = ()
    requests: Sequence[dict[str, Any]] = ()
    more: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        requests = [request_json(run.request) for run in self.runs]
        return {"choice": asdict(self.choice), "requests": requests, "more": self.more}


def open_prepared(args: argparse.Namespace, prepare: Callable[[], Prepared]) -> tuple[OpenModel, Prepared]:
    """Let process 0 prepare a command, and open its model on all processes.

    Args:
        prepare: on process 0 alone.

    Returns:
        The model, and what was prepared, with its runs.
    """
    decided: Any = hosts.broadcast(prepare, Prepared.to_json)
    if isinstance(decided, dict):  # on another process
        decided = Prepared(**decided | {"choice": ModelChoice(**decided["choice"])})
    prepared: Prepared = decided
    model = OpenModel.open_on_hosts(prepared.choice, progress=not args.quiet)
    model.profiling = profiling_options(args)
    if len(prepared.runs) < len(prepared.requests):
        runs = [resolve(request_of_json(each), model.manifest, model.dtype) for each in prepared.requests]
        for theirs, run in zip(prepared.requests, runs, strict=True):
            hosts.check_equal("the settings", theirs, request_json(run.request))
        prepared = replace(prepared, runs=runs)
    return model, prepared


# --- the model


def look(args: argparse.Namespace, recorded: Mapping[str, Any] | None = None) -> tuple[ModelChoice, Manifest]:
    """Read the configs of the model that a command names, and check that it can be run; nothing is converted.

    Args:
        recorded: `model_id`, `revision`, `transformer`, `variant` and `dtype` of an earlier stage or of a recipe, as
            far as it says them; they stand where the command names no model, or no dtype.
    """
    recorded = {} if recorded is None else recorded
    where, revision, transformer, variant = args.model, args.revision, args.transformer, args.variant
    if where is None and "model_id" in recorded:
        where = None if recorded["model_id"] == EMBEDDED else recorded["model_id"]
        revision, transformer = revision or recorded.get("revision"), transformer or recorded.get("transformer")
        variant = variant or recorded.get("variant")
    elif where is None and getattr(args, "image", None):
        where = hub.EMBEDDED_IMAGE_TO_VIDEO
    where = hub.full_name(where)
    manifest = hub.peek(where, revision, transformer, variant, progress=not args.quiet)
    model_id, transformer = EMBEDDED if where is None else _absolute(where), transformer and _absolute(transformer)
    choice = ModelChoice(where, model_id, revision, transformer, variant, args.dtype or recorded.get("dtype"))
    return _on(choice, None if args.mesh in (None, "auto") else args.mesh, manifest), manifest


def _on(choice: ModelChoice, mesh: str | None, manifest: Manifest) -> ModelChoice:
    """The same model on a mesh.

    Raises:
        InputError: its weights do not divide over the mesh.
    """
    check_model(manifest, choice.model_id, choice.dtype, mesh_of(mesh))
    return replace(choice, mesh=mesh)


def _absolute(where: str) -> str:
    """A path that is there as it is named from any directory; a hub id stays."""
    path = expand_user(where)
    return os.path.abspath(path) if os.path.exists(path) else where


def with_automatic_mesh(
    args: argparse.Namespace, choice: ModelChoice, manifest: Manifest, run: Run | None = None
) -> ModelChoice:
    """The model on a mesh over all devices where none was named: that of the planner for a run, else one that suits the
    command. On one device there is none, and on CPUs only where it was asked for."""
    devices = jax.devices()
    n = len(devices)
    if choice.mesh is not None or n == 1 or (args.mesh is None and devices[0].platform == "cpu"):
        return choice
    if args.command == "decode":  # the decoder splits frames over all mesh axes; 2 x n/2 divides most sizes
        mesh = f"2,{n // 2},1" if n % 2 == 0 else f"1,{n},1"
    elif args.command == "encode":
        parts = math.gcd(n, *manifest.model.heads.values())
        mesh = f"1,{n // parts},{parts}"
    else:
        assert run is not None
        layouts = suitable_layouts(run, n, chip_of_device(devices[0]), slice_count(devices))
        mesh = describe_mesh(layouts[0].mesh)
        log.info("mesh %s (dp, sp, tp), as the planner says", mesh)
    return _on(choice, mesh, manifest)


def check_runs(
    args: argparse.Namespace, choice: ModelChoice, manifest: Manifest, runs: Sequence[Run], folder: Path
) -> Prepared:
    """Check what runs need of the machine: mesh, disk, and where profile and preview go."""
    choice = with_automatic_mesh(args, choice, manifest, runs[0])
    check_folder(folder, max(map(space_needed, runs)))
    if getattr(args, "profile", None) is not None:
        check_writable(args.profile / "trace")
    preview_of(args, manifest)
    for run in runs:
        check_run(run, mesh_of(choice.mesh), profiling_options(args))
    return Prepared(choice, runs)


def warn_of_other_model(
    model: OpenModel, recipe: Mapping[str, Any], path: Path, parts: Sequence[str] | None = None
) -> None:
    """Say where the model is not the one that a file was made with. On process 0 alone.

    parts: those that matter; None: all.
    """
    made_with, now = recipe.get("checkpoint"), short_fingerprints(model.fingerprints())
    if not isinstance(made_with, dict):
        release = model.manifest.release.name if model.manifest.release else model.native_dir.name
        if (made_by := recipe.get("release")) not in (None, release):
            log.warning("%s was made by %s, and this model is %s", path, made_by, release)
        return
    if other := [part for part in parts or now if made_with.get(part) != now.get(part)]:
        names = " and ".join(part.replace("_", " ") for part in other)
        log.warning("%s was made by %s with another %s than this model's", path, recipe.get("release"), names)


def profiling_options(args: argparse.Namespace) -> ProfilingOptions:
    profile = (args.profile, args.profile_steps) if "profile" in args else ()
    return ProfilingOptions(not args.no_jit, args.memory, *profile)


def preview_of(args: argparse.Namespace, manifest: Manifest) -> Preview | None:
    """What --preview asks for.

    Raises:
        InputError: as for `Preview`.
    """
    if getattr(args, "preview", None) is None:
        return None
    return Preview(manifest, args.preview, overwrite=getattr(args, "overwrite", False))


# --- what a command asks for


def request_of(args: argparse.Namespace, recorded: Mapping[str, Any]) -> GenerationRequest:
    """What a command asks for: the options of an earlier run, and those that were given now in their place.

    Of steps and timesteps, each decides the other: what was given now stands alone.

    Args:
        recorded: fields of the request; what else it holds is left out.
    """
    given = given_options(args)
    if "prompt" not in recorded or getattr(args, "prompt", None):
        given["prompt"] = read_prompts(args)
    known = {"prompt", *options("encode", "denoise", "decode")} - {*(SETTINGS if "distilled" in given else ())}
    known -= STEPS if STEPS & given.keys() else set()
    fields = {name: value for name, value in recorded.items() if name in known}
    return GenerationRequest(**{"lora": [], **fields, **given})


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the request that were given as options."""
    names = options("encode", "denoise", "decode", "generate")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        prompts += read_lines(args.prompt_file).values()
    if not prompts:
        raise InputError('no prompt was given; write one in quotes ("" is one too) or name a --prompt-file')
    if len(prompts) > 1 and not any(" " in prompt.strip() for prompt in prompts):
        raise InputError(
            f"these are {len(prompts)} prompts of one word each; for one prompt write it in quotes: "
            f'"{" ".join(prompts)}". Several prompts of one word go into a --prompt-file'
        )
    return prompts


# --- --like, and what recipes say


def read_like(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the request that --like asks for, its `dtype`, and its model as `model_id` where none was named.

    Raises:
        InputError: the file holds no usable recipe, or inputs that are not given again.
    """
    path = args.like
    if not (recipe := read_recipe(path)):
        raise InputError(f"{path} does not say how it was made; this program did not write it")
    fields = fields_of(recipe, path) | model_of_recipe(args, recipe, path)
    settings = recipe.get("settings", {})
    refuse_unrepeatable({**recipe, **settings}, path, "the command line cannot make it again")
    form = STEP_CACHES.get(settings.get("step_cache"))
    if recipe.get("row") is not None and form and form.decides_itself and "step_cache_full" not in settings:
        log.warning("%s was one of a batch whose step cache decided for all at once; alone it is another video", path)
    elif recipe.get("row"):
        log.warning("%s was not the first prompt of its batch, and had other noise than a run of it alone", path)
    fields["prompt"] = check_prompts(fields["prompt"])[0]
    for name, find in (dict.fromkeys(MEDIA, find_recorded_media) | {"lora": find_recorded_adapter}).items():
        records = fields.pop(name, [])
        if not records or getattr(args, name, None) is not None:
            continue
        files = [find(record, path) for record in records]
        option = f"--{name.replace('_', '-')}"
        if None in files:
            given = " ".join(f"{option} {record['file']}" for record in records)
            raise InputError(f"{path} was also made of other files; give them again: {given}")
        log.info("%s as %s was made with: %s", option, path, ", ".join(map(str, files)))
        named = [{**record, "file": str(file)} for record, file in zip(records, files, strict=True)]
        fields[name] = named if name == "lora" else [each["file"] for each in named]
    return fields


def refuse_unrepeatable(settings: Mapping[str, Any], path: Path, instead: str) -> None:
    """Refuse settings that hold what no option of a run gives; `instead` is what to do."""
    if stated := [f"{name} {json.dumps(settings[name])}" for name in UNREPEATABLE if settings.get(name) is not None]:
        raise InputError(f"{path} was made with more than the options of a run ({', '.join(stated)}); {instead}")


def model_of_recipe(args: argparse.Namespace, recipe: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The model of a recipe as `model_id`, where none was named: one that comes with the package.

    Raises:
        InputError: it is another one, which must be named.
    """
    if args.model is not None:
        return {}
    made_by, known = recipe.get("release"), {place.name: name for name, place in hub.EMBEDDED_MODELS.items() if name}
    if made_by not in known:
        raise InputError(f"{path} was made by {made_by}; name that checkpoint with --model")
    return {"model_id": known[made_by]}


def warn_of_other_media(run: Run, path: Path) -> None:
    """Say which images, clips and adapters are not those that a video was made of."""
    settings = read_recipe(path).get("settings", {})
    for name in (*MEDIA, "lora"):
        stored = [record.get("sha256") for record in settings.get(name, ())]
        given = [each["sha256"] if name == "lora" else each.sha256 for each in getattr(run.request, name) or ()]
        if stored and given and stored != given:
            log.warning("--%s is not the one that %s was made of", name.replace("_", "-"), path)


# --- the output


def stages_of(out: Path, request: GenerationRequest) -> Path:
    """The `stages_folder` of a run, named after its first video where the output's name has fields."""
    return stages_folder(fill(out, request.prompt[0], request.seed, 1) if is_template(out) else out)


@contextmanager
def output_of(args: argparse.Namespace) -> Iterator[Path]:
    """The path of --out; without it, video.mp4 or the first of video-2.mp4, ... that no other run has.

    Its folder of stages is the run's from then on, so that two commands never take one name, and says what was asked
    for, so that the same command goes on there. What fails before anything is finished leaves no folder.
    """
    name, is_new = hosts.broadcast(partial(_choose_output, args))
    out = Path(name)
    try:
        yield out
    except BaseException:
        if is_new:
            _give_back(args, out)
        raise
    _give_back(args, out)


def _give_back(args: argparse.Namespace, out: Path) -> None:
    """Remove the folder of stages whose name was chosen, if nothing in it is finished."""
    folder = stages_folder(out)
    if args.out is None and args.dir is None and hosts.is_first() and not store.finished(folder):
        with suppress(OSError):
            (folder / COMMAND_FILE).unlink(missing_ok=True)
            folder.rmdir()


def _choose_output(args: argparse.Namespace) -> list[Any]:
    """The path of the output, and whether its folder of stages was made for it now."""
    if args.out is not None:
        return [str(args.out), False]
    like = None if args.like is None else read_recipe(args.like)
    prompts = read_prompts(args) if like is None or args.prompt else like.get("prompt")
    count = len(prompts) if isinstance(prompts, list) else 1
    videos = check_option("num_videos", 1 if args.num_videos is None else args.num_videos)
    where = {name: getattr(args, name) for name in ("prompt", "model", "revision", "dtype")}
    more = {name: getattr(args, name) for name in ("transformer", "variant")}
    where |= {name: value for name, value in more.items() if value is not None}
    asked = json.dumps({**where, **given_options(args), "like": like}, default=str, sort_keys=True)
    first = Path("video.mp4")
    for path in itertools.chain([first], (first.with_stem(f"{first.stem}-{i}") for i in itertools.count(2))):
        is_there = any(os.path.lexists(each) for each in item_paths(path, count * videos))
        if args.dir is not None:
            if not is_there:
                return [str(path), False]
            continue
        folder = stages_folder(path)
        try:
            if not is_there:
                folder.mkdir()
                (folder / COMMAND_FILE).write_text(asked, encoding="utf-8")
                return [str(path), True]
        except FileExistsError:
            pass
        except OSError as e:
            raise InputError(f"cannot write to {folder}: {e.strerror}; choose another directory") from e
        with suppress(OSError, ValueError, InputError):
            if read_text(folder / COMMAND_FILE) == asked:
                return [str(path), False]
    raise AssertionError


def stages_folder(out: Path) -> Path:
    """Where a run keeps its stages until OUT is written.

    Raises:
        InputError: OUT ends in no name.
    """
    check_name(out)
    return out.with_name(out.name + ".stages")
