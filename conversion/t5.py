"""transformers' `T5EncoderModel` -> `cogvideox_flax.models.t5.TextEncoder`."""

from __future__ import annotations

from cogvideox_flax.conversion.rules import Alias, Ignore, Rule, Table
from cogvideox_flax.models.t5 import TextEncoderConfig

BLOCK = r"encoder\.block\.(?P<slot>\d+)\."
ATTENTION = BLOCK + r"layer\.0\.SelfAttention\."
MLP = BLOCK + r"layer\.1\.DenseReluDense\."


def t5_table(config: TextEncoderConfig) -> Table:
    """The mapping of every tensor of a saved T5 encoder, or of a full T5 whose decoder is ignored."""
    return (
        Rule(r"shared\.weight", "embedding"),
        Alias(r"encoder\.embed_tokens\.weight", "shared.weight"),
        # only the first block stores the table; all blocks share it
        Rule(r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight", "position_bias"),
        Rule(BLOCK + r"layer\.0\.layer_norm\.weight", "blocks.norm_attn.scale"),
        Rule(ATTENTION + r"([qkv])\.weight", r"blocks.attn.\2.weight"),
        Rule(ATTENTION + r"o\.weight", "blocks.attn.out.weight"),
        Rule(BLOCK + r"layer\.1\.layer_norm\.weight", "blocks.norm_mlp.scale"),
        Rule(MLP + r"wi_0\.weight", "blocks.mlp.gate.weight"),
        Rule(MLP + r"wi_1\.weight", "blocks.mlp.up.weight"),
        Rule(MLP + r"wo\.weight", "blocks.mlp.down.weight"),
        Rule(r"encoder\.final_layer_norm\.weight", "norm_out.scale"),
        Ignore(r"decoder\..*", "only the encoder is used"),
        Ignore(r"lm_head\..*", "only the encoder is used"),
    )
