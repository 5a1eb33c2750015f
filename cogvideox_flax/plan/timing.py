"""How long a compiled TPU program takes by a model of each operation; no waits, nothing overlaps.

A matrix product or convolution takes the compiler's own estimate of its cycles, or its bytes if they take longer; any
other operation the bytes that it reads and writes. Of a Pallas kernel the compiler says nothing: it takes the work that
it says it does, at the share of the matrix rate that its static schedule reaches.
"""

from __future__ import annotations

import re

from cogvideox_flax.plan.chips import Chip
from cogvideox_flax.plan.collectives import kind_of
from cogvideox_flax.plan.hlo import Op, Program, sizes

KERNEL_RATES = {"cogvideox_splash": 0.35, "cogvideox_conv": 0.75}
"""Kernel -> share of the matrix rate by its static schedule. Attention at head size 64, of which the shape of the
matrix unit allows 0.40 (`python -m benchmarks.attention`); convolutions 0.68 at 128 channels, 0.95 at more
(`python -m benchmarks.convolution`)."""

_OTHER_KERNEL = 0.2  # stock attention and its like

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
_PRODUCTS = {"convolution", "dot"}


def seconds_outside_kernels(program: Program, chip: Chip) -> float:
    """Of one run on one chip, without its collectives and Pallas kernels."""
    total = 0.0
    for ops, op, times in program.run():
        if op.kind in _FREE or kind_of(op) or _is_kernel(op) or op.kind.endswith("-start"):
            continue
        if op.kind == "async-done":  # what ran in the background is counted where it stands
            continue
        if op.kind.endswith("-done"):  # of a copy in the background: what was moved, and not what it was cut from
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
    """Of one run on one chip, in Pallas kernels."""
    total = 0.0
    for _, op, times in program.run():
        work = re.search(r'"flops":"(\d+)"', op.text) if _is_kernel(op) else None
        if work:
            rate = next((rate for name, rate in KERNEL_RATES.items() if name in op.text), _OTHER_KERNEL)
            total += times * int(work[1]) / (rate * chip.flops)
    return total


def _is_kernel(op: Op) -> bool:
    return op.kind == "custom-call" and "tpu_custom_call" in op.text
