"""Runs of a pipeline in a folder: whole, in stages, and stopped in the middle."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import numpy as np

from cogvideox_flax.generate.events import Denoised, Step, last_of
from cogvideox_flax.generate.store import RunDirectory


def files_in(pipe, folder):
    """What a run of the pipeline keeps in a folder."""
    model = {"model_id": "the model", "revision": None, "dtype": pipe.dtype}
    return RunDirectory(folder=folder, **model, fingerprints=pipe.fingerprints())


def latents_of(pipe, request, files=None, stages=("encode", "denoise")):
    """The latents of a run as the decoder takes them; None where the stages leave denoising out."""
    if files is not None:
        events = list(run(pipe, request, files, stages))
        return next((np.asarray(event.latents) for event in events if isinstance(event, Denoised)), None)
    asked = dataclasses.replace(request, output_type="latent").checked_for(request.manifest, request.asked)
    return np.asarray(last_of(run(pipe, asked)).result.frames)[:, pipe.resolve(request).size.extra_latents :]


def stop_after(pipe, request, files, step):
    """A run that is closed after a step."""
    with closing(run(pipe, request, files)) as events:
        next(event for event in events if isinstance(event, Step) and int(event.state.step) == step)
