"""Rules for frame counts, heights and widths, checked before anything is loaded or compiled."""

from __future__ import annotations

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.family import Release, Size
from cogvideox_flax.models.sizes import SizeRule


def resolve_size(
    transformer: TransformerConfig,
    vae: VAEConfig,
    release: Release | None,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Size:
    """Fill in the defaults and check the rules; all faults in one message.

    Args:
        num_frames, height, width: None for the release's default (for an unreleased model: its sample size).

    Raises:
        InputError: a size that the model does not support, with the nearest that it does.
    """
    scale = vae.spatial_compression
    if num_frames is None:
        num_frames = release.num_frames if release else fit_frames(transformer, vae, transformer.sample_frames)
    if height is None:
        height = release.height if release else transformer.sample_height * scale
    if width is None:
        width = release.width if release else transformer.sample_width * scale

    _rule(transformer, vae).check(num_frames, height, width)
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
        latent_channels=vae.latent_channels,
    )


def _rule(transformer: TransformerConfig, vae: VAEConfig) -> SizeRule:
    c, patch = vae.temporal_compression, transformer.patch_size_t or 1
    step = vae.spatial_compression * transformer.patch_size
    if transformer.takes == "inpaint" and patch > 1:  # these have no extra latent frames
        return SizeRule(c * (patch - 1) + 1, c * patch, step)
    # diffusers' decoder turns an odd number n of latents into c (n - 1) + 1 frames, an even number into c n
    return SizeRule(1, 2 * c, step)


def fit_frames(transformer: TransformerConfig, vae: VAEConfig, count: int) -> int:
    """The largest supported frame count of at most `count`; at least the smallest."""
    return _rule(transformer, vae).fit_frames(count)


def check_channels(transformer: TransformerConfig, vae: VAEConfig) -> None:
    """Refuse a model whose transformer takes inputs of another kind than those of `TransformerConfig.takes`.

    Raises:
        InputError: its input channels are not those of a known kind of model.
    """
    if transformer.takes is None or transformer.out_channels != vae.latent_channels:
        raise InputError(
            f"its transformer takes {transformer.in_channels} channels; text-to-video has {vae.latent_channels}, "
            f"image-to-video and control {2 * vae.latent_channels}, inpainting {2 * vae.latent_channels + 1}; take a "
            "checkpoint of one of these kinds"
        )


def size_warnings(transformer: TransformerConfig, vae: VAEConfig, release: Release | None, size: Size) -> list[str]:
    """Sentences about sizes that a model was not trained on."""
    found = []
    learned = tuple(side * vae.spatial_compression for side in (transformer.sample_height, transformer.sample_width))
    if transformer.learned_positions and (size.height, size.width) != learned:
        found.append(
            f"the learned positions are those of {learned[0]}x{learned[1]} and are left out at "
            f"{size.height}x{size.width}; the rotary ones stay"
        )
    if release is None:
        return found
    if release.any_size:
        sides = sorted((size.height, size.width))
        trained = sides[0] == release.height and sides[1] <= release.width
        sizes = f"shorter side {release.height}, longer side up to {release.width}"
    else:
        trained = (size.height, size.width) == (release.height, release.width)
        sizes = f"{release.height}x{release.width}"
    if not trained:
        found.append(f"{release.name} was trained at {sizes}, not {size.height}x{size.width}: expect worse video")
    if size.num_frames > release.max_frames or size.num_frames % release.frame_step != 1:
        frames = f"{release.frame_step} n + 1 frames up to {release.max_frames}"
        found.append(f"{release.name} was trained on {frames}, not {size.num_frames}: expect worse video")
    return found
