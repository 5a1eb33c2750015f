"""The logical axes of the parameters of HunyuanVideo-1.5's transformer and VAE.

With a LoRA, a linear map is the adapter's `base`; the adapter's a and b have the logical axes of its input and output.
"""

from cogvideox_flax.sharding import REPLICATED, ParameterRows

_STREAM = r"blocks\.(video|text)\."

TRANSFORMER: ParameterRows = (
    (_STREAM + r"attn\.[qkv]\.(base\.)?kernel", (None, "stored", "heads")),
    (_STREAM + r"attn\.[qkv]\.b", (None, None, "heads")),
    (_STREAM + r"attn\.[qkv]\.(base\.)?(bias|scale)", (None, "heads")),
    (_STREAM + r"attn\.out\.(base\.)?kernel", (None, "heads", "stored")),
    (_STREAM + r"attn\.out\.a", (None, "heads", None)),
    (_STREAM + r"mlp\.up\.(base\.)?kernel", (None, "stored", "hidden")),
    (_STREAM + r"mlp\.up\.b", (None, None, "hidden")),
    (_STREAM + r"mlp\.up\.(base\.)?(bias|scale)", (None, "hidden")),
    (_STREAM + r"mlp\.down\.(base\.)?kernel", (None, "hidden", "stored")),
    (_STREAM + r"mlp\.down\.a", (None, "hidden", None)),
    (_STREAM + r"modulation\.kernel", (None, "stored", None)),
    (_STREAM + r"(attn\.([qkv]\.a|out\.b)|mlp\.(up\.a|down\.b))", REPLICATED),
    (_STREAM + r"(attn\.out|mlp\.down)\.(base\.)?(bias|scale)", REPLICATED),
    (_STREAM + r"(attn\.norm_[qk]\.scale|modulation\.bias)", REPLICATED),
    (
        r"(patch_embed|text_embed|glyph_embed|image_embed|time_embedding|next_time_embedding|norm_out|proj_out)\..*",
        REPLICATED,
    ),
    (r"kind_embedding", REPLICATED),
)

VAE: ParameterRows = ((r"(encoder|decoder)\..*", REPLICATED),)
