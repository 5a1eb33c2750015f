"""The text part of Qwen2.5-VL, without its last two layers: RMS norms, grouped queries, rotary positions, SwiGLU.

Source: Qwen2.5-VL (arXiv 2502.13923); transformers `Qwen2_5_VLTextModel`, whose `hidden_states[-3]` this is.
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
from cogvideox_flax.config import Config, hf, require
from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.arrays import takes_tensors
from cogvideox_flax.nn import rope
from cogvideox_flax.nn.layers import Linear, RMSNorm, precision
from cogvideox_flax.nn.stack import scan_layers, stack

CLASS_NAMES = ("Qwen2_5_VLTextModel", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel")

SKIPPED_LAYERS = 2
"""The last layers, which the features do not come from."""

SHARDING: sharding.ParameterRows = (
    # four key heads may be fewer than the devices; attention is a seventh of the weights, and not split
    (r"blocks\.attn\.(q|k|v|out)\.kernel", (None, "stored", None)),
    (r"blocks\.mlp\.(gate|up)\.kernel", (None, "stored", "hidden")),
    (r"blocks\.mlp\.down\.kernel", (None, "hidden", "stored")),
    # scales are of quantized weights, one per output
    (r"blocks\.mlp\.(gate|up)\.scale", (None, "hidden")),
    (r"blocks\.(attn\.(q|k|v|out)|mlp\.down)\.scale", sharding.REPLICATED),
    (r"blocks\.attn\.[qkv]\.bias", sharding.REPLICATED),
    (r"blocks\.norm_(attn|mlp)\.scale", sharding.REPLICATED),
    (r"embedding", (None, "hidden")),
)
"""The logical axes of the parameters."""

LINEAR_MAPS = (
    *("blocks.attn.q", "blocks.attn.k", "blocks.attn.v", "blocks.attn.out"),
    *("blocks.mlp.gate", "blocks.mlp.up", "blocks.mlp.down"),
)
"""The linear maps of the blocks, which can be quantized."""


@dataclass(frozen=True, kw_only=True)
class QwenConfig(Config):
    """The text part of Qwen2.5-VL (transformers `Qwen2_5_VLTextConfig`). layers: those that are run."""

    vocab_size: int = 152064
    width: int = hf(3584, "hidden_size")
    layers: int = hf(26, "num_hidden_layers")
    heads: int = hf(28, "num_attention_heads")
    kv_heads: int = hf(4, "num_key_value_heads")
    mlp_width: int = hf(18944, "intermediate_size")
    rope_theta: float = hf(1e6, None)
    norm_eps: float = hf(1e-6, "rms_norm_eps")
    hf_values: ClassVar[Mapping[str, Any]] = {"model_type": "qwen2_5_vl_text"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise CheckpointError(
                f"text_encoder config: {self.width} channels, {self.heads} heads and {self.kv_heads} heads of keys; "
                "expected an even number of channels per head, and the same number of heads for each of the keys'"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Also of a whole Qwen2.5-VL, whose text part is `text_config`; theta's place differs by version.

        Before transformers 5, `rope_scaling` stands for `rope_parameters`, and wins over it.
        """
        raw = raw.get("text_config") or raw
        key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        positions = raw.get(key) or {}
        rope_type = positions.get("rope_type", positions.get("type", "default"))
        if any(isinstance(value, Mapping) for value in positions.values()):
            rope_type = positions  # one for each kind of layer
        supported = {f"{key}.rope_type": "default", "layer_types": ["full_attention"]}
        found = {
            # of text, the three axes of an image's positions are one
            f"{key}.rope_type": "default" if rope_type == "mrope" else rope_type,
            "layer_types": sorted(set(raw.get("layer_types") or ["full_attention"])),
        }
        require("text_encoder", dict(raw) | found, hidden_act="silu", use_sliding_window=False, **supported)
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if missing := [key for key in needed if key not in raw]:
            raise CheckpointError(f"text_encoder/config.json lacks {missing}; expected a Qwen2.5-VL config")
        if raw["num_hidden_layers"] <= SKIPPED_LAYERS:
            raise CheckpointError(f"text_encoder/config.json has {raw['num_hidden_layers']} layers; expected 3 or more")
        config = cls.named(
            {"rms_norm_eps": 1e-5} | dict(raw),
            layers=raw["num_hidden_layers"] - SKIPPED_LAYERS,
            kv_heads=raw.get("num_key_value_heads", 8) or raw["num_attention_heads"],
            rope_theta=positions.get("rope_theta", raw.get("rope_theta", 1e6)),
        )
        require("text_encoder", {"head_dim": raw.get("head_dim") or config.head_dim}, head_dim=config.head_dim)
        return config

    def to_hf(self) -> dict[str, Any]:
        """The channels of a head that are rotated by time, height and width are the released ones' shares."""
        rotated = self.head_dim // 2
        time, height = rotated // 4, (rotated - rotated // 4) // 2
        sections = [time, height, rotated - time - height]
        positions = {"rope_type": "default", "rope_theta": self.rope_theta, "mrope_section": sections}
        return super().to_hf() | {
            "num_hidden_layers": self.layers + SKIPPED_LAYERS,
            "rope_parameters": positions,
        }

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class QwenEncoder(nnx.Module):
    """Token ids to text features.

    The linear maps multiply in the parameters' dtype and sum in float32; the residual stream, the norms and attention
    are float32.
    """

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.width)))
        self.blocks = stack(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)

    @takes_tensors
    def __call__(self, ids: Int32[Array, "B L"]) -> Float[Array, "B L E"]:
        """Encode prompts, each token from itself and those before it.

        Args:
            ids: 0 to vocab_size - 1. Padding on the right needs no mask: no token of the prompt comes after it. Its
                features differ from the reference's and mean nothing.

        Returns:
            Features in the parameters' dtype, without a final norm.
        """
        dtype, config = self.embedding[...].dtype, self.config
        # text has one position where images have three
        positions = np.arange(ids.shape[1], dtype=np.float32)
        rotary = rope.rotary_of([positions], [config.head_dim], config.rope_theta)

        def layer(x: Float32[Array, "B L E"], block: Block) -> tuple[Float32[Array, "B L E"], None]:
            return sharding.layer_weights(SHARDING, block)(x, rotary, dtype), None

        return scan_layers(layer, self.embedding[...][ids].astype(jnp.float32), self.blocks).astype(dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        self.norm_attn = RMSNorm(config.width, eps=config.norm_eps)
        self.attn = CausalAttention(config, rngs=rngs)
        self.norm_mlp = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(self, x: Float32[Array, "B L E"], rotary: rope.Rotary, dtype: Any) -> Float32[Array, "B L E"]:
        x = x + self.attn(self.norm_attn(x, out_dtype=dtype), rotary)
        return x + self.mlp(self.norm_mlp(x, out_dtype=dtype))


class CausalAttention(nnx.Module):
    """Each group of query heads shares a head of keys and values."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.q = Linear(width, width, rngs=rngs)
        self.k = Linear(width, kv_width, rngs=rngs)
        self.v = Linear(width, kv_width, rngs=rngs)
        self.out = Linear(width, width, bias=False, rngs=rngs)
        self.head_dim = config.head_dim

    def __call__(self, x: Float[Array, "B L E"], rotary: rope.Rotary) -> Float32[Array, "B L E"]:
        batch, length, width = x.shape

        def heads(y: Float32[Array, "B L I"]) -> Float32[Array, "B L N K"]:
            return y.reshape(batch, length, -1, self.head_dim)

        q, k, v = (heads(linear(x, out_dtype=jnp.float32)) for linear in (self.q, self.k, self.v))
        q, k = rope.rotate(q, rotary), rope.rotate(k, rotary)
        q = q.reshape(batch, length, k.shape[2], -1, self.head_dim)
        exact = precision(jnp.float32)
        logits = jnp.einsum("bqgnk,bsgk->bgnqs", q, k, precision=exact) * self.head_dim**-0.5
        causal = jnp.arange(length)[:, None] >= jnp.arange(length)
        p = jax.nn.softmax(jnp.where(causal, logits, -jnp.inf), axis=-1)
        values = jnp.einsum("bgnqs,bsgk->bqgnk", p, v, precision=exact)
        return self.out(values.reshape(batch, length, width).astype(x.dtype), out_dtype=jnp.float32)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.mlp_width, bias=False, rngs=rngs)
        self.up = Linear(config.width, config.mlp_width, bias=False, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B L E"]) -> Float32[Array, "B L E"]:
        hidden = jax.nn.silu(self.gate(x, out_dtype=jnp.float32)) * self.up(x, out_dtype=jnp.float32)
        return self.down(hidden.astype(x.dtype), out_dtype=jnp.float32)
