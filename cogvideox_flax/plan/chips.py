"""Published memory and rates of each kind of chip, and compiling for chips without having them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from cogvideox_flax.errors import InputError, install_extra
from cogvideox_flax.runtime import libtpu

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """hbm: bytes that programs may use. Per second: flops of bfloat16 products; bytes of bandwidth and link; clock.
    unit: rows and columns of a matrix unit. network: bytes per second to other slices, over the data centre's network.
    """

    hbm: int
    flops: float
    bandwidth: float
    link: float
    clock: float
    unit: int
    network: float


CHIPS = {
    "v6e": Chip(int(31.25 * GIB), 918e12, 1640e9, 90e9, 1.75e9, 256, 12.5e9),
    "v5e": Chip(int(15.75 * GIB), 197e12, 819e9, 45e9, 1.5e9, 128, 3.125e9),
    "v5p": Chip(int(95.0 * GIB), 459e12, 2765e9, 90e9, 1.75e9, 128, 6.25e9),
    "v4": Chip(int(31.25 * GIB), 275e12, 1228e9, 45e9, 1.05e9, 128, 6.25e9),
}
"""Kind, as in the name of a topology -> chip. Clocks are derived from the matrix rate; a link's rate is the published
one, for one direction of one link to a neighbour, and was not measured. The network's rate was not measured either: of
v5e and v6e it is a share of the pod's published one, 6.4 and 25.6 Tbit/s for 256 chips (cloud.google.com/tpu/docs); of
v4 and v5p a quarter of 200 Gbit/s for a host of four chips, an assumption."""


@dataclass(frozen=True)
class Gpu:
    """The published properties of a GPU.

    cores: multiprocessors. lanes, threads: float32 units and resident threads per multiprocessor. shared, shared_most:
    bytes of shared memory per multiprocessor and per block. l2, memory: bytes. bandwidth: bytes/s. clock: GHz.
    flops: per second, of dense bfloat16 products that are summed in float32.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    threads: int
    shared: int
    shared_most: int
    l2: int
    memory: int
    bandwidth: float
    clock: float
    flops: float

    def config(self) -> str:
        """As text of XLA's protobuf message."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
                threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
                shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
                shared_memory_per_block_optin: {self.shared_most}
                core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock}
                block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
                memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.l2} device_memory_size: {self.memory}
                registers_per_core_limit: 65536 registers_per_block_limit: 65536
                cuda_compute_capability {{ major: {major} minor: {minor} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 1 }}
            runtime_version {{ major: 12 minor: 9 patch: 0 }}
            device_description_str: "{self.name}"
        """


_HOPPER = (9, 0), 132, 128, 2048, 233472, 232448, 50 << 20
_A100 = (8, 0), 108, 64, 2048, 167936, 166912, 40 << 20
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB", *_HOPPER, 80 << 30, 3.35e12, 1.98, 989e12),
    "h200": Gpu("NVIDIA H200", *_HOPPER, 140 << 30, 4.8e12, 1.98, 989e12),
    "a100-40": Gpu("NVIDIA A100 40GB", *_A100, 40 << 30, 1.555e12, 1.41, 312e12),
    "a100-80": Gpu("NVIDIA A100 80GB", *_A100, 80 << 30, 2.039e12, 1.41, 312e12),
    "rtx4090": Gpu(
        "NVIDIA RTX 4090", (8, 9), 128, 128, 1536, 102400, 101376, 72 << 20, 24 << 30, 1.008e12, 2.52, 165e12
    ),
}
"""Name after --topology -> the GPU."""

_TOPOLOGY = re.compile(r"\w+:\d{1,9}(x\d{1,9})*")
_SLICES = re.compile(r"([1-9]\d{0,3})x(\w+:.*)")


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as "v6e:2x4" or, of two slices, "2xv6e:8x8".

    Raises:
        InputError: an unknown kind.
    """
    kind = _of_slice(topology)[1].split(":")[0]
    if kind not in CHIPS:
        known = f"{', '.join(CHIPS)}, as in v6e:2x4, and the GPUs {', '.join(GPUS)}"
        raise InputError(f"unknown chip {kind!r} in topology {topology!r}; known are {known}")
    return CHIPS[kind]


def _of_slice(topology: str) -> tuple[int, str]:
    """The number of slices, and the topology of each."""
    found = _SLICES.fullmatch(topology)
    return (int(found[1]), found[2]) if found else (1, topology)


def topology_devices(topology: str) -> Sequence[jax.Device]:
    """The chips of a topology as for `chip_of`, as compile targets.

    Raises:
        InputError: libtpu is missing or does not know the topology.
    """
    chip_of(topology)
    if not libtpu.is_installed():
        raise InputError(f"a plan needs libtpu, the compiler for TPUs: {install_extra('tpu')}")
    libtpu.prepare_to_compile()
    from jax.experimental import topologies

    # a host has a square of chips, or all of a smaller topology
    count, each = _of_slice(topology)
    sides = [int(n) for n in each.split(":")[1].split("x")] if _TOPOLOGY.fullmatch(each) else []
    options: dict[str, Any] = {"chips_per_host_bounds": (*sides, 1, 1)[:3]} if 1 in sides[:2] else {}
    options |= {"num_slices": count} if count > 1 else {}
    try:
        return topologies.get_topology_desc(each, "tpu", **options).devices
    except (RuntimeError, ValueError, NotImplementedError) as e:
        raise InputError(f"no topology {topology!r}: {str(e).splitlines()[0]}; try v6e:2x4, v6e:1x1 or v5e:2x4") from e
