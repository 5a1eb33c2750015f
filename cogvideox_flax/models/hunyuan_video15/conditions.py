"""What the transformer attends to beside the video: tokens of the text, of its quoted parts, and of an image."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Num

from cogvideox_flax import attention
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig
from cogvideox_flax.nn.layers import LayerNorm, Linear, TimestepMLP, sinusoid
from cogvideox_flax.nn.stack import scan_layers, stack

TIME_WIDTH = 256
"""Sinusoids of a timestep."""

GLYPH_HIDDEN = 2048
"""Hidden width of the glyph projection, whatever the config says."""

REFINER_MLP = 4
"""MLP ratio of the refiner, whatever the config says."""

REFINER_EPS, EPS = 1e-6, 1e-5
"""Of the refiner's layer norms, and of those of the projections."""

TEXT, GLYPHS, IMAGE = range(3)
"""Rows of the table of kinds."""


def valid_first(x: Float[Array, "B L D"], mask: Num[Array, "B L"]) -> tuple[Float[Array, "B L D"], Int32[Array, " B"]]:
    """Tokens whose mask is not 0 in front, in order, then zeros; and how many they are."""
    valid = mask != 0
    count = valid.sum(1, dtype=jnp.int32)
    # padding is dropped: its place is past the end
    place = jnp.where(valid, jnp.cumsum(valid, 1) - 1, x.shape[1])

    def put(x: Float[Array, "L D"], place: Int32[Array, " L"]) -> Float[Array, "L D"]:
        return jnp.zeros_like(x).at[place].set(x, mode="drop", unique_indices=True)

    return jax.vmap(put)(x, place), count


class RefinerBlock(nnx.Module):
    """x += gate * attention(norm(x)); x += gate * mlp(norm(x)); the gates depend on time and text alone."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.norm1 = LayerNorm(width, eps=REFINER_EPS)
        self.q = Linear(width, width, rngs=rngs)
        self.k = Linear(width, width, rngs=rngs)
        self.v = Linear(width, width, rngs=rngs)
        self.out = Linear(width, width, rngs=rngs)
        self.norm2 = LayerNorm(width, eps=REFINER_EPS)
        self.up = Linear(width, REFINER_MLP * width, rngs=rngs)
        self.down = Linear(REFINER_MLP * width, width, rngs=rngs)
        self.gates = Linear(width, 2 * width, rngs=rngs)
        self.heads = config.heads

    def __call__(
        self, x: Float32[Array, "B L D"], emb: Float32[Array, "B D"], count: Int32[Array, " B"]
    ) -> Float32[Array, "B L D"]:
        """count: how many tokens, the first ones, are attended."""
        gate_attn, gate_mlp = jnp.split(self.gates(jax.nn.silu(emb))[:, None], 2, -1)
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*y.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        # a kernel would take a TPU's compiler longer than XLA takes for so few tokens
        attended = attention.attend(q, k, v, kv_len=count, backend="xla")
        x = x + gate_attn * self.out(attended.reshape(x.shape))
        return x + gate_mlp * self.down(jax.nn.silu(self.up(self.norm2(x))))


class TextRefiner(nnx.Module):
    """Features of the text to tokens, refined by blocks that know the time and the mean of the text."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.time_embedding = TimestepMLP(TIME_WIDTH, config.width, rngs=rngs)
        self.mean_embedding = TimestepMLP(config.text_width, config.width, rngs=rngs)
        self.proj_in = Linear(config.text_width, config.width, rngs=rngs)
        self.blocks = stack(config.refiner_layers, partial(RefinerBlock, config), rngs)

    def __call__(
        self, text: Float32[Array, "B L E"], count: Int32[Array, " B"], timestep: Float32[Array, " B"]
    ) -> Float32[Array, "B L D"]:
        """text: valid tokens first, `count` of them, then zeros."""
        mean = text.sum(1) / count[:, None]
        emb = self.time_embedding(sinusoid(timestep, TIME_WIDTH)) + self.mean_embedding(mean)
        return scan_layers(lambda x, block: (block(x, emb, count), None), self.proj_in(text), self.blocks)


class GlyphProjection(nnx.Module):
    """ByT5's features to tokens: norm, then three linear maps with GELU between them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(config.glyph_width, eps=EPS)
        self.linear_1 = Linear(config.glyph_width, GLYPH_HIDDEN, rngs=rngs)
        self.linear_2 = Linear(GLYPH_HIDDEN, GLYPH_HIDDEN, rngs=rngs)
        self.linear_3 = Linear(GLYPH_HIDDEN, config.width, rngs=rngs)

    def __call__(self, x: Float32[Array, "B M E"]) -> Float32[Array, "B M D"]:
        gelu = partial(jax.nn.gelu, approximate=False)
        return self.linear_3(gelu(self.linear_2(gelu(self.linear_1(self.norm(x))))))


class ImageProjection(nnx.Module):
    """SigLIP's features to tokens: two linear maps with GELU between them, and a norm on each side."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norm_in = LayerNorm(config.image_width, eps=EPS)
        self.linear_1 = Linear(config.image_width, config.image_width, rngs=rngs)
        self.linear_2 = Linear(config.image_width, config.width, rngs=rngs)
        self.norm_out = LayerNorm(config.width, eps=EPS)

    def __call__(self, x: Float32[Array, "B I E"]) -> Float32[Array, "B I D"]:
        return self.norm_out(self.linear_2(jax.nn.gelu(self.linear_1(self.norm_in(x)), approximate=False)))
