"""Checks of values from JSON and TOML files."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def is_finite_number(value: Any) -> bool:
    """Whether it is a finite number within float range; booleans are not numbers."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer above the float range
        return False


def is_count(value: Any, most: int) -> bool:
    """Whether it is an integer from 1 to `most`; booleans are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def shown(value: Any, most: int = 80) -> str:
    """A value for a message, truncated to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
