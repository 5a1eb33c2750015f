"""Low-rank adapters (LoRA) of the transformer: training, files in diffusers' layout, merging into the weights.

Source: LoRA (arXiv 2106.09685); files as diffusers' `CogVideoXLoraLoaderMixin.save_lora_weights` writes them.
"""

from cogvideox_flax.lora.adapters import (
    LoRALinear,
    add_lora,
    lora_parameters,
    merge_lora,
    with_parameters,
)
from cogvideox_flax.lora.files import FILE_NAME, LoRARecord, describe_lora, load_lora, save_lora

__all__ = [
    "FILE_NAME",
    "LoRALinear",
    "LoRARecord",
    "add_lora",
    "describe_lora",
    "load_lora",
    "lora_parameters",
    "merge_lora",
    "save_lora",
    "with_parameters",
]
