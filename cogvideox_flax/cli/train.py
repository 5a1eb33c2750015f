"""`cogvideox train`: fine-tuning."""

from __future__ import annotations

import argparse
import logging

from cogvideox_flax.cli.arguments import TRAINING_OPTIONS
from cogvideox_flax.errors import InputError, install_extra

try:
    import optax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
except ImportError as e:
    raise InputError(f"training needs {e.name}: {install_extra('train')}") from e

from cogvideox_flax.training.finetune import finetune
from cogvideox_flax.training.job import open_job


def train(args: argparse.Namespace) -> None:
    """Fine-tune, or with --check say what that would be."""
    logging.getLogger("absl").setLevel(logging.WARNING)  # which Orbax uses for notes about each state
    names = {key: option.removeprefix("--").replace("-", "_") for key, (option, _) in TRAINING_OPTIONS.items()}
    given = {key: getattr(args, name) for key, name in names.items()}
    job = open_job(args.config, {key: value for key, value in given.items() if value is not None})
    if args.check:
        print(job.describe())
        return
    result = finetune(job, progress=not args.quiet)
    if result is None:
        raise KeyboardInterrupt  # stopped in order: `main` says how to go on
    print(result)
