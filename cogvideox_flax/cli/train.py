"""`cogvideox train`: fine-tuning."""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.cli.arguments import TRAINING_OPTIONS
from cogvideox_flax.errors import InputError, install_extra

try:
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
except ImportError as e:
    raise InputError(f"training needs {e.name}: {install_extra('train')}") from e

from cogvideox_flax.plan import topology_devices
from cogvideox_flax.plan.chips import GPUS
from cogvideox_flax.runtime.terminal import say
from cogvideox_flax.training.config import LoopTable, LoRAConfig, TrainingConfig
from cogvideox_flax.training.finetune import finetune, loss_of, with_recorded_remat
from cogvideox_flax.training.forecast import (
    StepForecast,
    attached_devices,
    describe_excess,
    first_fit,
    fitting,
    meshes,
    on_topology,
    with_settings,
)
from cogvideox_flax.training.job import FinetuneJob, check_trainable, open_job


def train(args: argparse.Namespace) -> None:
    """Fine-tune, or with --check say what that would be."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # which Orbax uses for notes about each state
    names = {key: option.removeprefix("--").replace("-", "_") for key, (option, _) in TRAINING_OPTIONS.items()}
    given = {key: getattr(args, name) for key, name in names.items()}
    job = open_job(args.config, {key: value for key, value in given.items() if value is not None})
    if args.check:
        job, step, _ = fitting(with_recorded_remat(job), loss_of, attached_devices(job))
        print(job.describe(step.describe(job.config.loop.steps)))
        return
    result = finetune(job, progress=not args.quiet)
    if result is None:
        raise KeyboardInterrupt  # stopped in order: `main` says how to go on
    print(result)


PLANNED_STEPS = 1000
"""Whose time a plan says."""


def plan_training(args: argparse.Namespace, manifest: Manifest) -> tuple[FinetuneJob, StepForecast, str]:
    """The job that the options of `plan --train` describe, its step, and what to say of it.

    Without --mesh, the first mesh over all chips that fits: clips beside each other, then tokens, then weights split.
    """
    config = TrainingConfig(
        clips=Path(),
        out=Path(),
        method=args.method or "lora",
        lora=LoRAConfig(rank=args.rank, quantize=args.quantize),
        mesh=args.mesh,
        batch=args.batch or 1,
        remat=args.remat or "full",
        loop=LoopTable(steps=PLANNED_STEPS, dtype=args.dtype or manifest.default_dtype),
        **{name: getattr(args, name) for name in ("num_frames", "height", "width")},
    )
    job, candidates = FinetuneJob(config=config, manifest=manifest), []
    if args.mesh is None and args.topology not in GPUS:
        devices = topology_devices(args.topology)
        chips = len(devices)
        dp = math.gcd(chips, config.batch)
        job = with_settings(job, mesh=f"{dp},{chips // dp},1")
        candidates = [other for _, other in meshes(job, devices)]
    (job, target), first = on_topology(job, args.topology), None
    for candidate in [job, *(on_topology(other, args.topology)[0] for other in candidates)]:
        check_trainable(candidate, "the model")
        say(f"compiling a training step for {args.topology}, mesh {candidate.config.mesh or '1,1,1'}", not args.quiet)
        candidate, step, _ = first_fit(candidate, loss_of, target)
        if step.fits:
            text = f"training, remat {candidate.remat}: {step.describe(PLANNED_STEPS)}"
            if args.price is not None:
                chips = 1 if candidate.mesh is None else candidate.mesh.size
                dollars = PLANNED_STEPS * step.estimated_s / 3600 * chips * args.price
                text += f", ${dollars:.2f} at ${args.price:g} for an hour of each chip"
            return candidate, step, text
        first = first or (candidate, step)
    assert first is not None
    text = "" if args.json else describe_excess(first[0], loss_of, target, first[1])
    return *first, text
