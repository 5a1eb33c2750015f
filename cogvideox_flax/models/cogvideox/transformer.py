"""The 3D diffusion transformer of CogVideoX: text and video tokens in one sequence, AdaLN-zero, full attention.

Source: CogVideoX (arXiv 2408.06072); diffusers `CogVideoXTransformer3DModel` defines the numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from cogvideox_flax import attention, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.arrays import takes_tensors
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.sharding import TRANSFORMER
from cogvideox_flax.nn import rope
from cogvideox_flax.nn.adaln import AdaLNZero, per_stream
from cogvideox_flax.nn.component import Component
from cogvideox_flax.nn.layers import MLP, LayerNorm, Linear, TimestepMLP, in_columns, per_sample, sinusoid
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.nn.qk_norm import qk_norm
from cogvideox_flax.nn.remat import Remat, recomputed
from cogvideox_flax.nn.stack import scan_attended, scan_layers, stack

log = logging.getLogger(__name__)

QK_NORM_EPS = 1e-6

Attend = Callable[..., Float[Array, "B S N K"]]
"""attend(q, k, v, *, q_len, kv_len) -> B S N K, as `attention.attend`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The output of `Transformer.embed`, which the blocks update and the head reads: text, then video, then padding.

    x: the residual stream.
    emb: the conditioning vector, from the timestep and ofs.
    is_text: which tokens are text.
    rotary: cos and sin of every token; None if positions are added to x.
    text_length: number of text tokens.
    grid: (frames, rows, columns) of the video tokens.
    dtype: in which the blocks compute.
    """

    x: Float32[Array, "B S D"]
    emb: Float32[Array, "B E"]
    is_text: Bool[Array, "S 1"]
    rotary: rope.Rotary | None
    text_length: int = field(metadata={"static": True})
    grid: tuple[int, int, int] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def length(self) -> int:
        """Number of tokens that are not padding."""
        return self.text_length + math.prod(self.grid)

    @property
    def video(self) -> Float32[Array, "B n D"]:
        """The video's part of the residual stream."""
        return self.x[:, self.text_length : self.length]


class Attention(nnx.Module):
    """Joint self-attention with layer-normed, rotated queries and keys."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width, bias = config.width, config.attention_bias
        self.q = Linear(width, width, bias=bias, rngs=rngs)
        self.k = Linear(width, width, bias=bias, rngs=rngs)
        self.v = Linear(width, width, bias=bias, rngs=rngs)
        self.norm_q = LayerNorm(config.head_dim, eps=QK_NORM_EPS)
        self.norm_k = LayerNorm(config.head_dim, eps=QK_NORM_EPS)
        self.out = Linear(width, width, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B S D"], rotary: rope.Rotary | None, length: int, attend: Attend
    ) -> Float32[Array, "B S D"]:
        """Tokens past `length` are padding and are not attended."""
        # barriers write them to memory in x's dtype, since the norms read q and k more than once; a single one would
        # let no exchange over sp begin before the last product has ended
        q, k = map(jax.lax.optimization_barrier, (self.q(x), self.k(x)))
        v = in_columns(self.v, x).reshape(*x.shape[:2], -1, self.norm_q.scale.size)
        q, k = qk_norm(q, self.norm_q, rotary), qk_norm(k, self.norm_k, rotary)
        return self.out(attend(q, k, v, q_len=length, kv_len=length).reshape(x.shape), out_dtype=jnp.float32)


class Block(nnx.Module):
    """x += gate * attention(norm(x)); x += gate * mlp(norm(x)), with separate modulation of text and video.

    The residual stream x is float32 for every dtype of the weights: dozens of small additions to a large bfloat16
    number would be the model's largest error, and the stream is a small part of its memory traffic.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norm1 = AdaLNZero(config.time_width, config.width, eps=config.norm_eps, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.norm2 = AdaLNZero(config.time_width, config.width, eps=config.norm_eps, rngs=rngs)
        self.mlp = MLP(config.width, rngs=rngs)

    def __call__(self, tokens: Tokens, attend: Attend) -> Float32[Array, "B S D"]:
        x, is_text = tokens.x, tokens.is_text
        y, gate = self.norm1(x, tokens.emb, is_text, tokens.dtype)
        x = x + per_stream(gate, is_text) * self.attn(y, tokens.rotary, tokens.length, attend)
        y, gate = self.norm2(x, tokens.emb, is_text, tokens.dtype)
        return x + per_stream(gate, is_text) * self.mlp(y)


class AdaLNOut(nnx.Module):
    """The last norm: layer norm, then shift and scale from the timestep."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.linear = Linear(config.time_width, 2 * config.width, zero=True, rngs=rngs)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)

    def __call__(self, x: Float32[Array, "B S D"], emb: Float32[Array, "B E"]) -> Float32[Array, "B S D"]:
        shift, scale = jnp.split(self.linear(jax.nn.silu(emb))[:, None], 2, -1)
        return self.norm(x) * (1 + scale) + shift


class Transformer(Component):
    """Predicts v from noisy latents, text and time.

    The blocks compute in the weights' dtype; embeddings, time and output, computed once per call, are float32.

    Height and width of the latents are multiples of `patch_size`, frames a multiple of `patch_size_t`. Learned
    positions (5b-I2V, beside rotary ones) are added at the height and width they were learned at, and nowhere else.

    Attributes:
        attend: the attention function, static in the pytree; None is `attention.attend`. For another backend, tile
            sizes or smoothed keys use `functools.partial(attention.attend, ...)`.
    """

    def __init__(self, config: TransformerConfig, *, attend: Attend | None = None, rngs: nnx.Rngs):
        self.config = config
        self.attend = attend
        token_in = config.in_channels * config.patch_volume
        self.patch_embed = Linear(token_in, config.width, bias=config.patch_bias, rngs=rngs)
        self.text_proj = Linear(config.text_width, config.width, rngs=rngs)
        self.time_embedding = TimestepMLP(config.width, config.time_width, rngs=rngs)
        self.ofs_embedding = (
            TimestepMLP(config.ofs_width, config.ofs_width, rngs=rngs) if config.ofs_width is not None else None
        )
        self.pos_embedding = nnx.Param(jnp.zeros(config.learned_shape)) if config.learned_positions else None
        self.blocks = stack(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm_final = LayerNorm(config.width, eps=config.norm_eps)
        self.norm_out = AdaLNOut(config, rngs=rngs)
        self.proj_out = Linear(config.width, config.out_channels * config.patch_volume, zero=True, rngs=rngs)

    @takes_tensors
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        context: Float[Array, "B L E"],
        timestep: Int[Array, "*B"] | int,
        ofs: Float[Array, "*B"] | float | None = None,
        *,
        riflex: bool = False,
        remat: Remat = False,
    ) -> Float32[Array, "B T H W out"]:
        """One evaluation.

        Args:
            latents: noisy latents; image or control latents, where the release takes them, already concatenated on C.
            context: text encoder output, all positions attended.
            timestep: 0 to 999, one for all or one per batch element.
            ofs: the motion scalar of releases with `ofs_width` (2.0 in the released pipeline); else None.
            riflex: extend rotary positions beyond the frames of the training; see `rope.riflex`.
            remat: for training: what is recomputed in the backward pass, see `nn.remat`; True: each block.

        Returns:
            The v prediction, float32.

        Raises:
            InputError: a shape that the release does not support; ofs missing or not supported.
        """
        tokens = self.embed(latents, context, timestep, ofs, riflex=riflex)
        return self.head(self.run_blocks(tokens, remat=remat))

    @takes_tensors
    def embed(
        self,
        latents: Float[Array, "B T H W C"],
        context: Float[Array, "B L E"],
        timestep: Int[Array, "*B"] | int,
        ofs: Float[Array, "*B"] | float | None = None,
        *,
        riflex: bool = False,
    ) -> Tokens:
        """Tokens with their positions, and the conditioning vector. Arguments and errors as for `__call__`."""
        config = self.config
        self._check(latents, context, ofs)
        batch, text_length = context.shape[:2]
        patches = patchify(latents.astype(jnp.float32), config)
        _, frames, rows, columns, _ = patches.shape
        grid = (frames, rows, columns)

        emb = self.time_embedding(sinusoid(per_sample(timestep, batch), config.width))
        if self.ofs_embedding is not None and config.ofs_width is not None:
            emb = emb + self.ofs_embedding(sinusoid(per_sample(ofs, batch), config.ofs_width))

        text = self.text_proj(context.astype(jnp.float32))
        # rows for text and padding are added before the embedding, while tokens are narrow
        video = jnp.pad(patches.reshape(batch, -1, patches.shape[-1]), ((0, 0), (text_length, 0), (0, 0)))
        # a TPU stores tokens in tiles; otherwise each layer would pad queries, keys and values for the kernel
        video = sharding.pad_tokens(video, in_tiles=compiling_for.value == "tpu")
        x = self.patch_embed(sharding.split_tokens(video))
        x = jax.lax.dynamic_update_slice_in_dim(x, text, 0, 1)
        padding = x.shape[1] - text_length - math.prod(grid)
        positions = self._positions(text_length, grid)
        if positions is not None:
            x = x + jnp.pad(positions, ((0, padding), (0, 0)))
        rotary = None
        if config.rotary:
            trained = config.trained_positions if riflex else None
            rotary = rope.rotary(grid, config.head_dim, _rotary_base(config), trained)
            rotary = rope.pad_rotary(rotary, before=text_length, after=padding)
        is_text = (jnp.arange(x.shape[1]) < text_length)[:, None]
        dtype = self.proj_out.kernel.dtype
        return Tokens(x=x, emb=emb, is_text=is_text, rotary=rotary, text_length=text_length, grid=grid, dtype=dtype)

    def run_blocks(self, tokens: Tokens, *, start: int = 0, stop: int | None = None, remat: Remat = False) -> Tokens:
        """Blocks in one scan: all of them, or those of a slice (start=-1 is the last); remat as for `__call__`."""

        def layer(x: Float32[Array, "B S D"], block: Block) -> tuple[Float32[Array, "B S D"], None]:
            return _run_block(tokens, x, block, self.attend or attention.attend), None

        return replace(tokens, x=scan_layers(recomputed(layer, remat), tokens.x, self.blocks, start, stop))

    def run_attended(self, tokens: Tokens, attended: Any = None) -> tuple[Tokens, Any]:
        """All blocks, and what their attentions return; or with that of another step in their place.

        attended: [layers, B, S, D], from an earlier call; None is returned with it.
        """
        attend = self.attend or attention.attend
        x, attended = scan_attended(partial(_run_block, tokens), attend, tokens.x, self.blocks, attended)
        return replace(tokens, x=x), attended

    def teacache_signal(self, tokens: Tokens) -> Float32[Array, "B E"]:
        """The time embedding."""
        return tokens.emb

    def head(self, tokens: Tokens) -> Float32[Array, "B T H W out"]:
        """The v prediction of the video tokens."""
        x = self.proj_out(self.norm_out(self.norm_final(tokens.x), tokens.emb))
        # text and padding are removed after the projection, when tokens are narrow again
        x = sharding.constrain(sharding.split_tokens(x), "batch", None, None)[:, tokens.text_length : tokens.length]
        return unpatchify(x.reshape(x.shape[0], *tokens.grid, -1), self.config)

    def _positions(self, text_length: int, grid: tuple[int, int, int]) -> Float32[Array, "S D"] | None:
        """The additive positions; None for a model with only rotary positions."""
        config = self.config
        native = grid[1:] == (config.sample_height // config.patch_size, config.sample_width // config.patch_size)
        length = text_length + math.prod(grid)
        if self.pos_embedding is not None and native and self.pos_embedding.shape[0] == length:
            return self.pos_embedding[...].astype(jnp.float32)
        if config.rotary and not (config.learned_positions and native):
            return None
        if config.learned_positions:
            log.warning(
                "this release learned its positions for %d frames; at another count the reference replaces them by "
                "computed ones, and so do we: expect worse video",
                config.sample_frames,
            )
        video = rope.sincos(grid, config.width, config.spatial_interpolation_scale, config.temporal_interpolation_scale)
        return jnp.pad(video, ((text_length, 0), (0, 0)))

    def _check(self, latents: Array, context: Array, ofs: object) -> None:
        config = self.config
        if latents.ndim != 5 or latents.shape[-1] != config.in_channels:
            raise InputError(f"latents must be [B, T, H, W, {config.in_channels}]; got {latents.shape}")
        frames, height, width = latents.shape[1:4]
        if height % config.patch_size or width % config.patch_size or frames % (config.patch_size_t or 1):
            raise InputError(
                f"latents of {frames} frames, {height}x{width} do not cut into patches of "
                f"{config.patch_size_t or 1}x{config.patch_size}x{config.patch_size}"
            )
        if context.ndim != 3 or context.shape[-1] != config.text_width or context.shape[0] != latents.shape[0]:
            raise InputError(f"context must be [{latents.shape[0]}, L, {config.text_width}]; got {context.shape}")
        if (not config.rotary or config.learned_positions) and context.shape[1] != config.text_length:
            raise InputError(f"this release takes exactly {config.text_length} text tokens; got {context.shape[1]}")
        if (ofs is None) != (self.ofs_embedding is None):
            raise InputError(
                "this release needs ofs (2.0 in the released pipeline)" if ofs is None else "this release takes no ofs"
            )


def _run_block(tokens: Tokens, x: Float32[Array, "B S D"], block: Block, attend: Attend) -> Float32[Array, "B S D"]:
    return sharding.layer_weights(TRANSFORMER, block)(replace(tokens, x=sharding.split_tokens(x)), attend)


def patchify(x: Float[Array, "B T H W C"], config: TransformerConfig) -> Float[Array, "B t h w P"]:
    """Split latents into patches; a patch is flattened as (pt, ph, pw, C), channels fastest."""
    batch, frames, height, width, channels = x.shape
    pt, p = config.patch_size_t or 1, config.patch_size
    x = x.reshape(batch, frames // pt, pt, height // p, p, width // p, p, channels)
    return x.transpose(0, 1, 3, 5, 2, 4, 6, 7).reshape(batch, frames // pt, height // p, width // p, -1)


def unpatchify(x: Float[Array, "B t h w P"], config: TransformerConfig) -> Float[Array, "B T H W C"]:
    """The inverse of `patchify`."""
    batch, t, h, w, _ = x.shape
    pt, p = config.patch_size_t or 1, config.patch_size
    x = x.reshape(batch, t, h, w, pt, p, p, -1).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return x.reshape(batch, t * pt, h * p, w * p, -1)


def _rotary_base(config: TransformerConfig) -> tuple[int, int] | None:
    """The grid to which positions are resized (1.0 releases); None for 1.5, which counts tokens at any size.

    The reference limits 1.5's positions to its nominal size, which excludes portrait; below that limit, values agree.
    """
    if config.patch_size_t is not None:
        return None
    return config.sample_height // config.patch_size, config.sample_width // config.patch_size
