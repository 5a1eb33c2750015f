"""The logical axes of the parameters of CogVideoX's transformer and VAE."""

from cogvideox_flax.sharding import REPLICATED, ParameterRows, block_rows

TRANSFORMER: ParameterRows = (
    *block_rows("blocks"),
    (r"blocks\.norm[12]\.linear\.kernel", (None, "stored", None)),
    (r"blocks\.norm[12]\..*", REPLICATED),
    (r"(patch_embed|text_proj|time_embedding|ofs_embedding|norm_final|norm_out|proj_out)\..*", REPLICATED),
    (r"pos_embedding", REPLICATED),
)

VAE: ParameterRows = ((r"(encoder|decoder)\..*", REPLICATED),)
