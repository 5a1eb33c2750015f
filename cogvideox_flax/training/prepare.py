"""Text features and latents of a fine-tuning job, computed once and kept in its directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import stage_files
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.io.video import from_uint8
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.training import latent_cache
from cogvideox_flax.training.clips import load_clip
from cogvideox_flax.training.job import FinetuneJob
from cogvideox_flax.training.latent_cache import LatentCache

SHARD_SIZE = 16
"""Clips per file: what a killed preparation loses at most."""


def clip_features(job: FinetuneJob, pipe: CogVideoXPipeline, progress: bool) -> LatentCache:
    """`text` [L, E] of each clip's caption, in float32, which holds the values of every dtype."""

    def compute(indices: range) -> dict[str, np.ndarray]:
        return {"text": _encode_texts(job, pipe, [job.clips[i].caption for i in indices], progress)}

    return _open_cache(job, pipe, ("text_encoder", "tokenizer"), compute)


def prompt_features(job: FinetuneJob, pipe: CogVideoXPipeline, progress: bool) -> Float32[np.ndarray, "N L E"]:
    """Text features of the empty prompt and of the sample prompts. A resumed run may have other sample prompts."""
    path = _folder(job) / "prompts.safetensors"
    prompts = ["", *job.config.sample.prompts]
    key = json.dumps([prompts, pipe.dtype, [pipe.fingerprints()[name] for name in ("tokenizer", "text_encoder")]])
    if not stage_files.is_fresh(path, key):
        stage_files.save(path, {"features": _encode_texts(job, pipe, prompts, progress)}, {"settings": key})
    return stage_files.load(path, ("features",), "cogvideox train")[0]["features"]


def clip_latents(job: FinetuneJob, pipe: CogVideoXPipeline) -> LatentCache:
    """`mean` and `std` [t, h, w, C] of the VAE's posterior of each clip, without the scaling factor.

    In float16: latents stay within tens, and its relative precision of 1/2048 is finer than the noise of any timestep.
    """
    size = job.size
    encode = jax.jit(lambda vae, video: vae.encode(video), compiler_options=compiler_options(pipe.dtype))

    def compute(indices: range) -> dict[str, np.ndarray]:
        means, stds = [], []
        for group, count in _dp_groups(indices, job.mesh):
            frames = [load_clip(job.clips[i].path, size.num_frames, size.height, size.width, job.fps) for i in group]
            video = np.stack([from_uint8(clip) for clip in frames])
            place = sharding.named(job.mesh, ("batch",), video.shape, "clips") if job.mesh is not None else None
            mean, logvar = encode(pipe.vae, jax.device_put(video, place))
            means.append(np.asarray(mean, np.float16)[:count])
            stds.append(np.exp(0.5 * np.asarray(logvar, np.float32)).astype(np.float16)[:count])
        latents = {"mean": np.concatenate(means), "std": np.concatenate(stds)}
        if not all(np.isfinite(value).all() for value in latents.values()):
            names = ", ".join(job.clips[i].name for i in indices)
            raise InputError(f"the VAE gives NaN or infinity in {pipe.dtype} for some of {names}; train in float32")
        return latents

    return _open_cache(job, pipe, ("vae",), compute)


def _open_cache(
    job: FinetuneJob,
    pipe: CogVideoXPipeline,
    parts: tuple[str, ...],
    compute: Callable[[range], dict[str, np.ndarray]],
) -> LatentCache:
    """What these parts of the model compute from the clips, in a folder with the name of the first part."""
    size, fingerprints = job.size, pipe.fingerprints()
    meta = {
        "clips": job.clips_fingerprint,
        "size": [size.num_frames, size.height, size.width],
        "fps": job.fps,
        "model": [fingerprints[name] for name in parts],
        "dtype": pipe.dtype,
    }
    return latent_cache.prepare(_folder(job) / parts[0], len(job.clips), compute, shard_size=SHARD_SIZE, meta=meta)


def _folder(job: FinetuneJob) -> Path:
    return job.config.out / "prepared"


def _encode_texts(
    job: FinetuneJob, pipe: CogVideoXPipeline, texts: Sequence[str], progress: bool
) -> Float32[np.ndarray, "N L E"]:
    rows = []
    for group, count in _dp_groups(range(len(texts)), pipe.mesh):
        prompts = [texts[i] for i in group]
        request = job.samples.varied(prompt=prompts, negative_prompt=[""] * len(prompts))
        features = pipe.encode(request, negative=False, progress=progress).text["prompt_embeds"]
        rows.append(np.asarray(features, np.float32)[:count])
    return np.concatenate(rows)


def _dp_groups(indices: Sequence[int], mesh: Mesh | None) -> list[tuple[list[int], int]]:
    """Batches with one index per dp device, each with its count. The last index fills up the last batch."""
    size = mesh.shape["dp"] if mesh is not None else 1
    groups = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    return [(group + group[-1:] * (size - len(group)), len(group)) for group in groups]
