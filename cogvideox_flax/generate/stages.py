"""A run in three resumable stages on disk: encode, denoise, decode.

Each file is written atomically and says what it was made from, so that only matching work is taken over; see `run_dir`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError, NonFiniteError
from cogvideox_flax.generate import stage_files
from cogvideox_flax.generate.conditioning import VIDEO_FEATURE, Conditioning
from cogvideox_flax.generate.denoise import DenoiseState, with_progress
from cogvideox_flax.generate.media import describe_media
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.programs import RunPrograms
from cogvideox_flax.generate.result import GenerationResult, describe_run
from cogvideox_flax.generate.run_dir import (
    EMBEDDINGS_FILE,
    LATENTS_FILE,
    STATE_FILE,
    RunRecord,
    deciding,
    read_settings,
    recorded,
)
from cogvideox_flax.generate.windows import in_pieces
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.runtime import hosts
from cogvideox_flax.runtime.global_arrays import fetch, replicate

log = logging.getLogger(__name__)

NEGATIVE = "negative_"
"""Before the name of a text feature: of the negative prompt."""


def encode(
    pipe: Pipeline, record: RunRecord, folder: Path, *, text: Conditioning | None = None, progress: bool = True
) -> Conditioning | None:
    """Stage 1: prompts to features, with and without guidance; pictures and clips to latents.

    Skipped where the file is there and made from the same; then `text` is returned.

    text: an earlier result of this function for the same prompts, whose text features are used again.

    The file holds each text feature, float32 [B, ...] (`prompt_embeds` [B, L, E]), and that of the negative prompt
    under the same name after "negative_"; and the latents of each picture and clip, float32 [B, C, T, h, w], scaled.
    """
    path, request = folder / EMBEDDINGS_FILE, record.request
    settings = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
    run = pipe.programs(request)
    components = [stage.component for stage in pipe.manifest.model_family.text]
    components += [stage.component for stage in run.visual]
    made_with = settings
    if run.visual:  # a run of text alone does not depend on these
        size = {name: getattr(request, name) for name in ("num_frames", "height", "width", "tiling")}
        made_with = _deciding_latents_of_media(record, run) | size
    key = record.key(made_with, ("tokenizer", *dict.fromkeys(components)))

    def begin() -> bool:
        folder.mkdir(exist_ok=True)
        record.write(folder)
        return stage_files.is_fresh(path, key)

    if hosts.from_first(begin):
        return text
    conditioning = pipe.encode(request, negative=True, text=text, progress=progress)
    assert conditioning.negative_text is not None
    tensors = {name: fetch(value) for name, value in conditioning.text.items()}
    tensors |= {NEGATIVE + name: fetch(value) for name, value in conditioning.negative_text.items()}
    latents = {**conditioning.pictures, **({} if conditioning.video is None else {VIDEO_FEATURE: conditioning.video})}
    tensors |= {name: _in_file(fetch(x)) for name, x in latents.items()}
    if hosts.is_first():
        stage_files.save(path, tensors, {"settings": key, **settings, "model_id": record.model_id})
    return conditioning


def read_embeddings(folder: Path, record: RunRecord, manifest: Manifest) -> dict[str, Float32[np.ndarray, "B ..."]]:
    """Stage 1's features, latents as [B, T, h, w, C], by their names in the file.

    Raises:
        InputError: the file is missing, damaged, holds NaN, or is not of these prompts or not for this model.
    """
    path, request = folder / EMBEDDINGS_FILE, record.request
    again = "run `cogvideox encode` again"
    shapes = manifest.model_family.feature_shapes(manifest.configs, request.batch)
    shapes |= {NEGATIVE + name: shape for name, shape in shapes.items()}
    run = RunPrograms(manifest, request, record.dtype)
    visual = {stage.feature: run.feature_shape(stage) for stage in run.visual}
    shapes |= {name: _in_file(np.empty(shape, bool)).shape for name, shape in visual.items()}
    tensors, metadata = stage_files.load(path, tuple(shapes), "cogvideox encode")
    for name, value in tensors.items():
        if value.shape != shapes[name]:
            raise InputError(f"{path}: {name} is {list(value.shape)}, this run needs {list(shapes[name])}; {again}")
    prompts = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
    stage_files.check_made_for(path, metadata, prompts, again)
    if run.visual:
        stage_files.check_unchanged(path, metadata, _deciding_latents_of_media(record, run), again)
    return tensors | {name: _from_file(tensors[name]) for name in visual}


def _deciding_latents_of_media(record: RunRecord, run: RunPrograms) -> dict[str, Any]:
    """What the latents of pictures and clips depend on, but for their size; the seed draws the posterior's noise."""
    seed = {"seed": record.request.seed} if run.encodes_by_seed else {}
    return deciding(record.values(), "encode") | seed


def _in_file(x: np.ndarray) -> np.ndarray:
    """Latents as B C T H W, as the reference system stores them; other features of pictures as they are."""
    return np.ascontiguousarray(x.transpose(0, 4, 1, 2, 3)) if x.ndim == 5 else x


def _from_file(x: np.ndarray) -> np.ndarray:
    """The inverse of `_in_file`."""
    return x.transpose(0, 2, 3, 4, 1) if x.ndim == 5 else x


def _conditioning(tensors: dict[str, Float32[np.ndarray, "B ..."]], run: RunPrograms) -> Conditioning:
    latents = {stage.feature: tensors[stage.feature] for stage in run.visual}
    text = {name: x for name, x in tensors.items() if name not in latents and not name.startswith(NEGATIVE)}
    negative = {name: tensors[NEGATIVE + name] for name in text} if run.request.guided else None
    video = latents.pop(VIDEO_FEATURE, None)
    return Conditioning(text, negative, latents, video)


def denoise(
    pipe: Pipeline, record: RunRecord, folder: Path, *, embeddings: Path | None = None, progress: bool = True
) -> None:
    """Stage 2: features to latents. Skipped where the file is there and made from the same; a loop that was stopped
    goes on from its last state.

    Args:
        embeddings: the directory with stage 1's file; default: the same.

    Raises:
        InputError: stage 1's file is missing, damaged or not this run's.
        NonFiniteError: NaN or infinity in the latents; stage 1's file stays.
    """

    def begin() -> dict[str, Float32[np.ndarray, "B ..."]]:
        folder.mkdir(exist_ok=True)
        record.write(folder)
        return read_embeddings(embeddings or folder, record, pipe.manifest)

    features = hosts.from_first(begin)
    made_of = hashlib.sha256(b"".join(features[name].tobytes() for name in sorted(features))).hexdigest()
    path = folder / LATENTS_FILE
    parts = pipe.manifest.model_family.denoiser, "scheduler"
    key = record.key(deciding(record.values(), "encode", "denoise"), parts, embeddings=made_of)
    if hosts.from_first(lambda: stage_files.is_fresh(path, key)):
        return
    run = pipe.programs(record.request)
    keeper = _StateKeeper(folder / STATE_FILE, key, run, pipe.mesh)
    with keeper:
        found = keeper.found()
        conditioning = _conditioning(features, run)
        states = pipe.denoise(conditioning, record.request, state=found, progress=progress)
        done = found.step if found is not None else 0
        state = found
        with with_progress(states, len(run.steps), done=done, progress=progress) as each:
            for state in each:
                if run.may_resume(int(state.step)):
                    keeper.keep(state)
        pipe.profiling.after_stage("denoising")
        assert state is not None  # a loop that was stopped after its last step has none to do
        kept = fetch(state.latents)[:, run.size.extra_latents :].transpose(0, 4, 1, 2, 3)
        metadata = {"settings": key, **_latents_metadata(record)}
        if hosts.is_first():  # before the state is removed
            stage_files.save(path, {"latents": np.ascontiguousarray(kept)}, metadata)


class _StateKeeper:
    """Writes the state of the denoising loop now and then, so that a run that is killed loses little.

    A context: on an exception it writes the last state, otherwise it removes the file. Process 0 alone has the file.
    """

    MIN_INTERVAL_S = 1.0
    """Seconds between two writes."""

    MAX_TIME_SHARE = 0.05
    """Of the loop's time that writing may take."""

    def __init__(self, path: Path, key: str, run: RunPrograms, mesh: Mesh | None):
        self._path, self._key, self._mesh, self._enabled = path, key, mesh, not run.request.compiled_loop
        self._sampler: Any = jax.tree.structure(run.sampler_state())
        self._last: DenoiseState | None = None
        self._written, self._wait = time.monotonic(), self.MIN_INTERVAL_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not hosts.is_first():
            return
        if kind is None:
            self._path.unlink(missing_ok=True)
        elif self._last is not None and not issubclass(kind, NonFiniteError):
            with suppress(InputError):  # the disk may be full, which has an error of its own
                self._write(self._last)

    def found(self) -> DenoiseState | None:
        """The state that a run with the same settings left."""
        found = hosts.from_first(self._read) if self._enabled else None
        if found is None:
            return None
        step, latents, sampler = found
        return DenoiseState(np.int32(step), latents, jax.tree.unflatten(self._sampler, sampler))

    def _read(self) -> list[Any] | None:
        if not stage_files.is_fresh(self._path, self._key):
            return None
        tensors, metadata = stage_files.load(self._path, None, "cogvideox denoise")
        log.info("going on after step %s", metadata["step"])
        sampler = [tensors[f"sampler.{i}"] for i in range(self._sampler.num_leaves)]
        return [int(metadata["step"]), tensors["latents"], sampler]

    def keep(self, state: DenoiseState) -> None:
        """After a step from which the loop can go on without the step cache, which is not written; on every process."""
        if not self._enabled:
            return
        state = dataclasses.replace(state, cache=None)
        if hosts.count() > 1:  # so that process 0 has all of it
            state = replicate(state, self._mesh)
        if not hosts.is_first():
            return
        self._last = state
        start = time.monotonic()
        if start - self._written < self._wait:
            return
        try:
            self._write(state)
        except InputError as e:
            log.warning("a run that is stopped now begins the denoising anew: %s", e)
        self._written = time.monotonic()
        self._wait = max(self.MIN_INTERVAL_S, (self._written - start) / self.MAX_TIME_SHARE)

    def _write(self, state: DenoiseState) -> None:
        tensors = {"latents": fetch(state.latents)}
        tensors |= {f"sampler.{i}": fetch(x) for i, x in enumerate(jax.tree.leaves(state.sampler))}
        stage_files.save(self._path, tensors, {"settings": self._key, "step": int(state.step)})
        self._last = None


def read_latents(folder: Path, settings: dict[str, Any], channels: int) -> Float32[np.ndarray, "B T h w C"]:
    """Stage 2's latents as the library has them.

    Args:
        settings: from `read_settings`.
        channels: of the latents that the decoder takes.

    Raises:
        InputError: the file is missing, damaged, holds NaN, or was made with other settings or for another VAE.
    """
    path = folder / LATENTS_FILE
    again = "run `cogvideox denoise` again"
    tensors, metadata = stage_files.load(path, ("latents",), "cogvideox denoise")
    latents = tensors["latents"]
    if latents.ndim != 5 or latents.shape[1] != channels or 0 in latents.shape:
        raise InputError(f"{path}: latents are {list(latents.shape)}, expected [B, {channels}, T, H, W]; {again}")
    stage_files.check_made_for(path, metadata, _latents_metadata(settings), again)
    if fingerprints := settings.get("fingerprints"):  # this library wrote the settings, perhaps by a later `encode`
        now = deciding(settings, "encode", "denoise") | {"dtype": settings.get("dtype")}
        stage_files.check_unchanged(path, metadata, now, again, model=fingerprints)
    if len(latents) != len(settings["prompt"]):
        raise InputError(f"{path} holds {len(latents)} latents for {len(settings['prompt'])} prompts; {again}")
    return latents.transpose(0, 2, 3, 4, 1)


def decode(
    pipe: Pipeline, folder: Path, *, fps: int | None = None, tiling: bool = False, progress: bool = True
) -> GenerationResult:
    """Stage 3: latents to a video, which the caller saves. A clip made in windows is decoded while it is saved.

    Args:
        fps: default: the run's, else the release's.

    Raises:
        InputError: stage 2's file is missing, damaged or not of this run.
    """
    channels = pipe.manifest.model_family.latent_channels(pipe.manifest.configs)
    settings = hosts.from_first(lambda: read_settings(folder))
    latents = hosts.from_first(lambda: read_latents(folder, settings, channels))
    if in_pieces(settings.get("num_frames"), settings.get("window")):
        frames: Any = pipe.decode_clips(latents, progress=progress)
    else:
        frames = fetch(pipe.decode(latents, tiling=tiling, progress=progress))
    fps = fps or settings.get("fps") or pipe.manifest.model_family.defaults(pipe.manifest.configs).fps
    return GenerationResult(frames, fps, _describe(pipe, settings))


def save_latents(pipe: Pipeline, folder: Path, path: Path) -> Path:
    """Stage 2's latents as an npz: `latents` float32 [B, T, h, w, C], and `metadata`, a JSON string."""
    settings = read_settings(folder)
    latents = read_latents(folder, settings, pipe.manifest.model_family.latent_channels(pipe.manifest.configs))
    metadata = json.dumps(_describe(pipe, settings), ensure_ascii=False)
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez(file, latents=latents, metadata=metadata)
    return path


def _describe(pipe: Pipeline, settings: dict[str, Any]) -> dict[str, Any]:
    used = _latents_metadata(settings) | describe_media(settings)
    prompts = {name: used.pop(name) for name in ("prompt", "negative_prompt")}
    if not used.get("lora"):
        used.pop("lora", None)
    return describe_run(pipe.manifest, pipe.native_dir.name, prompts, used.pop("seed", None), used)


def _latents_metadata(run: RunRecord | dict[str, Any]) -> dict[str, Any]:
    """What latents were made with: the reference system's metadata, and ours where we know it."""
    names = ("prompt", "negative_prompt", *recorded("denoise"))
    if isinstance(run, RunRecord):
        values = {name: getattr(run.request, name) for name in names} | {"dtype": run.dtype}
        return {name: value for name, value in values.items() if value is not None}
    return {name: run[name] for name in (*names, "dtype") if name in run}
