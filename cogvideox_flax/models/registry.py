"""The model families by name, each imported when it is asked for, and all their releases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from cogvideox_flax.errors import InputError
from cogvideox_flax.models.model import Release, VideoModel

FIRST_FAMILY = "cogvideox"
"""That of checkpoints which do not name theirs: older versions knew one family."""

_CLASSES: dict[str, str | type[VideoModel]] = {
    "cogvideox": "cogvideox_flax.models.cogvideox.model:CogVideoX",
    "hunyuan_video15": "cogvideox_flax.models.hunyuan_video15.model:HunyuanVideo15",
    "hunyuan_video15_i2v": "cogvideox_flax.models.hunyuan_video15.model:HunyuanVideo15ImageToVideo",
}
"""Name -> family, or MODULE:CLASS until it is asked for."""


class _Families(Mapping[str, type[VideoModel]]):
    def __getitem__(self, name: str) -> type[VideoModel]:
        family = _CLASSES[name]
        if isinstance(family, str):
            module, _, cls = family.partition(":")
            family = _CLASSES[name] = getattr(import_module(module), cls)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)


class _Releases(Mapping[str, Release]):
    def __getitem__(self, name: str) -> Release:
        for family in FAMILIES.values():
            if name in family.releases:
                return family.releases[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for family in FAMILIES.values() for name in family.releases)

    def __len__(self) -> int:
        return sum(len(family.releases) for family in FAMILIES.values())


FAMILIES: Mapping[str, type[VideoModel]] = _Families()
"""Name -> family."""

RELEASES: Mapping[str, Release] = _Releases()
"""Name -> release, over all families."""


def register(family: type[VideoModel]) -> None:
    """Add a family and its releases.

    Raises:
        ValueError: a name that is taken.
    """
    if family.name in FAMILIES or family.releases.keys() & RELEASES.keys():
        raise ValueError(f"the family {family.name!r}, or one of its releases, is registered already")
    _CLASSES[family.name] = family


def get_family(name: str) -> type[VideoModel]:
    """The family called `name`.

    Raises:
        InputError: no such family; the message lists those there are.
    """
    if name not in _CLASSES:
        raise InputError(f"unknown model family {name!r}; this version knows {', '.join(_CLASSES)}")
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
