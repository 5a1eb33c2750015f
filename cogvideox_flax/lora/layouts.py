"""The names of adapters' matrices in files: the layouts that exist, read as one list of pairs.

layout       names in the file                                                  alpha
diffusers    transformer.M.lora_A.weight, lora_B.weight                         metadata, else the rank
finetrainers as diffusers                                                       metadata of its own
PEFT         M.lora_A.weight, M.lora_A.NAME.weight; also base_model.model.M     adapter_config.json beside the
                                                                                file, metadata, else the rank
older        transformer.M.lora.down.weight, lora.up.weight                     M.alpha, else the rank
SAT          model.diffusion_model.transformer.layers.{i}.attention.            1
             query_key_value.matrix_A.{0,1,2}, dense.matrix_A.0
kohya        lora_unet__M, with underscores for dots, .lora_down.weight         M.alpha, metadata, else the rank
ComfyUI      diffusion_model.M', where HunyuanVideo's q, k and v are one map    M.alpha, else the rank

M is diffusers' name of a linear map, M' that of another trainer (`LoRALayout.other_names`). With A [rank, in] and
B [out, rank], the weight gets scale * alpha / rank * B A. CogVideoX-Fun and musubi-tuner write kohya's layout.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

from cogvideox_flax.models.model import LoRALayout

Part = Literal["A", "B", "alpha"]

_KEY = re.compile(
    r"(?P<map>.+?)\."
    r"((?P<A>(lora_A(\.[^.]+)?|lora\.down|lora_down)\.weight)"
    r"|(?P<B>(lora_B(\.[^.]+)?|lora\.up|lora_up)\.weight)"
    r"|(?P<alpha>alpha)"
    r"|matrix_(?P<sat>[AB])\.(?P<number>\d))"
)
_LAYER = re.compile(r"((?:blocks|layers)[._])(\d+)(?=[._])")
_NOT_SERVED = (
    (r"lora_magnitude_vector|dora_scale", "a DoRA, which normalises weights again"),
    (r"\.lokr_", "a LoKr, whose matrices are Kronecker products"),
    (r"\.hada_", "a LoHa, whose matrices are products element by element"),
    (r"^lora_te|^text_encoder\.", "an adapter of the text encoder"),
    (r"\.original\.", "a SAT checkpoint with the model's own weights"),
    (r"\.diff(_b)?$", "a file of whole differences of weights"),
    (r"lora_B.*\.bias$", "an adapter with biases"),
)
"""Names of tensors of other kinds of adapters -> what the file is."""


class LoRAKey(NamedTuple):
    """A tensor's name, taken apart.

    map: name of the linear map, without what stands before it.
    part: which tensor of the adapter it is.
    layout: name of a layout that such names belong to.
    """

    map: str
    part: Part
    layout: str


def parse_key(name: str, component: str) -> LoRAKey | None:
    """A tensor's name, taken apart; None if it is not one of an adapter's."""
    match = _KEY.fullmatch(name)
    if match is None:
        return None
    name, layout = match["map"], "PEFT"
    if name.startswith("lora_unet_"):
        name, layout = name.removeprefix("lora_unet_").removeprefix("_"), "kohya"
    else:
        name = name.removeprefix("base_model.model.")
        if name.startswith(("model.diffusion_model.", "diffusion_model.")):
            name, layout = name.removeprefix("model.").removeprefix("diffusion_model."), "ComfyUI"
        if name.startswith(f"{component}."):
            name, layout = name.removeprefix(f"{component}."), "diffusers"
    if match["sat"]:
        return LoRAKey(f"{name}.{match['number']}", "A" if match["sat"] == "A" else "B", "SAT")
    if layout == "diffusers" and (match["alpha"] or not re.search("lora_[AB]", match[0])):
        layout = "older diffusers"
    return LoRAKey(name, "A" if match["A"] else "B" if match["B"] else "alpha", layout)


def unsupported_kind(name: str) -> str | None:
    """Name the unsupported kind of adapter that has a tensor of this name; None for other tensors."""
    return next((what for pattern, what in _NOT_SERVED if re.search(pattern, name)), None)


def known_maps(layout: LoRALayout, maps: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Each name that a file can give to a linear map -> diffusers' names; several for a fused map.

    Args:
        maps: diffusers' names of all linear maps of a model.
    """
    known = {name: (name,) for name in maps} | renamed_maps(layout.other_names, maps)
    return {name.replace(".", "_"): sources for name, sources in known.items()} | known


def renamed_maps(other_names: Mapping[str, str | tuple[str, ...]], maps: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The rows of a table of names (`LoRALayout.other_names`) for all layers that a model has."""
    renamed: dict[str, tuple[str, ...]] = {}
    for other, names in other_names.items():
        for i in itertools.count():
            sources = tuple(name.format(i=i) for name in ([names] if isinstance(names, str) else names))
            if not all(source in maps for source in sources):
                break
            renamed[other.format(i=i)] = sources
            if "{i}" not in other:
                break
    return renamed


def any_layer(name: str) -> str:
    """The name without its layer number, so that names that differ only in the layer share a line of a report."""
    return _LAYER.sub(r"\1*", name)


def last_layers(known: Iterable[str]) -> dict[str, int]:
    """Name without its layer number -> the last layer of the known maps that are called so."""
    layers: dict[str, int] = {}
    for name in known:
        if found := _LAYER.search(name):
            layers[any_layer(name)] = max(layers.get(any_layer(name), 0), int(found[2]))
    return layers
