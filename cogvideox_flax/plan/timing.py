"""The modelled time of a compiled TPU program, operation by operation, without stalls and without overlap.

A matrix product or convolution takes the compiler's estimate of its cycles, or the time to move its bytes if that is
longer; any other operation takes the time to move its bytes. The compiler has no estimate for a Pallas kernel: it takes
its own cost estimate at the share of the matrix rate that its static schedule reaches.
"""

from __future__ import annotations

import re

from cogvideox_flax.plan.chips import Chip
from cogvideox_flax.plan.collectives import kind_of
from cogvideox_flax.plan.hlo import Op, Program, sizes

KERNEL_RATES = {"cogvideox_conv": 0.75}
"""Kernel -> share of the matrix rate by its static schedule. Convolutions: 0.68 at 128 channels, 0.95 at more
(`python -m benchmarks.convolution`)."""

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


def seconds_outside_kernels(program: Program, chip: Chip) -> float:
    """Seconds of one run on one chip, without collectives and Pallas kernels."""
    total = 0.0
    for ops, op, times in program.run():
        if op.kind in _FREE or kind_of(op) or _is_kernel(op) or op.kind.endswith("-start"):
            continue
        if op.kind == "async-done":  # the asynchronous computation itself is counted separately
            continue
        if op.kind.endswith("-done"):  # an asynchronous copy: the bytes moved, not those of its source
            moved = sum(sizes(op.type)) + sum(sizes(op.type, hbm_only=True))
        else:
            moved = program.written_bytes(ops, op) + program.read_bytes(ops, op)
        seconds = moved / chip.bandwidth
        if op.kind in _PRODUCTS or any(inner.kind in _PRODUCTS for inner in program.inside(op)):
            cycles = re.search(r'"estimated_cycles":"?(\d+)', op.text)
            seconds = max(seconds, int(cycles[1]) / chip.clock if cycles else 0.0)
        total += times * seconds
    return total


def seconds_in_kernels(program: Program, chip: Chip) -> float:
    """Seconds of one run on one chip in Pallas kernels."""
    total = 0.0
    for _, op, times in program.run():
        work = re.search(r'"flops":"(\d+)"', op.text) if _is_kernel(op) else None
        if work:
            total += times * int(work[1]) / (_kernel_rate(op) * chip.flops)
    return total


def _kernel_rate(op: Op) -> float:
    """The share of the matrix rate that a Pallas kernel reaches."""
    heads = re.search(r"\[\d+,(\d+),\d+\]", op.type)  # the attention kernel's result is [heads, head size, queries]
    if ATTENTION in op.text and heads:
        return attention_rate(int(heads[1]))
    return next((rate for name, rate in KERNEL_RATES.items() if name in op.text), _OTHER_KERNEL)


def _is_kernel(op: Op) -> bool:
    return op.kind == "custom-call" and "tpu_custom_call" in op.text
