"""diffusers `CogVideoXTransformer3DModel` -> `cogvideox_flax.models.cogvideox.transformer.Transformer`."""

from __future__ import annotations

import numpy as np

from cogvideox_flax.conversion.rules import Rule, Shape, Table, linear, norm
from cogvideox_flax.models.cogvideox.config import TransformerConfig

LAYER = r"transformer_blocks\.(?P<slot>\d+)\."


def transformer_table(config: TransformerConfig) -> Table:
    """The mapping table for one architecture.

    Sources flatten a patch as (C, pt, ph, pw), channels slowest, in a convolution or a linear map; this library as
    (pt, ph, pw, C), the memory order of channels-last latents.
    """
    patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)

    def patch_in(weight: np.ndarray) -> np.ndarray:  # [D, C, ph, pw] or [D, C*pt*ph*pw] -> [pt*ph*pw*C, D]
        if weight.ndim != (4 if config.patch_size_t is None else 2):
            raise ValueError("1.0 releases hold a convolution, 1.5 releases a linear map")
        return weight.reshape(weight.shape[0], -1, *patch).transpose(2, 3, 4, 1, 0).reshape(-1, weight.shape[0])

    def patch_out(weight: np.ndarray) -> np.ndarray:  # [C*pt*ph*pw, ...] -> [..., pt*ph*pw*C]
        parts = weight.reshape(-1, *patch, *weight.shape[1:])
        return np.moveaxis(parts, 0, 3).reshape(-1, *weight.shape[1:]).T

    def patches(shape: Shape) -> Shape:  # the source's shape of patch_embed
        return (shape[1], config.in_channels, *patch[1:]) if config.patch_size_t is None else shape[::-1]

    rows: Table = (
        Rule(r"patch_embed\.proj\.weight", "patch_embed.kernel", patch_in, shape=patches),
        Rule(r"patch_embed\.proj\.bias", "patch_embed.bias"),
        *linear(r"patch_embed\.text_proj", "text_proj"),
        *linear(r"time_embedding\.linear_([12])", r"time_embedding.linear_\1"),
        *linear(LAYER + r"norm([12])\.linear", r"blocks.norm\2.linear"),
        *norm(LAYER + r"norm([12])\.norm", r"blocks.norm\2.norm"),
        *linear(LAYER + r"attn1\.to_([qkv])", r"blocks.attn.\2", bias=config.attention_bias),
        *norm(LAYER + r"attn1\.norm_([qk])", r"blocks.attn.norm_\2"),
        *linear(LAYER + r"attn1\.to_out\.0", "blocks.attn.out"),
        *linear(LAYER + r"ff\.net\.0\.proj", "blocks.mlp.up"),
        *linear(LAYER + r"ff\.net\.2", "blocks.mlp.down"),
        *norm(r"norm_final", "norm_final"),
        *linear(r"norm_out\.linear", "norm_out.linear"),
        *norm(r"norm_out\.norm", "norm_out.norm"),
        Rule(r"proj_out\.weight", "proj_out.kernel", patch_out, shape=lambda shape: shape[::-1]),
        Rule(r"proj_out\.bias", "proj_out.bias", patch_out),
    )
    if config.ofs_width is not None:
        rows += linear(r"ofs_embedding\.linear_([12])", r"ofs_embedding.linear_\1")
    if config.learned_positions:
        rows += (
            Rule(
                r"patch_embed\.pos_embedding", "pos_embedding", lambda table: table[0], shape=lambda shape: (1, *shape)
            ),
        )
    return rows
