"""The mapping tables of all model families."""

from __future__ import annotations

from conversion import cogvideox, hunyuan_video15
from conversion.rules import Tables

TABLES: dict[str, Tables] = {
    "cogvideox": cogvideox.TABLES,
    "hunyuan_video15": hunyuan_video15.TABLES,
    "hunyuan_video15_i2v": hunyuan_video15.TABLES,
}
"""Family -> its tables."""


def register_tables(family: str, tables: Tables) -> None:
    """Add the tables of a family."""
    TABLES[family] = tables
