"""The commands: each takes the parsed options, calls the library and prints the result.

A command imports what it needs, so that wrong options and --help answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from cogvideox_flax.cli.setup import (
    EMBEDDED,
    check_output,
    check_run,
    load,
    mesh_of,
    open_run,
    peek,
    read_prompts,
    take_over,
)
from cogvideox_flax.config import COMPONENTS, Release, get_release
from cogvideox_flax.errors import InputError
from cogvideox_flax.runtime import hosts

if TYPE_CHECKING:
    from cogvideox_flax.sharding import MeshShape

TRAINING_OPTIONS = {
    "model": ("--model", "the model"),
    "clips": ("--clips", "the folder of clips"),
    "out": ("--out", "the folder that the run writes to"),
    "mesh": ("--mesh", "devices, DP,SP,TP or DP,SP,TP,sharded"),
    "loop.steps": ("--steps", "how many steps"),
}
"""Key of the training configuration -> the option that overrides it."""


def generate(args: argparse.Namespace) -> None:
    """Prompt to video, in stages that a killed run goes on from."""
    from cogvideox_flax.generate import stages
    from cogvideox_flax.generate.memory import checked_stages

    latents_only = args.out.suffix.lower() == ".npz"
    folder = args.dir or args.out.with_name(args.out.name + ".stages")

    def begin() -> list[str]:
        prompts = read_prompts(args)
        check_output(args.out, len(prompts), latents_only)
        stages.check_folder(folder)
        return prompts

    prompts = hosts.from_first(begin)
    run = check_run(args, folder, prompt=prompts, negative_prompt=[args.negative_prompt] * len(prompts))
    pipe, settings = open_run(args, run)
    quiet = {"progress": not args.quiet}
    pipe.check_memory(
        pipe.size(settings.frames, settings.height, settings.width),
        len(prompts),
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        scheduler=settings.scheduler,
        stages=checked_stages(denoise=not args.compiled_loop, decode=not latents_only and not args.tiling),
        keep=False,
        **quiet,
    )
    with stages.run_dir_lock(folder, temporary=args.dir is None):
        stages.encode(pipe, settings, folder, **quiet)
        pipe.release("text_encoder")
        stages.denoise(pipe, settings, folder, compiled_loop=args.compiled_loop, **quiet)
        pipe.release("transformer")
        paths = []
        if not latents_only:
            video = stages.decode(pipe, folder, tiling=args.tiling, **quiet)
            paths = video.save(args.out) if hosts.is_first() else []
        elif hosts.is_first():
            paths = [stages.save_latents(pipe, folder, args.out)]
    print("\n".join(map(str, paths)))


def encode(args: argparse.Namespace) -> None:
    """Stage 1 alone."""
    from cogvideox_flax.generate import stages

    def begin() -> list[str]:
        prompts = read_prompts(args)
        stages.check_folder(args.dir)
        return prompts

    prompts = hosts.from_first(begin)
    run = check_run(args, args.dir, prompt=prompts, negative_prompt=[args.negative_prompt] * len(prompts))
    pipe, settings = open_run(args, run)
    with stages.run_dir_lock(args.dir):
        stages.encode(pipe, settings, args.dir, progress=not args.quiet)
    print(args.dir / stages.EMBEDDINGS_FILE)


def denoise(args: argparse.Namespace) -> None:
    """Stage 2 alone, with the directory's model and settings unless told otherwise."""
    from cogvideox_flax.generate import stages

    before = take_over(args)
    run = check_run(args, args.dir, **before)
    transformer, settings = run.manifest.transformer, run.settings
    assert transformer
    texts = settings.prompt, settings.negative_prompt
    hosts.from_first(lambda: len(stages.read_embeddings(args.dir, *texts, transformer)))
    pipe, settings = open_run(args, run)
    with stages.run_dir_lock(args.dir):
        stages.denoise(pipe, settings, args.dir, progress=not args.quiet, compiled_loop=args.compiled_loop)
    print(args.dir / stages.LATENTS_FILE)


def decode(args: argparse.Namespace) -> None:
    """Stage 3 alone."""
    from cogvideox_flax.generate import stages
    from cogvideox_flax.generate.checks import check_model

    before = take_over(args)
    out = args.out or args.dir / stages.VIDEO_FILE

    def begin() -> None:
        check_output(out, len(before["prompt"]), latents_only=False)
        stages.check_folder(out.absolute().parent)

    hosts.from_first(begin)
    manifest = peek(args)
    mesh = mesh_of(args, manifest, before)
    dtype = args.dtype or before.get("dtype", manifest.default_dtype)
    check_model(manifest, args.model or EMBEDDED, dtype, mesh)
    vae = manifest.vae
    assert vae
    hosts.from_first(lambda: len(stages.read_latents(args.dir, before, vae)))
    pipe = load(args, dtype, mesh)
    video = stages.decode(pipe, args.dir, fps=args.fps, tiling=args.tiling, progress=not args.quiet)
    print("\n".join(map(str, video.save(out) if hosts.is_first() else [])))


def train(args: argparse.Namespace) -> None:
    """Fine-tune, or with --check say what that would be."""
    try:
        import matplotlib  # noqa: F401
        import optax  # noqa: F401
        import orbax.checkpoint  # noqa: F401
    except ImportError as e:
        raise InputError(f'training needs {e.name}; install it with: pip install "cogvideox-flax[train]"') from e
    from cogvideox_flax.training.finetune import check, finetune
    from cogvideox_flax.training.recipe import read_config

    logging.getLogger("absl").setLevel(logging.WARNING)  # which Orbax uses for notes about each state
    given = {key: getattr(args, option.removeprefix("--")) for key, (option, _) in TRAINING_OPTIONS.items()}
    plan = check(read_config(args.config, {key: value for key, value in given.items() if value is not None}))
    if args.check:
        print(plan.describe())
        return
    result = finetune(plan, progress=not args.quiet)
    if result is None:
        raise KeyboardInterrupt  # stopped in order: `main` says how to go on
    print(result)


def plan(args: argparse.Namespace) -> None:
    """Forecast a run: each stage is compiled for chips that need not be there."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where there are chips, they are left alone
    from cogvideox_flax.checkpoint import Manifest, hub
    from cogvideox_flax.plan import Forecast, Request, best_mesh, describe, forecast
    from cogvideox_flax.sharding import parse_mesh

    def say(message: str) -> None:
        if not args.quiet:
            print(message, file=sys.stderr, flush=True)

    manifest = Manifest.of_release(get_release(args.release)) if args.release else hub.peek(args.model)
    same = ("num_frames", "height", "width", "prompts", "num_inference_steps", "guidance_scale", "scheduler")
    request = Request(manifest, args.dtype or manifest.default_dtype, **{name: getattr(args, name) for name in same})
    size = request.size()
    if args.mesh:
        mesh = parse_mesh(args.mesh)
    else:
        mesh = best_mesh(request, args.topology, lambda tried, found: say(_tried(tried, found)))
    stages = []
    for stage in forecast(request, args.topology, mesh, args.stages):
        say(f"compiled {stage.name} in {stage.compile_s:.0f} s")
        stages.append(stage)
    found = Forecast(args.topology, mesh, size, tuple(stages))
    if args.json:
        print(json.dumps(dataclasses.asdict(found) | {"fits": found.fits, "estimated_s": found.estimated_s}, indent=2))
    else:
        print(describe(found))


def _tried(mesh: MeshShape, found: Any) -> str:
    from cogvideox_flax.sharding import describe_mesh

    name = f"mesh {describe_mesh(mesh)}"
    if isinstance(found, InputError):
        return f"{name}: {str(found).splitlines()[0]}"
    fits = "" if found.fits else ", does not fit"
    return f"{name}: {found.estimated_s:.1f} s of denoising, {found.hbm_gib_per_chip:.1f} GiB per chip{fits}"


def quantize(args: argparse.Namespace) -> None:
    """Write a checkpoint again with weights of 8 bits."""
    from cogvideox_flax.checkpoint.quantize import quantize_checkpoint

    quantize_checkpoint(args.src, args.dst, args.component, args.kind)
    print(args.dst)


def info(args: argparse.Namespace) -> None:
    """Describe a checkpoint without loading or converting it."""
    from cogvideox_flax.checkpoint import abstract, hub, parameters

    manifest = hub.peek(args.where, args.revision)
    release: Release | None = manifest.release
    rows = {}
    for component in COMPONENTS:
        if (config := getattr(manifest, component)) is not None:
            count = sum(leaf.size for leaf in parameters(abstract(component, config)).values())
            rows[component] = {"parameters": count, **manifest.weights.get(component, {})}
    where = EMBEDDED if args.where is None else args.where
    result = manifest.to_json() | {"where": where, "components": rows}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{where}: {release.name if release else 'no released architecture'}")
    for name, row in rows.items():
        print(f"  {name:13} {row['parameters']:>14,} parameters  {_origin(row)}")
    if release is not None:
        print(
            f"  default       {release.num_frames} frames of {release.height}x{release.width} at {release.fps} fps, "
            f"{release.num_inference_steps} {release.sampler} steps, guidance {release.guidance_scale:g}"
            + (" (dynamic)" if release.use_dynamic_cfg else "")
        )


def _origin(row: dict[str, Any]) -> str:
    if "sha256" not in row:
        return "not converted yet"
    row = row | {"dtype": row.get("quantized", row.get("dtype", ""))}
    source = row.get("source", {})
    if "recipe" in source:
        return f"{row.get('dtype', ''):9} trained by {source['recipe']}, {source['steps']} steps"
    revision = f" at {source['revision'][:12]}" if "revision" in source else ""
    return f"{row.get('dtype', ''):9} from {source.get('hub_id', source.get('path', 'an unknown place'))}{revision}"
