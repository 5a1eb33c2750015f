"""The traffic of a compiled program between devices, read from its optimised HLO; loops count once per iteration."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cogvideox_flax.plan.hlo import Op, Program, sizes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Traffic:
    """One kind of collective, per device and run: count, bytes of the tensors, and bytes on the wire.

    Bytes on the wire are those of a ring: 2 (n-1)/n of an all-reduced tensor, (n-1)/n of a gathered, scattered or
    exchanged one, all of a permuted one.
    """

    count: int = 0
    tensor_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.count + other.count, self.tensor_bytes + other.tensor_bytes, self.wire_bytes + other.wire_bytes
        )

    def __mul__(self, times: float) -> Traffic:
        return Traffic(*(round(times * each) for each in (self.count, self.tensor_bytes, self.wire_bytes)))


def collectives(program: Program) -> dict[str, Traffic]:
    """Kind -> traffic; kinds that do not occur are absent."""
    found: dict[str, Traffic] = defaultdict(Traffic)
    for _, op, times in program.run():
        if (received := between_slices(op)) is not None:
            kind, traffic = received
            found[f"{kind} between slices"] += traffic * times
        for each in started_by(program, op):
            name = kind_of(each)
            assert name is not None
            found[name] += _sent(tensor_bytes(each, name), name, len(groups_of(each.text)[0])) * times
    return dict(found)


TRANSFER = "recv"
"""The operation with which libtpu waits for what other slices send, in the collectives that it splits into parts inside
a slice and a part between slices."""

_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


def between_slices(op: Op) -> tuple[str, Traffic] | None:
    """The collective between slices that an operation receives, and its traffic of each device; None for others."""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.text) if op.kind == TRANSFER else None
    if found is None:
        return None
    kind = _BETWEEN_SLICES[found[1]]
    target = re.search(r'_xla_megascale_target="\{*([\d,:]+)\}', op.text)  # "{1,2}x{0:3}": slices, devices of each
    slices = sum(_count(part) for part in target[1].split(",")) if target else 1
    received = max(sizes(op.type))
    return kind, _sent(received * (slices if kind == "reduce-scatter" else 1), kind, slices)


def _count(numbers: str) -> int:
    first, _, last = numbers.partition(":")
    return int(last or first) - int(first) + 1


_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
"""What libtpu calls in the fusions with which an asynchronous collective begins and ends. In those between, it goes on
beside a product."""


def started_by(program: Program, op: Op) -> list[Op]:
    """The collectives that an operation starts: itself, or those that libtpu puts in a fusion.

    An all-reduce of which a fusion keeps each device's part is a reduce-scatter, and sends as much.
    """
    if op.kind != "fusion":
        return [op] if kind_of(op) else []
    if role_of(program, op) in ("step", "done"):
        return []
    return [_as_scatter(each, op) for each in program.inside(op) if kind_of(each)]


def role_of(program: Program, op: Op) -> Literal["start", "step", "done"] | None:
    """The part that a fusion has in an asynchronous collective; None: it has none."""
    inside = list(program.inside(op)) if op.kind == "fusion" else []
    if not any(kind_of(each) and "chain_id=" in each.text for each in inside):
        return None
    calls = "".join(each.text for each in inside if each.kind == "custom-call")
    return "start" if _START in calls else "done" if _DONE in calls else "step"


def channel_of(program: Program, op: Op) -> str:
    """The channel of the collective in a fusion, by which its start and its end are known."""
    texts = (each.text for each in program.inside(op) if kind_of(each))
    return next(found[0] for text in texts if (found := re.search(r"channel_id=\d+", text)))


def _as_scatter(op: Op, fusion: Op) -> Op:
    n = len(groups_of(op.text)[0])
    if kind_of(op) == "all-reduce" and n > 1 and sum(sizes(fusion.type)) * n <= sum(sizes(op.type)):
        return replace(op, kind="reduce-scatter", type=fusion.type)
    return op


def kind_of(op: Op) -> str | None:
    """The collective that an operation starts; None for other operations and for the end of an asynchronous one."""
    kind = op.kind.removesuffix("-start")
    return kind if kind in KINDS else None


def tensor_bytes(op: Op, kind: str) -> int:
    """Bytes per device of a collective's full tensor."""
    found = sizes(op.type)
    if op.kind.endswith("-start") and kind != "all-reduce" and len(found) > 1:
        half = len([nbytes for nbytes in found if nbytes > 16]) // 2  # (operands, results, small state)
        found = found[half : 2 * half]
    return sum(found) * (len(groups_of(op.text)[0]) if kind == "reduce-scatter" else 1)


def _sent(nbytes: int, kind: str, n: int) -> Traffic:
    """Of a collective of tensors of this size between n devices."""
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    return Traffic(1, nbytes, round(share * nbytes))


def groups_of(text: str) -> list[list[int]]:
    """The groups of devices of a collective, in any of HLO's three notations."""
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape = [int(n) for n in match[3].split(",")]
        order = [int(n) for n in match[4].split(",")] if match[4] else range(len(shape))
        ids = np.arange(int(np.prod(shape))).reshape(shape).transpose(order)
        return ids.reshape(int(match[1]), int(match[2])).tolist()
    if match := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", text):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?)\}", text):
        axes = {name.strip("'"): int(size) for name, size in re.findall(r"('\w+')=(\d+)", match[1])}
        together = [name.strip().strip("'") for name in match[2].split(",")]
        ids = np.arange(int(np.prod(list(axes.values())))).reshape(list(axes.values()))
        last = [list(axes).index(name) for name in together]
        ids = np.moveaxis(ids, last, range(-len(last), 0))
        return ids.reshape(-1, int(np.prod([axes[name] for name in together]))).tolist()
    if "replica_groups=" in text:
        raise ValueError(f"cannot read who takes part in: {text.strip()[:300]}")
    return [[0]]
