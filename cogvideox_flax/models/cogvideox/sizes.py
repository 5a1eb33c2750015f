"""Which frame counts, heights and widths a model can take, decided before anything is loaded or compiled."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.family import Release

log = logging.getLogger(__name__)

MAX_FRAMES, MAX_SIDE = 2**14, 2**14
"""Frames of a video, and pixels of a side, beyond which no model and no machine goes."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of one run.

    `extra_latents` latent frames are denoised in front and dropped before decoding: releases that patch time (1.5)
    need a latent count that divides, while decoding to num_frames needs an odd one.
    """

    num_frames: int
    height: int
    width: int
    latent_frames: int  # those denoised, extra ones included
    extra_latents: int
    latent_height: int
    latent_width: int


def resolve_size(
    transformer: TransformerConfig,
    vae: VAEConfig,
    release: Release | None,
    *,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Size:
    """Fill in the defaults and check the rules; all faults in one message.

    Args:
        num_frames, height, width: None for the release's default (for an unreleased model: its sample size).

    Raises:
        InputError: a size that the model cannot take, with the nearest that it can.

    Logs a warning for a size that it can take but was not trained on.
    """
    scale = vae.spatial_compression
    if num_frames is None:
        num_frames = release.num_frames if release else transformer.sample_frames
    if height is None:
        height = release.height if release else transformer.sample_height * scale
    if width is None:
        width = release.width if release else transformer.sample_width * scale

    faults = []
    # the decoder turns an odd number n of latents into c (n - 1) + 1 frames, an even number into c n
    period = 2 * vae.temporal_compression
    if num_frames < 1 or num_frames % period != 1:
        below = max((num_frames - 1) // period, 0) * period + 1
        faults.append(
            f"num_frames is {num_frames}; it must be {period} n + 1. "
            + (f"Nearest: {below} and {below + period}" if num_frames > 1 else f"Smallest: 1 and {1 + period}")
        )
    step = scale * transformer.patch_size
    for name, value in (("height", height), ("width", width)):
        if value < step or value % step:
            below = max(value // step * step, step)
            faults.append(f"{name} is {value}; it must be a multiple of {step}. Nearest: {below} and {below + step}")
    for name, value, most in (
        ("num_frames", num_frames, MAX_FRAMES),
        ("height", height, MAX_SIDE),
        ("width", width, MAX_SIDE),
    ):
        if value > most:
            faults.append(f"{name} is {value}; the most is {most}")
    if transformer.learned_positions and not faults:
        only = (transformer.sample_height * scale, transformer.sample_width * scale)
        if (height, width) != only:
            faults.append(f"size is {height}x{width}; this release learned its positions at {only[0]}x{only[1]} only")
    if faults:
        raise InputError("\n".join(faults))

    if release is not None:
        _warn_untrained(release, num_frames, height, width)
    latents = (num_frames - 1) // vae.temporal_compression + 1
    extra = -latents % (transformer.patch_size_t or 1)
    return Size(
        num_frames=num_frames,
        height=height,
        width=width,
        latent_frames=latents + extra,
        extra_latents=extra,
        latent_height=height // scale,
        latent_width=width // scale,
    )


def check_text_to_video(transformer: TransformerConfig, vae: VAEConfig, where: object) -> None:
    """Refuse a model whose transformer wants more than noise (image-to-video, control).

    Raises:
        InputError: its input channels are not the VAE's latent channels.
    """
    if transformer.in_channels != vae.latent_channels:
        raise InputError(
            f"{where} is an image-to-video or control model: its transformer takes {transformer.in_channels} channels, "
            f"text-to-video gives {vae.latent_channels}"
        )


def _warn_untrained(release: Release, num_frames: int, height: int, width: int) -> None:
    if release.any_size:
        trained = min(height, width) == release.height and max(height, width) <= release.width
        sizes = f"shorter side {release.height}, longer side up to {release.width}"
    else:
        trained = (height, width) == (release.height, release.width)
        sizes = f"{release.height}x{release.width}"
    if not trained:
        log.warning("%s was trained at %s, not %dx%d: expect worse video", release.name, sizes, height, width)
    if num_frames > release.max_frames or num_frames % release.frame_step != 1:
        log.warning(
            "%s was trained on %d n + 1 frames up to %d, not %d: expect worse video",
            release.name,
            release.frame_step,
            release.max_frames,
            num_frames,
        )
