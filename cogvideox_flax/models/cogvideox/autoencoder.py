"""The 3D causal video autoencoder: 8x8 in space, 4 in time, 16 latent channels.

Source: CogVideoX (arXiv 2408.06072), section 2.1; diffusers `AutoencoderKLCogVideoX`. A clip is encoded and decoded in
chunks of frames. Convolutions have a cache from chunk to chunk and are exact, but group norms take their statistics per
chunk, so the chunk sizes are part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax import sharding
from cogvideox_flax.models.chunks import Chunk, chunk_sizes, run_levels
from cogvideox_flax.models.codec import ChunkedAutoencoder
from cogvideox_flax.models.cogvideox.config import VAEConfig
from cogvideox_flax.nn.conv.causal_conv import CausalConv3d, SpatialConv
from cogvideox_flax.nn.layers import Linear
from cogvideox_flax.nn.norms import GroupNormSiLU, SpatialNormSiLU
from cogvideox_flax.nn.resample import double_frames, halve_frames, repeat_frames, repeat_space
from cogvideox_flax.nn.stack import stack

ENCODE_CHUNK = 8
"""Video frames per encoder chunk."""

DECODE_CHUNK = 2
"""Latent frames per decoder chunk."""

FIXED_EPS = 1e-6
"""Epsilon of the norms that ignore the config, as in the reference: modulated norms and the encoder's last norm."""

Cache = Any
"""A pytree of feature caches: the last two padded input frames of every causal convolution."""


class ResNetBlock(nnx.Module):
    """norm, silu, conv, twice, plus the input. With `latent_channels`, the latent z modulates the norms."""

    def __init__(
        self, in_channels: int, out_channels: int, config: VAEConfig, latent_channels: int | None, *, rngs: nnx.Rngs
    ):
        self.norm1 = _norm(in_channels, config, latent_channels, rngs)
        self.conv1 = CausalConv3d(in_channels, out_channels, rngs=rngs)
        self.norm2 = _norm(out_channels, config, latent_channels, rngs)
        self.conv2 = CausalConv3d(out_channels, out_channels, rngs=rngs)
        self.shortcut = Linear(in_channels, out_channels, rngs=rngs) if in_channels != out_channels else None

    def __call__(
        self, x: Float[Array, "B T H W I"], cache: Cache, *z: Float[Array, "B t h w L"]
    ) -> tuple[Float[Array, "B T H W O"], Cache]:
        cache1, cache2 = (None, None) if cache is None else cache
        h, cache1 = self.conv1(self.norm1(x, *z), cache1)
        if self.shortcut is not None:
            x = self.shortcut(x)
        h, cache2 = self.conv2(self.norm2(h, *z), cache2, residual=x)
        return h, (cache1, cache2)


class ResNetBlocks(nnx.Module):
    """n blocks at one resolution: `first` changes the number of channels, the others are equal and stacked."""

    def __init__(
        self,
        n: int,
        in_channels: int,
        out_channels: int,
        config: VAEConfig,
        latent_channels: int | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        make = partial(ResNetBlock, config=config, latent_channels=latent_channels)
        changes = in_channels != out_channels
        self.first = make(in_channels, out_channels, rngs=rngs) if changes else None
        self.resnets = stack(n - changes, partial(make, out_channels, out_channels), rngs) if n > changes else None

    def run(
        self, x: Float[Array, "B T H W I"], cache: Cache, *z: Float[Array, "B t h w L"]
    ) -> tuple[Float[Array, "B T H W O"], Cache]:
        first, rest = (None, None) if cache is None else cache
        if self.first is not None:
            x, first = self.first(x, first, *z)
        if self.resnets is not None:
            x, rest = _scan(self.resnets, x, rest, *z)
        return x, (first, rest)


class DownBlock(ResNetBlocks):
    """ResNet blocks, then half the frames (if `temporal`) and half the height and width."""

    def __init__(self, config: VAEConfig, level: int, *, rngs: nnx.Rngs):
        widths = config.block_channels
        width = widths[level]
        super().__init__(config.layers_per_block, widths[max(level - 1, 0)], width, config, rngs=rngs)
        self.down = None if level == len(widths) - 1 else SpatialConv(width, stride=2, rngs=rngs)
        self.temporal = level < config.temporal_levels

    def __call__(self, x: Float[Array, "B T H W I"], cache: Cache) -> tuple[Float[Array, "B t H/2 W/2 O"], Cache]:
        x, cache = self.run(x, cache)
        if self.down is not None:
            x = self.down(halve_frames(x) if self.temporal else x)
        return x, cache


class UpBlock(ResNetBlocks):
    """ResNet blocks modulated by the latent, then double height and width and (if `temporal`) the frames."""

    def __init__(self, config: VAEConfig, level: int, *, rngs: nnx.Rngs):
        widths = config.block_channels[::-1]
        width, latent = widths[level], config.latent_channels
        super().__init__(config.layers_per_block + 1, widths[max(level - 1, 0)], width, config, latent, rngs=rngs)
        self.up = None if level == len(widths) - 1 else SpatialConv(width, rngs=rngs)
        self.temporal = level < config.temporal_levels

    def __call__(
        self, x: Float[Array, "B t H W I"], cache: Cache, z: Float[Array, "B l h w L"]
    ) -> tuple[Float[Array, "B T 2H 2W O"], Cache]:
        is_first = cache is None
        x, cache = self.run(x, cache, z)
        if self.up is not None:
            x = self.up(repeat_space(x, 2 * x.shape[2], 2 * x.shape[3]))
            # The reference repeats frames first and convolves each copy: the same result with twice the work.
            if self.temporal:
                x = double_frames(x) if is_first else repeat_frames(x, 2 * x.shape[1])
        return x, cache


class Encoder(nnx.Module):
    """One chunk of video to its latent moments, mean and log variance side by side."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        widths = config.block_channels
        self.conv_in = CausalConv3d(config.in_channels, widths[0], rngs=rngs)
        self.blocks = nnx.List(DownBlock(config, level, rngs=rngs) for level in range(len(widths)))
        self.mid = stack(2, partial(ResNetBlock, widths[-1], widths[-1], config, None), rngs)
        self.norm_out = GroupNormSiLU(widths[-1], groups=config.norm_groups, eps=FIXED_EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config.latent_channels, rngs=rngs)

    def __call__(self, x: Float[Array, "B F H W 3"], cache: Cache) -> tuple[Float[Array, "B T h w 2L"], Cache]:
        """cache: what the previous chunk returned; None for the first chunk of a clip."""
        conv_in, blocks, mid, conv_out = cache or (None, [None] * len(self.blocks), None, None)
        x, conv_in = self.conv_in(x, conv_in)
        # float32 between the blocks; the decoder does without, since its norms round less than the encoder's
        x = x.astype(jnp.float32)
        x, blocks = run_levels(self.blocks, x, blocks)
        x, mid = _scan(self.mid, x, mid)
        x, conv_out = self.conv_out(self.norm_out(x), conv_out)
        return x, (conv_in, blocks, mid, conv_out)


class Decoder(nnx.Module):
    """One chunk of latent frames to video. The latent itself modulates every norm."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        widths = config.block_channels[::-1]
        self.conv_in = CausalConv3d(config.latent_channels, widths[0], rngs=rngs)
        self.mid = stack(2, partial(ResNetBlock, widths[0], widths[0], config, config.latent_channels), rngs)
        self.blocks = nnx.List(UpBlock(config, level, rngs=rngs) for level in range(len(widths)))
        self.norm_out = _norm(widths[-1], config, config.latent_channels, rngs)
        self.conv_out = CausalConv3d(widths[-1], config.out_channels, rngs=rngs)

    def __call__(self, z: Float[Array, "B T h w L"], cache: Cache) -> tuple[Float[Array, "B F H W 3"], Cache]:
        """cache: what the previous chunk returned; None for the first chunk of a clip."""
        conv_in, mid, blocks, conv_out = cache or (None, None, [None] * len(self.blocks), None)
        x, conv_in = self.conv_in(z, conv_in)
        z = z.astype(jnp.float32)
        x, mid = _scan(self.mid, x, mid, z)
        x, blocks = run_levels(self.blocks, x, blocks, z)
        x, conv_out = self.conv_out(self.norm_out(x, z), conv_out)
        return x, (conv_in, mid, blocks, conv_out)


class Autoencoder(ChunkedAutoencoder):
    """Video to latent and back: F frames give ceil(F / 4) latent ones, odd T latent ones 4 (T - 1) + 1, even T 4 T.

    `sizes_after_first` as chunks of `decode` give 4 (T - 1) + 1 frames for any T.
    """

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def encoding(self, frames: int) -> tuple[Chunk, Sequence[int]]:
        return self.encoder, chunk_sizes(frames, ENCODE_CHUNK)

    def decoding(self, frames: int) -> tuple[Chunk, Sequence[int]]:
        return self.decoder, chunk_sizes(frames, DECODE_CHUNK)

    def decode_chunk(self, z: Float[Array, "B t h w L"], cache: Cache) -> tuple[Float[Array, "B F H W 3"], Cache]:
        """One chunk of `decode`, in order: its frames in about [-1, 1], and the cache for the next chunk.

        Args:
            z: raw, as for `decode`.
            cache: of the chunk before; None for the first.
        """
        with sharding.spatial_split(z.astype(self.decoder.conv_in.kernel.dtype)) as z:
            video, cache = self.decoder(z, cache)
            return video, sharding.spatial_constrain(cache)


def _scan(resnets: ResNetBlock, x: Array, cache: Cache, *z: Array) -> tuple[Array, Cache]:
    """Scan x through stacked blocks; caches are stacked alike."""
    return jax.lax.scan(lambda x, layer: layer[0](x, layer[1], *z), x, (resnets, cache))


def _norm(channels: int, config: VAEConfig, latent_channels: int | None, rngs: nnx.Rngs) -> Callable[..., Array]:
    if latent_channels is None:
        return GroupNormSiLU(channels, groups=config.norm_groups, eps=config.norm_eps)
    return SpatialNormSiLU(channels, latent_channels, groups=config.norm_groups, eps=FIXED_EPS, rngs=rngs)
