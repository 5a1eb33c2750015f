"""diffusers `HunyuanVideo15Transformer3DModel` -> `cogvideox_flax.models.hunyuan_video15.transformer.Transformer`."""

from __future__ import annotations

from cogvideox_flax.conversion.rules import Rule, Table, linear, norm, pointwise
from cogvideox_flax.models.hunyuan_video15.adapters import COMFYUI, TENCENT
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig

LAYER = r"transformer_blocks\.(?P<slot>\d+)\."
REFINER = r"context_embedder\."
REFINER_LAYER = REFINER + r"token_refiner\.refiner_blocks\.(?P<slot>\d+)\."

_TENCENT_BLOCK, _TENCENT_REFINER = "double_blocks.{i}", "txt_in.individual_token_refiner.blocks.{i}"
_ATTENTION = "transformer_blocks.{i}.attn"
OTHER_NAMES = {
    **TENCENT,
    **COMFYUI,
    "cond_type_embedding": "cond_type_embed",
    "byt5_in.layernorm": "context_embedder_2.norm",
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.4": "image_embedder.norm_out",
    **{f"{_TENCENT_REFINER}.norm{n}": f"context_embedder.token_refiner.refiner_blocks.{{i}}.norm{n}" for n in (1, 2)},
    **{
        f"{_TENCENT_BLOCK}.{theirs}": f"{_ATTENTION}.{ours}_{letter}"
        for stream, ours in (("img", "norm"), ("txt", "norm_added"))
        for letter, word in (("q", "query"), ("k", "key"))
        for theirs in (f"{stream}_attn_{letter}_norm", f"{stream}_attn.norm.{word}_norm")
    },
}
"""Names of modules in the authors' model and in ComfyUI's -> diffusers'. Those of the authors are as in diffusers'
`scripts/convert_hunyuan_video1_5_to_diffusers.py`."""


def transformer_table(config: TransformerConfig) -> Table:
    """The mapping table for one architecture."""
    second_time = linear(r"time_embed\.timestep_embedder_r\.linear_([12])", r"next_time_embedding.linear_\1")
    return (
        *pointwise(r"x_embedder\.proj", "patch_embed"),
        *linear(r"time_embed\.timestep_embedder\.linear_([12])", r"time_embedding.linear_\1"),
        *(second_time if config.use_meanflow else ()),
        *_refiner(),
        *norm(r"context_embedder_2\.norm", "glyph_embed.norm"),
        *linear(r"context_embedder_2\.linear_([123])", r"glyph_embed.linear_\1"),
        *norm(r"image_embedder\.norm_(in|out)", r"image_embed.norm_\1"),
        *linear(r"image_embedder\.linear_([12])", r"image_embed.linear_\1"),
        Rule(r"cond_type_embed\.weight", "kind_embedding"),
        *_stream("video", r"norm1", r"to_([qkv])", r"to_out\.0", "ff"),
        *_stream("text", r"norm1_context", r"add_([qkv])_proj", r"to_add_out", "ff_context"),
        Rule(LAYER + r"attn\.norm_([qk])\.weight", r"blocks.video.attn.norm_\2.scale"),
        Rule(LAYER + r"attn\.norm_added_([qk])\.weight", r"blocks.text.attn.norm_\2.scale"),
        *linear(r"norm_out\.linear", "norm_out"),
        *linear(r"proj_out", "proj_out"),
    )


def _refiner() -> Table:
    target = "text_embed.blocks"
    return (
        *linear(REFINER + r"time_text_embed\.timestep_embedder\.linear_([12])", r"text_embed.time_embedding.linear_\1"),
        *linear(REFINER + r"time_text_embed\.text_embedder\.linear_([12])", r"text_embed.mean_embedding.linear_\1"),
        *linear(REFINER + r"proj_in", "text_embed.proj_in"),
        *norm(REFINER_LAYER + r"norm([12])", target + r".norm\2"),
        *linear(REFINER_LAYER + r"attn\.to_([qkv])", target + r".\2"),
        *linear(REFINER_LAYER + r"attn\.to_out\.0", target + ".out"),
        *linear(REFINER_LAYER + r"ff\.net\.0\.proj", target + ".up"),
        *linear(REFINER_LAYER + r"ff\.net\.2", target + ".down"),
        *linear(REFINER_LAYER + r"norm_out\.linear", target + ".gates"),
    )


def _stream(name: str, modulation: str, projection: str, out: str, mlp: str) -> Table:
    target = f"blocks.{name}"
    return (
        *linear(LAYER + modulation + r"\.linear", target + ".modulation"),
        *linear(LAYER + r"attn\." + projection, target + r".attn.\2"),
        *linear(LAYER + r"attn\." + out, target + ".attn.out"),
        *linear(LAYER + mlp + r"\.net\.0\.proj", target + ".mlp.up"),
        *linear(LAYER + mlp + r"\.net\.2", target + ".mlp.down"),
    )
