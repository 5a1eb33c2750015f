"""What trainers and tools put around a component's tensors: prefixes, EMA copies, and 8-bit floats with scales."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np

from cogvideox_flax.errors import ConversionError
from cogvideox_flax.io.tensor_file import DTYPES, TensorInfo

EMA_PREFIXES = ("ema.", "ema_model.", "model_ema.")
"""Of averaged copies of the weights, which are left out where the weights themselves are there too."""

PREFIXES = ("module.", "model.diffusion_model.", "diffusion_model.", "transformer.", *EMA_PREFIXES)
"""Stripped where every tensor has it: DistributedDataParallel's, and those of files for other programs."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Stripped anywhere in a name: torch.compile's, FSDP's and activation checkpointing's."""

FLOAT8 = (DTYPES["F8_E4M3"], DTYPES["F8_E5M2"])

_BESIDE_FLOAT8 = re.compile(
    r"(?P<of>.*)\.(?P<scale>scale_weight|weight_scale)|(?P<unused>.*)\.(scale_input|input_scale)"
)
_MARKER = "scaled_fp8"  # an empty tensor, by which ComfyUI knows a file with scales


def unwrapped(stored: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The tensors' own names, and what was stripped.

    Returns:
        Name as it is stored -> the tensor's name, without EMA copies; and a phrase for each kind of change.
    """
    names, changes = {name: name for name in stored}, []
    for wrapper in WRAPPERS:
        if any(f".{wrapper}" in f".{name}" for name in names.values()):
            names = {key: f".{name}".replace(f".{wrapper}", ".")[1:] for key, name in names.items()}
            changes.append(f"the prefix {wrapper} is stripped")
    while True:
        copies = [key for key, name in names.items() if name.startswith(EMA_PREFIXES)]
        if 0 < len(copies) < len(names):
            changes.append(f"{len(copies)} tensors of an EMA copy are left out")
            names = {key: name for key, name in names.items() if key not in copies}
        shared = [prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names.values())]
        if not shared:
            return names, changes
        names = {key: name.removeprefix(shared[0]) for key, name in names.items()}
        changes.append(f"the prefix {shared[0]} is stripped")


def scales_of(tensors: Mapping[str, TensorInfo]) -> dict[str, str | None]:
    """The tensors that belong to weights in float8.

    Returns:
        Name of a scale -> that of its weight; None for what is not needed: scales of activations, and the marker of
        such files.

    Raises:
        ConversionError: a scale that is not one number, or one for each row of the weight.
    """
    found: dict[str, str | None] = {}
    for name in tensors:
        match = _BESIDE_FLOAT8.fullmatch(name)
        weight = f"{match['of'] or match['unused']}.weight" if match else ""
        if name == _MARKER:
            found[name] = None
        elif match and weight in tensors and tensors[weight].dtype in FLOAT8:
            found[name] = weight if match["scale"] else None
            shape, rows = tensors[name].shape, tensors[weight].shape[0]
            if match["scale"] and shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
                raise ConversionError(
                    f"{weight} has a scale of shape {shape}; expected one number, or one for each of its {rows} rows. "
                    "Take the file with 16-bit weights"
                )
    return found


def dequantized(weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """A weight in float8 times its scale of `scales_of`, where it has one, in float32."""
    value = weight.astype(np.float32)
    if scale is not None:
        value *= scale.astype(np.float32).reshape(-1, *(1,) * (weight.ndim - 1))
    return value
