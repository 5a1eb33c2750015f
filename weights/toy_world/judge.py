"""Checks whether a clip of the procedural world matches its prompt, attribute by attribute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations
from math import sqrt
from typing import Any

from weights.toy_world.claims import Claims, read_prompt
from weights.toy_world.seeing import Frames, Seen, SeenThing, see

ATTRIBUTES = ("colour", "shape", "size", "direction", "speed", "background", "count", "all")
"""The attributes that `score` reports, in the order of a table."""
IN_ALL = ("colour", "shape", "size", "direction", "count")
"""The attributes that must be right, if claimed, for a clip to be right."""


@dataclass(frozen=True)
class Rate:
    """How often something was right, with the Wilson 95 % interval; in percent."""

    right: int
    n: int
    percent: float
    low: float
    high: float


def compare(seen: Seen, claims: Claims) -> dict[str, bool]:
    """Which claims are right; a key is absent when the prompt makes no such claim.

    With two things, an attribute is right only if it is right for every thing of which it is claimed. Things are
    matched by colour first, then so that most is right. "all" is all of `IN_ALL` that are claimed.
    """
    nothing = SeenThing(None, None, None, None, None)
    count = len(claims.things)

    def right(match: tuple[SeenThing, ...]) -> dict[str, list[bool]]:
        pairs = list(zip(claims.things, match, strict=True))
        fields = {"colour": "colour", "shape": "shape", "size": "size", "direction": "motion", "speed": "speed"}
        return {
            name: [getattr(claim, field) == getattr(thing, field) for claim, thing in pairs if getattr(claim, field)]
            for name, field in fields.items()
        }

    matches = (right(match) for match in permutations((*seen.things[:6], *[nothing] * count), count))
    best = max(matches, key=lambda r: (sum(r["colour"]), sum(map(sum, r.values()))))
    result = {name: all(values) for name, values in best.items() if values}
    if claims.background is not None:
        result["background"] = seen.background == claims.background
    result["count"] = len(seen.things) == count
    result["all"] = all(result[name] for name in IN_ALL if name in result)
    return result


def score(frames: Frames, prompt: str) -> dict[str, bool]:
    """Which of the prompt's claims the clip fulfils; see `compare`.

    Raises:
        InputError: frames or a prompt that cannot be read.
    """
    claims = read_prompt(prompt)
    return compare(see(frames), claims)


def rates(scores: Iterable[dict[str, bool]]) -> dict[str, Rate]:
    """How often each attribute was right among the scores that claim it."""
    scores = list(scores)
    found = {name: [s[name] for s in scores if name in s] for name in ATTRIBUTES}
    return {name: wilson(sum(values), len(values)) for name, values in found.items() if values}


def percent(rate: dict[str, Any]) -> str:
    """A `Rate` as a dictionary, for a table: the percentage and its interval."""
    return f"{rate['percent']:.0f} ({rate['low']:.0f}–{rate['high']:.0f})"


def wilson(right: int, n: int, z: float = 1.959964) -> Rate:
    """A share with its score interval (Wilson, 1927)."""
    share = right / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Rate(right, n, 100 * share, 100 * max(middle - half, 0), 100 * min(middle + half, 1))
