"""Values that come out of other people's JSON and TOML."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def is_finite_number(value: Any) -> bool:
    """Whether it is a number that a float holds; true and false are none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def is_count(value: Any, most: int) -> bool:
    """Whether it is a whole number from 1 to `most`; true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def shown(value: Any, most: int = 80) -> str:
    """A value for a message, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
