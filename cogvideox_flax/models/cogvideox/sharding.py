"""The logical axes of the parameters of CogVideoX's transformer and VAE.

With a LoRA, a linear map is the adapter's `base`; the adapter's a and b have the logical axes of its input and output.
"""

from cogvideox_flax.sharding import REPLICATED, ParameterRows

TRANSFORMER: ParameterRows = (
    (r"blocks\.attn\.[qkv]\.(base\.)?kernel", (None, "stored", "heads")),
    (r"blocks\.attn\.[qkv]\.b", (None, None, "heads")),
    (r"blocks\.attn\.[qkv]\.(base\.)?(bias|scale)", (None, "heads")),
    (r"blocks\.attn\.out\.(base\.)?kernel", (None, "heads", "stored")),
    (r"blocks\.attn\.out\.a", (None, "heads", None)),
    (r"blocks\.mlp\.up\.(base\.)?kernel", (None, "stored", "hidden")),
    (r"blocks\.mlp\.up\.b", (None, None, "hidden")),
    (r"blocks\.mlp\.up\.(base\.)?(bias|scale)", (None, "hidden")),
    (r"blocks\.mlp\.down\.(base\.)?kernel", (None, "hidden", "stored")),
    (r"blocks\.mlp\.down\.a", (None, "hidden", None)),
    (r"blocks\.norm[12]\.linear\.kernel", (None, "stored", None)),
    (r"blocks\.(attn\.([qkv]\.a|out\.b)|mlp\.(up\.a|down\.b))", REPLICATED),
    (r"blocks\.(attn\.out|mlp\.down)\.(base\.)?(bias|scale)", REPLICATED),
    (r"blocks\.(attn\.norm_[qk]|norm[12])\..*", REPLICATED),
    (r"(patch_embed|text_proj|time_embedding|ofs_embedding|norm_final|norm_out|proj_out)\..*", REPLICATED),
    (r"pos_embedding", REPLICATED),
)

VAE: ParameterRows = ((r"(encoder|decoder)\..*", REPLICATED),)
