"""Adapters written for other programs: as PEFT, diffusers, ComfyUI and kohya's trainers name them.

layout     names in the file                                                          alpha
peft       base_model.model.M.lora_A.weight                                           adapter_config.json beside it
diffusers  transformer.M.lora_A.weight                                                metadata
comfyui    diffusion_model.M'.lora_A.weight                                           diffusion_model.M'.alpha
kohya      lora_unet__M or lora_unet_M', with underscores for dots, .lora_down.weight lora_unet_M'.alpha

M is diffusers' name of a linear map, M' that of `LoRALayout.written`. All matrices keep their bits, but the B of
maps that are fused with others of another strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cogvideox_flax.config import Config
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import atomic_directory, write_json
from cogvideox_flax.io.tensor_file import TensorFile, write_tensors
from cogvideox_flax.lora.alphas import METADATA_KEY, PEFT_CONFIG
from cogvideox_flax.lora.files import (
    FILE_NAME,
    PEFT_FILE,
    LowRankPair,
    linear_maps,
    peft_config,
    pipeline_metadata,
    read_adapter,
)
from cogvideox_flax.lora.layouts import any_layer, renamed_maps
from cogvideox_flax.models.model import Family


class _Map(NamedTuple):
    """The matrices of one linear map, [rank, in, ...] and [out, rank, ...], and its alpha."""

    a: np.ndarray
    b: np.ndarray
    alpha: float


def export_adapter(family: Family, config: Config, file: TensorFile, target: str | Path, layout: str) -> Path:
    """Write an adapter in another program's layout.

    Args:
        config: of a denoiser that the adapter fits.
        file: from `open_adapter`.
        target: a `.safetensors` file, or a folder that gets one; PEFT's is a new or empty folder.
        layout: "peft", "diffusers", "comfyui" or "kohya".

    Returns:
        The file, or PEFT's folder.

    Raises:
        CheckpointError: the file is damaged, or does not fit.
        InputError: the layout has no name for a map; the target cannot be written.
    """
    target = Path(target)
    file.check()
    pairs = read_adapter(family, config, file).pairs
    table = family.lora.written.get(layout)
    if table is None and layout == "comfyui":
        raise InputError(f"ComfyUI has no names for adapters of {family.name}; expected one of the layouts peft, kohya")
    names = {name: (name,) for name in pairs} if table is None else renamed_maps(table, linear_maps(family, config))
    if missing := pairs.keys() - {source for sources in names.values() for source in sources}:
        shown = ", ".join(sorted({any_layer(name) for name in missing}))
        raise InputError(f"{file.path} adapts {shown}, which the layout {layout} has no name for; --as peft writes all")
    swapped = family.lora.swapped
    maps = {
        name: _fused(
            [None if source not in pairs else _read(file, pairs[source]) for source in sources], name in swapped
        )
        for name, sources in names.items()
        if not pairs.keys().isdisjoint(sources)
    }
    if layout == "peft":
        return _write_peft(target, maps)
    path = target if target.suffix == ".safetensors" else target / FILE_NAME
    metadata = {"format": "pt"}
    if layout == "diffusers":
        metadata[METADATA_KEY] = pipeline_metadata(family.lora, _config(maps))
        tensors = _named(maps, f"{family.lora.component}.", "lora_A", "lora_B")
    elif layout == "comfyui":
        tensors = _named(maps, "diffusion_model.", "lora_A", "lora_B") | _alphas(maps, "diffusion_model.")
    else:
        prefix = "lora_unet__" if table is None else "lora_unet_"  # CogVideoX-Fun's, and that of all others
        maps = {name.replace(".", "_"): each for name, each in maps.items()}
        tensors = _named(maps, prefix, "lora_down", "lora_up") | _alphas(maps, prefix)
    write_tensors(path, tensors, metadata)
    return path


def _write_peft(folder: Path, maps: Mapping[str, _Map]) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already; PEFT's layout is a folder of two files: name a new or empty one")
    always = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "inference_mode": True}
    with atomic_directory(folder) as work:
        write_json(work / PEFT_CONFIG, always | _config(maps))
        write_tensors(work / PEFT_FILE, _named(maps, "base_model.model.", "lora_A", "lora_B"), {"format": "pt"})
    return folder


def _read(file: TensorFile, pair: LowRankPair) -> _Map:
    """The matrices of diffusers' map."""
    a, b = file.read(pair.a), file.read(pair.b)[pair.rows]
    b = b.reshape(*b.shape[:2], *[1] * (a.ndim - 2))  # of a convolution, b is one too
    return _Map(a, np.roll(b, len(b) // 2, axis=0) if pair.swapped else b, pair.alpha)


def _fused(maps: list[_Map | None], swapped: bool) -> _Map:
    """One map whose outputs are those of several, one after the other; None: one without an adapter."""
    present = [each for each in maps if each is not None]
    if len(maps) == 1:
        (one,) = present
        return one._replace(b=np.roll(one.b, len(one.b) // 2, axis=0)) if swapped else one
    first, strengths = present[0], {each.alpha / len(each.a) for each in present}
    if len(present) == len(maps) and all(each.alpha == first.alpha and _same(each.a, first.a) for each in present):
        return first._replace(b=np.concatenate([each.b for each in present]))  # they were fused before
    rank = sum(len(each.a) for each in present)
    blocks, start = [], 0
    for each in maps:
        rows = np.zeros((len(first.b), rank), first.b.dtype if each is None else each.b.dtype)
        if each is not None:
            rows[:, start : start + len(each.a)] = each.b
            start += len(each.a)
            rows = rows if len(strengths) == 1 else np.float32(each.alpha / len(each.a)) * rows.astype(np.float32)
        blocks.append(rows)
    strength = strengths.pop() if len(strengths) == 1 else 1.0
    return _Map(np.concatenate([each.a for each in present]), np.concatenate(blocks), strength * rank)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _named(maps: Mapping[str, _Map], prefix: str, a: str, b: str) -> dict[str, np.ndarray]:
    halves = {a: "a", b: "b"}
    return {
        f"{prefix}{name}.{half}.weight": getattr(each, field)
        for name, each in maps.items()
        for half, field in halves.items()
    }


def _alphas(maps: Mapping[str, _Map], prefix: str) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}.alpha": np.array(each.alpha, np.float32) for name, each in maps.items()}


def _config(maps: Mapping[str, _Map]) -> dict[str, object]:
    """PEFT's entries; patterns are full names behind a ^, since a name may be the end of another."""
    config = peft_config({name: len(x.a) for name, x in maps.items()}, {name: x.alpha for name, x in maps.items()})
    return config | {
        key: {f"^{name}": value for name, value in config[key].items()} for key in ("rank_pattern", "alpha_pattern")
    }
