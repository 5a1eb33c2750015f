"""Fine-tuning of a text- or image-to-video model on a folder of clips: LoRA adapters, or all of the transformer.

Contents of the run's directory, in the order in which they appear:

    finetune.json                       what the run is made of; a run with something else is refused
    prepared/                           latents and text features of the clips
    training/                           training states and metrics.jsonl, from which a stopped run resumes
    samples/000200.png                  videos of the sample prompts, a row each
    pytorch_lora_weights.safetensors    method "lora": for `cogvideox generate --lora`, and for diffusers
    checkpoint/                         method "full": for `cogvideox generate --model`
    loss.png
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int, Key, UInt8

from cogvideox_flax import checkpoint, hub
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.generate.events import Finished, last_of
from cogvideox_flax.generate.journey import make_videos
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.store import Memory, run_dir_lock
from cogvideox_flax.io.contents import read_record
from cogvideox_flax.io.video import save_contact_sheet
from cogvideox_flax.lora import lora_parameters, save_lora, with_parameters
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.runtime.global_arrays import fetch_on_first
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.settings import own_settings
from cogvideox_flax.schedulers import TimestepLaw
from cogvideox_flax.training.buckets import turn_of
from cogvideox_flax.training.config import AUTO
from cogvideox_flax.training.forecast import abstract_arguments, attached_devices, fitting, with_settings
from cogvideox_flax.training.job import RECORD_FILE, FinetuneJob
from cogvideox_flax.training.latent_cache import LatentCache
from cogvideox_flax.training.loop import METRICS_FILE, Trainer, Validation, match_run
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Metrics, drop_captions, sample_latents, velocity_loss
from cogvideox_flax.training.prepare import ClipLatents, clip_features, clip_latents, prompt_features
from cogvideox_flax.training.shuffle import shuffled_indices
from cogvideox_flax.training.step import Loss, TrainState

log = logging.getLogger(__name__)

TRAINING_DIR = "training"
VALIDATION_SAMPLES = 8
"""Noised clips that a validation loss is the mean over, at least."""


@own_settings()
def finetune(
    job: FinetuneJob, *, stop_after: Callable[[int], bool] | None = None, progress: bool = True
) -> Path | None:
    """Prepare the clips, train, and write the result; resumes from what is in the run's directory.

    Args:
        job: from `job.check`.
        stop_after: called after each step with the number of steps done; True stops the run there. SIGTERM and Ctrl-C
            stop it too.
        progress: progress on stderr.

    Returns:
        The LoRA file or the native checkpoint; None if the run was stopped before its last step.

    Raises:
        InputError: the training step needs more memory than the devices have; the directory holds a run of something
            else, or something there cannot be read or written.
        DivergedError: the loss is NaN or infinite.
    """
    asked, target, compiled = job.config.remat, attached_devices(job), None
    job = with_recorded_remat(job)
    if target.memory is not None or job.config.remat == AUTO:
        job, _, compiled = fitting(job, loss_of, target)
    config, out, name = job.config, job.config.out, job.model.denoiser
    how: Any = {"variant": config.variant, "dtype": config.trainer.dtype, "mesh": config.mesh}
    choice = ModelChoice(config.model, config.model or "embedded", config.revision, **how)
    pipe = Pipeline.open_on_hosts(choice, progress=progress)
    with run_dir_lock(out):
        decided = {"remat": job.remat} if asked == AUTO else {}
        match_run(out / RECORD_FILE, _made_of(job, pipe) | decided, may_change=("remat",))
        captions = clip_features(job, pipe, progress)
        prompts = prompt_features(job, pipe, progress)
        pipe.release(*(stage.component for stage in job.model.text))
        latents = clip_latents(job, pipe)
        frozen: dict[str, Any] = {"empty": {key: value[0] for key, value in prompts.items()}}
        frozen |= {component: pipe.component(component) for component in job.condition.encoders}
        pipe.release(*_image_parts(job))
        if config.method == "lora":
            frozen[name] = job.add_lora(pipe.component(name), job.mesh)
            pipe.release(name)

        def on_step(done: int, state: TrainState) -> bool:
            if config.sample.prompts and (done % config.sample.every == 0 or done == config.loop.steps):
                params = jax.tree.map(lambda x: x.astype(pipe.dtype), state.trained)
                _save_samples(job, pipe, _assemble(job, params, frozen), prompts, done)
            return stop_after is not None and stop_after(done)

        if config.sample.prompts and not _has_sheet(job, 0):
            base = frozen[name] if name in frozen else pipe.component(name)  # new adapters change nothing
            _save_samples(job, pipe, base, prompts, 0)
        trainer = Trainer(
            loss=loss_of(job),
            batches=partial(_batch, job=job, latents=latents, captions=captions),
            config=config.trainer,
            folder=out / TRAINING_DIR,
            frozen=frozen,
            mesh=job.mesh,
            rows={name: job.model.components[name].sharding},
            validation=_validation(job, latents, captions),
            compiled=None if compiled is None else (abstract_arguments(job), compiled),
        )
        state = trainer.train(_initial_params(job, pipe.native_dir, frozen), on_step, progress=progress)
        if int(state.step) < config.loop.steps:
            return None
        trained = fetch_on_first(state.trained)
        return Path(_save_result(job, pipe.native_dir, trained, frozen))


def _initial_params(job: FinetuneJob, native: Path, frozen: dict[str, Any]) -> dict[str, Any]:
    """The trained parameters before the first step: adapters, or the denoiser's weights in their stored dtype."""
    name = job.model.denoiser
    if job.config.method == "lora":
        return {name: lora_parameters(frozen[name])}
    return {name: checkpoint.load_component(name, native, mesh=job.mesh)}


def _assemble(job: FinetuneJob, params: dict[str, Any], frozen: dict[str, Any]) -> Any:
    """The denoiser with the trained parameters."""
    name = job.model.denoiser
    return with_parameters(frozen[name], params[name]) if name in frozen else params[name]


def _batch(step: int, *, job: FinetuneJob, latents: ClipLatents, captions: LatentCache) -> dict[str, Any]:
    """What is prepared of the clips of one step: `text` (features by name), and the arrays of `clip_latents`."""
    config, buckets = job.config, job.in_buckets(job.trained_on)
    bucket, turn = turn_of(step, [len(clips) for clips in buckets], config.seed)
    clips = np.asarray(buckets[bucket])
    return _gather(
        clips[shuffled_indices(turn, batch=config.batch, count=len(clips), seed=config.seed)], latents, captions
    )


def _gather(indices: Int[np.ndarray, " B"], latents: ClipLatents, captions: LatentCache) -> dict[str, Any]:
    return {**latents.gather(indices), "text": captions.gather(indices)}


def _validation(job: FinetuneJob, latents: ClipLatents, captions: LatentCache) -> Validation:
    """All clips that are held out, else the first of each bucket that are trained on, at `VALIDATION_SAMPLES` noises or
    more."""
    config, places = job.config, []
    micro = config.batch // config.loop.accumulate
    buckets = job.in_buckets(job.held_out) or [clips[:VALIDATION_SAMPLES] for clips in job.in_buckets(job.trained_on)]
    for clips in buckets:
        count = -(-max(len(clips), VALIDATION_SAMPLES // len(buckets)) // micro)
        places += list(np.resize(np.asarray(clips), (count, micro)))

    def batch(i: int) -> dict[str, Any]:
        return _gather(places[i], latents, captions)

    return Validation(_validation_name(job), batch, len(places), config.validation.every)


def _validation_name(job: FinetuneJob) -> str:
    return "validation_loss" if job.held_out else "fixed_noise_loss"


def with_recorded_remat(job: FinetuneJob) -> FinetuneJob:
    """The job, with the choice of the run that is there in place of "auto"."""
    if job.config.remat != AUTO:
        return job

    def recorded() -> Any:
        with suppress(OSError, ValueError):  # a damaged record is refused later
            return read_record(job.config.out / RECORD_FILE).get("remat")

    choice = hosts.broadcast(recorded)
    return job if choice is None else with_settings(job, remat=choice)


def loss_of(job: FinetuneJob) -> Loss:
    """What a job minimises."""
    return partial(_loss, job=job)


def _loss(
    params: dict[str, Any], frozen: dict[str, Any], batch: dict[str, Any], key: Key[Array, ""], *, job: FinetuneJob
) -> tuple[Float32[Array, ""], Metrics]:
    """The velocity on samples of the clips' latents, with some captions and images dropped. A `Loss` of the training
    loop."""
    sample_key, drop_key, noise_key = jax.random.split(key, 3)
    statistics = job.model.codec.statistics
    extra_latents = -batch["mean"].shape[1] % job.model.temporal_patch
    latents = sample_latents(batch["mean"], batch["std"], sample_key, statistics, extra_latents)
    text = drop_captions(batch["text"], frozen["empty"], job.config.caption_dropout, drop_key)
    beside = job.condition.features(batch, frozen, latents.shape, jax.random.fold_in(key, 3))
    features, model = {**text, **beside}, _assemble(job, params, frozen)

    def denoiser(x: Array, t: Array) -> Array:
        return job.model.predict(model, x, features, t, remat=job.remat)

    return velocity_loss(denoiser, latents, noise_key, job.model.scheduler(), job.timesteps, min_snr=job.config.min_snr)


def _made_of(job: FinetuneJob, pipe: Pipeline) -> dict[str, Any]:
    """Everything that decides the run's result, except its loop's settings; the record in its directory."""
    config, size = job.config, job.size
    return {
        "method": config.method,
        "batch": config.batch,
        "caption_dropout": config.caption_dropout,
        "timesteps": None if job.timesteps == TimestepLaw() else vars(job.timesteps),
        "min_snr": config.min_snr,
        "image": job.condition.record,
        **({"lora": job.made_of_lora} if config.method == "lora" else {}),
        "clips": job.clips_fingerprint,
        "held out": len(job.held_out) or None,
        "buckets": config.buckets or None,
        "size": [size.num_frames, size.height, size.width],
        "fps": job.fps,
        **{name.replace("_", " "): value for name, value in pipe.fingerprints().items()},
    }


def _save_samples(
    job: FinetuneJob,
    pipe: Pipeline,
    denoiser: Any,
    features: Features,
    done: int,
) -> None:
    """Generate the sample prompts and save a contact sheet with a row for each.

    Args:
        denoiser: in the pipeline's dtype.
        features: of the empty prompt, then of the sample prompts.
        done: the number of steps done; 0 shows what the model makes before it is trained.
    """
    model = job.model
    prompts = {name: value[1:] for name, value in features.items()}
    empty = {name: np.repeat(value[:1], len(value) - 1, 0) for name, value in features.items()}
    pipe.replace_component(model.denoiser, denoiser)
    text = Conditioning(prompts, empty if job.samples.guided else None)
    last = last_of(make_videos(pipe, job.samples.varied(**job.sample_media), Memory(text)))
    pipe.release(model.denoiser, *_image_parts(job))  # the weights may be buffers that the next step overwrites
    assert isinstance(last, Finished)
    _save_sheet(job, last.result.frames, done)


def _image_parts(job: FinetuneJob) -> tuple[str, ...]:
    """The components that encode images and clips, and decode them."""
    return *(visual.component for visual in job.model.visual), job.model.decoder


def _sheet_path(job: FinetuneJob, done: int) -> Path:
    return job.config.out / "samples" / f"{done:06d}.png"


@hosts.broadcast_result
def _has_sheet(job: FinetuneJob, done: int) -> bool:
    return _sheet_path(job, done).exists()


@hosts.on_process_0
def _save_sheet(job: FinetuneJob, video: UInt8[np.ndarray, "B F H W 3"], done: int) -> None:
    sample, size = job.config.sample, job.size
    shown = np.linspace(0, size.num_frames - 1, min(sample.frames, size.num_frames)).round().astype(int)
    path = _sheet_path(job, done)
    save_contact_sheet(path, video[:, shown].reshape(-1, *video.shape[2:]), columns=len(shown))
    log.info("samples of step %d in %s", done, path)


@hosts.broadcast_result
def _save_result(job: FinetuneJob, native: Path, trained: dict[str, Any], frozen: dict[str, Any]) -> str:
    """Write the adapters or the checkpoint, whose path is returned, and the plot of the loss."""
    denoiser = _assemble(job, trained, frozen)
    if job.config.method == "full":
        result = _save_checkpoint(job, checkpoint.read_manifest(native, warn=False), native, denoiser)
    else:
        result = save_lora(job.model, job.config.out, denoiser)
    try:
        metrics = job.config.out / TRAINING_DIR / METRICS_FILE
        names = ("loss", "mean_loss", _validation_name(job), "gradient_norm")
        plot_metrics([metrics], names, job.config.out / "loss.png")
    except ImportError:
        log.warning("there is no plot of the loss, since matplotlib is not installed: pip install matplotlib")
    return str(result)


def _save_checkpoint(job: FinetuneJob, manifest: Manifest, native: Path, denoiser: Any) -> Path:
    """A native checkpoint of the trained denoiser and the base model's other components."""
    target, name = job.config.out / hub.TRAINED_CHECKPOINT, job.model.denoiser
    base, manifest = manifest.weights[name], dataclasses.replace(manifest, domain=None)
    source = {
        "path": str(job.config.out.absolute()),
        "steps": job.config.loop.steps,
        "base": base.get("source", {}),
    }
    checkpoint.save(target, manifest, {name: denoiser}, base["dtype"], source, kept=native)
    return target
