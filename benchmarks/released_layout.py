"""Random checkpoints of the released shapes, in the Hugging Face layout, streamed to disk.

Names and shapes come from the reference classes on torch's meta device, so nothing here repeats them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.tensorfile import DTYPES, TensorWriter

SHARD_BYTES = 5_000_000_000  # as the released checkpoints are cut

_ROTARY: dict[str, Any] = {"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "cogvideox-2b": {},
    "cogvideox-5b": _ROTARY,
    "cogvideox1.5-5b": _ROTARY
    | {"patch_size_t": 2, "patch_bias": False, "sample_height": 96, "sample_width": 170, "sample_frames": 81},
}
"""release -> what diffusers' `CogVideoXTransformer3DModel` is told beyond its defaults."""

T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


def reference_module(component: str, release: str, **changes: Any) -> Any:
    """The reference's module for one component of a release; build it under a torch device of your choice."""
    import diffusers
    import transformers

    if component == "transformer":
        return diffusers.CogVideoXTransformer3DModel(**TRANSFORMERS[release] | changes)
    if component == "text_encoder":
        return transformers.T5EncoderModel(transformers.T5Config(**T5_XXL | changes))
    types = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    scale = 1.15258426 if release == "cogvideox-2b" else 0.7
    return diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(128, 256, 256, 512), layers_per_block=3, scaling_factor=scale, **types, **changes
    )


def write_component(folder: Path, component: str, release: str, dtype: str, seed: int = 0) -> int:
    """Write one component with random weights. Returns its bytes on disk; peak memory is about one tensor."""
    import torch

    with torch.device("meta"):
        module = reference_module(component, release)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    shapes.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight, and not saved by the reference either
    folder = folder / component
    folder.mkdir(parents=True)
    config = dict(module.config.to_dict() if component == "text_encoder" else module.config)
    (folder / "config.json").write_text(json.dumps(config, default=str))

    kind = DTYPES[{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]]
    shards = list(_shards(shapes, kind.itemsize))
    stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
    random = np.random.default_rng(seed)
    where = {}
    for i, names in enumerate(shards):
        suffix = "" if len(shards) == 1 else f"-{i + 1:05d}-of-{len(shards):05d}"
        path = folder / f"{stem}{suffix}.safetensors"
        writer = TensorWriter(path, {name: (shapes[name], kind) for name in names}, {"format": "pt"})
        for name in names:
            writer.write(name, _random(random, name, shapes[name]).astype(kind))
            where[name] = path.name
        writer.close()
    if len(shards) > 1:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(path.stat().st_size for path in folder.iterdir())


def write_scheduler(folder: Path, release: str) -> None:
    """The released scheduler config."""
    from diffusers.schedulers import CogVideoXDDIMScheduler

    scheduler: Any = CogVideoXDDIMScheduler(
        snr_shift_scale=3.0 if release == "cogvideox-2b" else 1.0,
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
        clip_sample=False,
    )
    scheduler.save_pretrained(folder / "scheduler")


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape)) * itemsize
        if names and size + nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _random(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep activations near unit size through dozens of layers."""
    x = random.standard_normal(shape, np.float32)
    if len(shape) > 1:
        return x * np.float32(int(np.prod(shape[1:])) ** -0.5)
    return np.float32(1) + np.float32(0.1) * x if name.endswith("weight") else np.float32(0.1) * x
