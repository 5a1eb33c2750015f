"""Published memory and rates of each kind of chip, and compiling for chips without having them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from cogvideox_flax.errors import InputError, install_extra
from cogvideox_flax.runtime import libtpu

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """hbm: bytes that programs may use. Per second: flops of bfloat16 products; bytes of bandwidth and link; clock."""

    hbm: int
    flops: float
    bandwidth: float
    link: float
    clock: float


CHIPS = {
    "v6e": Chip(int(31.25 * GIB), 918e12, 1640e9, 90e9, 1.75e9),
    "v5e": Chip(int(15.75 * GIB), 197e12, 819e9, 45e9, 1.5e9),
    "v5p": Chip(int(95.0 * GIB), 459e12, 2765e9, 90e9, 1.75e9),
    "v4": Chip(int(31.25 * GIB), 275e12, 1228e9, 45e9, 1.05e9),
}
"""Kind, as in the name of a topology -> chip. Clocks are derived from the matrix rate; a link's rate is the published
one, for one direction of one link to a neighbour, and was not measured."""

_TOPOLOGY = re.compile(r"\w+:\d{1,9}(x\d{1,9})*")


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as "v6e:2x4".

    Raises:
        InputError: an unknown kind.
    """
    kind = topology.split(":")[0]
    if kind not in CHIPS:
        raise InputError(f"unknown chip {kind!r} in topology {topology!r}; known are {', '.join(CHIPS)}, as in v6e:2x4")
    return CHIPS[kind]


def topology_devices(topology: str) -> Sequence[jax.Device]:
    """The chips of a topology such as "v6e:2x4", as compile targets.

    Raises:
        InputError: libtpu is missing or does not know the topology.
    """
    chip_of(topology)
    if not libtpu.is_installed():
        raise InputError(f"a plan needs libtpu, the compiler for TPUs: {install_extra('tpu')}")
    libtpu.prepare_to_compile()
    from jax.experimental import topologies

    # a host has a square of chips, or all of a smaller topology
    sides = [int(n) for n in topology.split(":")[1].split("x")] if _TOPOLOGY.fullmatch(topology) else []
    host = {"chips_per_host_bounds": (*sides, 1, 1)[:3]} if 1 in sides[:2] else {}
    try:
        return topologies.get_topology_desc(topology, "tpu", **host).devices
    except (RuntimeError, ValueError, NotImplementedError) as e:
        raise InputError(f"no topology {topology!r}: {str(e).splitlines()[0]}; try v6e:2x4, v6e:1x1 or v5e:2x4") from e
