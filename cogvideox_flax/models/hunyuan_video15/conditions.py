"""The tokens beside the video that the transformer attends to: of the text, its quoted parts, and an image.

As in the blocks, linear maps compute in the weights' dtype, and the residual stream and the results are float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, Num

from cogvideox_flax import sharding
from cogvideox_flax.attention import xla
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
    # the n-th valid token, from 0, stands after all tokens that have at most n valid ones up to and including them
    place = (jnp.cumsum(valid, 1)[:, :, None] <= jnp.arange(x.shape[1])).sum(1)
    take = partial(jnp.take, axis=0, mode="fill", fill_value=0)  # places past the end: zeros
    return sharding.constrain(jax.vmap(take)(x, place), "batch", None, None), count


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
        dtype = self.q.kernel.dtype
        y = self.norm1(x, out_dtype=dtype)
        q, k, v = (f(y).reshape(*y.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        # few tokens, whole on every device: neither a kernel nor sequence parallelism would pay
        attended = xla.attend(q, k, v, count)
        x = x + gate_attn * self.out(attended.reshape(x.shape), out_dtype=jnp.float32)
        hidden = jax.nn.silu(self.up(self.norm2(x, out_dtype=dtype)))
        return x + gate_mlp * self.down(hidden, out_dtype=jnp.float32)


class TextRefiner(nnx.Module):
    """Features of the text to tokens, refined by blocks that know the time and the mean of the text."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.time_embedding = TimestepMLP(TIME_WIDTH, config.width, rngs=rngs)
        self.mean_embedding = TimestepMLP(config.text_width, config.width, rngs=rngs)
        self.proj_in = Linear(config.text_width, config.width, rngs=rngs)
        self.blocks = stack(config.refiner_layers, partial(RefinerBlock, config), rngs)

    def __call__(
        self, text: Float[Array, "B L E"], count: Int32[Array, " B"], timestep: Float32[Array, " B"]
    ) -> Float32[Array, "B L D"]:
        """text: valid tokens first, `count` of them, then zeros."""
        mean = text.astype(jnp.float32).sum(1) / count[:, None]
        emb = self.time_embedding(sinusoid(timestep, TIME_WIDTH)) + self.mean_embedding(mean)
        x = self.proj_in(text.astype(self.proj_in.kernel.dtype), out_dtype=jnp.float32)
        return scan_layers(lambda x, block: (block(x, emb, count), None), x, self.blocks)


class GlyphProjection(nnx.Module):
    """ByT5's features to tokens: norm, then three linear maps with GELU between them."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norm = LayerNorm(config.glyph_width, eps=EPS)
        self.linear_1 = Linear(config.glyph_width, GLYPH_HIDDEN, rngs=rngs)
        self.linear_2 = Linear(GLYPH_HIDDEN, GLYPH_HIDDEN, rngs=rngs)
        self.linear_3 = Linear(GLYPH_HIDDEN, config.width, rngs=rngs)

    def __call__(self, x: Float[Array, "B M E"]) -> Float32[Array, "B M D"]:
        gelu = partial(jax.nn.gelu, approximate=False)
        x = self.norm(x, out_dtype=self.linear_1.kernel.dtype)
        return self.linear_3(gelu(self.linear_2(gelu(self.linear_1(x)))), out_dtype=jnp.float32)


class ImageProjection(nnx.Module):
    """SigLIP's features to tokens: two linear maps with GELU between them, and a norm on each side."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.norm_in = LayerNorm(config.image_width, eps=EPS)
        self.linear_1 = Linear(config.image_width, config.image_width, rngs=rngs)
        self.linear_2 = Linear(config.image_width, config.width, rngs=rngs)
        self.norm_out = LayerNorm(config.width, eps=EPS)

    def __call__(self, x: Float[Array, "B I E"]) -> Float32[Array, "B I D"]:
        x = self.norm_in(x, out_dtype=self.linear_1.kernel.dtype)
        x = self.linear_2(jax.nn.gelu(self.linear_1(x), approximate=False), out_dtype=jnp.float32)
        return self.norm_out(x)
