"""The command line: parse, call the library, report. Messages go to stderr, results to stdout.

Exit codes: 0 done, 2 the input cannot be served (one message, no traceback), 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_flax.config import COMPONENTS, RELEASES, Release, get_release
from cogvideox_flax.errors import InputError
from cogvideox_flax.version import __version__

if TYPE_CHECKING:  # a command imports what it needs, so that wrong options and --help answer at once
    from jax.sharding import Mesh

    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.execution import Watch
    from cogvideox_flax.pipeline import CogVideoXPipeline
    from cogvideox_flax.stages import Settings

STAGES = ("encode", "denoise", "decode")

EMBEDDED = "embedded"
"""The name under which a run remembers that it used the embedded checkpoint."""

SAME_NAMES = ("height", "width", "num_inference_steps", "guidance_scale", "scheduler", "seed", "lora")
"""Options that are called the same on the command line and in the settings."""

TRAINING_OPTIONS = {
    "model": ("--model", "the model"),
    "clips": ("--clips", "the folder of clips"),
    "out": ("--out", "the folder that the run writes to"),
    "mesh": ("--mesh", "devices, DP,SP,TP"),
    "loop.steps": ("--steps", "how many steps"),
}
"""Key of the training configuration -> the option that overrides it."""

DYNAMIC_CFG: dict[str, Any] = {"off": False, "timestep": True, "index": "index"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    for name in ("cogvideox_flax", "conversion"):
        logging.getLogger(name).setLevel(logging.WARNING if getattr(args, "quiet", False) else logging.INFO)
    try:
        args.run(args)
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from what was finished", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cogvideox", description="CogVideoX text-to-video in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prompt = argparse.ArgumentParser(add_help=False)
    prompt.add_argument("prompt", nargs="*", help="one or more prompts")
    prompt.add_argument("--prompt-file", type=_path, help="a text file with one prompt per line")
    prompt.add_argument("--negative-prompt", default="", help="what to steer away from")

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", help="native or Hugging Face layout directory, or hub id; default: the embedded one")
    model.add_argument("--revision", help="of a hub id: branch, tag or commit")
    model.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float16"), help="default: bfloat16; float32 for the embedded model"
    )
    model.add_argument(
        "--mesh",
        metavar="DP,SP,TP",
        help="devices for batch, tokens, heads; auto: all of them, as the planner says; default: auto, on CPUs 1,1,1",
    )
    model.add_argument("--quiet", action="store_true", help="no progress")

    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--num-frames", type=int, help="8 n + 1; default: the release's")
    sampling.add_argument("--height", type=int, help="pixels, a multiple of 16; default: the release's")
    sampling.add_argument("--width", type=int, help="pixels, a multiple of 16; default: the release's")
    sampling.add_argument("--num-inference-steps", "--steps", type=int, help="default: the release's (50)")
    sampling.add_argument(
        "--guidance-scale", type=float, help="default: the checkpoint's (6 for the releases); 1 turns guidance off"
    )
    sampling.add_argument("--scheduler", choices=("ddim", "dpm"), help="default: the release's")
    sampling.add_argument(
        "--dynamic-cfg",
        choices=DYNAMIC_CFG,
        help="guidance that changes over the steps: as released (timestep) or rising (index); default: the release's",
    )
    sampling.add_argument("--seed", type=int, help="0 to 4294967295; default: 0")
    sampling.add_argument(
        "--lora",
        action="append",
        type=_lora,
        metavar="FILE[:SCALE]",
        help="an adapter in diffusers' layout and its strength (1); several are added one after the other",
    )
    sampling.add_argument("--compiled-loop", action="store_true", help="run all steps as one compiled program")

    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument("--tiling", action="store_true", help="decode in tiles: less memory, slightly different")
    decoding.add_argument("--fps", type=_positive, help="default: the release's")

    looking = argparse.ArgumentParser(add_help=False)
    looking.add_argument("--no-jit", action="store_true", help="operation by operation: slow, for debuggers and prints")
    looking.add_argument("--memory", action="store_true", help="say after each stage what the devices hold")
    profiling = argparse.ArgumentParser(add_help=False)
    profiling.add_argument(
        "--profile", type=_path, metavar="DIR", help="write a profiler's trace of some denoising steps"
    )
    profiling.add_argument(
        "--profile-steps", type=_steps, default=(1, 2), metavar="FIRST-LAST", help="counted from 0; default: 1-2"
    )

    def command(name: str, run: Any, help: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, parents=list(parents))
        sub.set_defaults(run=run)
        return sub

    sub = command("generate", generate, "prompt to video", prompt, model, sampling, decoding, looking, profiling)
    sub.add_argument(
        "--out",
        type=_path,
        default=Path("video.mp4"),
        help=".mp4, .gif, frames/%%04d.png, a directory of PNGs, or .npz (latents); several prompts number their files",
    )
    sub.add_argument("--dir", type=_path, help="where the stages' files go; default: beside OUT, removed at the end")
    sub = command("encode", encode, "stage 1: prompts to embeddings", prompt, model, looking)
    sub.add_argument("--dir", type=_path, required=True, help="where the stages' files go")
    what = "stage 2: embeddings to latents; default: the settings in DIR"
    sub = command("denoise", denoise, what, model, sampling, looking, profiling)
    sub.add_argument("--dir", type=_path, required=True, help="with stage 1's files")
    sub.add_argument(
        "--no-lora", dest="lora", action="store_const", const=[], help="without the adapters that the settings name"
    )
    sub = command("decode", decode, "stage 3: latents to a video", model, decoding, looking)
    sub.add_argument("--dir", type=_path, required=True, help="with stage 2's files")
    sub.add_argument("--out", type=_path, help="default: output_video.mp4 in DIR")
    sub = command("train", train, "fine-tune a model on a folder of clips")
    sub.add_argument("--config", type=_path, required=True, help="a TOML file, see cogvideox_flax/training/recipe.py")
    sub.add_argument("--check", action="store_true", help="check everything, say what would be done, and stop")
    for name, what in TRAINING_OPTIONS.values():
        sub.add_argument(name, type=int if name == "--steps" else str, help=f"{what}, in place of the file's")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    sub = command(
        "plan", plan, "what a run will need on TPUs: memory, work, traffic, time; needs no weights and no TPU"
    )
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--release", choices=RELEASES, help="a released model, by name")
    which.add_argument("--model", help="native or Hugging Face layout directory, or hub id; default: the embedded one")
    sub.add_argument("--topology", default="v6e:2x4", help="chips, such as v6e:2x4 (the default), v6e:1x1 or v5e:2x4")
    sub.add_argument("--mesh", metavar="DP,SP,TP", help="default: all of them are tried and the fastest is taken")
    sub.add_argument("--num-frames", type=int, help="8 n + 1; default: the release's")
    sub.add_argument("--height", type=int, help="pixels, a multiple of 16; default: the release's")
    sub.add_argument("--width", type=int, help="pixels, a multiple of 16; default: the release's")
    sub.add_argument("--num-inference-steps", "--steps", type=_positive, default=50, help="default: 50")
    sub.add_argument("--guidance-scale", type=float, default=6.0, help="default: 6; 1 turns guidance off")
    sub.add_argument("--scheduler", choices=("ddim", "dpm"), help="default: the checkpoint's")
    sub.add_argument("--prompts", type=_positive, default=1, help="how many at once; default: 1")
    sub.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16", help="default: bfloat16"
    )
    sub.add_argument(
        "--stages",
        nargs="+",
        choices=(*STAGES, "run"),
        default=STAGES,
        help="default: encode denoise decode; run is all of them as one program",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    sub = command("quantize", quantize, "a native checkpoint with int8 weights: half of the memory of bfloat16")
    sub.add_argument("src", type=_path, metavar="SRC", help="a native checkpoint")
    sub.add_argument("dst", type=_path, metavar="DST", help="the one to write")
    sub.add_argument(
        "--component",
        nargs="+",
        choices=("transformer", "text_encoder"),
        default=("transformer", "text_encoder"),
        help="default: both",
    )
    sub = command("info", info, "what a checkpoint is and holds")
    sub.add_argument("where", nargs="?", help="native or Hugging Face layout directory, or hub id; default: embedded")
    sub.add_argument("--revision", help="of a hub id: branch, tag or commit")
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _lora(text: str) -> dict[str, Any]:
    """'my.safetensors:0.8' -> file and scale; a colon that no number follows is part of the name."""
    file, _, scale = text.rpartition(":")
    try:
        return {"file": file, "scale": float(scale)} if file else {"file": text, "scale": 1.0}
    except ValueError:
        return {"file": text, "scale": 1.0}


def _steps(text: str) -> tuple[int, int]:
    """'3-5' -> (3, 5); '3' is that step alone."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise argparse.ArgumentTypeError(f"expected a step or two, such as 3 or 3-5; got {text!r}")
    return int(first), int(last or first)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more; got {text!r}")
    return int(text)


def generate(args: argparse.Namespace) -> None:
    """Prompt to video, in stages that a killed run goes on from."""
    from cogvideox_flax import stages
    from cogvideox_flax.pipeline import checked_stages

    prompts = _prompts(args)
    latents_only = args.out.suffix.lower() == ".npz"
    _check_output(args.out, len(prompts), latents_only)
    folder = args.dir or args.out.with_name(args.out.name + ".stages")
    stages.check_folder(folder)
    run = _check(args, folder, prompt=prompts, negative_prompt=[args.negative_prompt] * len(prompts))
    pipe, settings = _open(args, run)
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
    with stages.workplace(folder, temporary=args.dir is None):
        stages.encode(pipe, settings, folder, **quiet)
        pipe.release("text_encoder")
        stages.denoise(pipe, settings, folder, compiled_loop=args.compiled_loop, **quiet)
        pipe.release("transformer")
        if latents_only:
            paths = [stages.save_latents(pipe, folder, args.out)]
        else:
            paths = stages.decode(pipe, folder, tiling=args.tiling, **quiet).save(args.out)
    print("\n".join(map(str, paths)))


def encode(args: argparse.Namespace) -> None:
    """Stage 1 alone."""
    from cogvideox_flax import stages

    prompts = _prompts(args)
    stages.check_folder(args.dir)
    run = _check(args, args.dir, prompt=prompts, negative_prompt=[args.negative_prompt] * len(prompts))
    pipe, settings = _open(args, run)
    with stages.workplace(args.dir):
        stages.encode(pipe, settings, args.dir, progress=not args.quiet)
    print(args.dir / stages.EMBEDDINGS_FILE)


def denoise(args: argparse.Namespace) -> None:
    """Stage 2 alone, with the directory's model and settings unless told otherwise."""
    from cogvideox_flax import stages

    before = _take_over(args)
    run = _check(args, args.dir, **before)
    assert run.manifest.transformer
    stages.read_embeddings(args.dir, run.settings.prompt, run.settings.negative_prompt, run.manifest.transformer)
    pipe, settings = _open(args, run)
    with stages.workplace(args.dir):
        stages.denoise(pipe, settings, args.dir, progress=not args.quiet, compiled_loop=args.compiled_loop)
    print(args.dir / stages.LATENTS_FILE)


def decode(args: argparse.Namespace) -> None:
    """Stage 3 alone."""
    from cogvideox_flax import stages
    from cogvideox_flax.checks import check_model

    before = _take_over(args)
    out = args.out or args.dir / stages.VIDEO_FILE
    _check_output(out, len(before["prompt"]), latents_only=False)
    stages.check_folder(out.absolute().parent)
    manifest = _peek(args)
    mesh = _mesh(args, manifest, before)
    dtype = args.dtype or before.get("dtype", manifest.default_dtype)
    check_model(manifest, args.model or EMBEDDED, dtype, mesh)
    assert manifest.vae
    stages.read_latents(args.dir, before, manifest.vae)
    pipe = _load(args, dtype, mesh)
    video = stages.decode(pipe, args.dir, fps=args.fps, tiling=args.tiling, progress=not args.quiet)
    print("\n".join(map(str, video.save(out))))


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
    from cogvideox_flax import hub
    from cogvideox_flax.checkpoint import Manifest
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


def _tried(mesh: tuple[int, int, int], found: Any) -> str:
    name = f"mesh {','.join(map(str, mesh))}"
    if isinstance(found, InputError):
        return f"{name}: {str(found).splitlines()[0]}"
    fits = "" if found.fits else ", does not fit"
    return f"{name}: {found.estimated_s:.1f} s of denoising, {found.hbm_gib_per_chip:.1f} GiB per chip{fits}"


def quantize(args: argparse.Namespace) -> None:
    """Write a checkpoint again in int8."""
    from cogvideox_flax.quantization import quantize_checkpoint

    quantize_checkpoint(args.src, args.dst, args.component)
    print(args.dst)


def info(args: argparse.Namespace) -> None:
    """Describe a checkpoint without loading or converting it."""
    from cogvideox_flax import hub
    from cogvideox_flax.checkpoint import abstract, parameters

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


def _prompts(args: argparse.Namespace) -> list[str]:
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
    return prompts


def _check_output(out: Path, count: int, latents_only: bool) -> None:
    """Refuse names that could not be written at the end of the run."""
    from cogvideox_flax.video import check_output_path, check_writable, item_paths

    if not latents_only:
        for path in item_paths(out, count):
            check_output_path(path)
        return
    check_writable(out)
    if out.is_dir():
        raise InputError(f"{out} is a directory; give the name of a file to write")


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that its configs allow; nothing is converted or loaded yet."""

    settings: Settings
    manifest: Manifest
    mesh: Mesh | None


def _check(args: argparse.Namespace, folder: Path, **settings: Any) -> _Run:
    """Check a run as far as is possible before anything is converted or loaded."""
    from cogvideox_flax import stages

    manifest = _peek(args)
    given = {
        "dtype": args.dtype,
        "frames": getattr(args, "num_frames", None),
        "fps": getattr(args, "fps", None),
        "use_dynamic_cfg": DYNAMIC_CFG.get(getattr(args, "dynamic_cfg", None) or ""),
    }
    given |= {name: getattr(args, name, None) for name in SAME_NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    mesh = _mesh(args, manifest, settings | given)
    model = EMBEDDED if args.model is None else args.model
    path = os.path.expanduser(model)
    resolved = stages.Settings.for_model(
        manifest,
        mesh,
        **{"dtype": manifest.default_dtype}
        | settings
        | {name: value for name, value in given.items() if value is not None},
        model_id=os.path.abspath(path) if args.model is not None and os.path.exists(path) else model,
        revision=args.revision,
    )
    stages.check_folder(folder, stages.space_needed(resolved, manifest))
    if hasattr(args, "compiled_loop"):
        _watch(args).check(resolved.num_inference_steps, args.compiled_loop)
    return _Run(resolved, manifest, mesh)


def _peek(args: argparse.Namespace) -> Manifest:
    from cogvideox_flax import hub
    from cogvideox_flax.checks import check_tiling

    manifest = hub.peek(args.model, args.revision, progress=not args.quiet)
    if getattr(args, "tiling", False) and manifest.vae is not None:
        check_tiling(manifest.vae)
    return manifest


def _mesh(args: argparse.Namespace, manifest: Manifest, settings: Mapping[str, Any]) -> Mesh | None:
    """The mesh that was asked for, or that the planner takes for a run of these settings; None for one device."""
    import jax

    from cogvideox_flax.sharding import make_mesh, parse_mesh

    if args.mesh not in (None, "auto"):
        return make_mesh(*parse_mesh(args.mesh))
    devices = jax.devices()
    if len(devices) == 1 or (args.mesh is None and devices[0].platform == "cpu"):
        return None
    from cogvideox_flax.plan import chip_of_device, choose_mesh
    from cogvideox_flax.sizes import resolve_size

    if manifest.transformer is None or manifest.vae is None or manifest.text_encoder is None:
        return None  # no model for a run, as will be said
    n = len(devices)
    if args.run is decode:  # pictures go over all axes, and most easily over two of them
        return make_mesh(2, n // 2, 1) if n % 2 == 0 else make_mesh(1, n, 1)
    if args.run is encode:
        parts = math.gcd(n, math.gcd(manifest.text_encoder.heads, manifest.transformer.heads))
        return make_mesh(1, n // parts, parts)
    sides = {"num_frames": settings.get("frames")} | {name: settings.get(name) for name in ("height", "width")}
    size = resolve_size(manifest.transformer, manifest.vae, manifest.release, **sides)
    guidance = settings.get("guidance_scale", manifest.default_guidance)
    batch = len(settings["prompt"]) * (2 if guidance > 1 else 1)
    dtype = settings.get("dtype", manifest.default_dtype)
    found = choose_mesh(manifest, size, batch, n, chip_of_device(devices[0]), dtype)
    logging.getLogger("cogvideox_flax").info("mesh dp=%d sp=%d tp=%d, as the planner says", *found.mesh)
    return make_mesh(*found.mesh)


def _open(args: argparse.Namespace, run: _Run) -> tuple[CogVideoXPipeline, Settings]:
    from cogvideox_flax.stages import identity

    pipe = _load(args, run.settings.dtype, run.mesh)
    for record in run.settings.lora:
        pipe.load_lora(record["file"], record["scale"])
    return pipe, dataclasses.replace(run.settings, weights=identity(pipe.manifest))


def _load(args: argparse.Namespace, dtype: str, mesh: Mesh | None) -> CogVideoXPipeline:
    """Open a model that was checked, converting it if that was not done yet."""
    from cogvideox_flax import hub
    from cogvideox_flax.compiled import keep_compiled
    from cogvideox_flax.pipeline import CogVideoXPipeline

    keep_compiled(hub.cache_dir() / "compiled")
    pipe = CogVideoXPipeline(hub.resolve(args.model, args.revision, progress=not args.quiet), dtype, mesh)
    pipe.watch = _watch(args)
    return pipe


def _watch(args: argparse.Namespace) -> Watch:
    from cogvideox_flax.execution import Watch

    profile = (args.profile, args.profile_steps) if "profile" in args else ()
    return Watch(not args.no_jit, args.memory, *profile)


def _take_over(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the stage before left; its model becomes this command's, unless another is named."""
    from cogvideox_flax.stages import read_settings

    before = read_settings(args.dir)
    model, revision = before.pop("model_id"), before.pop("revision", None)
    before.pop("weights", None)
    if args.model is None:
        args.model = None if model == EMBEDDED else model
        args.revision = args.revision or revision
    return before
