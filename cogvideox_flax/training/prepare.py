"""Text features and latents of a fine-tuning job, computed once and kept in its directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.store import is_fresh, read_stage, write_stage
from cogvideox_flax.io.clips import resize_frames
from cogvideox_flax.io.video import from_uint8
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.runtime.compile import compiled_once, compiler_options
from cogvideox_flax.runtime.global_arrays import fetch, put
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.training import latent_cache
from cogvideox_flax.training.clips import load_clip
from cogvideox_flax.training.images import FRAME, encoded_each_step
from cogvideox_flax.training.job import FinetuneJob
from cogvideox_flax.training.latent_cache import LatentCache

SHARD_SIZE = 16
"""Clips per file: what a killed preparation loses at most."""


def clip_features(job: FinetuneJob, pipe: Pipeline, progress: bool) -> LatentCache:
    """The text features of each clip's caption, in float32, which holds the values of every dtype."""

    def compute(indices: range) -> dict[str, np.ndarray]:
        return _encode_texts(job, pipe, [job.clips[i].caption for i in indices], progress)

    return _open_cache(job, pipe, _text_parts(job), compute, job.size, len(job.clips))


def prompt_features(job: FinetuneJob, pipe: Pipeline, progress: bool) -> dict[str, Float32[np.ndarray, "N ..."]]:
    """Text features of the empty prompt and of the sample prompts. A resumed run may have other sample prompts."""
    path = _folder(job) / "prompts.safetensors"
    prompts = ["", *job.config.sample.prompts]
    names = tuple(job.model.feature_shapes(1))
    key = json.dumps([prompts, names, pipe.dtype, [pipe.fingerprints()[name] for name in _text_parts(job)]])
    if not is_fresh(path, key):
        write_stage(path, _encode_texts(job, pipe, prompts, progress), {"settings": key})
    return read_stage(path, names, "cogvideox train")[0]


@dataclass(frozen=True)
class ClipLatents:
    """What `clip_latents` makes, a cache for each bucket. members: the indices of its clips, increasing."""

    caches: Sequence[LatentCache]
    members: Sequence[Sequence[int]]

    def gather(self, indices: Int[np.ndarray, " N"]) -> dict[str, np.ndarray]:
        """The arrays of these clips, which are of one bucket, stacked."""
        bucket = next(i for i, members in enumerate(self.members) if indices[0] in members)
        return self.caches[bucket].gather(np.searchsorted(self.members[bucket], indices))


def clip_latents(job: FinetuneJob, pipe: Pipeline) -> ClipLatents:
    """`mean` and `std` [t, h, w, C] of the VAE's posterior of each clip, not normalized; of image-to-video models also
    `FRAME` [H, W, 3], or the features of the first frame by name.

    In float16: latents stay within tens, and its relative precision of 1/2048 is finer than the noise of any timestep.
    """
    part = job.model.decoder

    def compiled(encode: Callable[..., Any]) -> Callable[..., Any]:
        return compiled_once(jax.jit(encode, compiler_options=compiler_options(pipe.dtype)), None)

    encode = compiled(job.model.codec.encode)
    prepared = [visual for visual in job.images if not encoded_each_step(visual)]
    encode_image = {visual.feature: compiled(job.samples.encode_visual(visual)) for visual in prepared}

    @hosts.broadcast_result
    def load(group: list[int], size: Size) -> np.ndarray:
        clips = []
        for i in group:
            with job.contents[i].reading():
                clips.append(load_clip(job.clips[i].path, size.num_frames, size.height, size.width, job.fps))
        return np.stack(clips)

    def compute(places: range, members: Sequence[int], size: Size) -> dict[str, np.ndarray]:
        indices = [members[place] for place in places]
        rows: list[dict[str, np.ndarray]] = []
        for group, count in _dp_groups(indices, job.mesh):
            clips = load(group, size)
            video = from_uint8(clips)
            place = sharding.named(job.mesh, ("batch",), video.shape, "clips") if job.mesh is not None else None
            mean, logvar = map(fetch, encode(pipe.component(part), put(video, place)))
            row = {"mean": mean.astype(np.float16), "std": np.exp(0.5 * logvar.astype(np.float32)).astype(np.float16)}
            if len(prepared) < len(job.images):
                row[FRAME] = clips[:, 0]
            for visual in prepared:
                images, noise = clips[:, :1], np.zeros((len(group), 1, *mean.shape[2:]), np.float32)
                if visual.frame_size is not None:
                    images = np.stack([resize_frames(image, *visual.frame_size) for image in images])
                inputs = put(images, place), put(noise, place)
                features, _ = encode_image[visual.feature](pipe.component(visual.component), *inputs)
                row[visual.feature] = fetch(features)
            rows.append({name: value[:count] for name, value in row.items()})
        latents = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        if not all(np.isfinite(value).all() for value in latents.values()):
            names = ", ".join(job.clips[i].name for i in indices)
            raise InputError(f"the VAE gives NaN or infinity in {pipe.dtype} for some of {names}; train in float32")
        return latents

    parts = dict.fromkeys((part, *(visual.component for visual in prepared)))
    caches = [
        _open_cache(job, pipe, tuple(parts), partial(compute, members=members, size=size), size, len(members))
        for size, members in zip(job.buckets, job.members, strict=True)
    ]
    return ClipLatents(caches, job.members)


def _text_parts(job: FinetuneJob) -> tuple[str, ...]:
    """The parts of the model that decide the text features."""
    return *(stage.component for stage in job.model.text), "tokenizer"


def _open_cache(
    job: FinetuneJob,
    pipe: Pipeline,
    parts: tuple[str, ...],
    compute: Callable[[range], dict[str, np.ndarray]],
    size: Size,
    count: int,
) -> LatentCache:
    """Open the cache of what these parts of the model compute from `count` clips, in a folder named by the first part,
    and by the size where there are several."""
    fingerprints, folder = pipe.fingerprints(), _folder(job) / parts[0]
    if size is not job.size:
        folder = folder.with_name(f"{parts[0]}-{size.num_frames}x{size.height}x{size.width}")
    meta = {
        "clips": job.clips_fingerprint,
        "features": list(job.model.feature_shapes(1)),
        "size": [size.num_frames, size.height, size.width],
        "fps": job.fps,
        "model": [fingerprints[name] for name in parts],
        "dtype": pipe.dtype,
    }
    return latent_cache.prepare(folder, count, compute, shard_size=SHARD_SIZE, meta=meta)


def _folder(job: FinetuneJob) -> Path:
    return job.config.out / "prepared"


def _encode_texts(
    job: FinetuneJob, pipe: Pipeline, texts: Sequence[str], progress: bool
) -> dict[str, Float32[np.ndarray, "N ..."]]:
    rows: list[Features] = []
    for group, count in _dp_groups(range(len(texts)), pipe.mesh):
        prompts = [texts[i] for i in group]
        run = job.samples.varied(prompt=prompts, negative_prompt=[""] * len(prompts), image=None)
        features = pipe.encode(run, negative=False, progress=progress).text
        rows.append({name: fetch(value).astype(np.float32)[:count] for name, value in features.items()})
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _dp_groups(indices: Sequence[int], mesh: Mesh | None) -> list[tuple[list[int], int]]:
    """Batches with one index per dp device, each with its count. The last index fills up the last batch."""
    size = 1 if mesh is None else sharding.devices_of("batch", mesh)
    groups = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    return [(group + group[-1:] * (size - len(group)), len(group)) for group in groups]
