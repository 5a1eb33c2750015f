"""The encoder half of T5 v1.1: relative positions, RMS norms, a gated feed-forward, no biases.

Source: T5 (arXiv 1910.10683), GLU variants (arXiv 2002.05202); transformers `T5EncoderModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from cogvideox_flax import sharding
from cogvideox_flax.attention.bounds import MASKED
from cogvideox_flax.config import Config, hf, require
from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.arrays import takes_tensors
from cogvideox_flax.nn.layers import RMSNorm, TransposedLinear, precision
from cogvideox_flax.nn.stack import scan_layers, stack

SHARDING: sharding.ParameterRows = (
    (r"blocks\.attn\.[qkv]\.weight", (None, "heads", "stored")),
    (r"blocks\.attn\.out\.weight", (None, "stored", "heads")),
    (r"blocks\.mlp\.(gate|up)\.weight", (None, "hidden", "stored")),
    (r"blocks\.mlp\.down\.weight", (None, "stored", "hidden")),
    # scales are of quantized weights, one per output
    (r"blocks\.attn\.[qkv]\.scale", (None, "heads")),
    (r"blocks\.mlp\.(gate|up)\.scale", (None, "hidden")),
    (r"blocks\.(attn\.out|mlp\.down)\.scale", sharding.REPLICATED),
    (r"position_bias", (None, "heads")),
    (r"embedding", (None, "hidden")),
    (r"blocks\.norm_(attn|mlp)\.scale|norm_out\.scale", sharding.REPLICATED),
)
"""The logical axes of the parameters."""

LINEAR_MAPS = (
    *("blocks.attn.q", "blocks.attn.k", "blocks.attn.v", "blocks.attn.out"),
    *("blocks.mlp.gate", "blocks.mlp.up", "blocks.mlp.down"),
)
"""The linear maps of the blocks, which can be quantized."""


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig(Config):
    """The encoder half of T5 v1.1 (transformers `T5Config`)."""

    vocab_size: int = 32128
    width: int = hf(4096, "d_model")
    layers: int = hf(24, "num_layers")
    heads: int = hf(64, "num_heads")
    head_dim: int = hf(64, "d_kv")
    mlp_width: int = hf(10240, "d_ff")
    position_buckets: int = hf(32, "relative_attention_num_buckets")
    position_max_distance: int = hf(128, "relative_attention_max_distance")
    norm_eps: float = hf(1e-6, "layer_norm_epsilon")
    hf_values: ClassVar[Mapping[str, Any]] = {
        "model_type": "t5",
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position_buckets < 4 or self.position_max_distance <= self.position_buckets // 4:
            raise CheckpointError(
                f"text_encoder config: {self.position_buckets} buckets of distances up to "
                f"{self.position_max_distance}; expected 4 buckets or more, and distances beyond a quarter of them"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        require(
            "text_encoder",
            {"feed_forward_proj": "relu"} | dict(raw),
            model_type="t5",
            feed_forward_proj="gated-gelu",
            dense_act_fn="gelu_new",  # wins over what feed_forward_proj says, as does is_gated_act
            is_gated_act=True,
            is_decoder=False,
        )
        # transformers' T5Config defaults are those of t5-small; a saved file always has these six values.
        needed = ("vocab_size", "d_model", "num_layers", "num_heads", "d_kv", "d_ff")
        missing = [key for key in needed if key not in raw]
        if missing:
            raise CheckpointError(f"text_encoder/config.json lacks {missing}; expected a T5 v1.1 encoder config")
        return cls.named(raw)


class TextEncoder(nnx.Module):
    """Token ids to text features.

    The linear maps multiply in the parameters' dtype and sum in float32; the residual stream, the norms and attention
    are float32. T5's residual stream outgrows float16 and loses detail in bfloat16.
    """

    def __init__(self, config: TextEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.width)))
        self.position_bias = nnx.Param(jax.random.normal(rngs.params(), (config.position_buckets, config.heads)))
        self.blocks = stack(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm_out = RMSNorm(config.width, eps=config.norm_eps)

    @takes_tensors
    def __call__(self, ids: Int32[Array, "B L"], mask: Int32[Array, "B L"] | None = None) -> Float[Array, "B L E"]:
        """Encode prompts.

        Args:
            ids: from the tokenizer, 0 to vocab_size - 1, right-padded with 0.
            mask: 1 for tokens that are attended, 0 for others. None: pads are attended too, as CogVideoX was trained.

        Returns:
            Features in the parameters' dtype.
        """
        dtype = self.embedding[...].dtype
        buckets = position_buckets(ids.shape[1], self.config.position_buckets, self.config.position_max_distance)
        bias = _gather_bias(self.position_bias[...].astype(jnp.float32), buckets)
        if mask is not None:
            bias = bias + jnp.where(mask[:, None, None] != 0, 0, MASKED)

        def layer(x: Float32[Array, "B L E"], block: Block) -> tuple[Float32[Array, "B L E"], None]:
            return sharding.layer_weights(SHARDING, block)(x, bias, dtype), None

        x = scan_layers(layer, self.embedding[...][ids].astype(jnp.float32), self.blocks)
        return self.norm_out(x).astype(dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TextEncoderConfig, *, rngs: nnx.Rngs):
        self.norm_attn = RMSNorm(config.width, eps=config.norm_eps)
        self.attn = SelfAttention(config, rngs=rngs)
        self.norm_mlp = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = GatedMLP(config.width, config.mlp_width, rngs=rngs)

    def __call__(
        self, x: Float32[Array, "B L E"], bias: Float32[Array, "*B N L L"], dtype: jnp.dtype
    ) -> Float32[Array, "B L E"]:
        x = x + self.attn(self.norm_attn(x).astype(dtype), bias)
        return x + self.mlp(self.norm_mlp(x).astype(dtype))


class SelfAttention(nnx.Module):
    """softmax(q k^T + bias) v; without the usual 1 / sqrt(head_dim), which T5 folds into its weights."""

    def __init__(self, config: TextEncoderConfig, *, rngs: nnx.Rngs):
        inner = config.heads * config.head_dim
        self.heads = config.heads
        self.q = TransposedLinear(config.width, inner, rngs=rngs)
        self.k = TransposedLinear(config.width, inner, rngs=rngs)
        self.v = TransposedLinear(config.width, inner, rngs=rngs)
        self.out = TransposedLinear(inner, config.width, rngs=rngs)

    def __call__(self, x: Float[Array, "B L E"], bias: Float32[Array, "*B N L L"]) -> Float32[Array, "B L E"]:
        def heads(y: Float32[Array, "B L I"]) -> Float32[Array, "B N L K"]:
            return y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2)

        # Unscaled logits are large, so rounding q and k matters; at 226 tokens float32 costs little.
        q, k, v = (heads(linear(x, out_dtype=jnp.float32)) for linear in (self.q, self.k, self.v))
        exact = precision(q.dtype)
        # the barriers keep a CPU's matrix library from fusing the softmax, whose exponential is slow there
        logits = jax.lax.optimization_barrier(jnp.matmul(q, k.swapaxes(2, 3), precision=exact)) + bias
        p = jax.lax.optimization_barrier(jax.nn.softmax(logits, axis=-1))
        values = jnp.matmul(p, v, precision=exact).swapaxes(1, 2)
        return self.out(values.reshape(*x.shape[:2], -1).astype(x.dtype), out_dtype=jnp.float32)


class GatedMLP(nnx.Module):
    """down(gelu(gate(x)) * up(x)), with the tanh approximation of GELU."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.gate = TransposedLinear(width, hidden, rngs=rngs)
        self.up = TransposedLinear(width, hidden, rngs=rngs)
        self.down = TransposedLinear(hidden, width, rngs=rngs)

    def __call__(self, x: Float[Array, "B L E"]) -> Float32[Array, "B L E"]:
        gate, up = self.gate(x, out_dtype=jnp.float32), self.up(x, out_dtype=jnp.float32)
        hidden = jax.nn.gelu(gate, approximate=True) * up
        # The product of two activations overflows float16, so with float16 weights `down` multiplies in float32.
        return self.down(hidden if x.dtype == jnp.float16 else hidden.astype(x.dtype), out_dtype=jnp.float32)


def _gather_bias(table: Float32[Array, "rows N"], row: np.ndarray) -> Float32[Array, "N L L"]:
    """table[row] with its last axis first.

    Computed as a product with a one-hot matrix, which is exact: a gather of so many short rows is slow on a CPU.
    """
    one_hot = (jnp.arange(len(table))[:, None] == row.reshape(-1)).astype(jnp.float32)
    return jnp.matmul(table.T, one_hot, precision=precision(jnp.float32)).reshape(-1, *row.shape)


def position_buckets(length: int, num_buckets: int, max_distance: int) -> np.ndarray:
    """The row of the bias table for each (query, key) pair, int32 [length, length].

    Half of the rows are for keys after the query. Of each half, the first half is one row per distance, and the rest
    widen logarithmically up to `max_distance`. The arithmetic is float32 truncated to integers, as in the reference.
    """
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]  # key - query
    half = num_buckets // 2
    exact = half // 2
    distance = abs(offset)
    # float64, then rounded: float32 logarithms differ by platform, and one bit moves a boundary.
    log = np.log(np.maximum(distance, 1) / exact).astype(np.float32)
    wide = exact + (log / np.float32(np.log(max_distance / exact)) * np.float32(half - exact)).astype(np.int32)
    bucket = np.where(distance < exact, distance, np.minimum(wide, half - 1))
    return (bucket + half * (offset > 0)).astype(np.int32)
