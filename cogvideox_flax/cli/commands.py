"""The commands: each takes the parsed options, calls the library and prints the result.

A command imports what it needs, so that wrong options and --help answer at once; until then Ctrl-C ends the process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_flax.cli.queue import generate_queue
from cogvideox_flax.cli.setup import (
    EMBEDDED,
    automatic_mesh,
    check_like,
    check_output,
    explicit_mesh,
    given_mesh,
    given_options,
    load,
    named_model,
    open_run,
    output_of,
    peek,
    placed_model,
    preview_of,
    profiling_options,
    read_like,
    read_prompts,
    read_settings,
    saying_replaced,
    stages_folder,
    use_model,
    warn_of_other_model,
)
from cogvideox_flax.errors import InputError, install_extra
from cogvideox_flax.generate.request import STAGES
from cogvideox_flax.io.interrupts import loaded
from cogvideox_flax.io.values import printable
from cogvideox_flax.runtime import hosts

if TYPE_CHECKING:
    from cogvideox_flax.generate.events import Events
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.generate.run import Run
    from cogvideox_flax.generate.store import RunDirectory
    from cogvideox_flax.sharding import MeshShape

TRAINING_OPTIONS = {
    "model": ("--model", "the model"),
    "clips": ("--clips", "the folder of clips"),
    "out": ("--out", "the folder that the run writes to"),
    "mesh": ("--mesh", "devices, DP,SP,TP or DP,SP,TP,fsdp"),
    "loop.steps": ("--steps", "how many steps"),
}
"""Key of the training configuration -> the option that overrides it."""


def generate(args: argparse.Namespace) -> None:
    """Prompt to video, in stages that a killed run goes on from; each line of a file to a video of its own."""
    if args.prompt_file is not None:
        generate_queue(args)
        return
    import cogvideox_flax.generate.journey  # noqa: F401  (before Ctrl-C is an exception)

    loaded()
    if args.batch is not None:
        raise InputError("--batch is of a --prompt-file; several prompts on the command line are one batch")
    with output_of(args) as out:
        _generate_one(args, out)


def _generate_one(args: argparse.Namespace, out: Path) -> None:
    """`generate` of the prompts on the command line."""
    from cogvideox_flax.generate.events import Denoised, Finished, show
    from cogvideox_flax.generate.journey import generate as journey
    from cogvideox_flax.generate.recipe import read_recipe
    from cogvideox_flax.generate.resolve import check_num_videos, check_prompts
    from cogvideox_flax.generate.result import save_latents
    from cogvideox_flax.generate.store import check_folder, run_dir_lock
    from cogvideox_flax.io.paths import item_paths

    folder = args.dir or stages_folder(out)
    latents_only = out.suffix.lower() == ".npz"

    def paths(prompts: int, videos: int) -> list[Path]:
        return item_paths(out, (1 if latents_only else prompts) * videos)  # an npz holds all prompts

    def read() -> dict[str, Any]:
        like = {} if args.like is None else read_like(args)
        prompts = read_prompts(args) if args.prompt or not like else check_prompts(like["prompt"])[0]
        videos = 1 if args.num_videos is None else args.num_videos
        check_num_videos(videos)
        check_output(paths(len(prompts), videos), latents_only, args.overwrite, args.preview)
        check_folder(folder)
        return like | {"prompt": prompts}

    def check(_: RunDirectory, run: Run) -> None:
        if args.like is not None:
            check_like(args, run)

    pipe, run, store = open_run(args, folder, read, check)
    if args.like is not None and hosts.is_first():
        warn_of_other_model(pipe, read_recipe(args.like), args.like)
    each = paths(run.batch, run.request.num_videos)
    batch = len(each) // run.request.num_videos
    stages = STAGES[:-1] if latents_only else STAGES
    events = show(_previewed(args, pipe, journey(pipe, run, store, stages)), not args.quiet)
    with run_dir_lock(folder, temporary=args.dir is None), closing(events):
        for event in events:
            match event:
                case Denoised(one, latents, metadata) if latents_only:
                    path = each[one.request.seed - run.request.seed]
                    with saying_replaced([path]):
                        save_latents(path, latents, metadata)
                case Finished(one, result):
                    first = (one.request.seed - run.request.seed) * batch
                    with saying_replaced(own := each[first : first + batch]):
                        result.save_items(own)
    print("\n".join(map(str, each)))


def encode(args: argparse.Namespace) -> None:
    """Stage 1 alone."""
    from cogvideox_flax.generate.store import EMBEDDINGS_FILE, check_folder

    loaded()

    def read() -> dict[str, Any]:
        check_folder(args.dir)
        return {"prompt": read_prompts(args)}

    _run_stage(args, *open_run(args, args.dir, read))
    print(args.dir / EMBEDDINGS_FILE)


def denoise(args: argparse.Namespace) -> None:
    """Stage 2 alone, with the directory's model and settings unless told otherwise."""
    from cogvideox_flax.generate.store import LATENTS_FILE, RunDirectory

    loaded()
    _run_stage(args, *open_run(args, args.dir, lambda: read_settings(args, asked=True), RunDirectory.read_features))
    print(args.dir / LATENTS_FILE)


def _run_stage(args: argparse.Namespace, pipe: Pipeline, run: Run, store: RunDirectory) -> None:
    from cogvideox_flax.generate.events import result_of
    from cogvideox_flax.generate.journey import generate as journey
    from cogvideox_flax.generate.store import run_dir_lock

    with run_dir_lock(args.dir):
        result_of(_previewed(args, pipe, journey(pipe, run, store, [args.command])), not args.quiet)


def _previewed(args: argparse.Namespace, pipe: Pipeline, events: Events[None]) -> Events[None]:
    """The same events; --preview sees them pass."""
    preview = preview_of(args, pipe.manifest)
    return events if preview is None else preview.watch(events)


def decode(args: argparse.Namespace) -> None:
    """Stage 3 alone: of a directory's latents, whatever system wrote them; or of an npz of `generate`."""
    from cogvideox_flax.generate.events import result_of
    from cogvideox_flax.generate.journey import decode as decode_latents
    from cogvideox_flax.generate.predict.windows import in_pieces
    from cogvideox_flax.generate.recipe import decoded_recipe, fields_of, read_latents_npz, read_recipe, recipe
    from cogvideox_flax.generate.resolve import check_fps, check_model, check_pieces, check_prompts
    from cogvideox_flax.generate.result import GenerationResult
    from cogvideox_flax.generate.run import decode_programs
    from cogvideox_flax.generate.store import VIDEO_FILE, check_folder, read_latents
    from cogvideox_flax.io.paths import item_paths

    loaded()
    if (args.latents is None) == (args.dir is None):
        raise InputError("name what to decode: an .npz of `cogvideox generate --out x.npz`, or a --dir; one of the two")
    out = args.out or (args.latents.with_suffix(".mp4") if args.dir is None else args.dir / VIDEO_FILE)
    settings: dict[str, Any] = {}  # known on process 0 alone, which writes
    stored: dict[str, Any] = {}  # the recipe of an npz

    def decide() -> dict[str, Any]:
        if args.dir is None:
            stored.update(read_recipe(args.latents))
            if not stored:
                raise InputError(f"{args.latents} was not made by `cogvideox generate --out x.npz`")
            settings.update(fields_of(stored, args.latents))
            settings["prompt"] = check_prompts(settings["prompt"])[0]
            use_model(args, stored, args.latents)
        else:
            settings.update(read_settings(args))
        check_output(item_paths(out, len(settings["prompt"])), overwrite=args.overwrite)
        check_fps(args.fps)
        check_folder(out.absolute().parent)
        manifest = peek(args)
        dtype = args.dtype or settings.get("dtype", manifest.default_dtype)
        mesh = given_mesh(args) or automatic_mesh(args, manifest, None)
        check_model(manifest, named_model(args)["model_id"], dtype, explicit_mesh(mesh))
        pieces = in_pieces(settings.get("num_frames"), settings.get("window"))
        tiling = bool(settings.get("tiling") if args.tiling is None else args.tiling)
        if pieces:
            check_pieces(manifest.model, tiling)
        elif tiling:
            manifest.model.codec.check_tiling()
        channels = manifest.model.codec.latent_channels
        if args.dir is None:
            latents = read_latents_npz(args.latents, len(settings["prompt"]), channels)
        else:
            latents = read_latents(args.dir, settings, channels)
        fps = args.fps or settings.get("fps") or manifest.model.defaults.fps
        return placed_model(args, dtype, mesh) | {"latents": latents, "pieces": pieces, "fps": fps, "tiling": tiling}

    pipe, decided = load(args, decide)
    latents, pieces = decided["latents"], decided["pieces"]
    how = {"tiling": decided["tiling"], "in_pieces": pieces}
    compiled = decode_programs(pipe.manifest, pipe.dtype, latents.shape, pipe.mesh, False, how["tiling"], pieces)
    result_of(pipe.checking_memory([("decode", compiled)]), not args.quiet)
    frames = result_of(decode_latents(pipe, latents, **how), not args.quiet)
    metadata: dict[str, Any] = {}
    if hosts.is_first():
        made_with = settings.get("fingerprints")
        if not stored:
            made_of = {name: value for name, value in settings.items() if name not in ("fingerprints", "asked")}
            stored = recipe(made_of, pipe.manifest, pipe.native_dir.name, made_with)
        warn_of_other_model(pipe, stored, args.latents or args.dir, [pipe.manifest.model.decoder])
        how_decoded: Any = {"dtype": pipe.dtype, "fps": decided["fps"], "tiling": decided["tiling"]}
        metadata = decoded_recipe(stored, pipe.fingerprints(), pipe.manifest.model.decoder, **how_decoded)
    saved = GenerationResult(frames, decided["fps"], metadata)
    with saying_replaced(item_paths(out, len(latents))):
        print("\n".join(map(str, saved.save(out))))


def upscale(args: argparse.Namespace) -> None:
    """A clip enlarged by a model that was fine-tuned for it, written as its frames are finished."""
    from cogvideox_flax.generate import upscale as upscaling
    from cogvideox_flax.generate.request import options_of
    from cogvideox_flax.generate.resolve import check_model, check_run
    from cogvideox_flax.generate.upscale_options import UpscaleOptions
    from cogvideox_flax.io.source import FrameStream
    from cogvideox_flax.io.video import HashedVideo, save_video

    loaded()
    if args.model is None:
        raise InputError("upscaling takes a model that was fine-tuned for it, such as DOVE; name one with --model")
    check_output([args.out], overwrite=args.overwrite)
    source = HashedVideo(args.clip)
    manifest = peek(args)
    dtype = args.dtype or manifest.default_dtype
    mesh = given_mesh(args)
    check_model(manifest, args.model, dtype, explicit_mesh(mesh))
    given = {name: value for name in options_of(UpscaleOptions) if (value := getattr(args, name)) is not None}
    plan = upscaling.plan_upscale(manifest, source.info, UpscaleOptions(**given), dtype)
    if mesh is None and (mesh := automatic_mesh(args, manifest, plan.run)) is not None:
        check_model(manifest, args.model, dtype, explicit_mesh(mesh))
    check_run(plan.run, explicit_mesh(mesh), profiling_options(args))
    pipe, _ = load(args, lambda: placed_model(args, dtype, mesh))
    how = {"progress": not args.quiet}
    upscaling.check_memory(pipe, plan, **how)
    run_tile = upscaling.tile_runner(pipe, plan, not args.quiet)
    frames = FrameStream(plan.shape, lambda: upscaling.upscale_frames(source, plan, run_tile, **how))
    fps = plan.clip.fps or manifest.model.defaults.fps
    try:
        with saying_replaced([args.out]):
            save_video(args.out, frames, fps, upscaling.describe(plan, pipe, args.clip))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("\nstopped; nothing was written") from None
    print(args.out)


def train(args: argparse.Namespace) -> None:
    """Fine-tune, or with --check say what that would be."""
    try:
        import optax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
    except ImportError as e:
        raise InputError(f"training needs {e.name}: {install_extra('train')}") from e
    from cogvideox_flax.training.finetune import finetune
    from cogvideox_flax.training.job import open_job

    loaded()
    logging.getLogger("absl").setLevel(logging.WARNING)  # which Orbax uses for notes about each state
    given = {key: getattr(args, option.removeprefix("--")) for key, (option, _) in TRAINING_OPTIONS.items()}
    job = open_job(args.config, {key: value for key, value in given.items() if value is not None})
    if args.check:
        print(job.describe())
        return
    result = finetune(job, progress=not args.quiet)
    if result is None:
        raise KeyboardInterrupt  # stopped in order: `main` says how to go on
    print(result)


def plan(args: argparse.Namespace) -> None:
    """Forecast a run: each stage is compiled for chips that need not be there."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where there are chips, they are left alone
    from cogvideox_flax.checkpoint import Manifest, hub
    from cogvideox_flax.generate.media import UNSEEN
    from cogvideox_flax.generate.request import GenerationRequest
    from cogvideox_flax.generate.resolve import resolve
    from cogvideox_flax.models.registry import get_release
    from cogvideox_flax.plan import Forecast, best_mesh, check_price, describe, forecast
    from cogvideox_flax.sharding import parse_mesh
    from cogvideox_flax.sharding.devices import find_devices

    loaded()
    find_devices()

    def say(message: str) -> None:
        if not args.quiet:
            print(message, file=sys.stderr, flush=True)

    check_price(args.price)
    manifest = Manifest.of_release(get_release(args.release)) if args.release else hub.peek(args.model)
    needed: dict[str, Any] = {s.input: [UNSEEN] for s in manifest.model.visual if s.required}
    if (sampler := manifest.model.samplers.get(args.scheduler)) is not None and sampler.needs_video:
        needed["video"] = [UNSEEN]
    run = resolve(GenerationRequest([""] * args.prompts, **given_options(args), **needed), manifest, args.dtype)
    if args.mesh:
        mesh = parse_mesh(args.mesh)
    else:
        mesh = best_mesh(run, args.topology, lambda tried, found: say(_tried(tried, found)))
    stages, forecasts = [], forecast(run, args.topology, mesh, args.stages)
    say(f"compiling for {args.topology}: {', '.join(args.stages)}; about a minute each on two cores")
    for stage in forecasts:
        say(f"compiled {stage.name} in {stage.compile_s:.0f} s")
        stages.append(stage)
    found = Forecast(args.topology, mesh, run.size, tuple(stages), args.prompts)
    if args.json:
        more = {"fits": found.fits, "estimated_s": found.estimated_s, "chips": found.chips}
        more |= {} if args.price is None else {"dollars": found.dollars(args.price)}
        print(json.dumps(dataclasses.asdict(found) | more, indent=2))
    else:
        print(describe(found, args.price))


def _tried(mesh: MeshShape, found: Any) -> str:
    from cogvideox_flax.sharding import describe_mesh

    name = f"mesh {describe_mesh(mesh)}"
    if isinstance(found, InputError):
        return f"{name}: {str(found).splitlines()[0]}"
    fits = "" if found.fits else ", does not fit"
    return f"{name}: {found.estimated_s:.1f} s of denoising, {found.hbm_gib_per_chip:.1f} GiB per chip{fits}"


def convert(args: argparse.Namespace) -> None:
    """Convert a Hugging Face checkpoint, or some of its components, to the native format."""
    from cogvideox_flax.checkpoint import is_native
    from cogvideox_flax.conversion.convert import convert, family_of
    from cogvideox_flax.conversion.download import Download, download, download_model
    from cogvideox_flax.conversion.progress import progress_bar
    from cogvideox_flax.io.paths import expand_user

    loaded()
    src = expand_user(args.src)
    try:
        if os.path.exists(src):
            if args.revision:
                raise InputError(f"--revision belongs to a hub id; {src} is a directory on this machine")
            source = Download(src, {})
        else:
            configs = download(args.src, args.revision)
            family = family_of(configs.folder, args.dst, args.release, args.component)
            source = download_model(args.src, configs, family, args.component)
        with progress_bar() as progress:
            convert(
                source.folder,
                args.dst,
                components=args.component,
                whole=args.component is None and not is_native(args.dst),
                dtype=args.dtype,
                release=args.release,
                origin=source.origin,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("\nstopped; components that were complete are kept for the next attempt") from None
    print(args.dst)


def quantize(args: argparse.Namespace) -> None:
    """Write a checkpoint again with weights of 8 bits."""
    from cogvideox_flax.checkpoint.quantize import quantize_checkpoint

    loaded()
    quantize_checkpoint(args.src, args.dst, args.component, args.kind)
    print(args.dst)


def info(args: argparse.Namespace) -> None:
    """Describe a checkpoint without loading or converting it, or an adapter, or say how a video was made."""
    from cogvideox_flax.checkpoint import hub

    loaded()
    if (made := _stored_recipe(args.where)) is not None:
        _print_recipe(made, args.json)
        return
    if args.where is not None and _print_adapter(args.where, args.json):
        return
    manifest = hub.peek(args.where, args.revision)
    release = manifest.release
    rows = {
        name: {"parameters": component.num_parameters(config), **manifest.weights.get(name, {})}
        for name, component in manifest.model.components.items()
        if (config := manifest.configs.get(name)) is not None
    }
    where = EMBEDDED if args.where is None else args.where
    result = manifest.to_json() | {"where": where, "components": rows}
    if args.json:
        _print(json.dumps(result, indent=2))
        return
    _print(f"{where}: {release.name if release else 'no released architecture'}")
    for name, row in rows.items():
        _print(f"  {name:13} {row['parameters']:>14,} parameters  {_origin(row)}")
    if release is not None:
        _print(
            f"  default       {release.num_frames} frames of {release.height}x{release.width} at {release.fps} fps, "
            f"{release.num_inference_steps} {release.scheduler} steps, guidance {release.guidance_scale:g}"
            + (" (dynamic)" if release.use_dynamic_cfg else "")
        )


def _print(text: str) -> None:
    """Print what a file holds."""
    print(printable(text))


def _stored_recipe(where: str | None) -> dict[str, Any] | None:
    """What a video or a file of latents says of how it was made; None if it is neither.

    Raises:
        InputError: this library did not write it.
    """
    from cogvideox_flax.checkpoint import is_native
    from cogvideox_flax.generate.recipe import read_recipe
    from cogvideox_flax.io.paths import expand_user
    from cogvideox_flax.io.source import format_of

    if where is None:
        return None
    path = expand_user(where)
    if not os.path.isfile(path):  # which is False, too, of a name that is too long
        is_made = os.path.isdir(path) and not is_native(path) and any(path.glob("*.png"))
    else:
        is_made = path.suffix.lower() == ".npz" or format_of(path) is not None
    if not is_made:
        return None
    found = read_recipe(path)
    if not found:
        raise InputError(f"{path} does not say how it was made; this library did not write it")
    return found


def _print_recipe(made: dict[str, Any], as_json: bool) -> None:
    """Print a recipe, each of its settings on a line."""
    if as_json:
        _print(json.dumps(made, indent=2, ensure_ascii=False))
        return
    rows = {name: value for name, value in made.items() if name != "settings"}
    for name, value in (rows | made.get("settings", {})).items():
        if value != "":
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            _print(f"{name:20} {text}".replace("\n", "\\n"))


def _print_adapter(where: str, as_json: bool) -> bool:
    """Print what an adapter is and the releases that it fits; False if `where` is not an adapter.

    Raises:
        InputError: it fits no release, or is a pickle.
    """
    from cogvideox_flax.generate.distilled import recognised
    from cogvideox_flax.io.paths import expand_user
    from cogvideox_flax.lora import (
        EMBEDDED_ADAPTERS,
        SUFFIXES,
        find_adapter,
        fitting_releases,
        is_adapter,
        open_adapter,
    )
    from cogvideox_flax.models.registry import FAMILIES

    if where not in EMBEDDED_ADAPTERS and not os.path.exists(expand_user(where)):  # a hub id is a model's
        return False
    path = find_adapter(where)
    if not path.is_file() or path.suffix not in SUFFIXES:
        return False
    with open_adapter(path) as file:
        if not is_adapter(file):
            return False
        fits = fitting_releases(file)
    if not fits:
        raise InputError(
            f"{file.path} fits no release as an adapter (docs/adapters.md has the layouts); --lora says what is wrong "
            "for one model"
        )
    adapter = next(iter(fits.values()))
    if as_json:
        strengths = {name: pair.strength for name, pair in adapter.pairs.items()}
        ranks = {name: pair.rank for name, pair in adapter.pairs.items()}
        found = {"layout": adapter.layout, "alpha": adapter.alpha, "rank": ranks, "alpha_over_rank": strengths}
        _print(json.dumps({"where": str(file.path), **found, "fits": list(fits)}, indent=2))
        return True
    _print(f"{file.path}: {adapter}")
    _print("  targets  " + ", ".join(adapter.targets))
    _print("  fits     " + ", ".join(fits))
    for family in FAMILIES.values():
        if (known := recognised(file.path, family)) is not None:
            _print(f"  made for {known}")
    return True


def _origin(row: dict[str, Any]) -> str:
    if "sha256" not in row:
        return "not converted yet"
    row = row | {"dtype": row.get("quantized", row.get("dtype", ""))}
    source = row.get("source", {})
    if "recipe" in source:
        return f"{row.get('dtype', ''):9} trained by {source['recipe']}, {source['steps']} steps"
    revision = f" at {source['revision'][:12]}" if "revision" in source else ""
    return f"{row.get('dtype', ''):9} from {source.get('hub_id', source.get('path', 'an unknown place'))}{revision}"
