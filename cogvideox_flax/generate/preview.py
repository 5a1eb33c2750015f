"""Cheap looks at a latent while it is denoised: a linear map from its channels to colours, in place of the decoder."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.events import Events, LoopBegan, Step
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.io.images import decoding
from cogvideox_flax.io.paths import check_writable
from cogvideox_flax.runtime.global_arrays import fetch
from cogvideox_flax.runtime.multihost import hosts

SUFFIXES = (".png", ".webp")

SHOWN_FRAMES = 8
"""The most latent frames of a PNG."""

_MARK = "cogvideox-flax preview"
"""In the metadata of each file, so that no other file is replaced."""

INTERVAL_S = 1.0
"""The minimum seconds between two files."""

SHARE = 0.02
"""The most of a run's time that files may take: one that took 40 ms is followed by another after 2 s."""


class Preview:
    """A reader of a run's events that shows what the video will be, as far as a step tells: `latest`, and a file.

    The estimate is the scheduler's x0: what is left if all noise were removed at once.

    Attributes:
        latest: the estimate after the last step seen, or the last written where there is a file, uint8 [B, T, h, w, 3]
            at the latents' size; None before the second step of a scheduler without noise.

    Args:
        path: written at most once a second, in at most 2 % of the time, and after the last step: a PNG with some latent
            frames of the first video beside each other, or an animated WebP of all; None: no file.
        overwrite: replace a file that is no preview.

    Raises:
        InputError: another kind of file, one that cannot be written or is no preview, or a model whose map to colours
            is not known.
    """

    def __init__(self, manifest: Manifest, path: Path | None = None, *, overwrite: bool = False):
        if path is not None:
            if path.suffix.lower() not in SUFFIXES:
                raise InputError(f"a preview is a .png or an animated .webp; got {path}")
            check_writable(path)
            if not overwrite and path.exists() and not is_preview(path):
                raise InputError(f"{path} is there and is no preview of this program; give --preview another name")
        matrix = manifest.preview_matrix
        if matrix is None:
            raise InputError(
                f"no map from latents to colours is known for this {manifest.family} autoencoder; leave --preview out"
            )
        self.path, self.codec = path, manifest.model.codec
        self.matrix: Float32[np.ndarray, "C+1 3"] = matrix
        self.latest: UInt8[np.ndarray, "B T h w 3"] | None = None
        self._tables: Any = None
        self._before: np.ndarray | None = None
        self._next = 0.0

    def watch(self, events: Events[None]) -> Events[None]:
        """The same events; closing this closes them."""
        with closing(events):
            for event in events:
                if isinstance(event, LoopBegan):
                    self._before = self.latest = None
                    self._tables = event.run.steps
                elif isinstance(event, Step):
                    self._see(event)
                yield event

    def _see(self, step: Step) -> None:
        began = time.monotonic()
        latents, is_last = fetch(step.state.latents), int(step.state.step) == step.run.num_steps
        before, self._before = self._before, latents
        if self.path is not None and not is_last and began < self._next:
            return
        if (x0 := self._x0(step, before, latents)) is None:
            return
        video_latents = dataclasses.replace(step.state, latents=x0).video_latents
        z: Any = self.codec.statistics.denormalize(jnp.asarray(video_latents))
        self.latest = apply_linear_map(np.asarray(z), self.matrix)
        if self.path is not None:
            fps = step.request.fps / self.codec.temporal_compression
            write_preview(self.path, self.latest[0], self.codec.spatial_compression, fps)
            ended = time.monotonic()
            self._next = ended + max(INTERVAL_S, (ended - began) / SHARE)

    def _x0(
        self, step: Step, before: np.ndarray | None, latents: Float[np.ndarray, "B T h w C"]
    ) -> Float[np.ndarray, "B T h w C"] | None:
        row = int(step.state.step) - 1
        if row + 1 == step.run.num_steps:
            return latents
        if (kept := step.run.scheduler.x0_of(step.state.scheduler_state)) is not None:
            return fetch(kept)
        if before is not None:
            return (latents - self._tables.from_sample[row] * before) / self._tables.from_x0[row]
        return None


@hosts.on_process_0
def write_preview(path: Path, frames: UInt8[np.ndarray, "T h w 3"], enlarge: int, fps: float) -> None:
    """Write latent frames, each pixel as a square: a row of some as a PNG, or all as an animated WebP."""
    large = frames.repeat(enlarge, 1).repeat(enlarge, 2)
    with atomic_write(path) as partial:
        if path.suffix.lower() == ".png":
            chosen = np.linspace(0, len(large) - 1, min(len(large), SHOWN_FRAMES)).round().astype(int)
            mark = PngInfo()
            mark.add_text("Software", _MARK)
            Image.fromarray(np.concatenate(list(large[chosen]), 1)).save(partial, "PNG", pnginfo=mark)
        else:
            first, *rest = map(Image.fromarray, large)
            how: Any = {"duration": round(1000 / fps), "loop": 0, "xmp": _MARK.encode()}
            first.save(partial, "WEBP", save_all=True, append_images=rest, **how)


def is_preview(path: Path) -> bool:
    """Whether `write_preview` wrote a file."""
    try:
        with decoding(path), Image.open(path, formats=("PNG", "WEBP")) as image:
            return _MARK in (image.info.get("Software"), image.info.get("xmp", b"").decode("utf-8", "replace"))
    except (OSError, InputError):
        return False


def apply_linear_map(
    latents: Float[np.ndarray, "*T h w C"], weights: Float[np.ndarray, "C+1 3"]
) -> UInt8[np.ndarray, "*T h w 3"]:
    """A preview of each latent frame at the latent's size, clipped to 0..255 and rounded.

    Raises:
        InputError: the weights are for another number of channels.
    """
    if weights.shape != (latents.shape[-1] + 1, 3):
        raise InputError(
            f"weights {list(weights.shape)} do not fit latents with {latents.shape[-1]} channels; "
            f"expected {[latents.shape[-1] + 1, 3]}"
        )
    colours = latents.astype(np.float32) @ weights[:-1] + weights[-1]
    return np.rint(colours.clip(0, 255)).astype(np.uint8)
