"""Checks whether a clip of the procedural world matches its prompt, attribute by attribute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import sqrt
from typing import Any

from weights.toy_world.judge.claims import Claims, read_prompt
from weights.toy_world.judge.seeing import Frames, Seen, SeenThing, see
from weights.toy_world.world import SHAPES

ATTRIBUTES = ("colour", "shape", "size", "direction", "speed", "background", "count", "all", "clear", "clean")
"""The attributes that a clip is judged by, in the order of a table. The last two need its outlines."""
IN_ALL = ("colour", "shape", "size", "direction", "count")
"""The attributes that must be right, if claimed, for a clip to be right."""

OVERLAPS = {"clear": 0.85, "clean": 0.92}
"""Least overlap of a thing with the ideal shape that is claimed. In a frame that is clear or clean all things have it,
and every other shape overlaps less by `MARGIN`; a clip is when all its frames are."""
MARGIN = 0.02


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

    With two things, an attribute is right only if it is right for every thing of which it is claimed. "all" is all of
    `IN_ALL` that are claimed. "clear" and "clean" need outlines.
    """
    match = _match(seen, claims)
    result = {name: all(values) for name, values in _right(match, claims).items() if values}
    if claims.background is not None:
        result["background"] = seen.background == claims.background
    result["count"] = len(seen.things) == len(claims.things)
    result["all"] = all(result[name] for name in IN_ALL if name in result)
    if seen.outlined:
        result |= {name: bool(frames) and all(frames) for name, frames in _drawn(match, claims).items()}
    return result


def drawn(seen: Seen, claims: Claims) -> dict[str, list[bool]]:
    """Whether each frame is "clear" and "clean", see `OVERLAPS`. Empty lists where a thing is not measured."""
    return _drawn(_match(seen, claims), claims)


def _drawn(match: Sequence[SeenThing], claims: Claims) -> dict[str, list[bool]]:
    def fits(overlaps: Sequence[float], shape: str, bar: float) -> bool:
        own = overlaps[SHAPES.index(shape)]
        others = [x for x, name in zip(overlaps, SHAPES, strict=True) if name != shape]
        return own >= bar and own >= max(others) + MARGIN

    frames = list(zip(*(thing.overlaps for thing in match), strict=False))
    shapes = [claim.shape for claim in claims.things]
    return {
        name: [all(fits(x, shape, bar) for x, shape in zip(frame, shapes, strict=True)) for frame in frames]
        for name, bar in OVERLAPS.items()
    }


def _match(seen: Seen, claims: Claims) -> tuple[SeenThing, ...]:
    """The thing of each claim: by colour first, then so that most is right."""
    nothing = SeenThing(None, None, None, None, None)
    count = len(claims.things)

    def merit(match: tuple[SeenThing, ...]) -> tuple[int, int]:
        right = _right(match, claims)
        return sum(right["colour"]), sum(map(sum, right.values()))

    return max(permutations((*seen.things[:6], *[nothing] * count), count), key=merit)


def _right(match: Sequence[SeenThing], claims: Claims) -> dict[str, list[bool]]:
    """Of each attribute, whether it is right for each thing of which it is claimed."""
    pairs = list(zip(claims.things, match, strict=True))
    fields = {"colour": "colour", "shape": "shape", "size": "size", "direction": "motion", "speed": "speed"}
    return {
        name: [getattr(claim, field) == getattr(thing, field) for claim, thing in pairs if getattr(claim, field)]
        for name, field in fields.items()
    }


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
