"""A run in three resumable stages on disk: encode, denoise, decode.

The files and their layouts are those of the torchax reference system for TPUs, so a run can move between the two:
`generation_config.json`, `stage1_embeddings.safetensors` (`prompt_embeds`, `negative_prompt_embeds`, as float32),
`stage2_latents.safetensors` (`latents` [B, C, T, H, W], scaled, extra frames dropped) and `output_video.mp4`.
Each is written atomically and carries the settings it depends on, so that only matching work is taken over.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.config import Release, SchedulerConfig
from cogvideox_flax.errors import InputError
from cogvideox_flax.pipeline import CogVideoXPipeline, Video
from cogvideox_flax.schedulers import make_scheduler
from cogvideox_flax.sizes import Size, check_text_to_video, resolve_size

log = logging.getLogger(__name__)

CONFIG_FILE = "generation_config.json"
EMBEDDINGS_FILE = "stage1_embeddings.safetensors"
LATENTS_FILE = "stage2_latents.safetensors"
VIDEO_FILE = "output_video.mp4"
MARGIN = 64 * 2**20  # bytes to leave free on the disk

# what each stage's result depends on
_ENCODE_FIELDS = ("prompt", "negative_prompt", "weights", "dtype")
_DENOISE_FIELDS = (
    *_ENCODE_FIELDS,
    "frames",
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "use_dynamic_cfg",
    "scheduler",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides what a run computes. Names in the file follow the reference system."""

    prompt: list[str]
    negative_prompt: list[str]
    model_id: str
    weights: str  # identifies the checkpoint's contents
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

    @classmethod
    def for_model(
        cls,
        manifest: Manifest,
        *,
        prompt: list[str],
        negative_prompt: list[str],
        model_id: str,
        dtype: str = "bfloat16",
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        fps: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        use_dynamic_cfg: bool | Literal["index"] | None = None,
        scheduler: str | None = None,
        seed: int = 0,
    ) -> Self:
        """Fill what is None with the settings that the release's authors recommend, and check the size.

        Raises:
            InputError: a size or dtype that the model cannot take.
        """
        transformer, vae = manifest.transformer, manifest.vae
        if transformer is None or vae is None:
            raise InputError(f"{model_id} lacks a transformer or a VAE; a run needs both")
        transformer.check_dtype(dtype)
        check_text_to_video(transformer, vae, model_id)
        release: Release | None = manifest.release
        size = resolve_size(transformer, vae, release, num_frames=num_frames, height=height, width=width)
        own = manifest.scheduler or SchedulerConfig()

        def default(value: Any, name: str, otherwise: Any) -> Any:
            if value is not None:
                return value
            return getattr(release, name) if release is not None else otherwise

        steps = default(num_inference_steps, "num_inference_steps", 50)
        make_scheduler(own).plan(steps)
        return cls(
            prompt=prompt,
            negative_prompt=negative_prompt,
            model_id=model_id,
            weights=identity(manifest),
            dtype=dtype,
            frames=size.num_frames,
            height=size.height,
            width=size.width,
            fps=default(fps, "fps", 16 if transformer.patch_size_t else 8),
            num_inference_steps=steps,
            guidance_scale=default(guidance_scale, "guidance_scale", 6.0),
            use_dynamic_cfg=default(use_dynamic_cfg, "use_dynamic_cfg", False),
            scheduler=default(scheduler, "sampler", own.kind),
            seed=seed,
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From `generation_config.json`.

        Raises:
            InputError: missing, damaged or incomplete.
        """
        path = folder / CONFIG_FILE
        try:
            raw = json.loads(path.read_text())
            names = {f.name for f in dataclasses.fields(cls)}
            for key in ("prompt", "negative_prompt"):
                raw[key] = [raw[key]] if isinstance(raw[key], str) else raw[key]
            return cls(**{k: v for k, v in raw.items() if k in names})
        except OSError as e:
            raise InputError(f"{path} cannot be read ({e.strerror}); run `cogvideox encode` first") from e
        except (ValueError, TypeError, KeyError) as e:
            raise InputError(f"{path} is not a complete run's settings ({e}); run `cogvideox encode` again") from e

    def write(self, folder: Path) -> None:
        raw = dataclasses.asdict(self)
        for key in ("prompt", "negative_prompt"):  # one prompt is written as the reference does
            raw[key] = raw[key][0] if len(raw[key]) == 1 else raw[key]
        temporary = folder / (CONFIG_FILE + ".tmp")
        temporary.write_text(json.dumps(raw, indent=2, ensure_ascii=False))
        os.replace(temporary, folder / CONFIG_FILE)

    def size(self, pipe: CogVideoXPipeline) -> Size:
        return pipe.size(self.frames, self.height, self.width)

    def used(self) -> dict[str, Any]:
        """What is stored with the video beside prompt and seed."""
        names = set(_DENOISE_FIELDS) - {"prompt", "negative_prompt", "weights", "seed"}
        return {name: getattr(self, name) for name in sorted(names)}

    def key(self, names: tuple[str, ...]) -> str:
        return json.dumps({name: getattr(self, name) for name in names}, ensure_ascii=False)


def identity(manifest: Manifest) -> str:
    """Tells checkpoints with different weights apart."""
    return ",".join(f"{name}:{record['sha256'][:16]}" for name, record in sorted(manifest.weights.items()))


def prepare(folder: Path, *, nbytes: int = 0) -> None:
    """Create a stage directory and make sure that results will fit.

    Raises:
        InputError: it cannot be written, or the disk is too full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as e:
        raise InputError(f"cannot write to {folder}: {e.strerror}; choose another directory") from e
    if free < nbytes + MARGIN:
        raise InputError(
            f"{folder} has {free / 2**20:.0f} MiB free; this run needs about {(nbytes + MARGIN) / 2**20:.0f} MiB. "
            "Free some space or choose another directory."
        )


def space_needed(settings: Settings, manifest: Manifest) -> int:
    """Bytes of the stage files and, generously, of the video."""
    text = manifest.transformer.text_length * manifest.transformer.text_width if manifest.transformer else 0
    pixels = settings.frames * settings.height * settings.width * 3
    return len(settings.prompt) * (2 * text * 4 + pixels)


def encode(pipe: CogVideoXPipeline, settings: Settings, folder: Path, *, progress: bool = True) -> None:
    """Stage 1: prompts to embeddings. Skipped where the file is there and made from the same settings."""
    settings.write(folder)
    path, key = folder / EMBEDDINGS_FILE, settings.key(_ENCODE_FIELDS)
    if _made_from(path, key):
        log.info("taking over %s", path)
        return
    context, negative = pipe.encode_prompts(settings.prompt, settings.negative_prompt, progress=progress)
    if negative is None:
        raise AssertionError("negative prompts were given, so their embeddings are there")
    names = {"prompt_embeds": context, "negative_prompt_embeds": negative}
    _save(
        path,
        {name: np.asarray(value, np.float32) for name, value in names.items()},
        {
            "settings": key,
            "dtype_info": json.dumps({name: str(value.dtype) for name, value in names.items()}),
            "prompt": json.dumps(settings.prompt, ensure_ascii=False),
            "negative_prompt": json.dumps(settings.negative_prompt, ensure_ascii=False),
            "model_id": settings.model_id,
        },
    )


def denoise(
    pipe: CogVideoXPipeline, settings: Settings, folder: Path, *, progress: bool = True, compiled_loop: bool = False
) -> None:
    """Stage 2: embeddings to latents. Skipped where the file is there and made from the same settings.

    Raises:
        InputError: stage 1's file is missing or damaged.
        NonFiniteError: NaN or infinity in the latents; stage 1's file stays.
    """
    settings.write(folder)
    path, key = folder / LATENTS_FILE, settings.key(_DENOISE_FIELDS)
    if _made_from(path, key):
        log.info("taking over %s", path)
        return
    embeddings, _ = _load(folder / EMBEDDINGS_FILE, ("prompt_embeds", "negative_prompt_embeds"), "cogvideox encode")
    size = settings.size(pipe)
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
    )
    kept = np.asarray(latents)[:, size.extra_latents :].transpose(0, 4, 1, 2, 3)
    _save(
        path,
        {"latents": np.ascontiguousarray(kept)},
        {
            "settings": key,
            "num_frames": str(settings.frames),
            "num_inference_steps": str(settings.num_inference_steps),
            "guidance_scale": str(settings.guidance_scale),
            "seed": str(settings.seed),
            "height": str(settings.height),
            "width": str(settings.width),
        },
    )


def read_latents(folder: Path) -> np.ndarray:
    """Stage 2's latents as the library has them, float32 [B, T, h, w, C].

    Raises:
        InputError: the file is missing, damaged or holds NaN or infinity.
    """
    tensors, _ = _load(folder / LATENTS_FILE, ("latents",), "cogvideox denoise")
    latents = tensors["latents"].astype(np.float32)
    if latents.ndim != 5:
        raise InputError(f"{folder / LATENTS_FILE}: latents must be [B, C, T, H, W]; got {latents.shape}")
    if not np.isfinite(latents).all():
        raise InputError(f"{folder / LATENTS_FILE} holds NaN or infinity; run `cogvideox denoise` again")
    return latents.transpose(0, 2, 3, 4, 1)


def decode(
    pipe: CogVideoXPipeline, settings: Settings, folder: Path, *, tiling: bool = False, progress: bool = True
) -> Video:
    """Stage 3: latents to a video, which the caller saves."""
    frames = pipe.decode_latents(read_latents(folder), tiling=tiling, progress=progress)
    metadata = pipe.metadata(settings.prompt, settings.negative_prompt, settings.seed, settings.used())
    return Video(np.asarray(frames), settings.fps, metadata)


def save_latents(pipe: CogVideoXPipeline, settings: Settings, folder: Path, path: Path) -> Path:
    """Stage 2's latents as an npz: `latents` float32 [B, T, h, w, C], and `metadata`, a JSON string."""
    metadata = pipe.metadata(settings.prompt, settings.negative_prompt, settings.seed, settings.used())
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, latents=read_latents(folder), metadata=json.dumps(metadata, ensure_ascii=False))
        os.replace(temporary, path)
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror}; the latents are kept in {folder}") from e
    return path


def _save(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, path)


def _made_from(path: Path, key: str) -> bool:
    """Whether a stage file is there, whole, and made from these settings."""
    try:
        with safe_open(path, "numpy") as file:
            return (file.metadata() or {}).get("settings") == key
    except (OSError, SafetensorError):
        return False


def _load(path: Path, names: tuple[str, ...], maker: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError as e:
        raise InputError(f"{path} is missing; run `{maker}` first") from e
    except (OSError, SafetensorError) as e:
        raise InputError(f"{path} cannot be read ({e}); run `{maker}` again") from e
