"""How a field of the request is given on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["encode", "denoise", "decode", "generate"]


@dataclass(frozen=True)
class Option:
    """How an option is given on the command line.

    help: what it does, and its default.
    stage: the first stage that needs it; "generate": none of the stages alone.
    recorded: whether the settings in a run directory hold it.
    flags: other names of the flag.
    parse: text -> value; ValueError or InputError where it cannot be.
    choices: text -> value, for options of few values.
    for_media: whether encoding pictures and clips needs it too.
    metavar, repeat: as argparse has them; repeat: each use adds a value.
    """

    help: str
    stage: Stage = "denoise"
    recorded: bool = True
    flags: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    choices: Mapping[str, Any] | None = None
    metavar: str | None = None
    repeat: bool = False
    for_media: bool = False


def options_of(kind: type) -> dict[str, Option]:
    """Field of a dataclass -> its option."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of the request that is an option of the command line; `how`: as for `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **how)})
