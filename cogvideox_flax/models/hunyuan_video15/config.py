"""The configs of HunyuanVideo-1.5's transformer and VAE (config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from cogvideox_flax.config import DEFAULT_MAX, Config, check_compression, hf, require
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.models.tiling import Tiling


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The dual-stream transformer (diffusers `HunyuanVideo15Transformer3DModel`).

    in_channels: of noisy latents, of the condition's latents and of their mask, side by side.
    refiner_layers: blocks that refine the text before the others.
    text_width, glyph_width, image_width: of the features of Qwen2.5-VL, of ByT5 and of SigLIP.
    rope_axes: channels of a head that are rotated by the position in time, height and width.
    target_size: side in pixels of a square as large as the videos of the training.
    use_meanflow: the model also takes the timestep to which a step leads (step-distilled checkpoints).
    """

    layers: int = hf(54, "num_layers")
    heads: int = hf(16, "num_attention_heads")
    head_dim: int = hf(128, "attention_head_dim")
    refiner_layers: int = hf(2, "num_refiner_layers")
    mlp_ratio: float = 4.0
    in_channels: int = 65
    out_channels: int = 32
    text_width: int = hf(3584, "text_embed_dim")
    glyph_width: int = hf(1472, "text_embed_2_dim")
    image_width: int = hf(1152, "image_embed_dim")
    rope_theta: float = 256.0
    rope_axes: tuple[int, ...] = hf((16, 56, 56), "rope_axes_dim")
    target_size: int = 640
    use_meanflow: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = self.rope_axes
        if len(axes) != 3 or sum(axes) != self.head_dim or any(n % 2 for n in axes):
            raise CheckpointError(
                f"transformer config: rope_axes_dim is {list(axes)}; expected three even numbers that add up to the "
                f"head size, {self.head_dim}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        require("transformer", raw, patch_size=1, patch_size_t=1, qk_norm="rms_norm")
        return cls.named(raw, rope_axes=tuple(raw.get("rope_axes_dim", (16, 56, 56))))

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def architecture(self) -> Self:
        """Trained at another size or not, the weights are those of one architecture."""
        return replace(self, target_size=1)

    def check_dtype(self, dtype: str | None) -> None:
        """Refuse float16: the model was trained in bfloat16."""
        if dtype == "float16":
            raise InputError("HunyuanVideo-1.5 was trained in bfloat16; use bfloat16 or float32")


@dataclass(frozen=True, kw_only=True)
class VAEConfig(Config):
    """The causal video VAE (diffusers `AutoencoderKLHunyuanVideo15`).

    block_channels: of the encoder's levels, from the video to the latents; the decoder has them in reverse.
    """

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 32
    block_channels: tuple[int, ...] = hf((128, 256, 512, 1024, 1024), "block_out_channels")
    layers_per_block: int = 2
    spatial_compression: int = hf(16, "spatial_compression_ratio")
    temporal_compression: int = hf(4, "temporal_compression_ratio")
    scaling_factor: float = 1.03682

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compression("spatial", self.spatial_compression, DEFAULT_MAX)
        check_compression("temporal", self.temporal_compression, self.spatial_compression)
        if len(self.block_channels) != self.spatial_levels + 1:
            raise CheckpointError(
                f"vae config: {len(self.block_channels)} levels for {self.spatial_compression}x compression; "
                f"expected {self.spatial_levels + 1}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        require("vae", raw, downsample_match_channel=True, upsample_match_channel=True)
        return cls.named(raw, block_channels=tuple(raw.get("block_out_channels", (128, 256, 512, 1024, 1024))))

    @property
    def tiling(self) -> Tiling:
        """The reference's tiles."""
        return Tiling(256, 256, 0.25, 0.25)

    @property
    def spatial_levels(self) -> int:
        """The number of the encoder's first levels that halve height and width."""
        return self.spatial_compression.bit_length() - 1

    @property
    def temporal_levels(self) -> int:
        """The number of these, the last ones, that halve the frames too; of the decoder, the first double them."""
        return self.temporal_compression.bit_length() - 1
