"""Checks of values from JSON and TOML files."""

from __future__ import annotations

from numbers import Real
from typing import Any

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
