"""Runs of a pipeline in a folder: whole, in stages, and stopped in the middle."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from cogvideox_flax.generate.events import Denoised, Step
from cogvideox_flax.generate.journey import generate
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.store import RunDirectory


def files_in(pipe, folder):
    """What a run of the pipeline keeps in a folder."""
    return RunDirectory(folder, ModelChoice(None, "the model"), pipe.fingerprints())


def latents_of(pipe, run, store=None, stages=("encode", "denoise")):
    """The latents of a run as the decoder takes them; None where the stages leave denoising out."""
    events = list(generate(pipe, run, store, stages))
    return next((np.asarray(event.latents) for event in events if isinstance(event, Denoised)), None)


def stop_after(pipe, run, store, step):
    """A run that is closed after a step."""
    with closing(generate(pipe, run, store)) as events:
        next(event for event in events if isinstance(event, Step) and int(event.state.step) == step)
