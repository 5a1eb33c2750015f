"""What lies where on a mesh of devices, and what they exchange.

Mesh axes are dp (batch and the two halves of guidance), sp (tokens) and tp (heads and hidden units); the autoencoder,
which has none of these but the batch, splits pictures over all of them. Everything else names logical axes only.
"""

from cogvideox_flax.sharding.sequence_parallel import over_heads, pad_tokens
from cogvideox_flax.sharding.spatial_parallel import Padding, over_picture, split_picture
from cogvideox_flax.sharding.tables import (
    AXES,
    REPLICATED,
    RULES,
    MeshShape,
    ParameterRows,
    check_batch,
    check_heads,
    constrain,
    describe_mesh,
    layer_weights,
    make_mesh,
    named,
    parameter_axes,
    parameter_name,
    parameter_sharding,
    parse_mesh,
)

__all__ = [
    "AXES",
    "REPLICATED",
    "RULES",
    "MeshShape",
    "Padding",
    "ParameterRows",
    "check_batch",
    "check_heads",
    "constrain",
    "describe_mesh",
    "layer_weights",
    "make_mesh",
    "named",
    "over_heads",
    "over_picture",
    "pad_tokens",
    "parameter_axes",
    "parameter_name",
    "parameter_sharding",
    "parse_mesh",
    "split_picture",
]
