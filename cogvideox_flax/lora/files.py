"""Adapters on disk, in the layout of diffusers' `CogVideoXLoraLoaderMixin` (0.42): read strictly, safetensors only.

transformer.transformer_blocks.{i}.attn1.to_q.lora_A.weight  [rank, in], the transpose of our `a` of layer i
transformer.transformer_blocks.{i}.attn1.to_q.lora_B.weight  [out, rank]
metadata: the adapter's config as JSON; files without it have alpha = rank, and older ones an `alpha` per module
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from cogvideox_flax import checkpoint
from cogvideox_flax.config import Config
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.contents import content_hash
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.io.tensor_file import TensorFile, write_tensors
from cogvideox_flax.io.values import is_finite_number, shown
from cogvideox_flax.lora.adapters import adapters, plain_linear, with_adapter
from cogvideox_flax.models.model import Family, LoRALayout

FILE_NAME = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"

_MATRIX_NAMES = (  # the current name, then those of older files
    r"((?P<a>(lora_A|lora\.down|lora_down)\.weight)|(?P<b>(lora_B|lora\.up|lora_up)\.weight)|alpha)"
)
_FLOATS = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32, np.float64)))


class LoRARecord(TypedDict):
    """Which adapter a run used: absolute path, strength, and the start of the file's SHA-256."""

    file: str
    scale: float
    sha256: str


def save_lora(family: Family, path: str | Path, transformer: Any) -> Path:
    """Write the adapters as diffusers does, with their config in the metadata.

    Args:
        path: a `.safetensors` file, or a directory, in which the file has diffusers' name.

    Returns:
        The file.

    Raises:
        InputError: the transformer has no adapters, or the file cannot be written.
    """
    path = Path(path)
    path = path if path.suffix == ".safetensors" else path / FILE_NAME
    tensors, ranks, alphas = {}, {}, {}
    layout, adapted = family.lora, adapters(transformer)
    for target in [target for target, place in layout.targets.items() if place in adapted]:
        linear, source = adapted[layout.targets[target]], layout.sources[target]
        ranks[source] = linear.a.shape[-1]
        alphas[source] = int(linear.alpha) if linear.alpha.is_integer() else linear.alpha
        for half, value in (("A", linear.a), ("B", linear.b)):
            for layer, matrix in enumerate(np.asarray(value[...])):
                name = f"{layout.component}.{layout.blocks}.{layer}.{source}.lora_{half}.weight"
                tensors[name] = np.ascontiguousarray(matrix.T)
    if not tensors:
        raise InputError(f"there is nothing to write to {path}: the transformer has no LoRA")
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    config = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(ranks),
        "rank_pattern": {source: value for source, value in ranks.items() if value != rank},
        "alpha_pattern": {source: value for source, value in alphas.items() if value != alpha},
    }
    text = json.dumps({f"{layout.component}.{key}": value for key, value in config.items()}, indent=2, sort_keys=True)
    write_tensors(path, tensors, {"format": "pt", METADATA_KEY: text})
    return path


def describe_lora(family: Family, path: str | Path, scale: float, config: Config) -> LoRARecord:
    """Check from its header that an adapter fits a transformer of this config; returns the adapter's record.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit; with all faults.
        InputError: the scale is not a finite number.
    """
    _check_scale(scale)
    layout = family.lora
    module = checkpoint.parameters(family.components[layout.component].abstract(config))
    with TensorFile(_adapter_file(path)) as file:
        file.check()
        shapes = {target: module[f"{place}.kernel"].shape for target, place in layout.targets.items()}
        _read_header(file, layout, shapes)
    return {"file": str(file.path.absolute()), "scale": float(scale), "sha256": content_hash(file.path)[:16]}


def load_lora(
    family: Family, path: str | Path, transformer: Any, scale: float = 1.0, *, mesh: Mesh | None = None
) -> Any:
    """The transformer with the adapters of a file, in float32.

    Layers that the file does not have get zero adapters. Where layers differ in rank or alpha, ranks are padded with
    zeros and `b` is scaled to a common alpha.

    Args:
        path: the file, or the directory that diffusers saved it to.
        transformer: without adapters; the result shares its arrays.
        scale: the strength, multiplied by the file's alpha / rank.
        mesh: the transformer's mesh.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit; with all faults.
        InputError: the scale is not a finite number, or the transformer has adapters.
    """
    _check_scale(scale)
    with TensorFile(_adapter_file(path)) as file:
        layout = family.lora
        shapes = {target: plain_linear(transformer, place).kernel.shape for target, place in layout.targets.items()}
        for target, pairs in _read_header(file, layout, shapes).items():
            layers, width, out = shapes[target]
            rank, alpha = max(pair.rank for pair in pairs.values()), next(iter(pairs.values())).alpha
            same = len({(pair.rank, pair.alpha) for pair in pairs.values()}) == 1
            a, b = np.zeros((layers, width, rank), np.float32), np.zeros((layers, rank, out), np.float32)
            for layer, pair in pairs.items():
                a[layer, :, : pair.rank] = file.read(pair.a).T
                b[layer, : pair.rank] = file.read(pair.b).T
                if not same:
                    b[layer] *= pair.alpha / pair.rank
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise CheckpointError(
                    f"{file.path} holds NaN or infinity in {layout.sources[target]}; download it again"
                )
            strength = scale * (alpha if same else rank)
            transformer = with_adapter(family, transformer, layout.targets[target], a, b, strength, mesh)
    return transformer


class _Pair(NamedTuple):
    """One adapter of one layer in a file: the names of its tensors."""

    a: str
    b: str
    rank: int
    alpha: float


def _check_scale(scale: float) -> None:
    if not is_finite_number(scale):
        raise InputError(f"the scale of a LoRA must be a finite number (1 is as trained); got {shown(scale)}")


def _adapter_file(path: str | Path) -> Path:
    path = expand_user(path)
    return path / FILE_NAME if path.is_dir() else path


def _read_header(
    file: TensorFile, layout: LoRALayout, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[int, _Pair]]:
    """Target -> layer -> adapter, without reading weights. shapes: target -> (layers, in, out) of the model."""
    groups, faults = _group(file, layout)
    for (target, layer), parts in groups.items():
        faults += _shape_faults(file, layout, parts, layer, shapes[target])
    if not file.tensors:
        faults.append("  missing  any tensor")
    if faults:
        faults = list(dict.fromkeys(faults))
        raise CheckpointError(
            f"{file.path} is not a LoRA that fits this transformer ({len(faults)} faults). A LoRA in diffusers' layout "
            f"has pairs {layout.component}.{layout.blocks}.*.TARGET.lora_A.weight and lora_B.weight; supported targets "
            f"are {', '.join(layout.sources.values())}.\n" + "\n".join(faults)
        )
    config = _config(file, layout)
    found: dict[str, dict[int, _Pair]] = {}
    for target, source in layout.sources.items():
        for layer in sorted(layer for other, layer in groups if other == target):
            parts = groups[target, layer]
            rank = file.tensors[parts["a"]].shape[0]
            if "alpha" in parts:
                alpha = float(file.read(parts["alpha"]).reshape(()))
            else:
                alpha = _alpha(config, f"{layout.blocks}.{layer}.{source}", rank)
            if not is_finite_number(alpha):
                raise CheckpointError(f"{file.path} has alpha {alpha} for {parts['a']}; expected a finite number")
            found.setdefault(target, {})[layer] = _Pair(parts["a"], parts["b"], rank, alpha)
    return found


def _group(file: TensorFile, layout: LoRALayout) -> tuple[dict[tuple[str, int], dict[str, str]], list[str]]:
    """(target, layer) -> names of its a, b and alpha; and the faults of names and dtypes."""
    groups: dict[tuple[str, int], dict[str, str]] = {}
    faults = []
    targets = {source: target for target, source in layout.sources.items()}
    blocks = re.escape(f"{layout.component}.{layout.blocks}.")
    key = re.compile(blocks + r"(?P<layer>0|[1-9][0-9]{0,4})\.(?P<source>.+?)\." + _MATRIX_NAMES)
    for name, info in file.tensors.items():
        match = key.fullmatch(name)
        if match is None or match["source"] not in targets:
            faults.append(f"  unknown  {_any_layer(name, layout)}")
            continue
        part = "a" if match["a"] else "b" if match["b"] else "alpha"
        parts = groups.setdefault((targets[match["source"]], int(match["layer"])), {})
        if part in parts:
            faults.append(f"  twice    {parts[part]} and {name}")
        if info.dtype not in _FLOATS:
            faults.append(
                f"  dtype    {_any_layer(name, layout)}: got {info.dtype}, expected bfloat16, float16 or float32"
            )
        parts[part] = name
    return groups, faults


def _shape_faults(
    file: TensorFile, layout: LoRALayout, parts: dict[str, str], layer: int, shape: tuple[int, ...]
) -> list[str]:
    layers, width, out = shape
    if missing := {"a", "b"} - parts.keys():
        return [f"  missing  lora_{' and lora_'.join(sorted(missing)).upper()} beside {next(iter(parts.values()))}"]
    faults = []
    if layer >= layers:
        faults.append(f"  layer    {parts['a']}: the model's last layer is {layers - 1}")
    a, b = (file.tensors[parts[half]].shape for half in "ab")
    rank = a[0] if a else 0
    if rank < 1 or a != (rank, width) or b != (out, rank):
        name = _any_layer(parts["a"], layout)
        faults.append(f"  shape    {name} and its b: got {a} and {b}, expected (rank, {width}) and ({out}, rank)")
    if "alpha" in parts and math.prod(file.tensors[parts["alpha"]].shape) != 1:
        faults.append(f"  shape    {_any_layer(parts['alpha'], layout)}: expected one number")
    return faults


def _any_layer(name: str, layout: LoRALayout) -> str:
    """The name without its layer number, so that tensors that differ only in the layer share a line of a report."""
    return re.sub(rf"{layout.blocks}\.\d+", f"{layout.blocks}.*", name)


def _config(file: TensorFile, layout: LoRALayout) -> dict[str, Any]:
    """The entries of PEFT's `LoraConfig` in the file's metadata that set the adapter's scale.

    Raises:
        CheckpointError: damaged, or patterns that are regular expressions rather than names.
    """
    prefix = f"{layout.component}."
    try:
        raw = json.loads(file.metadata.get(METADATA_KEY) or "{}")
        config = {key.removeprefix(prefix): value for key, value in raw.items() if key.startswith(prefix)}
        patterns = dict(config.get("alpha_pattern") or {})
        numbers = [*patterns.values(), *([config["lora_alpha"]] if config else [])]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
        raise CheckpointError(f"{file.path} has damaged {METADATA_KEY} ({type(e).__name__}: {e})") from e
    if not all(isinstance(number, float) or is_finite_number(number) for number in numbers):
        raise CheckpointError(f"{file.path} has damaged {METADATA_KEY}: lora_alpha and alpha_pattern must hold numbers")
    if expressions := [name for name in patterns if not re.fullmatch(r"\^?[\w.]+", name)]:
        raise CheckpointError(
            f"{file.path} gives alpha by regular expressions ({', '.join(expressions)}); only names of modules are read"
        )
    return config


def _alpha(config: dict[str, Any], module: str, rank: int) -> float:
    """The alpha that PEFT uses. A pattern matches the end of a name from any dot on; after a `^`, the full name."""
    if not config:
        return rank
    patterns = config.get("alpha_pattern") or {}
    matches = (x for name, x in patterns.items() if f"^{module}" == name or f".{module}".endswith(f".{name}"))
    alpha = next(matches, config["lora_alpha"])
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
