"""Values of JSON and TOML files: how they are read, and checked."""

from __future__ import annotations

import json
from numbers import Real
from pathlib import Path
from typing import Any

from cogvideox_flax.io.paths import open_file

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


def shown(value: Any, most: int = 80) -> str:
    """A value for a message, truncated to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


MAX_BYTES = 64 * 2**20


def load_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8.

    Raises:
        ValueError: it is not JSON, nested too deeply, or larger than `MAX_BYTES`.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
