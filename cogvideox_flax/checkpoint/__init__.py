"""The native checkpoint: a directory that loads straight into place.

config.json                         format version, family, configs, where the weights came from, hashes of all files
tokenizer/                          the tokenizer's own files
text_encoder/model.safetensors      of each component: keys are NNX paths; one stacked array for all layers of a block
transformer/model.safetensors       type
vae/model.safetensors
"""

from cogvideox_flax.checkpoint.domain import Domain
from cogvideox_flax.checkpoint.load import (
    cast,
    check_weights,
    load_component,
    load_parameters,
    load_text_encoder,
    load_transformer,
    load_vae,
    parameters,
)
from cogvideox_flax.checkpoint.manifest import (
    CONFIG_FILE,
    FORMAT_VERSION,
    WEIGHTS_FILE,
    Manifest,
    check_contents,
    fingerprints,
    is_native,
    read_manifest,
    verify,
    weights_file,
    write_manifest,
)
from cogvideox_flax.checkpoint.save import save

__all__ = [
    "CONFIG_FILE",
    "FORMAT_VERSION",
    "WEIGHTS_FILE",
    "Domain",
    "Manifest",
    "cast",
    "check_contents",
    "check_weights",
    "fingerprints",
    "is_native",
    "load_component",
    "load_parameters",
    "load_text_encoder",
    "load_transformer",
    "load_vae",
    "parameters",
    "read_manifest",
    "save",
    "verify",
    "weights_file",
    "write_manifest",
]
