"""`cogvideox plan`: the forecast of a run, on chips that need not be there."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

import jax

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.cli.prepare import given_options
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import UNSEEN
from cogvideox_flax.generate.request import STAGES, GenerationRequest
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.models.registry import get_release
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.plan import GPUS, Forecast, StageForecast, best_mesh, check_price, describe, forecast
from cogvideox_flax.runtime.terminal import say
from cogvideox_flax.sharding import MeshShape, describe_mesh, parse_mesh
from cogvideox_flax.sharding.devices import find_devices

TRAINING = ("method", "rank", "quantize", "batch", "remat")
"""Options of a training step."""


def plan(args: argparse.Namespace) -> None:
    """Forecast a run: each stage is compiled for chips that need not be there."""
    if jax.config.jax_platforms is None:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")  # where there are chips, they are left alone
    find_devices()
    check_price(args.price)
    progress = not args.quiet
    manifest = Manifest.of_release(get_release(args.release)) if args.release else hub.peek(args.model, args.revision)
    stages: list[StageForecast] = []
    mesh, size, said = parse_mesh(args.mesh or "1,1,1"), None, ""
    given = given_options(args)
    _check_training_options(args, given)
    if args.train:
        from cogvideox_flax.cli.train import plan_training

        job, step, said = plan_training(args, manifest)
        stages, mesh, size = [step], parse_mesh(job.config.mesh or "1,1,1"), job.size
    if args.stages or not args.train:
        args.mesh = describe_mesh(mesh) if args.train else args.mesh
        mesh, size, of_video = _plan_video(args, manifest, given, progress)
        stages = [*of_video, *stages]
    assert size is not None
    total = Forecast(args.topology, mesh, size, tuple(stages), args.prompts)
    if args.json:
        more = {"fits": total.fits, "estimated_s": total.estimated_s, "chips": total.chips}
        more |= {} if args.price is None else {"dollars": total.dollars(args.price)}
        print(json.dumps(dataclasses.asdict(total) | more, indent=2))
    else:
        print(describe(total, args.price))
        if said:
            print(said)


def _plan_video(
    args: argparse.Namespace, manifest: Manifest, given: Mapping[str, Any], progress: bool
) -> tuple[MeshShape, Size, list[StageForecast]]:
    """The mesh, the size and the stages of the videos that the options describe."""
    needed: dict[str, Any] = {s.input: [UNSEEN] for s in manifest.model.visual if s.required}
    if (scheduler := manifest.model.schedulers.get(args.scheduler)) is not None and scheduler.needs_video:
        needed["video"] = [UNSEEN]
    run = resolve(GenerationRequest([""] * args.prompts, **given, **needed), manifest, args.dtype)
    known: dict[str, list[StageForecast]] = {}
    if args.mesh or args.topology in GPUS:
        mesh = parse_mesh(args.mesh or "1,1,1")
    else:
        mesh, stage = best_mesh(run, args.topology, lambda tried, outcome: say(_tried(tried, outcome), progress))
        known["denoise"] = [stage]
    names = args.stages or STAGES
    forecasts = [known.get(name) or forecast(run, args.topology, mesh, [name]) for name in names]
    stages: list[StageForecast] = []
    say(f"compiling for {args.topology}: {', '.join(names)}; about a minute each on two cores", progress)
    for stage in itertools.chain.from_iterable(forecasts):
        say(f"compiled {stage.name} in {stage.compile_s:.0f} s", progress)
        stages.append(stage)
    return mesh, run.size, stages


def _check_training_options(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Refuse options that would be ignored."""
    if not args.train and (alone := [name for name in TRAINING if getattr(args, name) is not None]):
        raise InputError(f"--{alone[0]} is of training; add --train")
    of_video = [name for name in given if name not in ("num_frames", "height", "width")]
    if args.train and not args.stages and of_video:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in of_video)
        raise InputError(f"{names}: not of training; name the stages of a video too (--stages), or leave out --train")


def _tried(mesh: MeshShape, found: StageForecast | None) -> str:
    if found is None:
        return f"compiling denoise for the mesh {describe_mesh(mesh)}"
    fits = "" if found.fits else ", does not fit"
    seconds, gib = found.estimated_s, found.hbm_gib_per_chip
    return f"mesh {describe_mesh(mesh)}: {seconds:.1f} s of denoising, {gib:.1f} GiB per chip{fits}"
