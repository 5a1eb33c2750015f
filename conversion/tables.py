"""The mapping tables of all model families."""

from __future__ import annotations

from conversion import cogvideox
from conversion.rules import Tables

TABLES: dict[str, Tables] = {"cogvideox": cogvideox.TABLES}
"""Family -> its tables."""


def register_tables(family: str, tables: Tables) -> None:
    """Add the tables of a family."""
    TABLES[family] = tables
