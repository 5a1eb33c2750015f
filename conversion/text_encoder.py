"""transformers' `T5EncoderModel` -> `models.text_encoder.TextEncoder`."""

from __future__ import annotations

from cogvideox_flax.config import TextEncoderConfig
from conversion.rules import Alias, Ignore, Rule, Table, linear

BLOCK = r"encoder\.block\.(?P<slot>\d+)\."
ATTENTION = BLOCK + r"layer\.0\.SelfAttention\."
MLP = BLOCK + r"layer\.1\.DenseReluDense\."


def text_encoder_table(config: TextEncoderConfig) -> Table:
    """The mapping of every tensor of a saved T5 encoder, or of a whole T5 whose decoder is left aside."""
    return (
        Rule(r"shared\.weight", "embedding"),
        Alias(r"encoder\.embed_tokens\.weight", "shared.weight"),
        # only the first block stores the table; all blocks share it
        Rule(r"encoder\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight", "position_bias"),
        Rule(BLOCK + r"layer\.0\.layer_norm\.weight", "blocks.norm_attn.scale"),
        *linear(ATTENTION + "q", "blocks.attn.q", bias=False),
        *linear(ATTENTION + "k", "blocks.attn.k", bias=False),
        *linear(ATTENTION + "v", "blocks.attn.v", bias=False),
        *linear(ATTENTION + "o", "blocks.attn.out", bias=False),
        Rule(BLOCK + r"layer\.1\.layer_norm\.weight", "blocks.norm_mlp.scale"),
        *linear(MLP + "wi_0", "blocks.mlp.gate", bias=False),
        *linear(MLP + "wi_1", "blocks.mlp.up", bias=False),
        *linear(MLP + "wo", "blocks.mlp.down", bias=False),
        Rule(r"encoder\.final_layer_norm\.weight", "norm_out.scale"),
        Ignore(r"decoder\..*", "only the encoder is used"),
        Ignore(r"lm_head\..*", "only the encoder is used"),
    )
