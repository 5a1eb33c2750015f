"""The logical axes of the parameters of HunyuanVideo-1.5's transformer and VAE."""

from cogvideox_flax.sharding import REPLICATED, ParameterRows, block_rows

_STREAM = r"blocks\.(video|text)"

TRANSFORMER: ParameterRows = (
    *block_rows(_STREAM),
    (_STREAM + r"\.modulation\.kernel", (None, "stored", None)),
    (_STREAM + r"\.modulation\.bias", REPLICATED),
    (
        r"(patch_embed|text_embed|glyph_embed|image_embed|time_embedding|next_time_embedding|norm_out|proj_out)\..*",
        REPLICATED,
    ),
    (r"kind_embedding", REPLICATED),
)

VAE: ParameterRows = ((r"(encoder|decoder)\..*", REPLICATED),)
