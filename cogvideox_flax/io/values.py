"""Values out of JSON and TOML files: converted to a type, or refused with what is expected. And reading JSON files."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from cogvideox_flax.io.paths import open_file
from cogvideox_flax.io.stand_ins import HEAD_BYTES, describe_stand_in

MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Larger numbers are infinite where they are computed with."""


def is_finite_number(value: Any) -> bool:
    """Whether it is a finite number within the range of float32; booleans are not numbers."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and abs(float(value)) <= MAX_FLOAT32
    except OverflowError:  # an integer above the float range
        return False


def is_count(value: Any, most: int) -> bool:
    """Whether it is an integer from 1 to `most`; booleans are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def short_repr(value: Any, most: int = 80) -> str:
    """A value for a message, truncated to `most` characters."""
    try:
        text = " ".join(repr(value).splitlines())  # those of arrays are several lines
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        return f"a {type(value).__name__} of thousands of digits or levels"
    return text if len(text) <= most else f"{text[:most]}..."


def text_lines(text: str) -> list[str]:
    """The lines of a text. Unlike those of `str.splitlines`, U+2028 and its kin, which stand in prompts, end none."""
    return re.split("\r\n|\r|\n", text)


_UNSEEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line feeds, what ends a line or turns its direction, and lone surrogates."""


def printable(text: str) -> str:
    """Escape the characters that a terminal or a page would obey instead of show.

    Tabs and line feeds stay, and what a JSON text holds is the same afterwards.
    """
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


_SIMPLE: dict[Any, tuple[Any, str]] = {
    Any: (object, "a value"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text in quotes"),
    Path: (str | Path, "a path in quotes"),
    dict: (dict, "a table"),
    None: (types.NoneType, "null"),
    types.NoneType: (types.NoneType, "null"),
}
"""Type -> the types that a file may give for it, and their name in messages."""


def typed(kind: Any, value: Any) -> Any:
    """A value out of a JSON or TOML file as a type: lists become tuples where tuples are expected, and so on.

    Args:
        kind: bool, int, float, str, Path, None, Any; a Literal, a TypedDict; tuples, lists, sequences and unions of
            these; or a dataclass with fields of any of these types, for a table with their names.

    Raises:
        ValueError: it is of another type; with what is expected, or for a dataclass's table with all its `faults_of`.
            Ranges are the caller's to check.
    """
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(expected_of(kind))
        if faults := faults_of(kind, value):
            raise ValueError("\n".join(faults))
        hints = typing.get_type_hints(kind)
        return kind(**{name: typed(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    try:
        return _typed(kind, value)
    except (ValueError, OverflowError):  # of a part, or an integer beyond the range of float
        raise ValueError(expected_of(kind)) from None


def _typed(kind: Any, value: Any) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            with suppress(ValueError):
                return typed(part, value)
    elif origin is Literal:
        if any(value is part or (isinstance(part, str) and value == part) for part in parts):
            return value
    elif typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        if isinstance(value, dict) and value.keys() >= kind.__required_keys__:
            return {**value, **{key: typed(hint, value[key]) for key, hint in hints.items() if key in value}}
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {typed(parts[0], key): typed(parts[1], each) for key, each in value.items()}
    elif origin is not None and issubclass(origin, Sequence):
        each = parts[:1] if origin is not tuple or parts[1:] == (...,) else parts
        if isinstance(value, list | tuple) and (len(each) == 1 or len(each) == len(value)):
            kinds = each * len(value) if len(each) == 1 else each
            return (tuple if origin is tuple else list)(typed(*pair) for pair in zip(kinds, value, strict=True))
    elif isinstance(value, _SIMPLE[kind][0]) and not (isinstance(value, bool) and kind not in (bool, Any)):
        return kind(value) if kind in (float, Path) else value
    raise ValueError


def expected_of(kind: Any) -> str:
    """A type of `typed` in words."""
    origin, parts = typing.get_origin(kind), [part for part in typing.get_args(kind) if part is not ...]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(expected_of, parts)))
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple and ... not in typing.get_args(kind):
        return f"a list of {len(parts)}: {', '.join(map(expected_of, parts))}"
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    if origin is not None:
        return f"a list of {expected_of(parts[0]).removeprefix('a ').replace(' in quotes', '')}s"
    return "a table" if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind) else _SIMPLE[kind][1]


def faults_of(kind: Any, table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Check a table for a dataclass, and the tables in it; return an indented line for each fault.

    Faults are keys that are unknown or missing, and values of another type than the field.

    Args:
        prefix: the dotted name of the table, with a dot at its end; "" for the whole file.
    """
    fields, hints = {field.name: field for field in dataclasses.fields(kind)}, typing.get_type_hints(kind)
    faults = [f"  {prefix}{key}: unknown key; known are {', '.join(fields)}" for key in table if key not in fields]
    for name, field in fields.items():
        hint, where = hints[name], f"{prefix}{name}"
        if name not in table:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                faults.append(f"  {where}: missing")
        elif not dataclasses.is_dataclass(hint):
            try:
                typed(hint, table[name])
            except ValueError as e:
                faults.append(f"  {where}: got {short_repr(table[name])}, expected {e}")
        elif isinstance(table[name], Mapping):
            faults += faults_of(hint, table[name], f"{where}.")
        else:
            faults.append(f"  {where}: got {short_repr(table[name])}, expected a table, [{where}]")
    return faults


MAX_BYTES = 64 * 2**20


def load_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8, with or without a byte order mark.

    Raises:
        ValueError: it is not JSON, nested too deeply, or larger than `MAX_BYTES`.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8-sig"))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    except ValueError as e:
        raise ValueError(describe_stand_in(data[:HEAD_BYTES]) or str(e)) from e
