"""The model families, and all their releases."""

from __future__ import annotations

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.hunyuan_video15.model import HunyuanVideo15, HunyuanVideo15ImageToVideo
from cogvideox_flax.models.model import Release, VideoModel

FIRST_FAMILY = CogVideoX.name
"""That of checkpoints which do not name theirs: older versions knew one family."""

FAMILIES: dict[str, type[VideoModel]] = {}
"""Name -> family."""

RELEASES: dict[str, Release] = {}
"""Name -> release, over all families."""


def register(family: type[VideoModel]) -> None:
    """Add a family and its releases.

    Raises:
        ValueError: a name that is taken.
    """
    if family.name in FAMILIES or family.releases.keys() & RELEASES:
        raise ValueError(f"the family {family.name!r}, or one of its releases, is registered already")
    FAMILIES[family.name] = family
    RELEASES.update(family.releases)


def get_family(name: str) -> type[VideoModel]:
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


for _family in (CogVideoX, HunyuanVideo15, HunyuanVideo15ImageToVideo):
    register(_family)
