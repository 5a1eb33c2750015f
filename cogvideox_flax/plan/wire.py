"""The bytes that a compiled program's collectives send over the links of a grid of chips.

A link joins two neighbours and carries both directions at once; messages are routed along the first axis first; edges
do not wrap around, as in all slices of up to 64 chips of a v5e or v6e.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, product

from cogvideox_flax.plan.collectives import groups_of, kind_of, tensor_bytes
from cogvideox_flax.plan.hlo import Op

Place = tuple[int, ...]
Message = tuple[Place, Place, float]
"""From, to, bytes."""


class Links:
    """What a mesh's collectives send over its links, inside a slice. places: grid coordinates of its devices."""

    def __init__(self, places: Sequence[Place]):
        self._load = cache(lambda text, kind, nbytes: busiest(_messages(text, kind, nbytes, places)))

    def busiest_bytes(self, op: Op) -> float:
        """The bytes that a collective sends over the busiest link; 0 for other operations."""
        kind = kind_of(op)
        return self._load(op.text, kind, tensor_bytes(op, kind)) if kind else 0.0


def _messages(text: str, kind: str, nbytes: int, places: Sequence[Place]) -> Iterator[Message]:
    if kind == "collective-permute":
        found = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text)
        if found is None:
            raise ValueError(f"cannot read who sends to whom in: {text.strip()[:300]}")
        for source, target in re.findall(r"\{(\d+),(\d+)\}", found[1]):
            yield places[int(source)], places[int(target)], nbytes
        return
    for group in groups_of(text):
        chips = [places[i] for i in group]
        if kind == "all-to-all":
            yield from exchange(chips, nbytes)
        else:
            yield from ring(chips, nbytes * (2 if kind == "all-reduce" else 1))


def busiest(messages: Iterable[Message]) -> float:
    """Bytes over the busiest link, in its busier direction, when all messages are sent at once."""
    loads: dict[tuple[Place, Place], float] = defaultdict(float)
    for source, target, nbytes in messages:
        for link in pairwise(_route(source, target)):
            loads[link] += nbytes
    return max(loads.values(), default=0.0)


def exchange(group: Sequence[Place], nbytes: float) -> Iterator[Message]:
    """An all-to-all of tensors of this size: each chip sends an equal part to every other chip."""
    for source, target in product(group, group):
        if source != target:
            yield source, target, nbytes / len(group)


def ring(group: Sequence[Place], nbytes: float) -> Iterator[Message]:
    """Each chip sends `nbytes` to the next, in one direction: a gather, a scatter, or half of an all-reduce."""
    for source, target in zip(group, [*group[1:], *group[:1]], strict=True):
        if source != target:
            yield source, target, nbytes * (len(group) - 1) / len(group)


def _route(source: Place, target: Place) -> Iterator[Place]:
    """The chips on the route, both ends included."""
    at = list(source)
    yield tuple(at)
    for axis, end in enumerate(target):
        while at[axis] != end:
            at[axis] += 1 if end > at[axis] else -1
            yield tuple(at)
