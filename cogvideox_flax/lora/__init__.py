"""Low-rank adapters (LoRA) of the transformer: training, files in every layout that exists, merging into the weights.

Source: LoRA (arXiv 2106.09685); files are written as diffusers' `CogVideoXLoraLoaderMixin.save_lora_weights` does.
"""

from cogvideox_flax.lora.active import ActiveAdapters
from cogvideox_flax.lora.adapters import (
    LoRALinear,
    add_lora,
    is_adapter_parameter,
    lora_parameters,
    merge_lora,
    with_parameters,
    without_adapters,
)
from cogvideox_flax.lora.export import export_adapter
from cogvideox_flax.lora.files import (
    EMBEDDED_ADAPTERS,
    FILE_NAME,
    SUFFIXES,
    LoRARecord,
    adapter_hash,
    describe_lora,
    find_adapter,
    fitting_releases,
    is_adapter,
    is_without_effect,
    known_models,
    open_adapter,
    published_name,
    read_adapter,
    save_lora,
)
from cogvideox_flax.lora.merge import Merged, load_adapters, merge_files, trained_targets

__all__ = [
    "EMBEDDED_ADAPTERS",
    "FILE_NAME",
    "SUFFIXES",
    "ActiveAdapters",
    "LoRALinear",
    "LoRARecord",
    "Merged",
    "adapter_hash",
    "add_lora",
    "describe_lora",
    "export_adapter",
    "find_adapter",
    "fitting_releases",
    "is_adapter",
    "is_adapter_parameter",
    "is_without_effect",
    "known_models",
    "load_adapters",
    "lora_parameters",
    "merge_files",
    "merge_lora",
    "open_adapter",
    "published_name",
    "read_adapter",
    "save_lora",
    "trained_targets",
    "with_parameters",
    "without_adapters",
]
