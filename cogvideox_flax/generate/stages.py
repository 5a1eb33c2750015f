"""A run in three resumable stages on disk: encode, denoise, decode.

The files, their layouts and their metadata are those of the torchax reference system for TPUs, so a run can move
between the two: `generation_config.json`, `stage1_embeddings.safetensors` (`prompt_embeds`, `negative_prompt_embeds`,
float32 [B, L, E]), `stage2_latents.safetensors` (`latents` [B, C, T, H, W], scaled, extra frames dropped) and
`output_video.mp4`. Each is written atomically and says what it was made from, so that only matching work is taken over.
`stage2_state.safetensors` is where a denoising loop that was stopped goes on.

On several hosts the directory is process 0's: it alone reads and writes there, and tells the others what they need.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.config import TransformerConfig, VAEConfig
from cogvideox_flax.errors import InputError, NonFiniteError
from cogvideox_flax.generate import stage_files
from cogvideox_flax.generate.checks import check_model, check_prompts, check_sampling
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.generate.programs import DenoiseState
from cogvideox_flax.generate.result import Video
from cogvideox_flax.io.atomic import atomic_write, remove_orphans
from cogvideox_flax.io.contents import is_as_written, write_record
from cogvideox_flax.io.locks import file_lock
from cogvideox_flax.io.paths import check_writable
from cogvideox_flax.io.space import check_free_space
from cogvideox_flax.io.text import load_json
from cogvideox_flax.io.values import is_count, is_finite_number
from cogvideox_flax.lora import LoRARecord, describe_lora
from cogvideox_flax.models.cogvideox.sizes import MAX_FPS, resolve_size
from cogvideox_flax.runtime import hosts
from cogvideox_flax.runtime.hosts import fetch, replicate
from cogvideox_flax.schedulers import make_scheduler

log = logging.getLogger(__name__)

CONFIG_FILE = "generation_config.json"
EMBEDDINGS_FILE = "stage1_embeddings.safetensors"
LATENTS_FILE = "stage2_latents.safetensors"
STATE_FILE = "stage2_state.safetensors"
VIDEO_FILE = "output_video.mp4"
LOCK_FILE = ".lock"

# what of the settings each stage's result depends on, beside the weights of its component and the stage before
_ENCODE_FIELDS = ("prompt", "negative_prompt", "dtype")
_DENOISE_FIELDS = (
    *("frames", "height", "width", "num_inference_steps", "guidance_scale", "use_dynamic_cfg", "scheduler", "seed"),
    "dtype",
    "lora",
)


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_lora(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("file"), str) and is_finite_number(record.get("scale"))


_VALID: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda value: isinstance(value, list),
    "negative_prompt": lambda value: isinstance(value, list),
    "model_id": lambda value: isinstance(value, str),
    "revision": lambda value: isinstance(value, str | None),
    "dtype": lambda value: isinstance(value, str),
    "frames": _is_whole_number,
    "height": _is_whole_number,
    "width": _is_whole_number,
    "fps": lambda value: is_count(value, MAX_FPS),
    "num_inference_steps": _is_whole_number,
    "guidance_scale": is_finite_number,
    "use_dynamic_cfg": lambda value: isinstance(value, bool | str),
    "scheduler": lambda value: isinstance(value, str),
    "seed": _is_whole_number,
    "lora": lambda value: isinstance(value, list) and all(map(_is_lora, value)),
}
"""The fields of `Settings` -> whether a value out of a JSON file is one. What it may be is checked with the model."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a run computes. Names in the file follow the reference system."""

    prompt: list[str]
    negative_prompt: list[str]
    model_id: str
    revision: str | None
    fingerprints: dict[str, str]  # part of the checkpoint -> fingerprint of its config and contents
    dtype: str
    frames: int
    height: int
    width: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    use_dynamic_cfg: bool | Literal["index"]
    scheduler: str
    seed: int
    lora: list[LoRARecord]

    @classmethod
    def for_model(
        cls,
        manifest: Manifest,
        mesh: Mesh | None = None,
        *,
        prompt: list[str],
        negative_prompt: list[str],
        model_id: str,
        revision: str | None = None,
        dtype: str,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        fps: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        use_dynamic_cfg: bool | Literal["index"] | None = None,
        scheduler: str | None = None,
        seed: int = 0,
        lora: Sequence[Mapping[str, Any]] = (),
    ) -> Self:
        """Fill what is None with the settings that the release's authors recommend, and check everything.

        Args:
            lora: adapters as `LoRARecord`; what identifies the contents is looked up again.

        Raises:
            InputError: an option that cannot be served, by this model or on this mesh.
        """
        prompt, negative_prompt = check_prompts(prompt, negative_prompt)
        check_model(manifest, model_id, dtype, mesh)
        assert manifest.transformer and manifest.vae and manifest.scheduler
        release, own = manifest.release, manifest.scheduler
        size = resolve_size(manifest.transformer, manifest.vae, release, num_frames=frames, height=height, width=width)

        def default(value: Any, name: str, otherwise: Any) -> Any:
            if value is not None:
                return value
            return getattr(release, name) if release is not None else otherwise

        settings = cls(
            prompt=prompt,
            negative_prompt=negative_prompt,
            model_id=model_id,
            revision=revision,
            fingerprints={},  # known once the checkpoint is open
            dtype=dtype,
            frames=size.num_frames,
            height=size.height,
            width=size.width,
            fps=default(fps, "fps", 16 if manifest.transformer.patch_size_t else 8),
            num_inference_steps=default(num_inference_steps, "num_inference_steps", 50),
            guidance_scale=manifest.default_guidance if guidance_scale is None else float(guidance_scale),
            use_dynamic_cfg=default(use_dynamic_cfg, "use_dynamic_cfg", False),
            scheduler=default(scheduler, "sampler", own.kind),
            seed=seed,
            lora=[describe_lora(record["file"], record["scale"], manifest.transformer) for record in lora],
        )
        check_sampling(settings.guidance_scale, settings.use_dynamic_cfg, seed)
        make_scheduler(dataclasses.replace(own, kind=settings.scheduler)).plan(settings.num_inference_steps)
        sharding.check_batch(mesh, len(prompt) * (2 if settings.guidance_scale > 1 else 1))
        return settings

    def write(self, folder: Path) -> None:
        """Write `generation_config.json`; one prompt is written as the reference does."""
        prompts = {name: stage_files.one_or_all(getattr(self, name)) for name in ("prompt", "negative_prompt")}
        raw = dataclasses.asdict(self) | prompts
        write_record(folder / CONFIG_FILE, raw)

    def key(self, names: tuple[str, ...], parts: tuple[str, ...], **more: Any) -> str:
        """All that decides a stage's result: these settings, these parts of the checkpoint, and more."""
        model = {name: self.fingerprints[name] for name in parts}
        return json.dumps({name: getattr(self, name) for name in names} | {"model": model} | more, ensure_ascii=False)


def read_settings(folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says: prompts and model at least. The reference system writes fewer fields than we.

    Raises:
        InputError: missing, damaged or incomplete.
    """
    path = folder / CONFIG_FILE
    try:
        raw = load_json(path)
    except OSError as e:
        raise InputError(f"{path} cannot be read ({e.strerror}); run `cogvideox encode` first") from e
    except ValueError as e:
        raise InputError(f"{path} is not JSON ({e}); run `cogvideox encode` again") from e
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold a JSON object; run `cogvideox encode` again")
    if not is_as_written(raw):
        log.warning("%s was edited or damaged after it was written; it is taken as it stands", path)
    settings = {name: raw[name] for name in _VALID if name in raw}
    for name in ("prompt", "negative_prompt"):
        settings[name] = [raw.get(name)] if isinstance(raw.get(name), str) else raw.get(name)
    settings.setdefault("model_id", None)
    wrong = [name for name, value in settings.items() if not _VALID[name](value)]
    if wrong:
        raise InputError(f"{path} has no usable {' and no '.join(wrong)}; run `cogvideox encode` again")
    check_prompts(settings["prompt"], settings["negative_prompt"])
    return settings


def check_folder(folder: Path, nbytes: int = 0) -> None:
    """Refuse a stage directory, there or not yet, that results could not be written to.

    Raises:
        InputError: it cannot be made or written, or the disk is too full.
    """
    check_writable(folder / CONFIG_FILE)
    check_free_space(folder, nbytes)


def space_needed(settings: Settings, manifest: Manifest) -> int:
    """Bytes of the stage files and, generously, of the video."""
    text = manifest.transformer.text_length * manifest.transformer.text_width if manifest.transformer else 0
    pixels = settings.frames * settings.height * settings.width * 3
    return len(settings.prompt) * (2 * text * 4 + pixels)


@contextmanager
def run_dir_lock(folder: Path, *, temporary: bool = False) -> Iterator[None]:
    """Make the stage directory and keep other runs out of it while this one works there.

    temporary: our files are removed when all went well, and when nothing was finished.

    Raises:
        InputError: another run works there, or the directory cannot be written.
    """
    if not hosts.is_first():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"cannot write to {folder}: {e.strerror}; choose another directory") from e
    finished = [folder / name for name in (EMBEDDINGS_FILE, STATE_FILE, LATENTS_FILE)]
    busy = f"another run is at work in {folder}; wait for it or choose another --dir or --out"
    try:
        with file_lock(folder / LOCK_FILE, busy=busy):
            try:
                yield
            except BaseException:
                if kept := [path.name for path in finished if path.exists()]:
                    log.warning("%s in %s: kept, the same command goes on from there", " and ".join(kept), folder)
                elif temporary:
                    _remove_files(folder)
                raise
            if temporary:
                _remove_files(folder)
    finally:
        if temporary:
            with suppress(OSError):  # not ours alone
                folder.rmdir()


def _remove_files(folder: Path) -> None:
    remove_orphans(folder)
    for name in (CONFIG_FILE, EMBEDDINGS_FILE, STATE_FILE, LATENTS_FILE):
        (folder / name).unlink(missing_ok=True)


def encode(pipe: CogVideoXPipeline, settings: Settings, folder: Path, *, progress: bool = True) -> None:
    """Stage 1: prompts to embeddings. Skipped where the file is there and made from the same settings."""
    path = folder / EMBEDDINGS_FILE
    key = settings.key(_ENCODE_FIELDS, ("tokenizer", "text_encoder"))

    def begin() -> bool:
        settings.write(folder)
        return stage_files.is_fresh(path, key)

    if hosts.from_first(begin):
        return
    context, negative = pipe.encode_prompts(settings.prompt, settings.negative_prompt, progress=progress)
    assert negative is not None
    tensors = {"prompt_embeds": fetch(context), "negative_prompt_embeds": fetch(negative)}
    names = ("prompt", "negative_prompt", "model_id")
    if hosts.is_first():
        stage_files.save(path, tensors, {"settings": key} | {name: getattr(settings, name) for name in names})


def read_embeddings(
    folder: Path, prompt: list[str], negative_prompt: list[str], config: TransformerConfig
) -> dict[str, Float32[np.ndarray, "B L E"]]:
    """Stage 1's `prompt_embeds` and `negative_prompt_embeds`.

    Raises:
        InputError: the file is missing, damaged, holds NaN, or is not of these prompts or not for this transformer.
    """
    path = folder / EMBEDDINGS_FILE
    again = "run `cogvideox encode` again"
    tensors, metadata = stage_files.load(path, ("prompt_embeds", "negative_prompt_embeds"), "cogvideox encode")
    shape = (len(prompt), config.text_length, config.text_width)
    for name, value in tensors.items():
        if value.shape != shape:
            raise InputError(f"{path}: {name} is {list(value.shape)}, this run needs {list(shape)}; {again}")
    stage_files.check_made_for(path, metadata, {"prompt": prompt, "negative_prompt": negative_prompt}, again)
    return tensors


def denoise(
    pipe: CogVideoXPipeline, settings: Settings, folder: Path, *, progress: bool = True, compiled_loop: bool = False
) -> None:
    """Stage 2: embeddings to latents. Skipped where the file is there and made from the same; a loop that was stopped
    goes on from its last state.

    Raises:
        InputError: stage 1's file is missing, damaged or not this run's.
        NonFiniteError: NaN or infinity in the latents; stage 1's file stays.
    """

    def begin() -> dict[str, np.ndarray]:
        settings.write(folder)
        return read_embeddings(folder, settings.prompt, settings.negative_prompt, pipe.transformer_config)

    embeddings = hosts.from_first(begin)
    path = folder / LATENTS_FILE
    made_of = hashlib.sha256(b"".join(embeddings[name].tobytes() for name in sorted(embeddings))).hexdigest()
    key = settings.key(_DENOISE_FIELDS, ("transformer", "scheduler"), embeddings=made_of)
    if hosts.from_first(lambda: stage_files.is_fresh(path, key)):
        return
    size = pipe.size(settings.frames, settings.height, settings.width)
    with _StateKeeper(folder / STATE_FILE, key) as keeper:
        resumable: dict[str, Any] = {} if compiled_loop else {"state": keeper.found(), "on_state": keeper.keep}
        latents, _ = pipe.denoise(
            embeddings["prompt_embeds"],
            embeddings["negative_prompt_embeds"] if settings.guidance_scale > 1 else None,
            size,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            use_dynamic_cfg=settings.use_dynamic_cfg,
            scheduler=settings.scheduler,
            seed=settings.seed,
            progress=progress,
            compiled_loop=compiled_loop,
            **resumable,
        )
        kept = np.ascontiguousarray(fetch(latents)[:, size.extra_latents :].transpose(0, 4, 1, 2, 3))
        metadata = {"settings": key, **_of_latents(dataclasses.asdict(settings))}
        if hosts.is_first():
            stage_files.save(path, {"latents": kept}, metadata)  # before the state is removed


class _StateKeeper:
    """Writes the state of the denoising loop now and then, so that a run that is killed loses little.

    A context: on an exception it writes the last state, otherwise it removes the file. Process 0 alone has the file.
    """

    MIN_INTERVAL_S = 1.0
    """Seconds between two writes."""

    MAX_TIME_SHARE = 0.05
    """Of the loop's time that writing may take."""

    def __init__(self, path: Path, key: str):
        self._path, self._key = path, key
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
        fields = hosts.from_first(self._read)
        return DenoiseState(*fields) if fields is not None else None

    def _read(self) -> list[Any] | None:
        if not stage_files.is_fresh(self._path, self._key):
            return None
        tensors, metadata = stage_files.load(self._path, None, "cogvideox denoise")
        log.info("going on after step %s", metadata["step"])
        return [int(metadata["step"]), tensors["latents"], tensors.get("sampler")]

    def keep(self, state: DenoiseState) -> None:
        """After each step, on every process."""
        state = dataclasses.replace(state, latents=replicate(state.latents), sampler=replicate(state.sampler))
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
        if state.sampler is not None:
            tensors["sampler"] = fetch(state.sampler)
        stage_files.save(self._path, tensors, {"settings": self._key, "step": state.step})
        self._last = None


def read_latents(folder: Path, settings: dict[str, Any], config: VAEConfig) -> Float32[np.ndarray, "B T h w C"]:
    """Stage 2's latents as the library has them.

    Args:
        settings: from `read_settings`.

    Raises:
        InputError: the file is missing, damaged, holds NaN, or was made with other settings or for another VAE.
    """
    path = folder / LATENTS_FILE
    again = "run `cogvideox denoise` again"
    tensors, metadata = stage_files.load(path, ("latents",), "cogvideox denoise")
    latents = tensors["latents"]
    if latents.ndim != 5 or latents.shape[1] != config.latent_channels or 0 in latents.shape:
        expected = f"[B, {config.latent_channels}, T, H, W]"
        raise InputError(f"{path}: latents are {list(latents.shape)}, expected {expected}; {again}")
    stage_files.check_made_for(path, metadata, _of_latents(settings), again)
    if len(latents) != len(settings["prompt"]):
        raise InputError(f"{path} holds {len(latents)} latents for {len(settings['prompt'])} prompts; {again}")
    return latents.transpose(0, 2, 3, 4, 1)


def decode(
    pipe: CogVideoXPipeline, folder: Path, *, fps: int | None = None, tiling: bool = False, progress: bool = True
) -> Video:
    """Stage 3: latents to a video, which the caller saves.

    Args:
        fps: default: the run's.

    Raises:
        InputError: stage 2's file is missing, damaged or not of this run.
    """
    settings = hosts.from_first(lambda: read_settings(folder))
    latents = hosts.from_first(lambda: read_latents(folder, settings, pipe.vae_config))
    frames = pipe.decode_latents(latents, tiling=tiling, progress=progress)
    return Video(fetch(frames), fps or settings.get("fps", pipe.fps), _describe(pipe, settings))


def save_latents(pipe: CogVideoXPipeline, folder: Path, path: Path) -> Path:
    """Stage 2's latents as an npz: `latents` float32 [B, T, h, w, C], and `metadata`, a JSON string."""
    settings = read_settings(folder)
    latents = read_latents(folder, settings, pipe.vae_config)
    metadata = json.dumps(_describe(pipe, settings), ensure_ascii=False)
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.savez(file, latents=latents, metadata=metadata)
    return path


def _describe(pipe: CogVideoXPipeline, settings: dict[str, Any]) -> dict[str, Any]:
    used = _of_latents(settings)
    prompts, negatives = used.pop("prompt"), used.pop("negative_prompt")
    if not used.get("lora"):
        used.pop("lora", None)
    return pipe.metadata(prompts, negatives, used.pop("seed", None), used)


def _of_latents(settings: dict[str, Any]) -> dict[str, Any]:
    """What latents were made with: the reference system's metadata, and ours where we know it."""
    names = {name: name for name in ("prompt", "negative_prompt", *_DENOISE_FIELDS)} | {"frames": "num_frames"}
    return {names[name]: settings[name] for name in names if name in settings}
