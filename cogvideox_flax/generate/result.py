"""What a run returns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import MEDIA, describe_media
from cogvideox_flax.generate.request import ResolvedRequest
from cogvideox_flax.io.paths import item_paths
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.io.video import save_video
from cogvideox_flax.version import __version__


@dataclass(frozen=True)
class GenerationResult:
    """What a run returns.

    frames: uint8 [B, F, H, W, 3]; float32 in [0, 1] for output_type "float"; latents float32 [B, T, h, w, C] for
        "latent" (not unscaled; with the extra frame of 1.5 releases, as the reference returns them); a list of
        `FrameStream` from the stages of a long clip.
    fps: frames per second.
    metadata: prompt, seed, release, version and settings of the run.
    """

    frames: Any
    fps: int
    metadata: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> list[Path]:
        """Write one file per item, by the path's suffix (.mp4, .gif, ...); items of a batch are numbered.

        Raises:
            InputError: the frames are not uint8, or the path cannot be written.
        """
        return self.save_items(item_paths(path, len(self.frames)))

    def save_items(self, paths: list[Path]) -> list[Path]:
        """Write each item to a path of its own; errors as for `save`."""
        if self.frames[0].dtype != np.uint8:
            raise InputError(f"only uint8 frames can be saved; this video holds {self.frames[0].dtype}")
        for i, (name, frames) in enumerate(zip(paths, self.frames, strict=True)):
            each = {key: value[i] for key, value in self.metadata.items() if isinstance(value, list)}
            save_video(name, frames, self.fps, self.metadata | each)
        return paths

    def read_along(self) -> None:
        """What a host does that does not save, while process 0 does: frames that are decoded while they are read need
        all hosts."""
        for frames in self.frames:
            if isinstance(frames, FrameStream):
                deque(frames.parts(), maxlen=0)


def describe_run(
    manifest: Manifest, name: str, prompts: dict[str, list[str]], seed: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """What is stored with a video; a list where its items differ.

    Args:
        name: of the model, where its architecture is none of a release.
        prompts: `prompt` and `negative_prompt` of each item.
        settings: of the sampling.
    """
    return {
        **{key: texts if len(texts) > 1 else texts[0] for key, texts in prompts.items()},
        "seed": seed,
        "release": manifest.release.name if manifest.release else name,
        "version": f"cogvideox-flax {__version__}",
        "settings": settings,
    }


def describe_request(
    request: ResolvedRequest, manifest: Manifest, name: str, dtype: str, steps_done: int
) -> dict[str, Any]:
    """The same for a request; arguments as for `describe_run`."""
    n = request.num_videos
    prompts = {key: list(getattr(request, key)) * n for key in ("prompt", "negative_prompt")}
    seeds = [request.seed + i for i in range(n) for _ in range(request.batch)]
    names = ("num_frames", "height", "width", "num_inference_steps", "guidance_scale", "use_dynamic_cfg")
    settings: dict[str, Any] = {key: getattr(request, key) for key in names}
    settings |= {"scheduler": request.sampler(manifest).config.kind, "dtype": dtype}
    settings |= {} if request.strength is None else {"strength": request.strength}
    cache = {name: getattr(request, name) for name in ("step_cache", "step_cache_schedule")}
    settings |= {name: value for name, value in cache.items() if value is not None}
    settings |= describe_media({name: getattr(request, name) for name in MEDIA})
    settings |= ({"lora": request.lora} if request.lora else {}) | {"steps_done": steps_done}
    return describe_run(manifest, name, prompts, request.seed if n == 1 else seeds, settings)
