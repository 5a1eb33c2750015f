"""Clips longer than the model's: denoised in overlapping windows of time, so that memory does not grow with the clip.

Source: MultiDiffusion (arXiv 2302.08113), along time, with the noise of FreeNoise (arXiv 2310.15169).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import IMAGES
from cogvideox_flax.generate.predict.plain import Cache, Latents, Plain, StepInfo
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.tiles import Windows
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.models.denoiser import Denoiser, Features
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.models.sizes import Size


@dataclass(frozen=True)
class Windowed:
    """The weighted mean of the predictions in windows, which are made one after the other.

    Features with a row per latent frame, such as those of a control clip, are cut alike.

    windows: over the latent frames of the clip.
    """

    inner: Plain
    windows: Windows

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        windows = self.windows

        def cut(x: Array, start: Int[Array, ""]) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, windows.size, 1)

        def add(total: Array, window: tuple[Array, Array]) -> tuple[Array, None]:
            start, weight = window
            own = {n: cut(x, start) if x.ndim == 5 and x.shape[1] == windows.length else x for n, x in features.items()}
            prediction, _ = self.inner(denoiser, cut(latents, start), own, info, None)
            summed = cut(total, start) + weight[:, None, None, None] * prediction
            return jax.lax.dynamic_update_slice_in_dim(total, summed, start, 1), None

        each = jnp.asarray(windows.starts, jnp.int32), jnp.asarray(windows.weights)
        return jax.lax.scan(add, jnp.zeros_like(latents), each)[0], cache

    def noise(self, key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        """Noise of the first window, reused in the others by `noise_order`."""
        first = self.inner.noise(key, (shape[0], self.windows.size, *shape[2:]))
        return first[:, np.asarray(self.noise_order)]

    @property
    def noise_order(self) -> list[int]:
        """For each latent frame of the clip, the frame of the first window whose noise it has.

        A window's new frames reuse, shuffled, the noise of the frames that the window before had and it has not. So all
        windows start from the same noise, and their contents agree. Source: FreeNoise (arXiv 2310.15169), section 3.2.
        """
        order, shuffle = list(range(self.windows.size)), np.random.default_rng(0)
        for before, start in itertools.pairwise(self.windows.starts):
            order += shuffle.permutation(order[before:start]).tolist()
        return order


def in_windows(num_frames: int | None, window: int | None) -> bool:
    """Whether a clip is longer than its window, and so is denoised in windows and decoded in chunks.

    num_frames: None: not known, as in directories of the reference system, which has no windows.
    """
    return window is not None and num_frames is not None and window < num_frames


def window_size(model: VideoModel, request: GenerationRequest, size: Size) -> Size:
    """The size that the denoiser sees at once: of a window, or of a clip that is not longer.

    Raises:
        InputError: a window that is no frame count of the model.
    """
    if request.window is None:
        return size
    try:
        window = model.resolve_size(request.window, size.height, size.width)
    except InputError as e:
        raise InputError(str(e).replace("num_frames", "window")) from e
    return window if in_windows(size.num_frames, request.window) else size


def resolve_windows(model: VideoModel, request: GenerationRequest, size: Size) -> Windows | None:
    """The windows of a request; None where its clip fits into one, or none are asked for.

    Raises:
        InputError: a window that is no frame count of the model, or is 1; an overlap that is not below the window, or
            not a whole number of latent frames, or without a window; images, which stand at one place of a clip.
    """
    overlap = request.window_overlap
    if request.window is None:
        if overlap is not None:
            raise InputError("window_overlap is of two windows; give --window too, or leave it out")
        return None
    window = window_size(model, request, size)
    if window is size:
        return None
    if window.num_frames == 1:
        raise InputError("window is 1, which has no frame to share with the next one; expected more frames")
    per_latent = (window.num_frames - 1) // (window.latent_frames - window.extra_latents - 1)
    if overlap is None:
        overlap = max(window.num_frames // (3 * per_latent), 1) * per_latent
    if overlap >= window.num_frames or overlap % per_latent:
        raise InputError(
            f"window_overlap is {short_repr(overlap)}; expected a multiple of {per_latent} below the window's "
            f"{window.num_frames} frames"
        )
    if any(getattr(request, name) is not None for name in IMAGES):
        raise InputError("an image is the start or end of one window; leave the window out where images are given")
    return Windows(size.latent_frames, window.latent_frames, overlap // per_latent)
