"""The command line: parse, call the library, report. Messages go to stderr, results to stdout.

Exit codes: 0 done, 2 the input cannot be served (one message, no traceback), 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cogvideox_flax.config import COMPONENTS, Release
from cogvideox_flax.errors import InputError
from cogvideox_flax.version import __version__

DYNAMIC_CFG: dict[str, Any] = {"off": False, "timestep": True, "index": "index"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("cogvideox_flax").setLevel(logging.WARNING if getattr(args, "quiet", False) else logging.INFO)
    try:
        args.run(args)
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; finished stages are kept, the same command goes on from them", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cogvideox", description="CogVideoX text-to-video in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    prompt = argparse.ArgumentParser(add_help=False)
    prompt.add_argument("prompt", nargs="*", help="one or more prompts")
    prompt.add_argument("--prompt-file", type=Path, help="a text file with one prompt per line")
    prompt.add_argument("--negative-prompt", default="", help="what to steer away from")

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", help="native or Hugging Face layout directory, or hub id; default: the embedded one")
    model.add_argument("--revision", help="of a hub id: branch, tag or commit")
    model.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), help="default: bfloat16")
    model.add_argument("--mesh", metavar="DP,SP,TP", help="devices for batch, tokens, heads; default: one device")
    model.add_argument("--quiet", action="store_true", help="no progress")

    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--num-frames", type=int, help="8 n + 1; default: the release's")
    sampling.add_argument("--height", type=int, help="pixels, a multiple of 16; default: the release's")
    sampling.add_argument("--width", type=int, help="pixels, a multiple of 16; default: the release's")
    sampling.add_argument("--num-inference-steps", "--steps", type=int, help="default: the release's (50)")
    sampling.add_argument("--guidance-scale", type=float, help="default: the release's (6); 1 turns guidance off")
    sampling.add_argument("--scheduler", choices=("ddim", "dpm"), help="default: the release's")
    sampling.add_argument(
        "--dynamic-cfg",
        choices=DYNAMIC_CFG,
        help="guidance that changes over the steps: as released (timestep) or rising (index); default: the release's",
    )
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--compiled-loop", action="store_true", help="run all steps as one compiled program")

    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument("--tiling", action="store_true", help="decode in tiles: less memory, slightly different")
    decoding.add_argument("--fps", type=int, help="default: the release's")

    def command(name: str, run: Any, help: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, parents=list(parents))
        sub.set_defaults(run=run)
        return sub

    sub = command("generate", generate, "prompt to video", prompt, model, sampling, decoding)
    sub.add_argument(
        "--out", type=Path, default=Path("video.mp4"), help=".mp4, .gif, .png (a sequence) or .npz (latents)"
    )
    sub.add_argument("--dir", type=Path, help="where the stages' files go; default: beside OUT, removed at the end")
    sub = command("encode", encode, "stage 1: prompts to embeddings", prompt, model)
    sub.add_argument("--dir", type=Path, required=True, help="where the stages' files go")
    sub = command("denoise", denoise, "stage 2: embeddings to latents", model, sampling)
    sub.add_argument("--dir", type=Path, required=True, help="with stage 1's files")
    sub = command("decode", decode, "stage 3: latents to a video", model, decoding)
    sub.add_argument("--dir", type=Path, required=True, help="with stage 2's files")
    sub.add_argument("--out", type=Path, help="default: output_video.mp4 in DIR")
    sub = command("info", info, "what a checkpoint is and holds")
    sub.add_argument("where", help="native or Hugging Face layout directory, or hub id")
    sub.add_argument("--revision", help="of a hub id: branch, tag or commit")
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def generate(args: argparse.Namespace) -> None:
    """Prompt to video, in stages that a killed run goes on from."""
    from cogvideox_flax import stages
    from cogvideox_flax.video import check_output_path

    prompts = _prompts(args)
    latents_only = args.out.suffix == ".npz"
    if not latents_only:
        check_output_path(args.out)
    wanted = _settings(args, prompts)
    folder = args.dir or args.out.with_name(args.out.name + ".stages")
    stages.prepare(folder)
    pipe = _pipeline(args, wanted.dtype)
    settings = dataclasses.replace(wanted, weights=stages.identity(pipe.manifest))
    stages.prepare(folder, nbytes=stages.space_needed(settings, pipe.manifest))
    quiet = {"progress": not args.quiet}
    stages.encode(pipe, settings, folder, **quiet)
    pipe.release("text_encoder")
    stages.denoise(pipe, settings, folder, compiled_loop=args.compiled_loop, **quiet)
    pipe.release("transformer")
    if latents_only:
        paths = [stages.save_latents(pipe, settings, folder, args.out)]
    else:
        paths = stages.decode(pipe, settings, folder, tiling=args.tiling, **quiet).save(args.out)
    if args.dir is None:
        shutil.rmtree(folder)
    print("\n".join(map(str, paths)))


def encode(args: argparse.Namespace) -> None:
    """Stage 1 alone."""
    from cogvideox_flax import stages

    prompts = _prompts(args)
    wanted = _settings(args, prompts)
    stages.prepare(args.dir)
    pipe = _pipeline(args, wanted.dtype)
    settings = dataclasses.replace(wanted, weights=stages.identity(pipe.manifest))
    stages.encode(pipe, settings, args.dir, progress=not args.quiet)
    print(args.dir / stages.EMBEDDINGS_FILE)


def denoise(args: argparse.Namespace) -> None:
    """Stage 2 alone, with stage 1's model and settings unless told otherwise."""
    from cogvideox_flax import stages

    before = _take_over(args)
    wanted = _settings(args, before.prompt, before.negative_prompt)
    pipe = _pipeline(args, wanted.dtype)
    settings = dataclasses.replace(wanted, weights=stages.identity(pipe.manifest))
    stages.prepare(args.dir, nbytes=stages.space_needed(settings, pipe.manifest))
    stages.denoise(pipe, settings, args.dir, progress=not args.quiet, compiled_loop=args.compiled_loop)
    print(args.dir / stages.LATENTS_FILE)


def decode(args: argparse.Namespace) -> None:
    """Stage 3 alone."""
    from cogvideox_flax import stages
    from cogvideox_flax.video import check_output_path

    settings = _take_over(args)
    out = args.out or args.dir / stages.VIDEO_FILE
    check_output_path(out)
    stages.read_latents(args.dir)
    pipe = _pipeline(args, settings.dtype)
    settings = dataclasses.replace(settings, fps=args.fps or settings.fps)
    video = stages.decode(pipe, settings, args.dir, tiling=args.tiling, progress=not args.quiet)
    print("\n".join(map(str, video.save(out))))


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
    result = manifest.to_json() | {"where": str(args.where), "components": rows}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{args.where}: {release.name if release else 'no released architecture'}")
    for name, row in rows.items():
        source = row.get("source", {})
        origin = source.get("hub_id", source.get("path", "not converted yet"))
        revision = f" at {source['revision'][:12]}" if "revision" in source else ""
        print(f"  {name:13} {row['parameters']:>14,} parameters  {row.get('dtype', '-'):9} from {origin}{revision}")
    if release is not None:
        print(
            f"  default       {release.num_frames} frames of {release.height}x{release.width} at {release.fps} fps, "
            f"{release.num_inference_steps} {release.sampler} steps, guidance {release.guidance_scale:g}"
            + (" (dynamic)" if release.use_dynamic_cfg else "")
        )


def _prompts(args: argparse.Namespace) -> list[str]:
    from cogvideox_flax.pipeline import check_prompts

    prompts = list(args.prompt)
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"cannot read prompts from {args.prompt_file}: {e}") from e
        prompts += [line for line in lines if line.strip()]
    return check_prompts(prompts)[0]


def _settings(args: argparse.Namespace, prompts: list[str], negatives: list[str] | None = None) -> Any:
    """The run's settings, checked against the model's configs before anything is converted or loaded."""
    from cogvideox_flax import hub
    from cogvideox_flax.stages import Settings

    dynamic = getattr(args, "dynamic_cfg", None)
    return Settings.for_model(
        hub.peek(args.model, args.revision),
        prompt=prompts,
        negative_prompt=negatives if negatives is not None else [args.negative_prompt] * len(prompts),
        model_id=str(args.model or "embedded"),
        dtype=args.dtype or "bfloat16",
        num_frames=getattr(args, "num_frames", None),
        height=getattr(args, "height", None),
        width=getattr(args, "width", None),
        fps=getattr(args, "fps", None),
        num_inference_steps=getattr(args, "num_inference_steps", None),
        guidance_scale=getattr(args, "guidance_scale", None),
        use_dynamic_cfg=DYNAMIC_CFG[dynamic] if dynamic else None,
        scheduler=getattr(args, "scheduler", None),
        seed=getattr(args, "seed", 0),
    )


def _take_over(args: argparse.Namespace) -> Any:
    """The settings of the stage before; its model and dtype become this command's, unless named anew."""
    from cogvideox_flax.stages import Settings

    before = Settings.read(args.dir)
    if args.model is None and before.model_id != "embedded":
        args.model = before.model_id
    args.dtype = args.dtype or before.dtype
    return before


def _pipeline(args: argparse.Namespace, dtype: str) -> Any:
    from cogvideox_flax.pipeline import CogVideoXPipeline
    from cogvideox_flax.sharding import make_mesh, parse_mesh

    mesh = make_mesh(*parse_mesh(args.mesh)) if args.mesh else None
    return CogVideoXPipeline.from_pretrained(args.model, dtype, mesh, revision=args.revision)
