"""transformers' `Qwen2_5_VLTextModel` and `SiglipVisionModel` -> the encoders of HunyuanVideo-1.5."""

from __future__ import annotations

import numpy as np

from cogvideox_flax.conversion.rules import Ignore, Rule, Table, linear, norm
from cogvideox_flax.models.hunyuan_video15.qwen import SKIPPED_LAYERS, QwenConfig
from cogvideox_flax.models.hunyuan_video15.siglip import VisionConfig

TEXT = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"
"""Prefixes of the text part: of it alone, or within a whole Qwen2.5-VL, by version."""

VISION = r"(?:vision_model\.)?"
"""transformers 5 leaves it out."""


def qwen_table(config: QwenConfig) -> Table:
    """The mapping of every tensor of Qwen2.5-VL; all but the layers that are run is ignored."""
    layer = TEXT + r"layers\.(?P<slot>\d+)\."
    last = "|".join(str(config.layers + i) for i in range(SKIPPED_LAYERS))
    return (
        Ignore(TEXT + rf"layers\.({last})\..*", "the features come from before the last layers"),
        Ignore(TEXT + r"norm\.weight", "the features come from before the last norm"),
        Ignore(r"lm_head\..*", "nothing is generated"),
        Ignore(r"(?:model\.)?visual\..*", "only text is read"),
        Rule(TEXT + r"embed_tokens\.weight", "embedding"),
        Rule(layer + r"input_layernorm\.weight", "blocks.norm_attn.scale"),
        *linear(layer + r"self_attn\.([qkv])_proj", r"blocks.attn.\2"),
        *linear(layer + r"self_attn\.o_proj", "blocks.attn.out", bias=False),
        Rule(layer + r"post_attention_layernorm\.weight", "blocks.norm_mlp.scale"),
        *linear(layer + r"mlp\.(gate|up|down)_proj", r"blocks.mlp.\2", bias=False),
    )


def siglip_table(config: VisionConfig) -> Table:
    """The mapping of every tensor of a SigLIP vision tower."""
    side = config.patch_size
    layer = VISION + r"encoder\.layers\.(?P<slot>\d+)\."

    def patches(weight: np.ndarray) -> np.ndarray:  # [D, 3, ph, pw] -> [ph * pw * 3, D]
        return weight.transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])

    return (
        Ignore(VISION + r"head\..*", "the features are those of the patches"),
        Rule(
            VISION + r"embeddings\.patch_embedding\.weight",
            "patch_embed.kernel",
            patches,
            shape=lambda shape: (shape[1], 3, side, side),
        ),
        Rule(VISION + r"embeddings\.patch_embedding\.bias", "patch_embed.bias"),
        Rule(VISION + r"embeddings\.position_embedding\.weight", "position_embedding"),
        *norm(layer + r"layer_norm([12])", r"blocks.norm\2"),
        *linear(layer + r"self_attn\.([qkv])_proj", r"blocks.attn.\2"),
        *linear(layer + r"self_attn\.out_proj", "blocks.attn.out"),
        *linear(layer + r"mlp\.fc1", "blocks.mlp.up"),
        *linear(layer + r"mlp\.fc2", "blocks.mlp.down"),
        *norm(VISION + r"post_layernorm", "norm_out"),
    )
