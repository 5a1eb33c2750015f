"""Fine-tuning of a text-to-video model on a folder of clips: LoRA adapters, or all weights of the transformer.

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
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Key

from cogvideox_flax import checkpoint
from cogvideox_flax.checkpoint import Manifest, hub
from cogvideox_flax.generate.conditioning import Conditioning
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.generate.run_dir import run_dir_lock
from cogvideox_flax.io.video import save_contact_sheet
from cogvideox_flax.lora import lora_parameters, save_lora, with_parameters
from cogvideox_flax.models.cogvideox.family import OFS
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.training.job import RECORD_FILE, FinetuneJob
from cogvideox_flax.training.latent_cache import LatentCache
from cogvideox_flax.training.loop import METRICS_FILE, Trainer, match_run
from cogvideox_flax.training.metrics import plot_metrics
from cogvideox_flax.training.objectives import Metrics, drop_captions, sample_latents, v_prediction
from cogvideox_flax.training.prepare import clip_features, clip_latents, prompt_features
from cogvideox_flax.training.shuffle import shuffled_indices
from cogvideox_flax.training.step import TrainState

log = logging.getLogger(__name__)

CHECKPOINT_DIR = "checkpoint"


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
        InputError: the directory holds a run of something else, or something there cannot be read or written.
        DivergedError: the loss is NaN or infinite.
    """
    config, out, full = job.config, job.config.out, job.config.method == "full"
    native = hub.resolve(config.model, config.revision, progress=progress)
    with run_dir_lock(out):
        pipe = CogVideoXPipeline(native, config.loop.dtype, job.mesh)
        match_run(out / RECORD_FILE, _made_of(job, pipe))
        captions = clip_features(job, pipe, progress)
        prompts = prompt_features(job, pipe, progress)
        pipe.release("text_encoder")
        latents = clip_latents(job, pipe)
        pipe.release("vae")
        frozen: dict[str, Any] = {"empty": prompts[0]}
        if not full:
            frozen["transformer"] = job.add_lora(pipe.transformer, job.mesh)
            pipe.release("transformer")

        def on_step(done: int, state: TrainState) -> bool:
            if config.sample.prompts and (done % config.sample.every == 0 or done == config.loop.steps):
                params = jax.tree.map(lambda x: x.astype(pipe.dtype), state.trained)
                _save_samples(job, pipe, _assemble(params, frozen), prompts, done)
            return stop_after is not None and stop_after(done)

        trainer = Trainer(
            loss=partial(_loss, job=job),
            batches=partial(_batch, job=job, latents=latents, captions=captions),
            config=config.loop,
            folder=out / "training",
            frozen=frozen,
            mesh=job.mesh,
        )
        state = trainer.train(_initial_params(job, native, frozen), on_step)
        if int(state.step) < config.loop.steps:
            return None
        trained = _assemble(state.trained, frozen)
        result = _save_checkpoint(job, pipe.manifest, native, trained) if full else save_lora(job.family, out, trained)
        plot_metrics([trainer.folder / METRICS_FILE], ("loss", "gradient_norm"), out / "loss.png")
        return result


def _initial_params(job: FinetuneJob, native: Path, frozen: dict[str, Any]) -> dict[str, Any]:
    """What is trained, before the first step: the adapters, or the transformer's weights in their stored dtype."""
    if job.config.method == "lora":
        return {"transformer": lora_parameters(frozen["transformer"])}
    return {"transformer": checkpoint.load_transformer(native, mesh=job.mesh)}


def _assemble(params: dict[str, Any], frozen: dict[str, Any]) -> Transformer:
    """The transformer with the trained parameters."""
    if "transformer" in frozen:
        return with_parameters(frozen["transformer"], params["transformer"])
    return params["transformer"]


def _batch(step: int, *, job: FinetuneJob, latents: LatentCache, captions: LatentCache) -> dict[str, np.ndarray]:
    """`mean`, `std` and `text` of the clips of one step."""
    config = job.config
    indices = shuffled_indices(step, batch=config.batch, count=len(job.clips), seed=config.loop.seed)
    return {**latents.gather(indices), **captions.gather(indices)}


def _loss(
    params: dict[str, Any], frozen: dict[str, Any], batch: dict[str, Array], key: Key[Array, ""], *, job: FinetuneJob
) -> tuple[Float32[Array, ""], Metrics]:
    """v-prediction on samples of the clips' latents, with some captions dropped. A `Loss` of the training loop."""
    vae, transformer_config, scheduler = (job.manifest.configs[name] for name in ("vae", "transformer", "scheduler"))
    sample_key, drop_key, noise_key = jax.random.split(key, 3)
    latents = sample_latents(batch["mean"], batch["std"], sample_key, vae.scaling_factor, job.size.extra_latents)
    context = drop_captions(batch["text"], frozen["empty"], job.config.caption_dropout, drop_key)
    transformer = _assemble(params, frozen)
    ofs = None if transformer_config.ofs_width is None else OFS

    def denoiser(x: Array, t: Array) -> Array:
        return transformer(x, context, t, ofs, remat=job.config.remat)

    return v_prediction(denoiser, latents, noise_key, scheduler)


def _made_of(job: FinetuneJob, pipe: CogVideoXPipeline) -> dict[str, Any]:
    """What decides the result of the run, beside the settings of its loop; the record in its directory."""
    config, size = job.config, job.size
    return {
        "method": config.method,
        "batch": config.batch,
        "caption_dropout": config.caption_dropout,
        **({"lora": dataclasses.asdict(config.lora)} if config.method == "lora" else {}),
        "clips": job.clips_fingerprint,
        "size": [size.num_frames, size.height, size.width],
        "fps": job.fps,
        **{name.replace("_", " "): value for name, value in pipe.fingerprints().items()},
    }


def _save_samples(
    job: FinetuneJob,
    pipe: CogVideoXPipeline,
    transformer: Transformer,
    features: Float32[np.ndarray, "N L E"],
    done: int,
) -> None:
    """Generate the sample prompts and save a contact sheet with a row for each.

    Args:
        transformer: in the pipeline's dtype.
        features: of the empty prompt, then of the sample prompts.
        done: the number of steps done.
    """
    sample, size = job.config.sample, job.size
    empty, prompts = features[:1], features[1:]
    pipe.use("transformer", transformer)
    guided = sample.guidance_scale > 1
    negative = {"prompt_embeds": np.repeat(empty, len(prompts), 0)} if guided else None
    *_, last = pipe.denoise(Conditioning({"prompt_embeds": prompts}, negative), job.samples)
    pipe.release("transformer")  # its weights may be buffers that the next training step overwrites
    video = np.asarray(pipe.decode(last.latents[:, size.extra_latents :], progress=False))
    pipe.release("vae")
    shown = np.linspace(0, size.num_frames - 1, min(sample.frames, size.num_frames)).round().astype(int)
    path = job.config.out / "samples" / f"{done:06d}.png"
    save_contact_sheet(path, video[:, shown].reshape(-1, *video.shape[2:]), columns=len(shown))
    log.info("samples of step %d in %s", done, path)


def _save_checkpoint(job: FinetuneJob, manifest: Manifest, native: Path, transformer: Transformer) -> Path:
    """A native checkpoint of the trained transformer and the base model's other components."""
    target = job.config.out / CHECKPOINT_DIR
    base = manifest.weights["transformer"]
    source = {
        "path": str(job.config.out.absolute()),
        "steps": job.config.loop.steps,
        "base": base.get("source", {}),
    }
    checkpoint.save(target, manifest, {"transformer": transformer}, base["dtype"], source, kept=native)
    return target
