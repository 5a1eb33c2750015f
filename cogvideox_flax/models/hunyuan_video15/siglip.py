"""SigLIP's vision tower: a transformer over the patches of an image.

Source: SigLIP (arXiv 2303.15343), shape-optimized (arXiv 2305.13035); transformers `SiglipVisionModel`, whose
`last_hidden_state` this is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from cogvideox_flax import sharding
from cogvideox_flax.attention import xla
from cogvideox_flax.config import Config, hf, require
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.arrays import takes_tensors
from cogvideox_flax.nn.layers import MLP, LayerNorm, Linear
from cogvideox_flax.nn.stack import scan_layers, stack

SHARDING: sharding.ParameterRows = (
    (r"blocks\.attn\.[qkv]\.kernel", (None, "stored", "heads")),
    (r"blocks\.attn\.[qkv]\.(bias|scale)", (None, "heads")),
    (r"blocks\.attn\.out\.kernel", (None, "heads", "stored")),
    (r"blocks\.mlp\.up\.kernel", (None, "stored", "hidden")),
    (r"blocks\.mlp\.up\.(bias|scale)", (None, "hidden")),
    (r"blocks\.mlp\.down\.kernel", (None, "hidden", "stored")),
    (r"blocks\.(attn\.out|mlp\.down)\.(bias|scale)", sharding.REPLICATED),
    (r"blocks\.norm[12]\..*", sharding.REPLICATED),
    (r"(patch_embed|norm_out)\..*|position_embedding", sharding.REPLICATED),
)
"""The logical axes of the parameters."""

LINEAR_MAPS = (
    *("blocks.attn.q", "blocks.attn.k", "blocks.attn.v", "blocks.attn.out"),
    *("blocks.mlp.up", "blocks.mlp.down"),
)
"""The linear maps of the blocks, which can be quantized."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Config):
    """The vision tower (transformers `SiglipVisionConfig`). image_size, patch_size: pixels of a side."""

    width: int = hf(1152, "hidden_size")
    layers: int = hf(27, "num_hidden_layers")
    heads: int = hf(16, "num_attention_heads")
    mlp_width: int = hf(4304, "intermediate_size")
    image_size: int = 384
    patch_size: int = 14
    norm_eps: float = hf(1e-6, "layer_norm_eps")
    hf_values: ClassVar[Mapping[str, Any]] = {
        "model_type": "siglip_vision_model",
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads or self.image_size < self.patch_size:
            raise CheckpointError(
                f"image_encoder config: {self.width} channels in {self.heads} heads, images of {self.image_size} "
                f"pixels in patches of {self.patch_size}; expected whole heads, and images of a patch or more"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Also of a whole SigLIP, whose vision tower is `vision_config`."""
        raw = raw.get("vision_config") or raw
        require("image_encoder", raw, hidden_act="gelu_pytorch_tanh", num_channels=3)
        base = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        return cls.named(base | {"image_size": 224, "patch_size": 16} | dict(raw))

    @property
    def grid(self) -> int:
        """Patches of a side; pixels that fill none are left out."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Features of an image."""
        return self.grid**2


class VisionEncoder(nnx.Module):
    """Images to features. The blocks compute in the parameters' dtype, with a float32 residual stream."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = Linear(3 * config.patch_size**2, config.width, rngs=rngs)
        self.position_embedding = nnx.Param(jax.random.normal(rngs.params(), (config.tokens, config.width)))
        self.blocks = stack(config.layers, lambda rngs: Block(config, rngs=rngs), rngs)
        self.norm_out = LayerNorm(config.width, eps=config.norm_eps)

    @takes_tensors
    def __call__(self, images: Float[Array, "B H W 3"]) -> Float[Array, "B I E"]:
        """The features of each patch, in the parameters' dtype.

        Args:
            images: in [-1, 1], of `config.image_size`.

        Raises:
            InputError: another shape.
        """
        side, patch, grid = self.config.image_size, self.config.patch_size, self.config.grid
        if images.shape[1:] != (side, side, 3):
            raise InputError(f"images must be [B, {side}, {side}, 3]; got {images.shape}")
        kept = images[:, : grid * patch, : grid * patch].astype(jnp.float32)
        patches = kept.reshape(-1, grid, patch, grid, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = self.patch_embed(patches.reshape(len(images), grid * grid, -1))
        x = x + self.position_embedding[...].astype(jnp.float32)
        dtype = self.patch_embed.kernel.dtype

        def layer(x: Float32[Array, "B I E"], block: Block) -> tuple[Float32[Array, "B I E"], None]:
            return sharding.layer_weights(SHARDING, block)(x, dtype), None

        return self.norm_out(scan_layers(layer, x, self.blocks), out_dtype=dtype)


class SelfAttention(nnx.Module):
    """Each patch to all patches."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs):
        self.q = Linear(config.width, config.width, rngs=rngs)
        self.k = Linear(config.width, config.width, rngs=rngs)
        self.v = Linear(config.width, config.width, rngs=rngs)
        self.out = Linear(config.width, config.width, rngs=rngs)
        self.heads = config.heads

    def __call__(self, x: Float[Array, "B I E"]) -> Float32[Array, "B I E"]:
        q, k, v = (f(x).reshape(*x.shape[:2], self.heads, -1) for f in (self.q, self.k, self.v))
        # a single image does not divide over data parallelism, and its tokens are few
        return self.out(xla.attend(q, k, v).reshape(x.shape), out_dtype=jnp.float32)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(config.width, eps=config.norm_eps)
        self.attn = SelfAttention(config, rngs=rngs)
        self.norm2 = LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config.width, config.mlp_width, rngs=rngs)

    def __call__(self, x: Float32[Array, "B I E"], dtype: Any) -> Float32[Array, "B I E"]:
        x = x + self.attn(self.norm1(x, out_dtype=dtype))
        return x + self.mlp(self.norm2(x, out_dtype=dtype))
