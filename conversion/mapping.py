"""Matches source tensors with a model's parameters, strictly in both directions, before any tensor is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cogvideox_flax.checkpoint import parameters
from cogvideox_flax.conversion.rules import Alias, Ignore, Rule, Shape, Table, same
from cogvideox_flax.conversion.tables import get_naming, get_tables
from cogvideox_flax.errors import ConversionError
from cogvideox_flax.models.model import Family, VideoModel

MAX_FAULTS = 20

OTHER_NAMINGS = {
    "double_blocks.": "Tencent's own and ComfyUI's files",
    ".attention.query_key_value.": "SAT, the code in which CogVideoX was trained,",
}
"""Part of a tensor's name -> whose names have it, of models whose files in other layouts are not read."""


class WeightMove(NamedTuple):
    """The target of one source tensor: the parameter, the slot in its layer axis, the transform, the source's shape."""

    target: str
    slot: int | None
    transform: Callable[[np.ndarray], np.ndarray]
    shape: Shape

    def back(self, value: np.ndarray) -> np.ndarray:
        """The source tensor of a parameter, or of its layer: the inverse of `transform`, which only moves elements."""
        if self.transform is same:
            return value
        if self.transform is np.transpose:
            return value.T
        places = self.transform(np.arange(value.size).reshape(self.shape))
        source = np.empty(value.size, value.dtype)
        source[places.reshape(-1)] = value.reshape(-1)
        return source.reshape(self.shape)


class WeightMoves(NamedTuple):
    """A complete mapping: the move of every used source tensor, and the shape of every parameter."""

    moves: dict[str, WeightMove]
    shapes: dict[str, Shape]


def weight_moves(family: type[VideoModel], component: str, config: Any, tensors: Mapping[str, Shape]) -> WeightMoves:
    """Match source tensors (name -> shape) with the parameters of a family's component.

    Raises:
        ConversionError: with all missing, unused and duplicate tensors and all wrong shapes.
    """
    moves, shapes, faults = _match(family, component, config, tensors)
    if faults:
        _refuse_other_naming(family, component, tensors)
        more = [f"  ... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        others = {name: r.configs[component] for name, r in family.releases.items()}
        others = {name: other for name, other in others.items() if other != config}
        fits = [name for name, other in others.items() if not _match(family, component, other, tensors)[2]]
        way_out = f"wrong config.json? Try cogvideox convert with --release {fits[0]}" if fits else ""
        hint = [f"  these tensors fit {' and '.join(fits)}: {way_out}"] if fits else []
        raise ConversionError(
            "\n".join(
                [f"{component} does not match its config ({len(faults)} faults)", *faults[:MAX_FAULTS], *more, *hint]
            )
        )
    return WeightMoves(moves, shapes)


def _refuse_other_naming(family: type[VideoModel], component: str, tensors: Iterable[str]) -> None:
    """Raise where the tensors have the names of a layout that is known and, of this model, not read."""
    if get_naming(family.name, component).modules:
        return
    for part, whose in OTHER_NAMINGS.items():
        if found := next((name for name in tensors if part in f".{name}"), None):
            released = ", ".join(release.hub_id for release in family.releases.values())
            raise ConversionError(
                f"the {component} has the names of {whose} such as {found}; expected those of diffusers. Take the "
                f"model in diffusers' layout ({released}), or convert the file with diffusers' scripts/ first"
            )


def source_moves(family: Family, component: str, config: Any) -> dict[str, WeightMove]:
    """The name of every tensor that a source checkpoint of this config holds -> its move."""
    table = get_tables(family.name)[component](config)
    moves = {}
    for target, leaf in parameters(family.components[component].abstract(config)).items():
        row, groups = _row_of_target(table, target)
        for slot in range(leaf.shape[0]) if _is_stacked(row) else (None,):
            shape = row.source_shape(leaf.shape if slot is None else leaf.shape[1:])
            moves[_source_name(row, groups, slot)] = WeightMove(target, slot, row.transform, shape)
    return moves


def _match(
    family: type[VideoModel], component: str, config: Any, tensors: Mapping[str, Shape]
) -> tuple[dict[str, WeightMove], dict[str, Shape], list[str]]:
    table = get_tables(family.name)[component](config)
    abstract = family.components[component].abstract(config)
    shapes = {name: tuple(leaf.shape) for name, leaf in parameters(abstract).items()}
    moves: dict[str, WeightMove] = {}
    filled: dict[tuple[str, int | None], str] = {}
    faults = []
    for name, shape in tensors.items():
        row, found = _find_row(table, name, tensors)
        if isinstance(row, Ignore):
            continue
        if row is None or found is None:
            faults.append(f"  unused   {name}")
            continue
        target = found.expand(row.target)
        slot = int(found["slot"]) - row.first_slot if _is_stacked(row) else None
        if target not in shapes or (slot is not None and not 0 <= slot < shapes[target][0]):
            faults.append(f"  unused   {name} (this model has no {_place(target, slot)})")
            continue
        if (target, slot) in filled:
            faults.append(f"  twice    {_place(target, slot)}: {filled[target, slot]} and {name}")
            continue
        filled[target, slot] = name
        expected = shapes[target] if slot is None else shapes[target][1:]
        try:
            # an array of the source's shape without memory: only its axes matter
            got = row.transform(np.broadcast_to(np.float32(0), shape)).shape
        except (ValueError, IndexError):
            got = None
        if got != expected:
            faults.append(f"  shape    {_place(target, slot)}: got {shape}, expected {expected} ({name})")
            continue
        moves[name] = WeightMove(target, slot, row.transform, tuple(shape))
    for target, shape in shapes.items():
        row, groups = _row_of_target(table, target)
        for slot in range(shape[0]) if _is_stacked(row) else (None,):
            if (target, slot) not in filled:
                faults.append(f"  missing  {_place(target, slot)} ({_source_name(row, groups, slot)})")
    return moves, shapes, faults


def _find_row(
    table: Table, name: str, tensors: Mapping[str, Shape]
) -> tuple[Rule | Ignore | None, re.Match[str] | None]:
    for row in table:
        if found := re.fullmatch(row.source, name):
            if not isinstance(row, Alias):
                return row, found
            if row.original in tensors:
                return Ignore(row.source, f"tied to {row.original}"), None
            return _find_row(table, row.original, tensors)
    return None, None


def _row_of_target(table: Table, target: str) -> tuple[Rule, dict[str, str]]:
    """The row that fills a parameter, and the required values of its groups (group number -> text)."""
    for row in table:
        if isinstance(row, Rule):
            found = _target_pattern(row.target).fullmatch(target)
            # a group of the source may match less than the target's name would allow
            if found and re.fullmatch(row.source, _source_name(row, found.groupdict(), 0)):
                return row, found.groupdict()
    raise KeyError(f"no row of the mapping table fills {target}: the table and the model disagree")


@cache
def _target_pattern(target: str) -> re.Pattern[str]:
    """The names that a row's target stands for, with the source's groups as g1, g2, ..."""
    return re.compile(re.sub(r"\\\\(\d)", r"(?P<g\1>[^.]+)", re.escape(target)))


def _is_stacked(row: Rule) -> bool:
    return "(?P<slot>" in row.source


def _place(target: str, slot: int | None) -> str:
    return target if slot is None else f"{target} layer {slot}"


def _source_name(row: Rule, groups: dict[str, str], slot: int | None) -> str:
    """The name of the source tensor that a row expects for one slot: its pattern with the groups filled in."""
    number = 0

    def fill(group: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return str((slot or 0) + row.first_slot) if "?P<slot>" in group[0] else groups.get(f"g{number}", group[0])

    named = re.sub(r"\(\?:[^()]*\)\?", "", row.source)  # without optional prefixes
    return re.sub(r"\([^()]*\)", fill, named).replace("\\.", ".")
