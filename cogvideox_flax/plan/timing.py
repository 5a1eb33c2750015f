"""The modelled time of a compiled TPU program, operation by operation, without stalls and without overlap.

A matrix product or convolution takes the compiler's estimate of its cycles, or the time to move its bytes if that is
longer; any other operation takes the time to move its bytes. The compiler has no estimate for a Pallas kernel: it takes
its own cost estimate at the share of the matrix rate that its static schedule reaches, or the time to move its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cogvideox_flax.nn.conv import tpu_kernel
from cogvideox_flax.plan.chips import Chip
from cogvideox_flax.plan.collectives import kind_of
from cogvideox_flax.plan.hlo import Op, Program, sizes

CONVOLUTION_RATES = {128: 0.69, 256: 0.96}
"""Output channels -> share of the matrix rate that a convolution reaches by its static schedule, over the columns that
it computes, which are more than the picture's (`python -m benchmarks.convolution`)."""

ATTENTION = "cogvideox_splash"
ATTENTION_RATES = {64: 0.35, 128: 0.63}
"""Head size -> that of the attention kernel; the matrix unit allows at most 0.40 and 0.67
(`python -m benchmarks.attention`)."""


def attention_rate(head_dim: int) -> float:
    """That of the nearest head size."""
    return ATTENTION_RATES[min(ATTENTION_RATES, key=lambda size: abs(size - head_dim))]


_OTHER_KERNEL = 0.2  # such as stock attention

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
_PRODUCTS = {"convolution", "dot"}


@dataclass(frozen=True)
class Part:
    """An operation of a program on one chip, or several of the same name, kind and result.

    name: the scopes and the function that it comes from, its kind, its result.
    in_kernel: whether it is a Pallas kernel.
    count: how often it runs.
    seconds: of all those.
    """

    name: str
    in_kernel: bool
    count: float
    seconds: float


def parts(program: Program, chip: Chip) -> list[Part]:
    """What one run on one chip consists of, without collectives, the longest first."""
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    for op, times, seconds in _timed(program, chip):
        scope = re.search(r'op_name="([^"]*)"', op.text)
        key = (f"{scope[1] if scope else ''} {op.kind} {op.type.partition('{')[0]}".strip(), _is_kernel(op))
        count, total = found.get(key, (0.0, 0.0))
        found[key] = count + times, total + times * seconds
    listed = (Part(*key, *values) for key, values in found.items())
    return sorted(listed, key=lambda part: part.seconds, reverse=True)


def _timed(program: Program, chip: Chip) -> Iterator[tuple[Op, float, float]]:
    """The operations but for collectives, how often each runs, and the seconds that it takes."""
    for ops, op, times in program.run():
        if op.kind in _FREE or kind_of(op) or op.kind.endswith("-start"):
            continue
        if op.kind == "async-done":  # the asynchronous computation itself is counted separately
            continue
        if _is_kernel(op):
            flops, moved = (_estimate(op, name) for name in ("flops", "bytes_accessed"))
            yield op, times, max(flops / (_kernel_rate(op) * chip.flops), moved / chip.bandwidth)
            continue
        if op.kind.endswith("-done"):  # an asynchronous copy: the bytes moved, not those of its source
            moved = sum(sizes(op.type)) + sum(sizes(op.type, hbm_only=True))
        else:
            moved = program.written_bytes(ops, op) + program.read_bytes(ops, op)
        seconds = moved / chip.bandwidth
        if op.kind in _PRODUCTS or any(inner.kind in _PRODUCTS for inner in program.inside(op)):
            cycles = re.search(r'"estimated_cycles":"?(\d+)', op.text)
            seconds = max(seconds, int(cycles[1]) / chip.clock if cycles else 0.0)
        yield op, times, seconds


def _estimate(op: Op, name: str) -> int:
    """A Pallas kernel's own cost estimate; 0 without one."""
    found = re.search(rf'"{name}":"(\d+)"', op.text)
    return int(found[1]) if found else 0


def _kernel_rate(op: Op) -> float:
    """The share of the matrix rate that a Pallas kernel reaches."""
    heads = re.search(r"\[\d+,(\d+),\d+\]", op.type)  # the attention kernel's result is [heads, head size, queries]
    if ATTENTION in op.text and heads:
        return attention_rate(int(heads[1]))
    picture = re.search(r"\[\d+,\d+,\d+,(\d+),(\d+)\]", op.type)
    if tpu_kernel.NAME in op.text and picture:
        columns, channels = int(picture[1]), int(picture[2])
        rate = CONVOLUTION_RATES[max(n for n in CONVOLUTION_RATES if n <= channels)]
        return rate * columns / tpu_kernel.row_width(columns)
    return _OTHER_KERNEL


def _is_kernel(op: Op) -> bool:
    return op.kind == "custom-call" and "tpu_custom_call" in op.text
