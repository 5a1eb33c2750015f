"""The 3D diffusion transformer of HunyuanVideo-1.5: two streams, video and text, that attend to each other.

Each block has its own weights for the tokens of the video and for those of the prompt (and image), and one attention
over both. Source: HunyuanVideo 1.5 (arXiv 2511.18870); diffusers `HunyuanVideo15Transformer3DModel` defines the
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Num

from cogvideox_flax import attention, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.arrays import takes_tensors
from cogvideox_flax.models.hunyuan_video15.conditions import (
    GLYPHS,
    IMAGE,
    TEXT,
    TIME_WIDTH,
    GlyphProjection,
    ImageProjection,
    TextRefiner,
    valid_first,
)
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig
from cogvideox_flax.models.hunyuan_video15.sharding import TRANSFORMER
from cogvideox_flax.nn import rope
from cogvideox_flax.nn.adaln import modulated_norm
from cogvideox_flax.nn.component import Component
from cogvideox_flax.nn.layers import MLP, Linear, RMSNorm, TimestepMLP, per_sample, sinusoid, standardize
from cogvideox_flax.nn.qk_norm import qk_norm
from cogvideox_flax.nn.remat import Remat, recomputed
from cogvideox_flax.nn.stack import scan_attended, scan_layers, stack

EPS = 1e-6

Attend = Callable[..., tuple[Float[Array, "B S N K"], Float[Array, "B L N K"]]]
"""attend(q, k, v, joint, *, kv_len, joint_len), and tiles where attention is sparse, as `attention.attend_jointly`."""

Streams = tuple[Float32[Array, "B S D"], Float32[Array, "B L D"]]
"""Tokens of the video, and of the prompt."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The output of `Transformer.embed`, which the blocks update and the head reads.

    x: the residual streams: of the video, then padding; and of image, glyphs and text, then zeros.
    emb: the conditioning vector, from the timestep.
    text_length: how many tokens of the second stream are attended.
    rotary: cos and sin of the video tokens.
    grid: (frames, rows, columns) of the video tokens.
    dtype: in which the blocks compute.
    sparse: which tiles of them attend to which; None: all.
    """

    x: Streams
    emb: Float32[Array, "B D"]
    text_length: Int32[Array, " B"]
    rotary: rope.Rotary
    grid: tuple[int, int, int] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    sparse: attention.SparseTiles | None = field(default=None, metadata={"static": True})

    @property
    def length(self) -> int:
        """Number of video tokens that are not padding."""
        return math.prod(self.grid)

    @property
    def video(self) -> Float32[Array, "B n D"]:
        """The video's residual stream."""
        return self.x[0][:, : self.length]


class Attention(nnx.Module):
    """One stream's part of the joint attention: RMS-normed queries and keys."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.q = Linear(config.width, config.width, rngs=rngs)
        self.k = Linear(config.width, config.width, rngs=rngs)
        self.v = Linear(config.width, config.width, rngs=rngs)
        self.norm_q = RMSNorm(config.head_dim, eps=EPS)
        self.norm_k = RMSNorm(config.head_dim, eps=EPS)
        self.out = Linear(config.width, config.width, rngs=rngs)

    def project(self, x: Float[Array, "B S D"], rotary: rope.Rotary | None) -> sharding.JointQKV:
        """Queries, keys and values [B, S, N, K]; rotary: of the video alone."""
        # barriers write them to memory in x's dtype, since the norms read q and k more than once; a single one would
        # let no exchange over sp begin before the last product has ended
        q, k, v = map(jax.lax.optimization_barrier, (self.q(x), self.k(x), self.v(x)))
        q, k = qk_norm(q, self.norm_q, rotary), qk_norm(k, self.norm_k, rotary)
        return q, k, v.reshape(q.shape)


class Stream(nnx.Module):
    """The weights of a block for one of the two streams.

    The residual stream x is float32 for every dtype of the weights, as in CogVideoX's transformer.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.modulation = Linear(config.width, 6 * config.width, zero=True, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.mlp = MLP(config.width, int(config.width * config.mlp_ratio), rngs=rngs)

    def modulate(self, emb: Float32[Array, "B D"]) -> list[Float32[Array, "B 1 D"]]:
        """Shift, scale and gate of the attention, then of the MLP."""
        return jnp.split(self.modulation(jax.nn.silu(emb))[:, None], 6, -1)

    def norm(
        self, x: Float32[Array, "B S D"], shift: Float32[Array, "B 1 D"], scale: Float32[Array, "B 1 D"], *, dtype: Any
    ) -> Float[Array, "B S D"]:
        """The modulated layer norm, in this dtype."""
        return modulated_norm(x, 1 + scale, shift, eps=EPS, dtype=dtype)

    def finish(
        self, x: Float32[Array, "B S D"], attended: Float[Array, "B S N K"], modulation: list[Float32[Array, "B 1 D"]]
    ) -> Float32[Array, "B S D"]:
        """x with the result of the attention, then with that of the MLP."""
        _, _, gate, *of_mlp, gate_mlp = modulation
        x = x + gate * self.attn.out(attended.reshape(x.shape), out_dtype=jnp.float32)
        return x + gate_mlp * self.mlp(self.norm(x, *of_mlp, dtype=attended.dtype))


class Block(nnx.Module):
    """Both streams: x += gate * attention(norm(x)), over both; x += gate * mlp(norm(x)), each for itself."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.video = Stream(config, rngs=rngs)
        self.text = Stream(config, rngs=rngs)

    def __call__(self, tokens: Tokens, attend: Attend) -> Streams:
        video, text = tokens.x
        of_video, of_text = self.video.modulate(tokens.emb), self.text.modulate(tokens.emb)
        q, k, v = self.video.attn.project(self.video.norm(video, *of_video[:2], dtype=tokens.dtype), tokens.rotary)
        joint = self.text.attn.project(self.text.norm(text, *of_text[:2], dtype=tokens.dtype), None)
        lengths = {"kv_len": tokens.length, "joint_len": tokens.text_length}
        tiles: dict[str, Any] = {} if tokens.sparse is None else {"tiles": (tokens.sparse, tokens.grid)}
        attended, joint_attended = attend(q, k, v, joint, **lengths, **tiles)
        return self.video.finish(video, attended, of_video), self.text.finish(text, joint_attended, of_text)


class Transformer(Component):
    """Predicts the velocity from noisy latents, a prompt, an image and time.

    The blocks compute in the weights' dtype; embeddings, time and output, computed once per call, are float32.

    Attributes:
        attend: the attention function, static in the pytree; None is `attention.attend_jointly`.
    """

    def __init__(self, config: TransformerConfig, *, attend: Attend | None = None, rngs: nnx.Rngs):
        self.config = config
        self.attend = attend
        self.patch_embed = Linear(config.in_channels, config.width, rngs=rngs)
        self.text_embed = TextRefiner(config, rngs=rngs)
        self.glyph_embed = GlyphProjection(config, rngs=rngs)
        self.image_embed = ImageProjection(config, rngs=rngs)
        self.kind_embedding = nnx.Param(jax.random.normal(rngs.params(), (3, config.width)))
        self.time_embedding = TimestepMLP(TIME_WIDTH, config.width, rngs=rngs)
        self.next_time_embedding = TimestepMLP(TIME_WIDTH, config.width, rngs=rngs) if config.use_meanflow else None
        self.blocks = stack(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm_out = Linear(config.width, 2 * config.width, zero=True, rngs=rngs)
        self.proj_out = Linear(config.width, config.out_channels, zero=True, rngs=rngs)

    @takes_tensors
    def __call__(
        self,
        latents: Float[Array, "B T H W C"],
        timestep: Num[Array, "*B"] | float,
        *,
        remat: Remat = False,
        **inputs: Any,
    ) -> Float32[Array, "B T H W out"]:
        """One evaluation: `embed`, all blocks, `head`.

        Args:
            latents, timestep, inputs: as for `embed`.
            remat: for training: what is recomputed in the backward pass, see `nn.remat`; True: each block.

        Returns:
            The velocity, float32.

        Raises:
            InputError: as for `embed`.
        """
        return self.head(self.run_blocks(self.embed(latents, timestep, **inputs), remat=remat))

    @takes_tensors
    def embed(
        self,
        latents: Float[Array, "B T H W C"],
        timestep: Num[Array, "*B"] | float,
        *,
        text: Float[Array, "B L E"],
        text_mask: Num[Array, "B L"],
        glyphs: Float[Array, "B M E2"],
        glyph_mask: Num[Array, "B M"],
        image: Float[Array, "B I E3"] | None = None,
        image_mask: Num[Array, " B"] | None = None,
        next_timestep: Num[Array, "*B"] | float | None = None,
        sparse: attention.SparseTiles | None = None,
    ) -> Tokens:
        """Tokens of both streams, and the conditioning vector.

        Args:
            latents: noisy latents, those of the condition, and its mask, side by side.
            timestep: 0 to 1000, not rounded; one for all or one per batch element.
            text: features of the prompt; those whose mask is 0 are not attended. At least one is, in every row.
            glyphs: features of the prompt's quoted parts, in the same way; a row may have none.
            image: features of the first frame; None for text-to-video.
            image_mask: 0 for those that are not attended; None: all are.
            next_timestep: to which the step leads, for checkpoints with `use_meanflow`; None leaves it out.
            sparse: which tiles of the video attend to which; None: all.

        Raises:
            InputError: a shape that the model does not support, or `next_timestep` for a model that takes none.
        """
        config, batch = self.config, latents.shape[0]
        self._check(latents, text, glyphs, image, next_timestep)
        t = per_sample(timestep, batch)
        emb = self.time_embedding(sinusoid(t, TIME_WIDTH))
        if self.next_time_embedding is not None and next_timestep is not None:
            emb = emb + self.next_time_embedding(sinusoid(per_sample(next_timestep, batch), TIME_WIDTH))

        kinds = self.kind_embedding[...].astype(jnp.float32)
        text, count = valid_first(text, text_mask)
        parts = [
            (self.glyph_embed(glyphs) + kinds[GLYPHS], glyph_mask != 0),
            (self.text_embed(text, count, t) + kinds[TEXT], jnp.arange(text.shape[1]) < count[:, None]),
        ]
        if image is not None:
            tokens = self.image_embed(image) + kinds[IMAGE]
            present = jnp.ones(tokens.shape[:2], bool)
            parts.insert(0, (tokens, present if image_mask is None else present & (image_mask != 0)[:, None]))
        prompt, text_length = valid_first(*(jnp.concatenate(part, 1) for part in zip(*parts, strict=True)))

        _, frames, rows, columns, _ = latents.shape
        grid = (frames, rows, columns)
        patches = latents.astype(jnp.float32).reshape(batch, -1, latents.shape[-1])
        video = self.patch_embed(sharding.split_tokens(sharding.pad_tokens(patches)))
        axes = rope.axis_positions(grid, None)
        rotary = rope.rotary_of(axes, config.rope_axes, config.rope_theta)
        rotary = rope.pad_rotary(rotary, before=0, after=video.shape[1] - math.prod(grid))
        of_all = {"rotary": rotary, "grid": grid, "sparse": sparse, "dtype": self.proj_out.kernel.dtype}
        return Tokens(x=(video, prompt), emb=emb, text_length=text_length, **of_all)

    def run_blocks(self, tokens: Tokens, *, start: int = 0, stop: int | None = None, remat: Remat = False) -> Tokens:
        """Blocks in one scan: all of them, or those of a slice (start=-1 is the last); remat as for `__call__`."""

        def layer(x: Streams, block: Block) -> tuple[Streams, None]:
            return _run_block(tokens, x, block, self.attend or attention.attend_jointly), None

        return replace(tokens, x=scan_layers(recomputed(layer, remat), tokens.x, self.blocks, start, stop))

    def run_attended(self, tokens: Tokens, attended: Any = None) -> tuple[Tokens, Any]:
        """All blocks, and what their attentions return; or with that of another step in their place.

        attended: of both streams, [layers, B, S, D], from an earlier call; None is returned with it.
        """
        attend = self.attend or attention.attend_jointly
        x, attended = scan_attended(partial(_run_block, tokens), attend, tokens.x, self.blocks, attended)
        return replace(tokens, x=x), attended

    def teacache_signal(self, tokens: Tokens) -> Float32[Array, "B S D"]:
        """The video's input of the first block's attention: normed and modulated by the timestep."""
        first = self.blocks[0] if isinstance(self.blocks, nnx.List) else jax.tree.map(lambda x: x[0], self.blocks)
        video = sharding.layer_weights(TRANSFORMER, first).video
        y = video.norm(tokens.x[0], *video.modulate(tokens.emb)[:2], dtype=tokens.dtype)
        return y.astype(jnp.float32)[:, : tokens.length]

    def head(self, tokens: Tokens) -> Float32[Array, "B T H W out"]:
        """The velocity of the video tokens."""
        video, _ = tokens.x
        scale, shift = jnp.split(self.norm_out(jax.nn.silu(tokens.emb))[:, None], 2, -1)
        x = self.proj_out(standardize(video, EPS) * (1 + scale) + shift)
        # padding is removed after the projection, when tokens are narrow again
        x = sharding.constrain(sharding.split_tokens(x), "batch", None, None)[:, : tokens.length]
        return x.reshape(x.shape[0], *tokens.grid, -1)

    def _check(self, latents: Array, text: Array, glyphs: Array, image: Array | None, next_timestep: object) -> None:
        config, batch = self.config, latents.shape[0]
        if latents.ndim != 5 or latents.shape[-1] != config.in_channels:
            raise InputError(f"latents must be [B, T, H, W, {config.in_channels}]; got {latents.shape}")
        given = [("text", text, config.text_width), ("glyphs", glyphs, config.glyph_width)]
        given += [] if image is None else [("image", image, config.image_width)]
        for name, x, width in given:
            if x.ndim != 3 or (x.shape[0], x.shape[2]) != (batch, width):
                raise InputError(f"{name} must be [{batch}, tokens, {width}]; got {x.shape}")
        if next_timestep is not None and not config.use_meanflow:
            raise InputError("this checkpoint takes one timestep; leave next_timestep out")


def _run_block(tokens: Tokens, x: Streams, block: Block, attend: Attend) -> Streams:
    block, (video, text) = sharding.layer_weights(TRANSFORMER, block), x
    x = sharding.split_tokens(video), sharding.constrain(text, "batch", None, None)
    return block(replace(tokens, x=x), attend)
