"""From options to an open run: all of it is checked before anything is converted or loaded.

On several hosts process 0 alone reads options, files and pictures, and decides; the others take over what it decided.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import check_name, expand_user, read_text
from cogvideox_flax.runtime import hosts

if TYPE_CHECKING:  # imported where needed, as by the commands
    from jax.sharding import Mesh

    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.generate.preview import Preview
    from cogvideox_flax.generate.run import Run
    from cogvideox_flax.generate.store import RunDirectory
    from cogvideox_flax.runtime.profiling import ProfilingOptions

log = logging.getLogger("cogvideox_flax")

COMMAND_FILE = "command.json"
"""In a folder of stages whose name the command chose: what was asked for."""

EMBEDDED = "embedded"
"""The name under which a run remembers that it used the embedded checkpoint."""


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"cannot read prompts from {args.prompt_file}: {e}; expected UTF-8 text") from e
        if not any(line.strip() for line in lines):
            raise InputError(f"{args.prompt_file} holds no prompt; expected one per line")
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise InputError('no prompt was given; write one in quotes ("" is one too) or name a --prompt-file')
    if len(prompts) > 1 and not any(" " in prompt.strip() for prompt in prompts):
        raise InputError(
            f"these are {len(prompts)} prompts of one word each; for one prompt write it in quotes: "
            f'"{" ".join(prompts)}". Several prompts of one word go into a --prompt-file'
        )
    return prompts


def read_settings(args: argparse.Namespace, *, asked: bool = False) -> dict[str, Any]:
    """The settings that the stage before left; its model becomes this command's, unless another is named.

    asked: without the options that were filled in, which this command's own may change.
    """
    from cogvideox_flax.generate import store

    before = store.read_settings(args.dir)
    if asked:
        _refuse_unrepeatable(before, args.dir, "go on with it there")
        before = store.asked_settings(before)
    model, revision = before.pop("model_id"), before.pop("revision", None)
    if args.model is None:
        args.model = None if model == EMBEDDED else model
        args.revision = args.revision or revision
    return before


@contextmanager
def output_of(args: argparse.Namespace) -> Iterator[Path]:
    """The path of --out; without it, video.mp4 or the first of video-2.mp4, ... that no other run has.

    Its folder of stages is the run's from then on, so that two commands never take one name, and says what was asked
    for, so that the same command goes on there. What fails before anything is finished leaves no folder.
    """
    from cogvideox_flax.generate.store import finished

    name, is_new = hosts.from_first(lambda: _choose_output(args))
    folder = stages_folder(Path(name))

    def leave() -> None:
        if args.out is None and args.dir is None and hosts.is_first() and not finished(folder):
            with suppress(OSError):
                (folder / COMMAND_FILE).unlink(missing_ok=True)
                folder.rmdir()

    try:
        yield Path(name)
    except BaseException:
        if is_new:
            leave()
        raise
    leave()


def _choose_output(args: argparse.Namespace) -> list[Any]:
    """The path of the output, and whether its folder of stages was made for it now."""
    from cogvideox_flax.generate.recipe import read_recipe
    from cogvideox_flax.generate.resolve import check_num_videos
    from cogvideox_flax.io.paths import item_paths

    if args.out is not None:
        return [str(args.out), False]
    like = None if args.like is None else read_recipe(args.like)
    prompts = read_prompts(args) if like is None or args.prompt else like.get("prompt")
    count = len(prompts) if isinstance(prompts, list) else 1
    check_num_videos(videos := 1 if args.num_videos is None else args.num_videos)
    where = {name: getattr(args, name) for name in ("prompt", "model", "revision", "dtype")}
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


def check_output(
    paths: Sequence[Path], latents_only: bool = False, overwrite: bool = False, preview: Path | None = None
) -> None:
    """Refuse names that could not be written at the end of the run, and files that this library did not write.

    overwrite: these may be replaced.
    preview: another file of the run.
    """
    from cogvideox_flax.io.paths import check_writable
    from cogvideox_flax.io.video import check_output_path

    if preview is not None and any(preview.absolute() == path.absolute() for path in paths):
        raise InputError(f"{preview} is to hold the video; give --preview another name")
    for path in paths:
        if not latents_only:
            check_output_path(path)
        else:
            check_writable(path)
            if path.is_dir():
                raise InputError(f"{path} is a directory; give the name of a file to write")
        if not overwrite:
            _check_own(path)


def _check_own(path: Path) -> None:
    """Refuse to replace a file that this library did not write.

    Raises:
        InputError: it did not.
    """
    from cogvideox_flax.generate.recipe import read_recipe

    if not (any(path.iterdir()) if path.is_dir() else path.exists()):
        return
    try:
        is_own = bool(read_recipe(path))
    except InputError:
        is_own = False
    if not is_own:
        raise InputError(
            f"{path} is there and was not made by this program; give another --out, or --overwrite to replace it"
        )


@contextmanager
def saying_replaced(paths: Sequence[Path]) -> Iterator[None]:
    """Log which of the files that are written here took the place of others."""
    there = [path for path in paths if path.exists()]
    yield
    for path in there:
        log.info("%s was replaced", path)


def read_like(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the request that --like asks for; its model becomes the command's, unless another is named.

    Raises:
        InputError: the file holds no usable recipe, or inputs that are not given again.
    """
    from cogvideox_flax.generate.media import MEDIA
    from cogvideox_flax.generate.recipe import fields_of, read_recipe
    from cogvideox_flax.generate.request import THRESHOLDS

    path = args.like
    if not (recipe := read_recipe(path)):
        raise InputError(f"{path} does not say how it was made; this program did not write it")
    found = fields_of(recipe, path)
    use_model(args, recipe, path)
    settings = recipe.get("settings", {})
    _refuse_unrepeatable({**recipe, **settings}, path, "the command line cannot make it again")
    decides = settings.get("step_cache") in {*THRESHOLDS} - {"magcache"} and "step_cache_full" not in settings
    if recipe.get("row") is not None and decides:
        log.warning("%s was one of a batch whose step cache decided for all at once; alone it is another video", path)
    elif recipe.get("row"):
        log.warning("%s was not the first prompt of its batch, and had other noise than a run of it alone", path)
    for name in (*MEDIA, "lora"):
        if (records := found.pop(name, None)) and getattr(args, name, None) is None:
            files = " ".join(f"--{name.replace('_', '-')} {record.get('file')}" for record in records)
            raise InputError(f"{path} was made with more than words; give it again: {files}")
    return found


def _refuse_unrepeatable(settings: Mapping[str, Any], path: Path, instead: str) -> None:
    """Refuse settings that hold what no option of a run gives.

    Raises:
        InputError: they do; with `instead`, what to do.
    """
    from cogvideox_flax.generate.freshness import UNREPEATABLE

    if stated := [f"{name} {json.dumps(settings[name])}" for name in UNREPEATABLE if settings.get(name) is not None]:
        raise InputError(f"{path} was made with more than the options of a run ({', '.join(stated)}); {instead}")


def use_model(args: argparse.Namespace, recipe: Mapping[str, Any], path: Path) -> None:
    """Take the model of a recipe where none was named: one that comes with the package.

    Raises:
        InputError: it is another one, which must be named.
    """
    from cogvideox_flax.checkpoint import hub

    made_by, known = recipe.get("release"), {place.name: name for name, place in hub.EMBEDDED_MODELS.items() if name}
    if args.model is not None:
        return
    if made_by not in known:
        raise InputError(f"{path} was made by {made_by}; name that checkpoint with --model")
    args.model = known[made_by]


def check_like(args: argparse.Namespace, run: Run) -> None:
    """Say which pictures, clips and adapters are not those that --like was made of."""
    from cogvideox_flax.generate.media import MEDIA
    from cogvideox_flax.generate.recipe import read_recipe

    settings = read_recipe(args.like).get("settings", {})
    for name in (*MEDIA, "lora"):
        stored = [record.get("sha256") for record in settings.get(name, ())]
        given = [each["sha256"] if name == "lora" else each.sha256 for each in getattr(run.request, name) or ()]
        if stored and given and stored != given:
            log.warning("--%s is not the one that %s was made of", name.replace("_", "-"), args.like)


def warn_of_other_model(
    pipe: Pipeline, recipe: Mapping[str, Any], path: Path, parts: Sequence[str] | None = None
) -> None:
    """Say where the model is not the one that a file was made with. On process 0 alone.

    parts: those that matter; None: all.
    """
    from cogvideox_flax.generate.recipe import short_fingerprints

    made_with, now = recipe.get("checkpoint"), short_fingerprints(pipe.fingerprints())
    if not isinstance(made_with, dict):
        release = pipe.manifest.release.name if pipe.manifest.release else pipe.native_dir.name
        if (made_by := recipe.get("release")) not in (None, release):
            log.warning("%s was made by %s, and this model is %s", path, made_by, release)
        return
    other = [part for part in parts or now if made_with.get(part) != now.get(part)]
    if other:
        names = " and ".join(part.replace("_", " ") for part in other)
        log.warning("%s was made by %s with another %s than this model's", path, recipe.get("release"), names)


def later_options(before: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an earlier run, and those that were given now in their place.

    Of steps and timesteps, each decides the other: what was given now stands alone.
    """
    pair = {"num_inference_steps", "timesteps"}
    left_out = pair if pair & given.keys() else set()
    return {name: value for name, value in before.items() if name not in left_out} | dict(given)


def open_run(
    args: argparse.Namespace,
    folder: Path,
    read: Callable[[], dict[str, Any]],
    check: Callable[[RunDirectory, Run], object] | None = None,
) -> tuple[Pipeline, Run, RunDirectory]:
    """`open_runs` of a single request.

    Args:
        read: checks names; returns fields of the request, which the options override. On process 0 alone.
        check: more checks, of what the folder holds. On process 0 alone.
    """
    from cogvideox_flax.generate.distilled import SETTINGS
    from cogvideox_flax.generate.request import GenerationRequest, options
    from cogvideox_flax.generate.resolve import resolve
    from cogvideox_flax.generate.store import RunDirectory

    def requests(manifest: Manifest, before: dict[str, Any], dtype: str) -> list[Run]:
        given = given_options(args)
        left_out = SETTINGS if "distilled" in given else ()
        known = {"prompt", *options("encode", "denoise", "decode")} - {*left_out}
        fields = {name: value for name, value in before.items() if name in known}
        run = resolve(GenerationRequest(**{"lora": [], **later_options(fields, given)}), manifest, dtype)
        if check is not None:
            check(RunDirectory(folder=folder, **named_model(args)), run)
        return [run]

    pipe, (run,), store = open_runs(args, folder, read, requests)
    return pipe, run, store


def open_runs(
    args: argparse.Namespace,
    folder: Path,
    read: Callable[[], dict[str, Any]],
    resolve_all: Callable[[Manifest, dict[str, Any], str], list[Run]],
) -> tuple[Pipeline, list[Run], RunDirectory]:
    """Check runs as far as is possible without weights, and open their model, converting it if that was not done yet.

    Args:
        folder: where their files go.
        read: what is checked before the model is looked at; may say the dtype. On process 0 alone.
        resolve_all: what the model is asked for, at least one request, from the result of `read`. On process 0 alone.
    """
    from cogvideox_flax.generate.resolve import check_model, check_run, resolve
    from cogvideox_flax.generate.store import RunDirectory, check_folder, request_json, request_of_json, space_needed
    from cogvideox_flax.io.paths import check_writable

    made: list[Run] = []

    def decide() -> dict[str, Any]:
        before = read()
        manifest = peek(args)
        dtype, mesh = dtype_of(args, manifest, before), given_mesh(args)
        where = named_model(args)["model_id"]
        check_model(manifest, where, dtype, explicit_mesh(mesh))
        made.extend(resolve_all(manifest, before, dtype))
        if mesh is None and (mesh := automatic_mesh(args, manifest, made[0])) is not None:
            check_model(manifest, where, dtype, explicit_mesh(mesh))
        check_folder(folder, max(map(space_needed, made)))
        if getattr(args, "profile", None) is not None:
            check_writable(args.profile / "trace")
        preview_of(args, manifest)
        for run in made:
            check_run(run, explicit_mesh(mesh), profiling_options(args))
        return placed_model(args, dtype, mesh) | {"requests": [request_json(run.request) for run in made]}

    pipe, decided = load(args, decide)
    if not made:
        made.extend(resolve(request_of_json(each), pipe.manifest, pipe.dtype) for each in decided["requests"])
        for theirs, own in zip(decided["requests"], made, strict=True):
            hosts.check_equal("the settings", theirs, request_json(own.request))
    return pipe, made, RunDirectory(folder=folder, **decided["model"], fingerprints=pipe.fingerprints())


def dtype_of(args: argparse.Namespace, manifest: Manifest, before: Mapping[str, Any]) -> str:
    """As given, else of an earlier stage, else the checkpoint's own."""
    return args.dtype or before.get("dtype", manifest.default_dtype)


def named_model(args: argparse.Namespace) -> dict[str, Any]:
    """The model as a run remembers it: `model_id` and `revision`."""
    model = EMBEDDED if args.model is None else args.model
    path = expand_user(model)
    is_path = args.model is not None and os.path.exists(path)
    return {"model_id": os.path.abspath(path) if is_path else model, "revision": args.revision}


def placed_model(args: argparse.Namespace, dtype: str, mesh: str | None) -> dict[str, Any]:
    """What process 0 tells the others of the model, and of where it runs."""
    return {"where": args.model, "model": named_model(args), "dtype": dtype, "mesh": mesh}


def load(args: argparse.Namespace, decide: Callable[[], dict[str, Any]]) -> tuple[Pipeline, dict[str, Any]]:
    """Let process 0 decide on a run, and open its model.

    Args:
        decide: checks the run; returns `placed_model`, and what else all processes need. On process 0 alone.
    """
    from cogvideox_flax.generate.pipeline import Pipeline

    decided = hosts.from_first(decide)
    mesh, revision = explicit_mesh(decided["mesh"]), decided["model"]["revision"]
    pipe = Pipeline.open_on_hosts(decided["where"], decided["dtype"], mesh, revision=revision, progress=not args.quiet)
    pipe.profiling = profiling_options(args)
    keep_programs(pipe)
    return pipe, decided


def preview_of(args: argparse.Namespace, manifest: Manifest) -> Preview | None:
    """What --preview asks for.

    Raises:
        InputError: as for `Preview`.
    """
    if getattr(args, "preview", None) is None:
        return None
    from cogvideox_flax.generate.preview import Preview

    return Preview(manifest, args.preview, overwrite=getattr(args, "overwrite", False))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the request that were given as options."""
    from cogvideox_flax.generate.request import options

    names = options("encode", "denoise", "decode", "generate")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def peek(args: argparse.Namespace) -> Manifest:
    from cogvideox_flax.checkpoint import hub

    if args.model is None and getattr(args, "image", None):
        args.model = hub.EMBEDDED_IMAGE_TO_VIDEO
    return hub.peek(args.model, args.revision, progress=not args.quiet)


def given_mesh(args: argparse.Namespace) -> str | None:
    """The mesh that was asked for; None: an automatic one."""
    return None if args.mesh in (None, "auto") else args.mesh


def explicit_mesh(text: str | None) -> Mesh | None:
    from cogvideox_flax.sharding import make_mesh, parse_mesh

    return None if text is None else make_mesh(*parse_mesh(text))


def automatic_mesh(args: argparse.Namespace, manifest: Manifest, run: Run | None) -> str | None:
    """The mesh over all devices that suits the command, a run's by the planner; None for one device, and on CPUs unless
    it was asked for."""
    import jax

    from cogvideox_flax.sharding import describe_mesh

    devices = jax.devices()
    n = len(devices)
    if n == 1 or (args.mesh is None and devices[0].platform == "cpu"):
        return None
    if args.command == "decode":  # pictures go over all axes, and most easily over two of them
        return f"2,{n // 2},1" if n % 2 == 0 else f"1,{n},1"
    if args.command == "encode":
        parts = math.gcd(n, *manifest.model.heads.values())
        return f"1,{n // parts},{parts}"
    from cogvideox_flax.plan import chip_of_device, choose_mesh

    assert run is not None
    found = describe_mesh(choose_mesh(run, n, chip_of_device(devices[0])).mesh)
    log.info("mesh %s (dp, sp, tp), as the planner says", found)
    return found


def keep_programs(pipe: Pipeline) -> None:
    """Keep compiled programs, unless the user has chosen a cache of JAX for them, or none."""
    import jax

    from cogvideox_flax.io.paths import NotPrivateError, private_cache_dir

    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or jax.process_count() > 1:
        return
    try:
        pipe.keep_programs(private_cache_dir("programs"))
    except (NotPrivateError, InputError, OSError) as e:
        log.warning("compiled programs are not kept, so every start compiles anew: %s", e)


def profiling_options(args: argparse.Namespace) -> ProfilingOptions:
    from cogvideox_flax.runtime.profiling import ProfilingOptions

    profile = (args.profile, args.profile_steps) if "profile" in args else ()
    return ProfilingOptions(not args.no_jit, args.memory, *profile)
