"""What a compiled program sends between devices, read from its optimised HLO text; loops count as often as they run."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
_OP = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<type>.*?) (?P<op>[a-z][\w-]*)\(")
_TENSOR = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")


@dataclass(frozen=True)
class Traffic:
    """Of one kind of collective, per device and run: how many, bytes of their tensors, and bytes on the wire.

    On the wire of a ring: twice (n-1)/n of an all-reduced tensor, (n-1)/n of a gathered, scattered or exchanged one,
    all of a permuted one.
    """

    count: int = 0
    tensor_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.count + other.count, self.tensor_bytes + other.tensor_bytes, self.wire_bytes + other.wire_bytes
        )

    def __mul__(self, times: int) -> Traffic:
        return Traffic(times * self.count, times * self.tensor_bytes, times * self.wire_bytes)


def collectives(hlo: str) -> dict[str, Traffic]:
    """Kind -> traffic of a program's HLO text; kinds that do not occur are absent.

    Raises:
        ValueError: a loop with collectives whose number of rounds is not in the text.
    """
    bodies, entry = _computations(hlo)
    memo: dict[str, dict[str, Traffic]] = {}

    def of(name: str) -> dict[str, Traffic]:
        if name not in memo:
            memo[name] = {}  # nothing calls itself
            found: dict[str, Traffic] = defaultdict(Traffic)
            for line in bodies[name]:
                kind = _kind(line)
                if kind is not None:
                    found[kind] += _traffic(line, kind)
                    continue
                rounds = 1
                called = re.findall(r"(?:calls|to_apply|body|called_computations)=\{?%?([\w.-]+)", line)
                called += [n for group in re.findall(r"branch_computations=\{([^}]*)\}", line) for n in _names(group)]
                inner = [of(c) for c in called if c in bodies]
                if " while(" in line and any(inner):
                    match = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
                    if match is None:
                        raise ValueError(
                            f"a loop with collectives does not say how often it runs: {line.strip()[:200]}"
                        )
                    rounds = int(match[1])
                for traffic in inner:
                    for other, value in traffic.items():
                        found[other] += value * rounds
            memo[name] = dict(found)
        return memo[name]

    return of(entry)


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, name = "", None
    for line in hlo.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = None
        elif name is not None:
            bodies[name].append(line)
    if not entry:
        raise ValueError("this is no HLO module: it has no entry computation")
    return bodies, entry


def _kind(line: str) -> str | None:
    """The collective that a line starts; the second half of an asynchronous one is not counted again."""
    match = _OP.match(line)
    op = match["op"].removesuffix("-start") if match else None
    return op if op in KINDS else None


def _traffic(line: str, kind: str) -> Traffic:
    match = _OP.match(line)
    assert match
    sizes = [_BYTES[t] * prod(int(n) for n in dims.split(",") if n) for t, dims in _TENSOR.findall(match["type"])]
    if match["op"].endswith("-start") and kind != "all-reduce" and len(sizes) > 1:
        half = len([s for s in sizes if s > 16]) // 2  # (operands, results, and a few words of state)
        sizes = sizes[half : 2 * half]
    nbytes, n = sum(sizes), _group_size(line)
    if kind == "reduce-scatter":
        nbytes *= n
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(kind, (n - 1) / n)
    return Traffic(1, nbytes, round(share * nbytes))


def _group_size(line: str) -> int:
    compact = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if compact:
        return int(compact[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else 1


def _names(group: str) -> list[str]:
    return [name.strip().lstrip("%") for name in group.split(",")]
