"""How long a compiled TPU program takes by a model of each operation; no waits, nothing overlaps.

A matrix product or convolution takes the compiler's own estimate of its cycles, or its bytes if they take longer; any
other operation the bytes that it reads and writes. The attention kernel is not among them: the compiler says nothing of
what is inside one.
"""

from __future__ import annotations

import re

from cogvideox_flax.plan.chips import Chip
from cogvideox_flax.plan.collectives import kind_of
from cogvideox_flax.plan.hlo import Op, Program, sizes

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota"}
_PRODUCTS = {"convolution", "dot"}


def seconds_outside_kernels(program: Program, chip: Chip) -> float:
    """Of one run on one chip, without its collectives and Pallas kernels."""
    total = 0.0
    for ops, op, times in program.run():
        if op.kind in _FREE or kind_of(op) or _is_kernel(op) or op.kind.endswith("-start"):
            continue
        if op.kind.endswith("-done"):  # of a copy in the background: what was moved, and not what it was cut from
            moved = sum(sizes(op.type)) + sum(sizes(op.type, hbm_only=True))
        else:
            moved = sum(sizes(op.type, hbm_only=True)) + program.read_bytes(ops, op)
        seconds = moved / chip.bandwidth
        if op.kind in _PRODUCTS or any(inner.kind in _PRODUCTS for inner in program.inside(op)):
            cycles = re.search(r'"estimated_cycles":"?(\d+)', op.text)
            seconds = max(seconds, int(cycles[1]) / chip.clock if cycles else 0.0)
        total += times * seconds
    return total


def _is_kernel(op: Op) -> bool:
    return op.kind == "custom-call" and "tpu_custom_call" in op.text
