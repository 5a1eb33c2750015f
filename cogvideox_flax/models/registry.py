"""The model families, and all their releases."""

from __future__ import annotations

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.family import COGVIDEOX
from cogvideox_flax.models.family import ModelFamily, Release
from cogvideox_flax.models.hunyuan_video15 import family as hunyuan_video15

FIRST_FAMILY = COGVIDEOX.name
"""That of checkpoints which do not name theirs: older versions knew one family."""

FAMILIES: dict[str, ModelFamily] = {}
"""Name -> family."""

RELEASES: dict[str, Release] = {}
"""Name -> release, over all families."""


def register(family: ModelFamily) -> None:
    """Add a family and its releases.

    Raises:
        ValueError: a name that is taken.
    """
    if family.name in FAMILIES or family.releases.keys() & RELEASES:
        raise ValueError(f"the family {family.name!r}, or one of its releases, is registered already")
    FAMILIES[family.name] = family
    RELEASES.update(family.releases)


def get_family(name: str) -> ModelFamily:
    """The family called `name`.

    Raises:
        InputError: no such family; the message lists those there are.
    """
    if name not in FAMILIES:
        raise InputError(f"unknown model family {name!r}; this version knows {', '.join(FAMILIES)}")
    return FAMILIES[name]


def component_names() -> list[str]:
    """The names of the components of all families, each once."""
    return list(dict.fromkeys(name for family in FAMILIES.values() for name in family.components))


def get_release(name: str) -> Release:
    """The release called `name` (case does not matter).

    Raises:
        InputError: no such release; the message lists those there are.
    """
    if name.lower() not in RELEASES:
        raise InputError(f"unknown release {name!r}; known are {', '.join(RELEASES)}")
    return RELEASES[name.lower()]


for _family in (COGVIDEOX, hunyuan_video15.TEXT_TO_VIDEO, hunyuan_video15.IMAGE_TO_VIDEO):
    register(_family)
