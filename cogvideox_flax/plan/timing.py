"""The modelled time of a compiled TPU program, operation by operation, without stalls.

A matrix product or convolution takes the compiler's estimate of its cycles, or the time to move its bytes if that is
longer; any other operation takes the time to move its bytes. The compiler has no estimate for a Pallas kernel: it takes
its own cost estimate at the share of the matrix rate that its static schedule reaches, or the time to move its bytes.

Operations run one after the other, in the order of the compiler's schedule. Only an asynchronous collective runs beside
those between its start and its end, and one inside a fusion beside what else the fusion does; collectives inside a
slice wait for each other, and so do those between slices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod

from cogvideox_flax.nn.conv import tpu_kernel
from cogvideox_flax.plan.chips import Chip
from cogvideox_flax.plan.collectives import KINDS, TRANSFER, channel_of, role_of
from cogvideox_flax.plan.hlo import Op, Program, sizes

CONVOLUTION_RATES = {128: 0.64, 256: 0.93}
"""Output channels -> share of the matrix rate that a convolution reaches by its static schedule, over the columns that
it computes, which are more than the image's (`python -m benchmarks.convolution`)."""

ATTENTION, SPARSE = "cogvideox_splash", "cogvideox_sparse_splash"
ATTENTION_RATES = {64: 0.35, 128: 0.63, 256: 0.94}
"""Head size -> that of the attention kernel; the matrix unit allows at most 0.40 and 0.67
(`python -m benchmarks.attention`)."""

BACKWARD = "cogvideox_splash_backward"
BACKWARD_RATES = {64: 0.38, 128: 0.62, 256: 0.77}
"""Head size -> that of the kernel of its gradient, five products; at most 0.45 and 0.71, on a v6e chip
(`python -m benchmarks.attention --gradient`)."""

SPARSE_RATES = {64: 0.26, 128: 0.43, 256: 0.64}
"""That of the kernel for lists of tiles of 384 tokens, which are narrower than two of the matrix unit's sides."""


UNIT = 256
"""Rows and columns of a v6e's matrix unit, of which these rates are. Heads and channels fill twice the share of a unit
of half its size, and so they are taken to reach the rate of twice their number. The rates of 256 are as much of what
the unit allows, which is all, as those of 128, but for the gradient's, which is that of a v5p's heads of 128 by their
static schedule."""


def attention_rate(head_dim: int, rates: dict[int, float], unit: int = UNIT) -> float:
    """That of the nearest head size, on a matrix unit of this size."""
    filled = head_dim * UNIT // unit
    return rates[min(rates, key=lambda size: abs(size - filled))]


_OTHER_KERNEL = 0.2  # such as stock attention

_TRANSFERS = {"send", "send-done", "recv", "recv-done"}  # between slices
FREE = _TRANSFERS | {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "iota",
}
_PRODUCTS = {"convolution", "dot"}


@dataclass(frozen=True)
class Part:
    """An operation of a program on one chip, or several of the same name, kind and result.

    name: the scopes and the function that it comes from, its kind, its result.
    in_kernel: whether it is a Pallas kernel.
    count: how often it runs.
    seconds: of all those.
    windows: matrix products: name in the compiled program -> over how many windows of the result it loops.
    """

    name: str
    in_kernel: bool
    count: float
    seconds: float
    windows: dict[str, int]


def parts(program: Program, chip: Chip) -> list[Part]:
    """What one run on one chip consists of, without collectives, the longest first."""
    found: dict[tuple[str, bool], Part] = {}
    for ops, op, times in program.run():
        seconds = _seconds(program, ops, op, chip)
        if not seconds:
            continue
        scope = re.search(r'op_name="([^"]*)"', op.text)
        key = (f"{scope[1] if scope else ''} {op.kind} {op.type.partition('{')[0]}".strip(), _is_kernel(op))
        part = found.get(key, Part(*key, 0.0, 0.0, {}))
        total = part.seconds + times * seconds
        windows = part.windows | (_windows(op) if is_product(program, op) else {})
        found[key] = replace(part, count=part.count + times, seconds=total, windows=windows)
    return sorted(found.values(), key=lambda part: part.seconds, reverse=True)


def _windows(op: Op) -> dict[str, int]:
    bounds = re.search(r'"window_config":.*?"iteration_bounds":\[(.*?)\]', op.text)
    return {op.name: prod(int(n) for n in re.findall(r"\d+", bounds[1]))} if bounds else {}


@dataclass
class _Timeline:
    """Of one run of a computation, in seconds from its begin.

    now: when what has been seen so far has ended.
    links_free: when the collectives so far have ended: those inside a slice, and those between slices.
    ends: when each asynchronous collective ends.
    """

    now: float = 0.0
    links_free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    ends: dict[str, float] = field(default_factory=dict)


def waits(program: Program, chip: Chip, link_seconds: Callable[[Op], float]) -> tuple[float, float]:
    """How long one run waits for its collectives, and for how much of their time it does something else.

    link_seconds: of the collectives that an operation starts; 0 if it starts none.
    """
    timelines: dict[int, _Timeline] = defaultdict(_Timeline)  # by computation: nothing stands under a loop or a branch
    waited = in_all = 0.0
    for ops, op, times in program.run():
        line, seconds = timelines[id(ops)], link_seconds(op)
        begin = line.now
        if seconds:
            in_all += times * seconds
            crosses = op.kind == TRANSFER
            end = line.links_free[crosses] = max(line.now, line.links_free[crosses]) + seconds
            if crosses or op.kind.endswith("-start") or role_of(program, op) == "start":
                line.ends[channel_of(program, op) if op.kind == "fusion" else op.name] = end
                continue
            own = _seconds(program, ops, op, chip)  # of a fusion
            line.now = max(line.now + own, end)
            begin += own
        elif (done := _ended_by(program, op)) in line.ends:
            line.now = max(line.now, line.ends.pop(done))
        else:
            line.now += _seconds(program, ops, op, chip)
            continue
        waited += times * (line.now - begin)
    return waited, in_all - waited


def _ended_by(program: Program, op: Op) -> str:
    """The name of the asynchronous collective that an operation may end; any other text if it ends none."""
    if op.kind == "fusion":
        return channel_of(program, op) if role_of(program, op) == "done" else ""
    return op.operands[0] if op.kind.endswith("-done") else ""


def _seconds(program: Program, ops: dict[str, Op], op: Op, chip: Chip) -> float:
    """Of one operation; 0 for collectives and for what begins an asynchronous operation."""
    if op.kind in FREE or op.kind.removesuffix("-start").removesuffix("-done") in KINDS or op.kind.endswith("-start"):
        return 0.0
    role = role_of(program, op)
    if role in ("start", "done"):
        return 0.0
    if op.kind == "async-done":  # the asynchronous computation itself is counted separately
        return 0.0
    if _is_kernel(op):
        flops, moved = (_estimate(op, name) for name in ("flops", "bytes_accessed"))
        return max(flops / (_kernel_rate(op, chip.unit) * chip.flops), moved / chip.bandwidth)
    if op.kind.endswith("-done"):  # an asynchronous copy: the bytes moved, not those of its source
        moved = sum(sizes(op.type)) + sum(sizes(op.type, hbm_only=True))
    else:
        moved = program.written_bytes(ops, op) + program.read_bytes(ops, op)
    seconds = moved / chip.bandwidth if role is None else 0.0  # beside a collective it passes on the collective's too
    if is_product(program, op):
        cycles = re.search(r'"estimated_cycles":"?(\d+)', op.text)
        seconds = max(seconds, int(cycles[1]) / chip.clock if cycles else 0.0)
    return seconds


def _estimate(op: Op, name: str) -> int:
    """A Pallas kernel's own cost estimate; 0 without one."""
    found = re.search(rf'"{name}":"(\d+)"', op.text)
    return int(found[1]) if found else 0


def _kernel_rate(op: Op, unit: int) -> float:
    """The share of the matrix rate that a Pallas kernel reaches."""
    heads = re.search(r"\[\d+,(\d+),\d+\]", op.type)  # the attention kernel's result is [heads, head size, queries]
    if ATTENTION in op.text and heads:
        return attention_rate(int(heads[1]), BACKWARD_RATES if BACKWARD in op.text else ATTENTION_RATES, unit)
    if SPARSE in op.text and heads:
        return attention_rate(int(heads[1]), SPARSE_RATES, unit)
    image = re.search(r"\[\d+,\d+,\d+,(\d+),(\d+)\]", op.type)
    if tpu_kernel.NAME in op.text and image:
        columns, channels = int(image[1]), int(image[2])
        rate = CONVOLUTION_RATES[max(n for n in CONVOLUTION_RATES if n <= channels * UNIT // unit)]
        return rate * columns / tpu_kernel.row_width(columns)
    return _OTHER_KERNEL


def is_product(program: Program, op: Op) -> bool:
    """Whether it is a matrix product or a convolution, or a fusion with one."""
    return op.kind in _PRODUCTS or any(inner.kind in _PRODUCTS for inner in program.inside(op))


def _is_kernel(op: Op) -> bool:
    return op.kind == "custom-call" and "tpu_custom_call" in op.text
