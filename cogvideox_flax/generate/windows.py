"""Windows of clips longer than the model's: where they lie, and which a request asks for.

Source: MultiDiffusion (arXiv 2302.08113), along time, with the noise of FreeNoise (arXiv 2310.15169).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import PICTURES
from cogvideox_flax.generate.tiles import window_starts, window_weights
from cogvideox_flax.io.values import is_count, shown
from cogvideox_flax.models.family import Configs, ModelFamily, Size

if TYPE_CHECKING:
    from cogvideox_flax.generate.request import GenerationRequest


@dataclass(frozen=True)
class Windows:
    """Windows of equal length over the latent frames of a clip.

    frames: latent frames of the clip.
    length: of a window.
    overlap: latent frames that two neighbours share, at least.
    """

    frames: int
    length: int
    overlap: int

    @property
    def starts(self) -> list[int]:
        """The first latent frame of each window."""
        return window_starts(self.frames, self.length, self.overlap)

    @property
    def weights(self) -> Float32[np.ndarray, "W L"]:
        """Of each window's frames: linear over the overlaps, with the sum 1 at each frame of the clip."""
        return window_weights(self.frames, self.length, self.overlap)

    @property
    def noise_order(self) -> list[int]:
        """Which frame of the first window each latent frame of the clip has its noise from.

        The frames that a window has beyond the one before have the noise of those that it has no more, shuffled, so
        that windows start alike and their contents agree. Source: FreeNoise (arXiv 2310.15169), section 3.2.
        """
        order, shuffle = list(range(self.length)), np.random.default_rng(0)
        for before, start in itertools.pairwise(self.starts):
            order += shuffle.permutation(order[before:start]).tolist()
        return order


def check_long(family: ModelFamily, configs: Configs, request: GenerationRequest, size: Size) -> Size:
    """Check the options of long clips.

    Returns:
        The size that the denoiser sees at once: of a window, if there are any.

    Raises:
        InputError: as for `resolve_windows`; positions that this model does not have; windows and a step cache.
    """
    known = family.positions(configs)
    if request.positions is not None and request.positions not in known:
        others = f"this model has {', '.join(known)}" if known else "this model has none that can be extended"
        raise InputError(f"positions is {shown(request.positions)}; {others}. Leave it out for those of the training")
    if resolve_windows(family, configs, request, size) is not None:
        check_pieces(family, request.tiling)
        if request.step_cache is not None:
            raise InputError("a step cache is of one clip that is denoised whole; leave step_cache or the window out")
    return window_size(family, configs, request, size)


def in_pieces(num_frames: int | None, window: int | None) -> bool:
    """Whether a clip is longer than its window, and so is denoised in windows and decoded in pieces.

    num_frames: None: not known, as in directories of the reference system, which has no windows.
    """
    return window is not None and num_frames is not None and window < num_frames


def window_size(family: ModelFamily, configs: Configs, request: GenerationRequest, size: Size) -> Size:
    """The size that the denoiser sees at once: of a window, or of a clip that is not longer.

    Raises:
        InputError: a window that is no frame count of the model.
    """
    if request.window is None:
        return size
    try:
        window = family.resolve_size(configs, request.window, size.height, size.width)
    except InputError as e:
        raise InputError(str(e).replace("num_frames", "window")) from e
    return window if in_pieces(size.num_frames, request.window) else size


def check_pieces(family: ModelFamily, tiled: bool) -> None:
    """Refuse to decode in pieces where that is not possible.

    Raises:
        InputError: the family cannot, or tiles are asked for too.
    """
    if family.decode_piece is None:
        raise InputError(f"{family.name} cannot decode a clip in pieces; leave the window out")
    if tiled:
        raise InputError("a long clip is decoded in pieces of time, without tiles; leave tiling or the window out")


def resolve_windows(family: ModelFamily, configs: Configs, request: GenerationRequest, size: Size) -> Windows | None:
    """The windows of a request; None where its clip fits into one, or none are asked for.

    Raises:
        InputError: a window that is no frame count of the model; an overlap that is not below the window, or not a
            whole number of latent frames, or without a window; pictures, which stand at one place of a clip.
    """
    overlap = request.window_overlap
    if request.window is None:
        if overlap is not None:
            raise InputError("window_overlap is of two windows; give --window too, or leave it out")
        return None
    window = window_size(family, configs, request, size)
    if window is size:
        return None
    per_latent = (window.num_frames - 1) // max(window.latent_frames - window.extra_latents - 1, 1)
    if overlap is None:
        overlap = max(window.num_frames // (3 * per_latent), 1) * per_latent
    if not is_count(overlap, window.num_frames - 1) or overlap % per_latent:
        raise InputError(
            f"window_overlap is {shown(overlap)}; expected a multiple of {per_latent} below the window's "
            f"{window.num_frames} frames"
        )
    if any(getattr(request, name) is not None for name in PICTURES):
        raise InputError("a picture is the start or end of one window; leave the window out where pictures are given")
    return Windows(size.latent_frames, window.latent_frames, overlap // per_latent)
