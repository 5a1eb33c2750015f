"""What can be said on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cogvideox_flax.cli import commands
from cogvideox_flax.cli.commands import TRAINING_OPTIONS
from cogvideox_flax.cli.setup import DYNAMIC_CFG
from cogvideox_flax.config import RELEASES
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.home import expand_user
from cogvideox_flax.models.cogvideox.sizes import MAX_FPS
from cogvideox_flax.runtime.rendezvous import JOIN_TIMEOUT_S
from cogvideox_flax.version import __version__

STAGES = ("encode", "denoise", "decode")


def make_parser() -> argparse.ArgumentParser:
    """All commands with their options; what it parses has the name as `command`, its function as `run`."""
    parser = argparse.ArgumentParser(prog="cogvideox", description="CogVideoX text-to-video in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    known = parser.add_subparsers(required=True, metavar="COMMAND")

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
        help="devices for batch, tokens, heads; DP,SP,TP,sharded splits weights over DP and SP as well; auto: all "
        "devices, as the planner says; default: auto, on CPUs 1,1,1",
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

    hosts = argparse.ArgumentParser(add_help=False)
    group = hosts.add_argument_group("several hosts", "the same command on every host, see docs/parallelism.md")
    group.add_argument("--coordinator", metavar="ADDRESS:PORT", help="of process 0, as the others reach it")
    group.add_argument("--num-processes", type=int, metavar="N", help="how many, one per host")
    group.add_argument("--process-id", type=int, metavar="I", help="of this one, 0 to N - 1")
    group.add_argument("--distributed", action="store_true", help="let JAX find these three: TPU pods, Slurm, Open MPI")
    group.add_argument(
        "--join-timeout",
        type=float,
        default=JOIN_TIMEOUT_S,
        metavar="SECONDS",
        help=f"to wait for the other processes; default: {JOIN_TIMEOUT_S:g}",
    )

    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument("--tiling", action="store_true", help="decode in tiles: less memory, slightly different")
    decoding.add_argument("--fps", type=_fps, help=f"1 to {MAX_FPS}; default: the release's")

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
        sub = known.add_parser(name, help=help, description=help, parents=list(parents))
        sub.set_defaults(run=run, command=name)
        return sub

    sub = command(
        "generate", commands.generate, "prompt to video", prompt, model, sampling, decoding, looking, profiling, hosts
    )
    sub.add_argument(
        "--out",
        type=_path,
        default=Path("video.mp4"),
        help=".mp4, .gif, frames/%%04d.png, a directory of PNGs, or .npz (latents); several prompts number their files",
    )
    sub.add_argument("--dir", type=_path, help="where the stages' files go; default: beside OUT, removed at the end")
    sub = command("encode", commands.encode, "stage 1: prompts to embeddings", prompt, model, looking, hosts)
    sub.add_argument("--dir", type=_path, required=True, help="where the stages' files go")
    what = "stage 2: embeddings to latents; default: the settings in DIR"
    sub = command("denoise", commands.denoise, what, model, sampling, looking, profiling, hosts)
    sub.add_argument("--dir", type=_path, required=True, help="with stage 1's files")
    sub.add_argument(
        "--no-lora", dest="lora", action="store_const", const=[], help="without the adapters that the settings name"
    )
    sub = command("decode", commands.decode, "stage 3: latents to a video", model, decoding, looking, hosts)
    sub.add_argument("--dir", type=_path, required=True, help="with stage 2's files")
    sub.add_argument("--out", type=_path, help="default: output_video.mp4 in DIR")
    sub = command("train", commands.train, "fine-tune a model on a folder of clips")
    sub.add_argument("--config", type=_path, required=True, help="a TOML file, see cogvideox_flax/training/recipe.py")
    sub.add_argument("--check", action="store_true", help="check everything, say what would be done, and stop")
    for name, what in TRAINING_OPTIONS.values():
        sub.add_argument(name, type=int if name == "--steps" else str, help=f"{what}, in place of the file's")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    sub = command(
        "plan", commands.plan, "what a run will need on TPUs: memory, work, traffic, time; needs no weights and no TPU"
    )
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--release", choices=RELEASES, help="a released model, by name")
    which.add_argument("--model", help="native or Hugging Face layout directory, or hub id; default: the embedded one")
    sub.add_argument("--topology", default="v6e:2x4", help="chips, such as v6e:2x4 (the default), v6e:1x1 or v5e:2x4")
    sub.add_argument("--mesh", metavar="DP,SP,TP[,sharded]", help="default: all are tried and the fastest is taken")
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
    sub = command(
        "quantize", commands.quantize, "a native checkpoint with weights of 8 bits: half of the memory of bfloat16"
    )
    sub.add_argument("src", type=_path, metavar="SRC", help="a native checkpoint")
    sub.add_argument("dst", type=_path, metavar="DST", help="the one to write")
    sub.add_argument(
        "--component",
        nargs="+",
        choices=("transformer", "text_encoder"),
        default=("transformer", "text_encoder"),
        help="default: both",
    )
    sub.add_argument("--kind", choices=("int8", "float8"), default="int8", help="float8 is e4m3; default: int8")
    sub = command("info", commands.info, "what a checkpoint is and holds")
    sub.add_argument("where", nargs="?", help="native or Hugging Face layout directory, or hub id; default: embedded")
    sub.add_argument("--revision", help="of a hub id: branch, tag or commit")
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def _path(text: str) -> Path:
    try:
        return expand_user(text)
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


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


def _fps(text: str) -> int:
    if (fps := _positive(text)) > MAX_FPS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_FPS} frames per second; got {text}")
    return fps


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more; got {text!r}")
    return int(text)
