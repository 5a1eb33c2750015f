"""Optimised HLO text of a compiled program: its operations, each with the number of times it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from cogvideox_flax.nn.scopes import share_of

_OP = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.*?) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$")
_TENSOR = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](\{[^}]*\})?")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 1, "u4": 1}

_SLICES = {"slice", "dynamic-slice"}
_BY_ELEMENT = {"bitcast", "concatenate", "convert", "copy", "pad", "reshape", "select", "transpose"}
_CALLERS = {"call", "conditional", "async-start"}


@dataclass(frozen=True)
class Op:
    """One operation of the program.

    text: its line, with all attributes.
    """

    name: str
    kind: str
    type: str
    operands: tuple[str, ...]
    text: str

    def called(self) -> list[str]:
        """Names of the computations that it calls or applies."""
        found = re.findall(r"(?:calls|to_apply|body|called_computations)=\{?%?([\w.-]+)", self.text)
        found += re.findall(r"false_computation=%?([\w.-]+)", self.text)  # of a conditional: first that of False
        found += re.findall(r"true_computation=%?([\w.-]+)", self.text)
        for group in re.findall(r"branch_computations=\{([^}]*)\}", self.text):
            found += [name.strip().lstrip("%") for name in group.split(",")]
        return found


def _constant(op: Op) -> int | None:
    """A constant natural number."""
    found = re.search(r" constant\((\d+)\)", op.text)
    return int(found[1]) if found else None


class Program:
    """The computations of an HLO module.

    shares: named scope of a conditional -> how often each of its branches runs when it does.

    Raises:
        ValueError: the text is not an HLO module.
    """

    def __init__(self, text: str, shares: Mapping[str, Sequence[float]] = MappingProxyType({})):
        self.shares = shares
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = ""
        current: dict[str, Op] | None = None
        for line in text.splitlines():
            head = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$", line)
            if head:
                current = self.computations.setdefault(head[2], {})
                self.entry = head[2] if head[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (match := _OP.match(line)):
                arguments = match["rest"].split("), ")[0]
                operands = tuple(re.findall(r"%([\w.-]+)", arguments))
                current[match["name"]] = Op(match["name"], match["op"], match["type"], operands, line)
        if not self.entry:
            raise ValueError("this is no HLO module: it has no entry computation")

    def run(self) -> Iterator[tuple[dict[str, Op], Op, float]]:
        """Every operation that runs, with its computation and its count; fusions and reductions are one operation.

        Of a conditional of which neither `shares` nor its own scope (`nn.scopes`) says how often it is taken, all
        branches are counted.

        Raises:
            ValueError: a loop whose number of iterations is not known.
        """
        yield from self._run(self.entry, 1)

    def _run(self, name: str, times: float) -> Iterator[tuple[dict[str, Op], Op, float]]:
        ops = self.computations[name]
        for op in ops.values():
            if op.kind == "while":
                yield from self._run(op.called()[-1], times * self._rounds(ops, op))
            elif op.kind in _CALLERS:
                called = op.called()
                scopes = [s for s in self.shares if f"/{s}/cond" in op.text] if op.kind == "conditional" else []
                shares = self.shares[scopes[0]] if scopes else [1] * len(called)
                if op.kind == "conditional" and (stated := share_of(op.text)) is not None:
                    shares = [1 - stated, stated]
                for inner, share in zip(called, shares, strict=True):
                    yield from self._run(inner, times * share)
            else:
                yield ops, op, times

    def _rounds(self, ops: dict[str, Op], loop: Op) -> int:
        """The number of iterations of a loop: its annotation, or the bound of its counter in its condition.

        The counter starts at 0, or at the constant with which the loop is called: at 1 if XLA runs the first iteration
        before the loop.
        """
        if noted := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.text):
            return int(noted[1])
        condition = re.search(r"condition=%?([\w.-]+)", loop.text)
        inside = self.computations[condition[1]] if condition else {}
        bounds = [number for op in inside.values() if (number := _constant(op)) is not None]
        compares = [op for op in inside.values() if op.kind == "compare" and "direction=LT" in op.text]
        if len(bounds) != 1 or len(compares) != 1:
            raise ValueError(f"a loop does not say how often it runs: {loop.text.strip()[:200]}")
        index = re.search(r"index=(\d+)", inside[compares[0].operands[0]].text)
        start = ops.get(loop.operands[0])
        if index and start and start.kind == "tuple":
            start = ops.get(start.operands[int(index[1])])
        while start and start.kind in ("bitcast", "copy"):
            start = ops.get(start.operands[0])
        return bounds[0] - ((start and _constant(start)) or 0)

    def written_bytes(self, ops: dict[str, Op], op: Op) -> int:
        """Bytes of HBM that an operation writes; for an in-place update, the bytes of the update."""
        where, roots = ops, [op]
        inner = next((self.computations[n] for n in op.called() if n in self.computations), None)
        if op.kind == "fusion" and inner is not None:
            where, roots = inner, [o for o in inner.values() if "ROOT " in o.text]
            if roots and roots[0].kind == "tuple":
                roots = [inner[name] for name in roots[0].operands]
        results = sizes(op.type, zero_fast=True)
        for i, root in enumerate(roots if len(roots) == len(results) else []):
            while root.kind == "bitcast" and root.operands[0] in where:
                root = where[root.operands[0]]
            if root.kind == "dynamic-update-slice" and root.operands[1] in where:
                results[i] = min(results[i], sum(sizes(where[root.operands[1]].type)))
        return sum(results)

    def read_bytes(self, ops: dict[str, Op], op: Op) -> int:
        """Bytes of HBM that an operation reads; for an operand that it only slices, the bytes of the slice."""
        inner = next((self.computations[n] for n in op.called() if n in self.computations), None)
        total = 0
        for i, name in enumerate(op.operands):
            if name not in ops:
                continue
            whole = sum(sizes(ops[name].type, hbm_only=True))
            if op.kind in _SLICES:
                whole = min(whole, sum(sizes(op.type))) if i == 0 else 0
            elif op.kind == "dynamic-update-slice" and i == 0:
                whole = 0
            elif op.kind == "fusion" and inner is not None and whole:
                whole = min(whole, self._read_of_parameter(inner, i, whole))
            total += whole
        return total

    def _read_of_parameter(self, ops: dict[str, Op], index: int, whole: int) -> int:
        """Bytes that a fusion reads of its parameter with this index."""
        parameter = next((o for o in ops.values() if o.kind == "parameter" and f"parameter({index})" in o.text), None)
        return whole if parameter is None else self._needed(ops, parameter, whole)

    def _needed(self, ops: dict[str, Op], op: Op, whole: int) -> int:
        """The bytes of a value inside a fusion that the fusion's result depends on.

        whole: of the value. Sums and products need all of what they read; other operations as many elements as are
        needed of them.
        """
        if "ROOT " in op.text:
            return whole
        total = 0
        for user in ops.values():
            if op.name not in user.operands:
                continue
            position = user.operands.index(op.name)
            inner = next((self.computations[n] for n in user.called() if n in self.computations), None)
            if user.kind in _SLICES and position == 0:
                total += sum(sizes(user.type))
            elif user.kind == "dynamic-update-slice" and position == 0:
                continue
            elif user.kind == "fusion" and inner is not None:
                total += self._read_of_parameter(inner, position, whole)
            elif user.kind in _BY_ELEMENT:
                needed = self._needed(ops, user, sum(sizes(user.type)))
                total += needed * _item_bytes(op) // _item_bytes(user)  # as many elements, also of another dtype
            else:
                return whole
        return min(whole, total)

    def inside(self, op: Op) -> Iterator[Op]:
        """The operations of a fusion."""
        for name in op.called():
            for inner in self.computations.get(name, {}).values():
                yield inner
                yield from self.inside(inner)


def _item_bytes(op: Op) -> int:
    """Bytes of an element of a value that is one tensor."""
    kind = _TENSOR.search(op.type)
    return _BYTES.get(kind[1], 4) if kind else 1


def sizes(type_text: str, *, hbm_only: bool = False, zero_fast: bool = False) -> list[int]:
    """Bytes of each tensor of a type. Tensors in a chip's VMEM are left out (hbm_only) or count 0 (zero_fast)."""
    found = []
    for kind, dims, layout in _TENSOR.findall(type_text):
        fast = "S(1)" in layout
        if not (hbm_only and fast):
            nbytes = _BYTES.get(kind, 4) * prod(int(n) for n in dims.split(",") if n)
            found.append(0 if zero_fast and fast else nbytes)
    return found
