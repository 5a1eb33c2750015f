"""The 3D causal video autoencoder of HunyuanVideo-1.5: 16x16 in space, 4 in time, 32 latent channels.

Source: HunyuanVideo 1.5 (arXiv 2511.18870); diffusers `AutoencoderKLHunyuanVideo15`. A clip is encoded and decoded one
latent frame at a time. That is exact: norms see single pixels, convolutions are causal with a cache of two frames, and
the middle attention is causal by frame with a cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax import sharding
from cogvideox_flax.attention import xla
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.chunks import Chunk, run_levels, sizes_after_first
from cogvideox_flax.models.codec import ChunkedAutoencoder
from cogvideox_flax.models.hunyuan_video15.config import VAEConfig
from cogvideox_flax.models.hunyuan_video15.resample import Downsample, Upsample, mean_groups, repeat_channels
from cogvideox_flax.nn.conv.causal_conv import CausalConv3d
from cogvideox_flax.nn.layers import Linear
from cogvideox_flax.nn.norms import ChannelRMSNorm
from cogvideox_flax.nn.stack import stack

Cache = Any
"""A pytree: the last two padded input frames of every causal convolution; the keys and values of the attention."""

Conv = partial(CausalConv3d, repeat_edges=True)


class ResNetBlock(nnx.Module):
    """norm, silu, conv, twice, plus the input."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.norm1 = ChannelRMSNorm(channels)
        self.conv1 = Conv(channels, channels, rngs=rngs)
        self.norm2 = ChannelRMSNorm(channels)
        self.conv2 = Conv(channels, channels, rngs=rngs)

    def __call__(self, x: Float[Array, "B T H W C"], cache: Cache) -> tuple[Float[Array, "B T H W C"], Cache]:
        cache1, cache2 = cache or (None, None)
        h, cache1 = self.conv1(self.norm1(x, silu=True), cache1)
        h, cache2 = self.conv2(self.norm2(h, silu=True), cache2, residual=x)
        return h, (cache1, cache2)


class FrameAttention(nnx.Module):
    """Attention of one head, as wide as the channels, of each pixel to those of its frame and of all frames before."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.norm = ChannelRMSNorm(channels)
        self.q = Linear(channels, channels, rngs=rngs)
        self.k = Linear(channels, channels, rngs=rngs)
        self.v = Linear(channels, channels, rngs=rngs)
        self.out = Linear(channels, channels, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B 1 H W C"], cache: Cache, frames: int
    ) -> tuple[Float[Array, "B 1 H W C"], Cache]:
        """One frame. frames: of the whole clip; the cache has place for all of them."""
        batch, _, height, width, channels = x.shape
        rows = sharding.image_rows(height)
        pixels = rows * width
        narrow = self.norm(x).astype(self.q.kernel.dtype)
        # each device has its own queries, and all keys
        flat = narrow[:, :, :rows].reshape(batch, pixels, channels)
        k, v = (sharding.whole_clips(f(flat))[:, :, None] for f in (self.k, self.v))
        empty = jnp.zeros((batch, frames * pixels, 1, channels), k.dtype)
        keys, values, done = cache or (empty, empty, jnp.int32(0))
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(buffer, new, done * pixels, 1)
            for buffer, new in ((keys, k), (values, v))
        )

        def attend(q: Array, keys: Array, values: Array, seen: Array) -> Array:
            share = (frames + 1) / (2 * frames)
            queries = q.reshape(len(q), -1, 1, channels)
            return xla.attend_to_first(queries, keys, values, seen, share=share).reshape(q.shape)

        attended = sharding.on_each_part(attend, self.q(narrow), (keys, values), (done + 1) * pixels)
        out = self.out(attended, out_dtype=jnp.float32)
        return (x + out).astype(x.dtype), (keys, values, done + 1)


class Middle(nnx.Module):
    """A ResNet block, attention, a ResNet block."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs):
        self.first = ResNetBlock(channels, rngs=rngs)
        self.attn = FrameAttention(channels, rngs=rngs)
        self.second = ResNetBlock(channels, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B 1 H W C"], cache: Cache, frames: int
    ) -> tuple[Float[Array, "B 1 H W C"], Cache]:
        first, attn, second = cache or (None, None, None)
        x, first = self.first(x, first)
        x, attn = self.attn(x, attn, frames)
        x, second = self.second(x, second)
        return x, (first, attn, second)


class Level(nnx.Module):
    """n ResNet blocks, then a change of size unless it is the last level."""

    def __init__(self, n: int, channels: int, resample: Downsample | Upsample | None, *, rngs: nnx.Rngs):
        self.resnets = stack(n, partial(ResNetBlock, channels), rngs)
        self.resample = resample

    def __call__(self, x: Float[Array, "B T H W C"], cache: Cache) -> tuple[Float[Array, "B t h w D"], Cache]:
        resnets, resample = cache or (None, None)
        x, resnets = jax.lax.scan(lambda x, layer: layer[0](x, layer[1]), x, (self.resnets, resnets))
        if self.resample is not None:
            x, resample = self.resample(x, resample)
        return x, (resnets, resample)


class Encoder(nnx.Module):
    """The frames of one latent frame to its moments, mean and log variance side by side."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        widths, temporal_from = config.block_channels, config.spatial_levels - config.temporal_levels

        def resample(i: int) -> Downsample | None:
            if i == config.spatial_levels:
                return None
            return Downsample(widths[i], widths[i + 1], temporal=i >= temporal_from, rngs=rngs)

        self.conv_in = Conv(config.in_channels, widths[0], rngs=rngs)
        self.levels = nnx.List(
            Level(config.layers_per_block, width, resample(i), rngs=rngs) for i, width in enumerate(widths)
        )
        self.mid = Middle(widths[-1], rngs=rngs)
        self.norm_out = ChannelRMSNorm(widths[-1])
        self.conv_out = Conv(widths[-1], 2 * config.latent_channels, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B F H W 3"], cache: Cache, frames: int
    ) -> tuple[Float[Array, "B 1 h w 2L"], Cache]:
        """cache: None for the first frame of a clip, which comes alone; else four come. frames: latent ones, of all."""
        conv_in, levels, mid, conv_out = cache or (None, [None] * len(self.levels), None, None)
        x, conv_in = self.conv_in(x, conv_in)
        x = x.astype(jnp.float32)  # between the blocks
        x, levels = run_levels(self.levels, x, levels)
        x, mid = self.mid(x, mid, frames)
        shortcut = mean_groups(x, self.conv_out.bias.shape[0])
        x, conv_out = self.conv_out(self.norm_out(x, silu=True), conv_out, residual=shortcut)
        return x, (conv_in, levels, mid, conv_out)


class Decoder(nnx.Module):
    """One latent frame to its frames of video."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        widths = config.block_channels[::-1]

        def resample(i: int) -> Upsample | None:
            if i == config.spatial_levels:
                return None
            return Upsample(widths[i], widths[i + 1], temporal=i < config.temporal_levels, rngs=rngs)

        self.conv_in = Conv(config.latent_channels, widths[0], rngs=rngs)
        self.mid = Middle(widths[0], rngs=rngs)
        self.levels = nnx.List(
            Level(config.layers_per_block + 1, width, resample(i), rngs=rngs) for i, width in enumerate(widths)
        )
        self.norm_out = ChannelRMSNorm(widths[-1])
        self.conv_out = Conv(widths[-1], config.out_channels, rngs=rngs)

    def __call__(
        self, z: Float[Array, "B 1 h w L"], cache: Cache, frames: int
    ) -> tuple[Float[Array, "B F H W 3"], Cache]:
        """cache: None for the first latent frame of a clip. frames: latent ones, of the clip."""
        conv_in, mid, levels, conv_out = cache or (None, None, [None] * len(self.levels), None)
        x, conv_in = self.conv_in(z, conv_in, residual=repeat_channels(z, self.conv_in.bias.shape[0]))
        x, mid = self.mid(x, mid, frames)
        x, levels = run_levels(self.levels, x, levels)
        x, conv_out = self.conv_out(self.norm_out(x, silu=True), conv_out)
        return x, (conv_in, mid, levels, conv_out)


class Autoencoder(ChunkedAutoencoder):
    """Video to latent and back: 4 (T - 1) + 1 frames, T latent ones."""

    pad = True

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def encoding(self, frames: int) -> tuple[Chunk, Sequence[int]]:
        time = self.config.temporal_compression
        if frames % time != 1:
            raise InputError(f"the video has {frames} frames; they must be {time} n + 1")
        sizes = sizes_after_first(frames, time)
        return partial(self.encoder, frames=len(sizes)), sizes

    def decoding(self, frames: int) -> tuple[Chunk, Sequence[int]]:
        return partial(self.decoder, frames=frames), [1] * frames
