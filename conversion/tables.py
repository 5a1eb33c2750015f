"""The mapping tables of the model families, each imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from cogvideox_flax.conversion.renamed import NO_NAMING, Naming
from cogvideox_flax.conversion.rules import Tables

TABLES: dict[str, Tables | str] = {
    "cogvideox": "cogvideox_flax.conversion.cogvideox",
    "hunyuan_video15": "cogvideox_flax.conversion.hunyuan_video15",
    "hunyuan_video15_i2v": "cogvideox_flax.conversion.hunyuan_video15",
}
"""Family -> its tables, or the module whose `TABLES` they are."""


def get_tables(family: str) -> Tables:
    """The tables of a family."""
    tables = TABLES[family]
    return import_module(tables).TABLES if isinstance(tables, str) else tables


def get_naming(family: str, component: str) -> Naming:
    """The names that files of other layouts give to the modules of a component."""
    tables = TABLES[family]
    namings = getattr(import_module(tables), "NAMINGS", {}) if isinstance(tables, str) else {}
    return namings.get(component, NO_NAMING)


def register_tables(family: str, tables: Tables) -> None:
    """Add the tables of a family."""
    TABLES[family] = tables
