"""The configs of a CogVideoX transformer and VAE (config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from cogvideox_flax.config import Config, check_compression, hf, require
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.models.tiling import Tiling


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The 3D diffusion transformer (diffusers `CogVideoXTransformer3DModel`).

    The training size: `sample_height`, `sample_width` in latent pixels, `sample_frames` in video frames.
    `add_noise_in_inpaint_model`: an inpainting model was trained on a masked video with some noise.
    """

    layers: int = hf(30, "num_layers")
    heads: int = hf(30, "num_attention_heads")
    head_dim: int = hf(64, "attention_head_dim")
    in_channels: int = 16
    out_channels: int = 16
    patch_size: int = 2
    patch_size_t: int | None = None
    text_width: int = hf(4096, "text_embed_dim")
    text_length: int = hf(226, "max_text_seq_length")
    time_width: int = hf(512, "time_embed_dim")
    ofs_width: int | None = hf(None, "ofs_embed_dim")
    rotary: bool = hf(False, "use_rotary_positional_embeddings")
    learned_positions: bool = hf(False, "use_learned_positional_embeddings")
    patch_bias: bool = True
    attention_bias: bool = True
    sample_height: int = 60
    sample_width: int = 90
    sample_frames: int = 49
    temporal_compression: int = hf(4, "temporal_compression_ratio")
    spatial_interpolation_scale: float = 1.875
    temporal_interpolation_scale: float = 1.0
    norm_eps: float = 1e-5
    add_noise_in_inpaint_model: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        require(
            "transformer",
            raw,
            activation_fn="gelu-approximate",
            timestep_activation_fn="silu",
            flip_sin_to_cos=True,
            freq_shift=0,
            norm_elementwise_affine=True,
        )
        learned = raw.get("use_learned_positional_embeddings", False)
        rotary = raw.get("use_rotary_positional_embeddings", False)
        if learned and not rotary:
            raise CheckpointError(
                "transformer config has use_learned_positional_embeddings without use_rotary_positional_embeddings, "
                "as no release has; expected both or neither, or rotary ones alone"
            )
        # the reference's linear patch embedding (1.5) has a bias regardless of `patch_bias`
        return cls.named(raw, patch_bias=raw.get("patch_bias", True) or raw.get("patch_size_t") is not None)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def patch_volume(self) -> int:
        """Latent pixels in one token."""
        return (self.patch_size_t or 1) * self.patch_size**2

    @property
    def trained_positions(self) -> int:
        """Positions along time, tokens, of a clip of `sample_frames`."""
        latents = (self.sample_frames - 1) // self.temporal_compression + 1
        return -(-latents // (self.patch_size_t or 1))

    @property
    def takes(self) -> Literal["text", "image", "control", "inpaint"] | None:
        """The kind of input beside noise; None: unknown.

        Image-to-video and control models have as many channels; but only the image-to-video releases have learned
        positions beside the rotary ones (1.0) or ofs (1.5). Inpainting models have one channel more, for the mask.
        """
        if self.in_channels == self.out_channels:
            return "text"
        if self.in_channels == 2 * self.out_channels + 1:
            return "inpaint"
        if self.in_channels != 2 * self.out_channels:
            return None
        return "image" if self.learned_positions or self.ofs_width is not None else "control"

    def architecture(self) -> Self:
        """The `sample_*` fields do not count: the 1.5 configs were re-uploaded with another nominal size."""
        unused = {"add_noise_in_inpaint_model": False}  # by all releases
        return replace(self, sample_height=1, sample_width=1, sample_frames=1, **unused)

    def check_dtype(self, dtype: str | None) -> None:
        """Refuse float16 for the rotary releases (5b and 1.5): trained in bfloat16, they overflow in float16."""
        if self.rotary and dtype == "float16":
            raise InputError(
                "float16 gives NaN (black video) with CogVideoX-5b and 1.5, which were trained in bfloat16; "
                "use bfloat16 or float32"
            )

    @property
    def learned_shape(self) -> tuple[int, int]:
        """(positions, width) of the stored table of a `learned_positions` model: text, then video at sample size."""
        frames = (self.sample_frames - 1) // self.temporal_compression + 1
        grid = (self.sample_height // self.patch_size) * (self.sample_width // self.patch_size)
        return self.text_length + frames * grid, self.width


@dataclass(frozen=True, kw_only=True)
class VAEConfig(Config):
    """The causal video VAE (diffusers `AutoencoderKLCogVideoX`). `sample_height`, `sample_width` are in pixels."""

    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 16
    block_channels: tuple[int, ...] = hf((128, 256, 256, 512), "block_out_channels")
    layers_per_block: int = 3
    norm_groups: int = hf(32, "norm_num_groups")
    norm_eps: float = 1e-6
    temporal_compression: int = hf(4, "temporal_compression_ratio")
    scaling_factor: float = 1.15258426
    invert_scale_latents: bool = False
    sample_height: int = 480
    sample_width: int = 720

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compression("temporal", self.temporal_compression, 2 ** (len(self.block_channels) - 1))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        require("vae", raw, act_fn="silu", use_quant_conv=False, use_post_quant_conv=False)
        channels = tuple(raw.get("block_out_channels", (128, 256, 256, 512)))
        for key, kind in {"down_block_types": "CogVideoXDownBlock3D", "up_block_types": "CogVideoXUpBlock3D"}.items():
            if list(raw.get(key, [kind] * len(channels))) != [kind] * len(channels):
                raise CheckpointError(f"vae config: {key} is {raw[key]}; expected {kind} {len(channels)} times")
        ratio = raw.get("temporal_compression_ratio", 4)
        ratio = int(ratio) if isinstance(ratio, float) and ratio.is_integer() else ratio
        return cls.named(raw, block_channels=channels, temporal_compression=ratio)

    def to_hf(self) -> dict[str, Any]:
        levels = len(self.block_channels)
        blocks = {f"{way}_block_types": [f"CogVideoX{way.title()}Block3D"] * levels for way in ("down", "up")}
        return super().to_hf() | blocks

    @property
    def temporal_levels(self) -> int:
        """The number of first blocks that halve (encoder) or double (decoder) the frame count."""
        return self.temporal_compression.bit_length() - 1

    @property
    def tiling(self) -> Tiling:
        """The reference's default: tiles of half the size of training."""
        return Tiling(self.sample_height // 2, self.sample_width // 2, 1 / 6, 1 / 5)

    @property
    def spatial_compression(self) -> int:
        return 2 ** (len(self.block_channels) - 1)
