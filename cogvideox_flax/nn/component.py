"""The base of a pipeline's transformer and autoencoder."""

from __future__ import annotations

from typing import Any

from flax import nnx

_ATTENTION = "leave it out: attention never holds all scores"

METHODS = {
    "enable_tiling": "tiling=True in a call of the pipeline, or of its decode",
    "disable_tiling": "tiling=False in a call of the pipeline, which is the default",
    "enable_slicing": "leave it out: the videos of a batch are decoded one after the other",
    "disable_slicing": "leave it out: the videos of a batch are decoded one after the other",
    "enable_gradient_checkpointing": "remat=True in a call of the transformer, or jax.checkpoint",
    "disable_gradient_checkpointing": "remat=False in a call of the transformer, which is the default",
    "enable_cache": "step_cache='first_block' and others in a call of the pipeline: docs/step_cache.md",
    "disable_cache": "leave step_cache out of the call of the pipeline",
    "set_attn_processor": "the module's attribute attend is its attention function",
    "set_attention_backend": "the module's attribute attend is its attention function",
    "enable_xformers_memory_efficient_attention": _ATTENTION,
    "disable_xformers_memory_efficient_attention": _ATTENTION,
    "enable_layerwise_casting": "float8 weights: `cogvideox quantize --kind float8`",
    "enable_group_offload": "from_pretrained(mesh=...) splits weights over devices; or take int8 weights",
    "fuse_qkv_projections": "leave it out: it changes no number here",
    "unfuse_qkv_projections": "leave it out: it changes no number here",
    "to": "from_pretrained(where, dtype=..., mesh=...) places the weights",
    "requires_grad_": "jax.grad takes what it differentiates by: docs/activations.md",
    "parameters": "cogvideox_flax.checkpoint.parameters(module), or jax.tree.leaves(module)",
    "state_dict": "cogvideox_flax.checkpoint.parameters(module): names and arrays",
    "register_forward_hook": "run_blocks(tokens, start=i, stop=i + 1) of the transformer: docs/activations.md",
}
"""Method of diffusers' models -> what takes its place."""


class Component(nnx.Module):
    """A module whose lack of a method of diffusers' models is answered with what takes its place."""

    def __getattr__(self, name: str) -> Any:
        hint = f"; diffusers' {name} is here: {METHODS[name]}" if name in METHODS else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
