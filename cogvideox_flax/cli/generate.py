"""Commands that make videos from prompts: `generate`, and its stages `encode`, `denoise` and `decode`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax

from cogvideox_flax import hub
from cogvideox_flax.cli.cluster import check_ray, make_on_cluster
from cogvideox_flax.cli.prepare import (
    Prepared,
    check_runs,
    given_options,
    look,
    model_of_recipe,
    open_prepared,
    output_of,
    preview_of,
    read_like,
    refuse_unrepeatable,
    request_of,
    stages_folder,
    stages_of,
    warn_of_other_media,
    warn_of_other_model,
    with_automatic_mesh,
)
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import journey
from cogvideox_flax.generate.events import Events, result_of, save_videos, show
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.predict.windows import in_windows
from cogvideox_flax.generate.queue import Queue, all_have_images, items_of
from cogvideox_flax.generate.recipe import decoded_recipe, fields_of, read_latents_npz, read_recipe, recipe
from cogvideox_flax.generate.request import STAGES, check_option
from cogvideox_flax.generate.resolve import check_chunks, check_prompts, resolve
from cogvideox_flax.generate.result import (
    GenerationResult,
    check_output,
    filled_paths,
    is_latents,
    is_template,
    logging_replaced,
    output_paths,
)
from cogvideox_flax.generate.run import Run, decode_programs
from cogvideox_flax.generate.store import (
    EMBEDDINGS_FILE,
    LATENTS_FILE,
    VIDEO_FILE,
    RunDirectory,
    asked_settings,
    check_folder,
    read_latents,
    read_settings,
    remove_files,
    run_dir_lock,
    space_needed,
)
from cogvideox_flax.io.paths import check_name, item_paths
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.terminal import duration_text, say
from cogvideox_flax.serve.group import worker_size


def generate(args: argparse.Namespace) -> None:
    """Make videos of the prompts, in stages that an interrupted run continues from; or one of each line of a file."""
    worker_size(args.ray, args.ray_worker, args.hosts_per_worker)
    if args.prompt_file is not None:
        _generate_queue(args, Path("video.mp4") if args.out is None else args.out)
        return
    if args.ray is not None:
        raise InputError("--ray is of a --prompt-file, whose lines it makes on the workers of a cluster")
    if args.batch is not None:
        raise InputError("--batch is of a --prompt-file; several prompts on the command line are one batch")
    with output_of(args) as out:
        model, prepared = open_prepared(args, partial(_prepare_generate, args, out))
        if args.like is not None and hosts.is_first():
            warn_of_other_model(model, read_recipe(args.like), args.like)
        (run,) = prepared.runs
        folder, paths = args.dir or stages_of(out, run.request), output_paths(out, run.request)
        with run_dir_lock(folder, temporary=args.dir is None):
            _make(args, model, run, RunDirectory(folder, prepared.choice, model.fingerprints()), paths)
        print("\n".join(map(str, paths)))


def _prepare_generate(args: argparse.Namespace, out: Path) -> Prepared:
    """`generate` of the prompts on the command line, or of --like."""
    if args.no_metadata and is_latents(out):
        raise InputError(f"{out} could not be decoded without its metadata; leave out --no-metadata")
    recorded = {} if args.like is None else read_like(args)
    request = request_of(args, recorded)
    check_option("num_videos", request.num_videos)
    check_output(output_paths(out, request), args.overwrite, args.preview, latents=is_latents(out))
    check_folder(folder := args.dir or stages_of(out, request))
    choice, manifest = look(args, recorded)
    run = resolve(request, manifest, choice.dtype)
    if args.like is not None:
        warn_of_other_media(run, args.like)
    return check_runs(args, choice, manifest, [run], folder)


def _make(
    args: argparse.Namespace,
    model: OpenModel,
    run: Run,
    store: RunDirectory,
    paths: Sequence[Path],
    *,
    keep: bool = False,
    timed: bool = False,
) -> list[dict[str, Any]]:
    """Make the videos of a run; returns what is stored with each. Other arguments as for `save_videos`."""
    latents = is_latents(paths[0])
    events = journey.generate(model, run, store, STAGES[:-1] if latents else STAGES, keep=keep)
    with closing(show(_previewed(args, model, events), not args.quiet)) as shown:
        return save_videos(shown, run, paths, latents=latents, timed=timed, bare=args.no_metadata)


def _previewed(args: argparse.Namespace, model: OpenModel, events: Events[None]) -> Events[None]:
    """The same events; --preview sees them pass."""
    preview = preview_of(args, model.manifest)
    return events if preview is None else preview.watch(events)


# --- a file of prompts


def _generate_queue(args: argparse.Namespace, out: Path) -> None:
    """Make a video for each line of --prompt-file; those that are there already, made of the same, stay."""
    check_name(out)
    if args.ray is not None:
        check_ray(args, out)
        jax.config.update("jax_platforms", "cpu")  # the devices are the workers'
    folder = (args.dir or stages_folder(out)) / "queue"  # below --dir, so that the files of other runs there stay
    queue = Queue(args.prompt_file, out)
    model, prepared = open_prepared(args, partial(_prepare_queue, args, queue, folder))
    store, keep = RunDirectory(folder, prepared.choice, model.fingerprints()), model.fits_at_once()
    missing = [(run, items) for run, items in zip(prepared.runs, queue.todo(model), strict=True) if items]
    if args.ray is not None:
        options = {"lora": [], **given_options(args)}
        make_on_cluster(args, model, prepared.choice, queue, [(run, todo) for run, (todo,) in missing], options, folder)
        missing = []
    count, total, started = 0, sum(len(items) for _, items in missing), time.monotonic()
    queue.write_page(args.model and str(args.model))
    with run_dir_lock(folder, temporary=True):
        for batch, items in missing:
            run = items_of(batch, [todo.item for todo in items])
            remaining = (time.monotonic() - started) / count * (total - count) if count else 0
            later = f", about {duration_text(remaining)} left" if count else ""
            what = f"video {count + 1} of {total}{later}: {', '.join(map(repr, run.request.prompt))}"
            say(what, not args.quiet, "video", number=count + 1, total=total, lines=[todo.line for todo in items])
            paths = [Path(todo.path) for todo in items]
            try:
                check_folder(folder, space_needed(run))
                stored = _make(args, model, run, store, paths, keep=keep, timed=True)
            except InputError as e:
                if jax.process_count() > 1:
                    raise
                for todo in items:
                    queue.refuse(todo.line, e)
            else:
                for todo, path, metadata in zip(items, paths, stored, strict=True):
                    queue.made(todo.line, run.request.seed, path, metadata)
                    print(path, flush=True)
                remove_files(folder)
            count += len(items)
            queue.write_page(args.model and str(args.model))
    if args.dir is None and hosts.is_first():
        with suppress(OSError):  # a run in the middle is there, too
            stages_folder(out).rmdir()
    if queue.faults:
        raise queue.failed()


def _prepare_queue(args: argparse.Namespace, queue: Queue, folder: Path) -> Prepared:
    """`generate --prompt-file`."""
    if args.like is not None:
        raise InputError("--like makes one video again; leave it out with a --prompt-file")
    if args.no_metadata:
        raise InputError("a queue knows its videos by what they hold; leave out --no-metadata, or the --prompt-file")
    if args.prompt:
        raise InputError("prompts were given beside --prompt-file; write them all into the file, or leave it out")
    queue.read()
    check_folder(folder)
    with_images = all_have_images(queue.lines.values())
    if args.ray is not None:  # the mesh is of a worker's devices
        args = argparse.Namespace(**vars(args) | {"mesh": None})
    choice, manifest = look(args, {"model_id": hub.EMBEDDED_IMAGE_TO_VIDEO} if with_images else None)
    options = {"lora": [], **given_options(args)}
    how = {"overwrite": True, "preview": args.preview, "latents": is_latents(queue.out)}
    batch = args.batch or 1
    runs = queue.resolve(options, manifest, choice.dtype, batch, lambda path: check_output([path], **how))
    return check_runs(args, choice, manifest, runs, folder)


# --- stages


def encode(args: argparse.Namespace) -> None:
    """Do stage 1 alone."""
    _run_stage(args, *open_prepared(args, partial(_prepare_encode, args)))
    print(args.dir / EMBEDDINGS_FILE)


def _prepare_encode(args: argparse.Namespace) -> Prepared:
    check_folder(args.dir)
    request = request_of(args, {})
    choice, manifest = look(args)
    return check_runs(args, choice, manifest, [resolve(request, manifest, choice.dtype)], args.dir)


def denoise(args: argparse.Namespace) -> None:
    """Do stage 2 alone, with the directory's model and settings unless told otherwise."""
    _run_stage(args, *open_prepared(args, partial(_prepare_denoise, args)))
    print(args.dir / LATENTS_FILE)


def _prepare_denoise(args: argparse.Namespace) -> Prepared:
    settings = read_settings(args.dir)
    refuse_unrepeatable(settings, args.dir, "go on with it there")
    choice, manifest = look(args, settings)
    run = resolve(request_of(args, asked_settings(settings)), manifest, choice.dtype)
    RunDirectory(args.dir, choice).read_features(run)
    return check_runs(args, choice, manifest, [run], args.dir)


def _run_stage(args: argparse.Namespace, model: OpenModel, prepared: Prepared) -> None:
    (run,), store = prepared.runs, RunDirectory(args.dir, prepared.choice, model.fingerprints())
    with run_dir_lock(args.dir):
        result_of(_previewed(args, model, journey.generate(model, run, store, [args.command])), not args.quiet)


def decode(args: argparse.Namespace) -> None:
    """Do stage 3 alone: of a directory's latents, whatever system wrote them; or of an npz of `generate`."""
    if (args.latents is None) == (args.dir is None):
        raise InputError("name what to decode: an .npz of `cogvideox generate --out x.npz`, or a --dir; one of the two")
    out = args.out or (args.latents.with_suffix(".mp4") if args.dir is None else args.dir / VIDEO_FILE)
    model, prepared = open_prepared(args, partial(_prepare_decode, args, out))
    names = ("latents", "fps", "tiling", "in_chunks", "crf", "paths")
    latents, fps, tiling, in_chunks, crf, paths = (prepared.more[name] for name in names)
    paths = [Path(path) for path in paths]
    programs = decode_programs(model.manifest, model.dtype, latents.shape, model.mesh, False, tiling, in_chunks)
    result_of(model.checking_memory([("decode", programs)]), not args.quiet)
    frames = result_of(journey.decode(model, latents, tiling=tiling, in_chunks=in_chunks), not args.quiet)
    metadata: dict[str, Any] = {}
    if hosts.is_first():  # which writes
        decoder = model.manifest.model.decoder
        made_by = prepared.recipe
        warn_of_other_model(model, made_by, args.latents or args.dir, [decoder])
        if args.dir is not None:  # by the model that decodes it
            made_by = made_by | {"release": made_by["release"] or model.native_dir.name}
        how: Any = {"dtype": model.dtype, "fps": fps, "tiling": tiling, "crf": crf}
        metadata = decoded_recipe(made_by, model.fingerprints(), decoder, **how)
    metadata = {} if args.no_metadata else metadata
    with logging_replaced(paths):
        print("\n".join(map(str, GenerationResult(frames, fps, metadata, crf).save_items(paths))))


def _prepare_decode(args: argparse.Namespace, out: Path) -> Prepared:
    if args.dir is None:
        made_by = read_recipe(args.latents)
        if not made_by:
            raise InputError(f"{args.latents} was not made by `cogvideox generate --out x.npz`")
        settings = fields_of(made_by, args.latents) | model_of_recipe(args, made_by, args.latents)
        settings["prompt"] = check_prompts(settings["prompt"])[0]
    else:
        settings = read_settings(args.dir)
    paths = _decoded_paths(out, settings["prompt"], settings.get("seed"))
    check_output(paths, args.overwrite)
    check_option("fps", args.fps)
    check_option("crf", args.crf)
    check_folder(out.absolute().parent)
    choice, manifest = look(args, settings)
    choice = with_automatic_mesh(args, choice, manifest)
    in_chunks = in_windows(settings.get("num_frames"), settings.get("window"))
    tiling = bool(settings.get("tiling") if args.tiling is None else args.tiling)
    if in_chunks:
        check_chunks(manifest.model, tiling)
    elif tiling:
        manifest.model.codec.check_tiling()
    channels = manifest.model.codec.latent_channels
    if args.dir is None:
        latents = read_latents_npz(args.latents, len(settings["prompt"]), channels)
    else:
        latents = read_latents(args.dir, settings, channels)
        of_model = ("fingerprints", "asked", "model_id", "revision", "transformer", "variant")
        made_of = {name: x for name, x in settings.items() if name not in of_model}
        made_by = recipe(made_of, manifest, "", settings.get("fingerprints"))
    fps = args.fps or settings.get("fps") or manifest.model.defaults.fps
    crf = settings.get("crf") if args.crf is None else args.crf
    more = {"latents": latents, "fps": fps, "tiling": tiling, "in_chunks": in_chunks, "crf": crf}
    return Prepared(choice, more=more | {"paths": list(map(str, paths))}, recipe=made_by)


def _decoded_paths(out: Path, prompts: Sequence[str], seed: int | list[int] | None) -> list[Path]:
    """The path of each video of these latents."""
    if not is_template(out):
        return item_paths(out, len(prompts))
    if seed is None and "{seed}" in out.name:
        raise InputError(f"--out {out}: the latents do not say of which seed they are; leave {{seed}} out")
    seeds = seed if isinstance(seed, list) else [seed or 0] * len(prompts)
    return filled_paths(out, list(zip(prompts, seeds, strict=True)))
