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
from jaxtyping import Array, Float32, Int, UInt8

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
from cogvideox_flax.training.conditions import CONTROL_MEAN, CONTROL_STD, FRAME, FRAMES, ControlClip, FirstFrame
from cogvideox_flax.training.job import FinetuneJob
from cogvideox_flax.training.latent_cache import LatentCache

SHARD_SIZE = 16
"""Clips per file: what a killed preparation loses at most."""

SHARD_SIZE_OF_FRAMES = 2
"""The same where all frames are kept, of which a clip has 50 to 250 MB: a file is made in memory."""


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
    """`mean` and `std` [t, h, w, C] of the VAE's posterior of each clip, not normalized, and the arrays of the job's
    condition.

    Latents are in float16: they stay within tens, and its relative precision of 1/2048 is finer than the noise of any
    timestep.
    """
    part = job.model.decoder

    def compiled(encode: Callable[..., Any]) -> Callable[..., Any]:
        return compiled_once(jax.jit(encode, compiler_options=compiler_options(pipe.dtype)), None)

    encode = compiled(job.model.codec.encode)
    condition = job.condition
    prepared = condition.prepared if isinstance(condition, FirstFrame) else []
    encode_image = {visual.feature: compiled(job.samples.encode_visual(visual)) for visual in prepared}

    def place(array: np.ndarray) -> Array:
        where = None if job.mesh is None else sharding.named(job.mesh, ("batch",), array.shape, "clips")
        return put(array, where)

    def posterior(clips: UInt8[np.ndarray, "B F H W 3"]) -> tuple[np.ndarray, np.ndarray]:
        mean, logvar = map(fetch, encode(pipe.component(part), place(from_uint8(clips))))
        return mean.astype(np.float16), np.exp(0.5 * logvar.astype(np.float32)).astype(np.float16)

    def compute(places: range, members: Sequence[int], size: Size) -> dict[str, np.ndarray]:
        indices = [members[place] for place in places]
        rows: list[dict[str, np.ndarray]] = []
        for group, count in _dp_groups(indices, job.mesh):
            clips = _load(job, group, size)
            mean, std = posterior(clips)
            row = {"mean": mean, "std": std}
            row |= {
                name: x for name, x in {FRAME: clips[:, 0], FRAMES: clips}.items() if name in condition.arrays(size)
            }
            if isinstance(condition, ControlClip):
                row[CONTROL_MEAN], row[CONTROL_STD] = posterior(_load(job, group, size, control=True))
            for visual in prepared:
                images, noise = clips[:, :1], np.zeros((len(group), 1, *mean.shape[2:]), np.float32)
                if visual.frame_size is not None:
                    images = np.stack([resize_frames(image, *visual.frame_size) for image in images])
                encoder = pipe.component(visual.component)
                features, _ = encode_image[visual.feature](encoder, place(images), place(noise))
                row[visual.feature] = fetch(features)
            rows.append({name: value[:count] for name, value in row.items()})
        latents = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        if not all(np.isfinite(value).all() for value in latents.values()):
            names = ", ".join(job.clips[i].name for i in indices)
            raise InputError(f"the VAE gives NaN or infinity in {pipe.dtype} for some of {names}; train in float32")
        return latents

    parts = dict.fromkeys((part, *(visual.component for visual in prepared)))
    shard_size = SHARD_SIZE_OF_FRAMES if FRAMES in condition.arrays(job.size) else SHARD_SIZE
    caches = [
        _open_cache(job, pipe, tuple(parts), partial(compute, members=group, size=size), size, len(group), shard_size)
        for size, group in zip(job.buckets, job.members, strict=True)
    ]
    return ClipLatents(caches, job.members)


@hosts.broadcast_result
def _load(job: FinetuneJob, group: Sequence[int], size: Size, control: bool = False) -> UInt8[np.ndarray, "B F H W 3"]:
    """Clips, or their control clips: the same part of them in time."""
    clips, shape = [], (size.num_frames, size.height, size.width)
    for clip, contents in [(job.clips[i], job.contents[i]) for i in group]:
        with contents.reading():
            if control:
                assert clip.control is not None
                clips.append(load_clip(clip.control, *shape, job.fps, count=clip.num_frames))
            else:
                clips.append(load_clip(clip.path, *shape, job.fps))
    return np.stack(clips)


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
    shard_size: int = SHARD_SIZE,
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
    return latent_cache.prepare(folder, count, compute, shard_size=shard_size, meta=meta)


def _folder(job: FinetuneJob) -> Path:
    return job.config.out / "prepared"


def _encode_texts(
    job: FinetuneJob, pipe: Pipeline, texts: Sequence[str], progress: bool
) -> dict[str, Float32[np.ndarray, "N ..."]]:
    rows: list[Features] = []
    for group, count in _dp_groups(range(len(texts)), pipe.mesh):
        prompts = [texts[i] for i in group]
        run = job.samples.varied(prompt=prompts, negative_prompt=[""] * len(prompts), image=None, control_video=None)
        features = pipe.encode(run, negative=False, progress=progress).text
        rows.append({name: fetch(value).astype(np.float32)[:count] for name, value in features.items()})
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _dp_groups(indices: Sequence[int], mesh: Mesh | None) -> list[tuple[list[int], int]]:
    """Batches with one index per dp device, each with its count. The last index fills up the last batch."""
    size = 1 if mesh is None else sharding.devices_of("batch", mesh)
    groups = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
    return [(group + group[-1:] * (size - len(group)), len(group)) for group in groups]
