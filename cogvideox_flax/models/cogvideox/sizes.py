"""Rules for frame counts, heights and widths, checked before anything is loaded or compiled."""

from __future__ import annotations

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.model import Release
from cogvideox_flax.models.sizes import Size, SizeRule


def size_rule(transformer: TransformerConfig, vae: VAEConfig) -> SizeRule:
    """The multiples of which frame counts and sides must be."""
    c, patch = vae.temporal_compression, transformer.patch_size_t or 1
    step = vae.spatial_compression * transformer.patch_size
    if transformer.takes == "inpaint" and patch > 1:  # these have no extra latent frames
        return SizeRule(c * (patch - 1) + 1, c * patch, step)
    # diffusers' decoder turns an odd number n of latents into c (n - 1) + 1 frames, an even number into c n
    return SizeRule(1, 2 * c, step)


def check_channels(transformer: TransformerConfig, vae: VAEConfig) -> None:
    """Refuse a model whose transformer takes inputs of another kind than those of `TransformerConfig.takes`."""
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
