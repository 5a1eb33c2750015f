"""Parses the claims of a prompt about the procedural world, thing by thing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from cogvideox_flax.errors import InputError
from weights.toy_world.world import BACKGROUNDS, COLOURS


@dataclass(frozen=True)
class ThingClaims:
    """The claims about one object; None for what the prompt does not state."""

    colour: str
    shape: str
    size: str | None = None
    motion: str | None = None
    speed: str | None = None


@dataclass(frozen=True)
class Claims:
    """The claims of a prompt."""

    things: tuple[ThingClaims, ...]
    background: str | None = None


def _spellings(**words: str) -> dict[str, str]:
    return {spelling: word for word, spellings in words.items() for spelling in spellings.split()}


_NOUNS = _spellings(circle="circle ball disc disk", square="square", triangle="triangle")
_WORDS: dict[str, dict[str, str]] = {
    "colour": {colour: colour for colour in COLOURS},
    "size": _spellings(small="small little tiny", large="large big"),
    "motion": _spellings(
        right="right rightwards",
        left="left leftwards",
        up="up upwards upward",
        down="down downwards downward",
        still="still not motionless stationary",
    ),
    "speed": _spellings(slowly="slowly slow", quickly="quickly quick fast rapidly"),
}
_GROUND = re.compile(r"(?:\b(?:on|against|before|in front of)\s+)?(?:\b(?:an?|the)\s+)?\b(\w+)\s+background\b")
_STARTS = {"a", "an", "the", "one", "and", ",", ";", "."}


def read_prompt(prompt: str) -> Claims:
    """The claims of a prompt, in the words of `world.describe` and a few similar ones.

    Words between two nouns belong to the first up to the last article, "and" or comma, and to the second from there.

    Raises:
        InputError: no known shape, a thing without a known colour, an unknown background, or contradicting words.
    """
    text = prompt.lower().replace("doesn't", "does not").replace("grey", "gray")
    grounds = {match[1] for match in _GROUND.finditer(text)}
    if len(grounds) > 1 or grounds - set(BACKGROUNDS):
        raise InputError(f"{prompt!r} must name one background of {', '.join(BACKGROUNDS)}")
    text = re.sub(r"\bto the (right|left)\b", r"\1", _GROUND.sub(" ", text))
    words = re.findall(r"[a-z]+|[,;.]", text)
    nouns = [i for i, word in enumerate(words) if word in _NOUNS]
    if not nouns:
        raise InputError(f"{prompt!r} names no shape; known are {', '.join(_NOUNS)}")
    cuts = [0]
    for before, after in pairwise(nouns):
        starts = [i for i in range(before + 1, after) if words[i] in _STARTS]
        adjectives = [i for i in range(before + 1, after) if words[i] in _WORDS["colour"] | _WORDS["size"]]
        cuts.append((starts or adjectives[:1] or [after])[-1])
    parts = [words[a:b] for a, b in zip(cuts, [*cuts[1:], len(words)], strict=True)]
    things = tuple(_read_thing(part, prompt) for part in parts)
    return Claims(things, grounds.pop() if grounds else None)


def _read_thing(words: list[str], prompt: str) -> ThingClaims:
    found: dict[str, str | None] = {}
    for fact, vocabulary in _WORDS.items():
        said = {vocabulary[word] for word in words if word in vocabulary}
        if len(said) > 1:
            raise InputError(f"{prompt!r} says two things about the {fact} of one object: {', '.join(sorted(said))}")
        found[fact] = said.pop() if said else None
    shape = next(_NOUNS[word] for word in words if word in _NOUNS)
    colour = found.pop("colour")
    if colour is None:
        raise InputError(f"{prompt!r} gives the {shape} no known colour; known are {', '.join(COLOURS)}")
    return ThingClaims(colour, shape, **found)
