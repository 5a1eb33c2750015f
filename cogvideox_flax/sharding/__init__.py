"""The sharding of arrays over a mesh of devices, and the communication between the devices.

Mesh axes are dp (batch and the two halves of guidance), sp (tokens) and tp (heads and hidden units). The autoencoder
splits the batch, and height and width over the other axes. Code outside this package names logical axes only.
"""

from cogvideox_flax.sharding.sequence_parallel import (
    JointQKV,
    joint_attention,
    pad_tokens,
    sequence_parallel_attention,
)
from cogvideox_flax.sharding.spatial_parallel import (
    Padding,
    WithHalo,
    image_mesh,
    image_rows,
    on_each_part,
    spatial_constrain,
    spatial_layout,
    spatial_parallel_conv,
    spatial_split,
    whole_clips,
)
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
    devices_of,
    layer_weights,
    make_mesh,
    named,
    on_each_shard,
    parameter_axes,
    parameter_name,
    parameter_sharding,
    parse_mesh,
)

__all__ = [
    "AXES",
    "REPLICATED",
    "RULES",
    "JointQKV",
    "MeshShape",
    "Padding",
    "ParameterRows",
    "WithHalo",
    "check_batch",
    "check_heads",
    "constrain",
    "describe_mesh",
    "devices_of",
    "image_mesh",
    "image_rows",
    "joint_attention",
    "layer_weights",
    "make_mesh",
    "named",
    "on_each_part",
    "on_each_shard",
    "pad_tokens",
    "parameter_axes",
    "parameter_name",
    "parameter_sharding",
    "parse_mesh",
    "sequence_parallel_attention",
    "spatial_constrain",
    "spatial_layout",
    "spatial_parallel_conv",
    "spatial_split",
    "whole_clips",
]
