"""The commands of the command line and their options."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import secrets
import types
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from cogvideox_flax.cli.parser import Parser, rarely
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import (
    DTYPES,
    MAX_SEED,
    MAX_VIDEOS,
    RANDOM,
    STAGES,
    GenerationRequest,
    Option,
    Stage,
    expected,
    help_of,
    options,
    options_of,
    types_of,
)
from cogvideox_flax.generate.upscale_options import UpscaleOptions
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.io.values import is_count, short_repr, typed
from cogvideox_flax.runtime.multihost.rendezvous import JOIN_TIMEOUT_S
from cogvideox_flax.version import __version__

log = logging.getLogger("cogvideox_flax")

TRAINING_OPTIONS = {
    "model": ("--model", "the model"),
    "revision": ("--revision", "branch, tag or commit of the model's hub id"),
    "variant": ("--variant", "the variant of the model's weight files, such as fp16"),
    "clips": ("--clips", "the folder of clips"),
    "out": ("--out", "the folder that the run writes to"),
    "mesh": ("--mesh", "devices, DP,SP,TP or DP,SP,TP,fsdp"),
    "loop.steps": ("--steps", "how many steps"),
    "lora.init": ("--init-lora", "the adapter from which training goes on"),
}
"""Key of the training configuration -> the option that overrides it."""

MODULES = {
    **dict.fromkeys(("encode", "denoise", "decode"), "generate"),
    **dict.fromkeys(("quantize", "export"), "convert"),
}
"""Command -> the module of `cli` that holds its function, where that has another name."""

_DTYPE = "default: bfloat16; float32 below 10^9 parameters"
_WHERE = "native or Hugging Face layout directory, hub id, or name of a release"
_MODEL = f"{_WHERE}; default: the embedded one"
_VARIANT = "variant of the weight files that are converted, such as fp16; default: the plain ones, or the only ones"


class _Path(str):
    """A path as it was given."""


def with_paths(args: argparse.Namespace) -> argparse.Namespace:
    """The options, with a `Path` for each that names one.

    Raises:
        InputError: one cannot be served, see `expand_user`.
    """
    values = vars(args).items()
    return argparse.Namespace(**{name: expand_user(x) if isinstance(x, _Path) else x for name, x in values})


def with_drawn_seed(args: argparse.Namespace) -> argparse.Namespace:
    """The options, with a number for `--seed random`; it is logged.

    Raises:
        InputError: it is for a queue, which goes on by what its videos were made of.
    """
    if getattr(args, "seed", None) != RANDOM:
        return args
    if getattr(args, "prompt_file", None) is not None and args.command == "generate":
        raise InputError(f"--seed {RANDOM} beside --prompt-file would make all videos again; give the lines seeds")
    seed = secrets.randbelow(MAX_SEED - MAX_VIDEOS)  # videos of one prompt count up from it
    log.info("--seed %d was drawn", seed)
    return argparse.Namespace(**vars(args) | {"seed": seed})


def make_parser() -> Parser:
    """All commands with their options; what it parses has the command's name as `command`."""
    parser = Parser(prog="cogvideox", description="Video from text, images and clips, in JAX.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = partial(_add_command, commands, _shared_options())
    _add_run_commands(command)
    larger = "a clip enlarged in one step, by a model that was fine-tuned for it (DOVE)"
    _add_upscale(command("upscale", larger, "model", "profiling"))
    _add_train(command("train", "fine-tune a model on a folder of clips", "hosts"))
    forecast = "what a run will need on TPUs or a GPU: memory, work, traffic, time; needs no weights and no device"
    _add_plan(command("plan", forecast))
    native = "a Hugging Face checkpoint in the native format, converted once"
    _add_convert(command("convert", native))
    back = "the way back: a native checkpoint in diffusers' layout, an adapter in that of other programs"
    _add_export(command("export", back))
    smaller = "a native checkpoint with weights of 8 bits: half of the memory of bfloat16"
    _add_quantize(command("quantize", smaller))
    sub = command("info", "what a checkpoint is and holds, or how a video was made")
    what = f"{_WHERE}; or a video or npz of `generate`; default: embedded"
    sub.add_argument("where", nargs="?", help=what)
    sub.add_argument("--revision", help="branch, tag or commit of a hub id")
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _add_serve(command("serve", "an HTTP API and a page, over a queue that survives restarts (docs/serving.md)"))
    what = "what is installed, what this machine has, what fits, and what to try next"
    sub = command("doctor", what)
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub = command(
        "completion", "a script that completes commands and options in a shell: source <(cogvideox completion bash)"
    )
    sub.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.commands, parser.overview = commands.choices, _OVERVIEW
    return parser


def _add_command(known: Any, shared: Mapping[str, Any], name: str, help: str, *parents: str) -> Parser:
    """Add a command with the groups of shared options that are named."""
    sub = known.add_parser(name, help=help, description=help, parents=[shared[parent] for parent in parents])
    sub.set_defaults(command=name)
    what = "bar: for people; json: messages and progress as lines of JSON on stderr, see docs/queue.md; default: bar"
    rarely(sub.add_argument("--progress", choices=("bar", "json"), default="bar", help=what))
    what = "append all messages to a file, with their times"
    rarely(sub.add_argument("--log", type=_Path, metavar="FILE", help=what))
    return sub


_OVERVIEW = """\
cogvideox makes videos from text, images and clips, in JAX.

  cogvideox generate "a small red circle moves to the left"      with the model in the box, on any machine
  cogvideox generate "A panda by a stream" --model zai-org/CogVideoX-2b --out panda.mp4
  cogvideox generate --prompt-file prompts.txt --out clips        a video for each line
  cogvideox generate "The sea rolls in" --model zai-org/CogVideoX-5b-I2V --image beach.png

Look:   doctor   what this machine has, and what fits
        info     what a checkpoint holds, or how a video was made
        plan     memory and time of a run on TPUs and GPUs, without one
Make:   generate, or in stages: encode, denoise, decode
        upscale  a clip, enlarged
        serve    a page in the browser, and an HTTP API
Own:    train    fine-tune on a folder of clips
        convert  a Hugging Face checkpoint, once
        export   to diffusers' layout; adapters for other programs
        quantize weights of 8 bits

cogvideox COMMAND --help says more.
"""


def _shared_options() -> dict[str, Any]:
    """Groups of options that several commands have."""
    groups = {name: argparse.ArgumentParser(add_help=False) for name in ("prompt", "model", "profiling", "profile")}
    prompt, model, profiling, profile = groups.values()
    prompt.add_argument(
        "prompt", nargs="*", action="extend", metavar='"PROMPT"', help="one or more prompts, each in quotes"
    )
    what = "the same as an option, once for each prompt"
    rarely(prompt.add_argument("--prompt", nargs=1, action="extend", metavar="TEXT", help=what))
    model.add_argument("--model", help=_MODEL)
    rarely(model.add_argument("--revision", help="branch, tag or commit of a hub id"))
    rarely(model.add_argument("--variant", metavar="NAME", help=_VARIANT))
    what = "a transformer in place of the model's: its directory or file, or a model that has one; or a hub id"
    rarely(model.add_argument("--transformer", metavar="WHERE", help=what))
    model.add_argument("--dtype", choices=DTYPES, help=_DTYPE)
    model.add_argument(
        "--mesh",
        metavar="DP,SP,TP",
        help="devices for batch, tokens, heads; DP,SP,TP,fsdp splits weights over DP and SP as well; auto: all "
        "devices, as the planner says; default: auto, on CPUs 1,1,1",
    )
    model.add_argument("--quiet", action="store_true", help="print no progress")

    profiling.add_argument("--no-jit", action="store_true", help="run operation by operation: slow, for debuggers")
    profiling.add_argument("--memory", action="store_true", help="print after each stage what the devices hold")
    profile.add_argument("--profile", type=_Path, metavar="DIR", help="write a profiler trace of some denoising steps")
    profile.add_argument(
        "--profile-steps", type=_steps, default=(1, 2), metavar="FIRST-LAST", help="steps to trace; default: 1-2"
    )

    groups["hosts"] = argparse.ArgumentParser(add_help=False)
    several = groups["hosts"].add_argument_group("several hosts, the same command on each (docs/parallelism.md)")
    several.add_argument("--coordinator", metavar="ADDRESS:PORT", help="address of process 0, as the others reach it")
    several.add_argument("--num-processes", type=int, metavar="N", help="number of processes, one per host")
    several.add_argument("--process-id", type=int, metavar="I", help="index of this process, 0 to N - 1")
    several.add_argument(
        "--distributed", action="store_true", help="let JAX find these three: TPU pods, Slurm, Open MPI"
    )
    wait = f"to wait for the other processes; default: {JOIN_TIMEOUT_S:g}"
    several.add_argument("--join-timeout", type=float, default=JOIN_TIMEOUT_S, metavar="SECONDS", help=wait)

    for each in ("profiling", "profile", "hosts"):
        for action in groups[each]._actions:
            rarely(action)
    stages: tuple[Stage, ...] = ("generate", "encode", "denoise", "decode")
    for stage in stages:
        groups[f"request {stage}"] = _grouped(options(stage))
    groups["media"] = _grouped({name: each for name, each in options("denoise").items() if each.for_media})
    return groups


def _grouped(known: Mapping[str, Option]) -> argparse.ArgumentParser:
    """A parser of these options, under their headings."""
    parser = argparse.ArgumentParser(add_help=False)
    headings = {group: parser.add_argument_group(group) for group in {each.group: None for each in known.values()}}
    for name, each in known.items():
        add_option(headings[each.group], name, each)
    return parser


def add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    name: str,
    option: Option,
    kind: type = GenerationRequest,
) -> None:
    """Give a parser the flag of a field of the request, or of other options; None says that it was not used."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    how: dict[str, Any] = {"dest": name, "default": None, "help": help_of(fields[name]).replace("%", "%%")}
    of_one = _without_none(types_of(kind)[name])
    if option.choices is not None:
        how |= {"type": partial(_choose, option.choices), "metavar": "{" + ",".join(option.choices) + "}"}
    elif option.parse is None and of_one is bool:
        how |= {"action": "store_const", "const": True}
    else:
        kind_of_value = {int: "N", float: "X"}.get(of_one, "TEXT")
        how |= {
            "type": option.parse or partial(_parse, of_one, expected(option, of_one), option.words),
            "metavar": option.metavar or kind_of_value,
        }
        how |= {"action": "append"} if option.repeat else {}
    action = parser.add_argument(f"--{name.replace('_', '-')}", *option.flags, **how)
    if kind is GenerationRequest and not option.common:
        rarely(action)


def _without_none(kind: Any) -> Any:
    """X of X | None; the first of several others."""
    parts = [part for part in typing.get_args(kind) if part is not types.NoneType]
    return parts[0] if typing.get_origin(kind) in (typing.Union, types.UnionType) else kind


def _parse(kind: Any, what: str, words: Collection[str], text: str) -> Any:
    """A value of this type: "3", or "3,4" for tuples and lists; or one of the words. `what` says what is expected."""
    if text in words:
        return text
    parts = typing.get_args(kind)
    try:
        return typed(kind, [parts[0](part.strip()) for part in text.split(",")] if parts else kind(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {what}; got {short_repr(text)}") from None


def _add_run_commands(command: Callable[..., Parser]) -> None:
    request = [f"request {stage}" for stage in ("encode", "denoise", "decode", "generate")]
    sub = command("generate", "prompt to video", "prompt", "model", *request, "profiling", "profile", "hosts")
    what = "a video for each line, a prompt or JSON with any of these options (docs/queue.md); -: stdin"
    sub.add_argument("--prompt-file", type=_Path, metavar="FILE", help=what)
    what = "number of lines with equal options to make at once; default: 1"
    rarely(sub.add_argument("--batch", type=_count, metavar="N", help=what))
    _add_ray(sub, "the lines of --prompt-file")
    sub.add_argument(
        "--out",
        "-o",
        type=_Path,
        help=".mp4, .webm, .gif, .webp, frames/%%04d.png, a folder of PNGs, .npz (latents); with {prompt}, {seed}, "
        "{n} in its name; default: video.mp4",
    )
    what = "directory of the stages' files; default: beside OUT, removed at the end"
    rarely(sub.add_argument("--dir", type=_Path, help=what))
    what = "take what is not given from a video or npz of ours"
    sub.add_argument("--like", type=_Path, metavar="FILE", help=what)
    overwrite: dict[str, Any] = {"action": "store_true", "help": "replace files that this program did not write"}
    sub.add_argument("--overwrite", **overwrite)
    bare: dict[str, Any] = {
        "action": "store_true",
        "help": "leave out of the file how it was made; then it is not ours",
    }
    rarely(sub.add_argument("--no-metadata", **bare))
    what = "write the video as it becomes clear: .png, .webp"
    preview: dict[str, Any] = {"type": _Path, "metavar": "FILE", "help": what}
    sub.add_argument("--preview", **preview)
    what = "stage 1: prompts to embeddings, images and clips to latents"
    groups = ("prompt", "model", "request encode", "media", "profiling", "hosts")
    sub = command("encode", what, *groups)
    what = "a text file with one prompt per line; # begins a comment; -: standard input"
    sub.add_argument("--prompt-file", type=_Path, metavar="FILE", help=what)
    sub.add_argument("--dir", type=_Path, required=True, help="directory of the stages' files")
    what = "stage 2: embeddings to latents; default: the settings in DIR"
    sub = command("denoise", what, "model", "request denoise", "profiling", "profile", "hosts")
    sub.add_argument("--dir", type=_Path, required=True, help="directory with stage 1's files")
    sub.add_argument("--preview", **preview)
    sub.add_argument(
        "--no-lora", dest="lora", action="store_const", const=[], help="leave out the adapters that the settings name"
    )
    what = "stage 3: latents to a video; of a directory, or of an npz of `generate`"
    sub = command("decode", what, "model", "request decode", "profiling", "hosts")
    sub.add_argument("latents", nargs="?", type=_Path, metavar="LATENTS.npz", help="file of `generate --out x.npz`")
    sub.add_argument("--dir", type=_Path, help="directory with stage 2's files")
    decoded = "output file, as of `generate`; default: output_video.mp4 in DIR, or beside the npz"
    sub.add_argument("--out", "-o", type=_Path, help=decoded)
    sub.add_argument("--overwrite", **overwrite)
    rarely(sub.add_argument("--no-metadata", **bare))


def _add_upscale(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("clip", type=_Path, metavar="CLIP", help="a video file or a folder of images")
    what = ".mp4, .webm, .gif, .webp, frames/%%04d.png or a directory of PNGs"
    sub.add_argument("--out", "-o", type=_Path, required=True, help=what)
    sub.add_argument("--overwrite", action="store_true", help="replace a file that this program did not write")
    for name, each in options_of(UpscaleOptions).items():
        add_option(sub, name, each, UpscaleOptions)


def _add_train(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--config", type=_Path, required=True, help="a TOML file, see docs/training.md")
    sub.add_argument("--check", action="store_true", help="check everything, say what would be done, and stop")
    for name, what in TRAINING_OPTIONS.values():
        sub.add_argument(name, type=int if name == "--steps" else str, help=f"{what}, in place of the file's")
    sub.add_argument("--quiet", action="store_true", help="print no progress")


def _add_plan(sub: argparse.ArgumentParser) -> None:
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--release", metavar="NAME", help="a released model, such as cogvideox1.5-5b")
    which.add_argument("--model", help=_MODEL)
    sub.add_argument("--revision", help="branch, tag or commit of a hub id")
    topology = "TPUs, such as v6e:2x4 (the default), v5e:1x1 or, of two slices, 2xv6e:8x8; "
    topology += "or a GPU: h100, h200, a100-40, a100-80, rtx4090"
    sub.add_argument("--topology", default="v6e:2x4", help=topology)
    sub.add_argument("--mesh", metavar="DP,SP,TP[,fsdp]", help="default: that of `generate --mesh auto`")
    for name, each in options("encode", "denoise", "decode").items():
        if each.affects_forecast:
            add_option(sub, name, each)
    what = "a training step, of these and of the options of size; videos too only with --stages"
    sub.add_argument("--train", action="store_true", help=what)
    sub.add_argument("--method", choices=("lora", "full"), help="what is trained; default: lora")
    sub.add_argument("--rank", type=_count, metavar="R", help="rank of the adapters; default: 64")
    what = "weights beside the adapters in 8 bit; default: as the checkpoint has them"
    sub.add_argument("--quantize", choices=("int8", "float8"), help=what)
    sub.add_argument("--batch", type=_count, metavar="CLIPS", help="clips of a step; default: 1")
    what = "what is recomputed in the backward pass (docs/training.md); default: full"
    sub.add_argument("--remat", choices=("none", "full", "attention", "offload", "auto"), help=what)
    what = "dollars for an hour of one chip: says what a run costs"
    sub.add_argument("--price", type=float, metavar="DOLLARS", help=what)
    sub.add_argument("--prompts", type=_count, default=1, help="number of prompts at once; default: 1")
    sub.add_argument("--dtype", choices=DTYPES, help=_DTYPE)
    sub.add_argument(
        "--stages",
        nargs="+",
        choices=(*STAGES, "run"),
        help="stages to forecast; default: encode denoise decode, with --train none; run is all of them as one program",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub.add_argument("--quiet", action="store_true", help="print no progress")


def _add_serve(sub: Parser) -> None:
    sub.add_argument("--model", action="append", metavar="WHERE", help=f"{_MODEL}; may be repeated")
    rarely(sub.add_argument("--revision", help="branch, tag or commit of a hub id"))
    rarely(sub.add_argument("--variant", metavar="NAME", help=_VARIANT))
    sub.add_argument("--dtype", choices=DTYPES, help=_DTYPE)
    sub.add_argument("--mesh", metavar="DP,SP,TP", help="devices for batch, tokens, heads; default: one device")
    folder = "folder of videos, uploads and the queue; clients may name the LoRA files in its adapters/"
    sub.add_argument("--dir", type=_Path, default=_Path("gallery"), help=f"{folder}; default: gallery")
    sub.add_argument("--port", type=int, default=8000, metavar="N", help="port; 0: a free one; default: 8000")
    host = "address to listen on; one that others reach needs a password, which is made if none is given"
    sub.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=f"{host}; default: 127.0.0.1")
    sub.add_argument("--password-file", type=_Path, metavar="FILE", help="file that holds the password")
    names = "name of this server for its clients, beside addresses and this machine's names; may be repeated"
    rarely(sub.add_argument("--name", action="append", default=[], metavar="HOST", help=names))
    waiting = "jobs that may wait; default: 1000"
    rarely(sub.add_argument("--max-queue", type=int, default=1000, metavar="N", help=waiting))
    _add_ray(sub, "the videos")
    upload = "MiB of an upload; default: 1024"
    rarely(sub.add_argument("--max-upload", type=int, default=1024, metavar="MIB", help=upload))
    sub.add_argument("--quiet", action="store_true", help="print no progress")


def _add_ray(sub: Parser, videos: str) -> None:
    what = f"make {videos} on a Ray cluster; local: one on this machine (docs/cluster.md)"
    rarely(sub.add_argument("--ray", metavar="ADDRESS", help=what))
    what = "what a worker takes of a host, such as CPU=8,GPU=1; default: a GPU, or all TPU chips, or all cores"
    rarely(sub.add_argument("--ray-worker", metavar="NAME=AMOUNT,...", help=what))
    what = "hosts that make a video together; default: those of a TPU slice, else one"
    rarely(sub.add_argument("--hosts-per-worker", type=int, metavar="N", help=what))


def _add_convert(sub: argparse.ArgumentParser) -> None:
    what = "directory in the Hugging Face layout, hub id such as zai-org/CogVideoX-2b, or a release's name "
    what += "(cogvideox-2b); or the directory or file of one component, for a DST that has the rest"
    sub.add_argument("src", metavar="SRC", help=what)
    sub.add_argument("dst", type=_Path, metavar="DST", help="the native checkpoint to write, or to add components to")
    what = "components such as transformer, vae or text_encoder; default: all, which SRC must have"
    sub.add_argument("--component", nargs="+", metavar="NAME", help=what)
    sub.add_argument("--dtype", choices=DTYPES, help="dtype to cast to; default: SRC's")
    what = "the model, such as cogvideox-5b, where SRC's config.json files are missing or wrong"
    sub.add_argument("--release", metavar="NAME", help=what)
    sub.add_argument("--variant", metavar="NAME", help=_VARIANT)
    sub.add_argument("--revision", help="branch, tag or commit of a hub id")


def _add_export(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("src", metavar="SRC", help="a native checkpoint; or an adapter: its file, folder or hub id")
    what = "the directory to write; of an adapter in other layouts than PEFT's, also a .safetensors file"
    sub.add_argument("dst", type=_Path, metavar="DST", help=what)
    what = "of a checkpoint: components such as transformer; default: the whole of it"
    sub.add_argument("--component", nargs="+", metavar="NAME", help=what)
    what = "the layout of an adapter; default: peft"
    sub.add_argument("--as", dest="layout", choices=("peft", "diffusers", "comfyui", "kohya"), help=what)


def _add_quantize(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("src", metavar="SRC", help=_WHERE)
    sub.add_argument("dst", type=_Path, metavar="DST", help="the checkpoint to write")
    sub.add_argument("--revision", help="branch, tag or commit of a hub id")
    sub.add_argument("--variant", metavar="NAME", help=_VARIANT)
    sub.add_argument(
        "--component",
        nargs="+",
        metavar="NAME",
        help="components such as transformer or text_encoder; default: all whose linear maps can be quantized",
    )
    sub.add_argument("--kind", choices=("int8", "float8"), default="int8", help="float8 is e4m3; default: int8")


def _choose(choices: Mapping[str, Any], text: str) -> Any:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(choices)}; got {text!r}")
    return choices[text]


def _steps(text: str) -> tuple[int, int]:
    """'3-5' -> (3, 5); '3' is that step alone."""
    first, _, last = text.partition("-")
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in (first, last or first)):
        raise argparse.ArgumentTypeError(f"expected a step or two, such as 3 or 3-5; got {text!r}")
    return int(first), int(last or first)


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not is_count(count := int(text), MAX_VIDEOS):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {MAX_VIDEOS}; got {text!r}")
    return count
