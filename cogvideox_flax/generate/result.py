"""What a run returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import item_paths
from cogvideox_flax.io.video import save_video


@dataclass(frozen=True)
class Video:
    """What a run returns.

    frames: uint8 [B, F, H, W, 3]; float32 in [0, 1] for output_type "float"; latents float32 [B, T, h, w, C] for
        "latent" (not unscaled; with the extra frame of 1.5 releases, as the reference returns them).
    fps: frames per second that the release was trained at.
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
        if self.frames.dtype != np.uint8:
            raise InputError(f"only uint8 frames can be saved; this video holds {self.frames.dtype}")
        paths = item_paths(path, len(self.frames))
        for i, (name, frames) in enumerate(zip(paths, np.asarray(self.frames), strict=True)):
            metadata = self.metadata | {
                key: self.metadata[key][i]
                for key in ("prompt", "negative_prompt")
                if isinstance(self.metadata.get(key), list)
            }
            save_video(name, frames, self.fps, metadata)
        return paths
