"""The mapping tables of all model families."""

from __future__ import annotations

from cogvideox_flax.conversion import cogvideox, hunyuan_video15
from cogvideox_flax.conversion.rules import Tables
from cogvideox_flax.models.cogvideox.releases import FAMILY as COGVIDEOX
from cogvideox_flax.models.hunyuan_video15.releases import FAMILY as HUNYUAN_VIDEO15
from cogvideox_flax.models.hunyuan_video15.releases import IMAGE_FAMILY as HUNYUAN_VIDEO15_IMAGE

TABLES: dict[str, Tables] = {
    COGVIDEOX: cogvideox.TABLES,
    HUNYUAN_VIDEO15: hunyuan_video15.TABLES,
    HUNYUAN_VIDEO15_IMAGE: hunyuan_video15.TABLES,
}
"""Family -> its tables."""


def register_tables(family: str, tables: Tables) -> None:
    """Add the tables of a family."""
    TABLES[family] = tables
