"""Tensors that files of another layout name otherwise than diffusers does, or hold together in one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cogvideox_flax.conversion.rules import Shape

_LAYER = re.compile(r"(?<=blocks\.)\d+(?=\.)")


class Naming(NamedTuple):
    """The names of a component's modules in files of other layouts.

    modules: a module's name -> diffusers'; several where the file has one, whose outputs are theirs one after the
        other. `{i}` stands for the layer.
    swapped: those of which the outputs have their two halves in the other order.
    """

    modules: Mapping[str, str | tuple[str, ...]] = {}
    swapped: tuple[str, ...] = ()


NO_NAMING = Naming()


class Part(NamedTuple):
    """A tensor, as part of a stored one: that of this number, from 0, among `parts` equal parts of its rows.

    swapped: whether its two halves are in the other order.
    """

    stored: str
    number: int = 0
    parts: int = 1
    swapped: bool = False

    def shape(self, stored: Shape) -> Shape:
        """The tensor's shape, by that of the stored one."""
        return stored if self.parts == 1 else (stored[0] // self.parts, *stored[1:])

    def of(self, value: np.ndarray) -> np.ndarray:
        """The tensor, by the stored one."""
        if self.swapped:
            return np.roll(value, len(value) // 2, axis=0)
        return value if self.parts == 1 else value[self.number * len(value) // self.parts :][: len(value) // self.parts]


def parts_of(shapes: Mapping[str, Shape], naming: Naming) -> dict[str, list[Part]]:
    """Diffusers' name of each tensor -> its part of a stored tensor; several are one too many.

    A tensor whose name is not in the table, or that has no such equal parts, keeps its name.
    """
    found: dict[str, list[Part]] = {}
    for stored, shape in shapes.items():
        module, _, leaf = stored.rpartition(".")
        layer = _LAYER.search(module)
        general = _LAYER.sub("{i}", module)
        others = naming.modules.get(general, ())
        names = (others,) if isinstance(others, str) else others
        if not names or not shape or shape[0] % len(names):
            found.setdefault(stored, []).append(Part(stored))
            continue
        leaf = "weight" if leaf == "scale" else leaf  # of a norm, in ComfyUI's files
        for number, name in enumerate(names):
            own = f"{name.format(i=layer and layer[0])}.{leaf}"
            found.setdefault(own, []).append(Part(stored, number, len(names), general in naming.swapped))
    return found
