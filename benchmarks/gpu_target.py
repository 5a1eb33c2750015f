"""Programs for NVIDIA GPUs compiled on a machine without one.

XLA's compiler for GPUs comes with `pip install ".[cuda]"` and needs no driver if it is given a GPU's properties. It
then cannot autotune, as it does on a GPU, so it may choose other algorithms for matrix products.
"""

from __future__ import annotations

import importlib.util
import logging
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Gpu:
    """The published properties of a GPU that the compiler needs.

    cores: multiprocessors. lanes, threads: float32 units and resident threads per multiprocessor. shared, shared_most:
    bytes of shared memory per multiprocessor and per block. l2, memory: bytes. bandwidth: bytes/s. clock: GHz.
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


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB", (9, 0), 132, 128, 2048, 233472, 232448, 50 << 20, 80 << 30, 3.35e12, 1.98),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 2048, 233472, 232448, 50 << 20, 140 << 30, 4.8e12, 1.98),
    "a100-40": Gpu("NVIDIA A100 40GB", (8, 0), 108, 64, 2048, 167936, 166912, 40 << 20, 40 << 30, 1.555e12, 1.41),
    "rtx4090": Gpu("NVIDIA RTX 4090", (8, 9), 128, 128, 1536, 102400, 101376, 72 << 20, 24 << 30, 1.008e12, 2.52),
}


def installed() -> bool:
    """Whether the compiler is installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = list(plugins.submodule_search_locations or ()) if plugins else []
    return any("cuda" in module.name for module in pkgutil.iter_modules(folders))


def prepare() -> None:
    """From here on, compile this process' programs for GPUs. No GPU is used.

    Raises:
        SystemExit: the compiler is not installed.
    """
    if not installed():
        raise SystemExit("no compiler for NVIDIA GPUs here: pip install '.[cuda]'")
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)  # that no driver is there

    from jax._src import xla_bridge

    known = xla_bridge.canonicalize_platform
    setattr(xla_bridge, "canonicalize_platform", lambda platform: "cuda" if platform == "gpu" else known(platform))  # noqa: B010
    for module, name, answer in answers():
        setattr(module, name, answer)
    jax.devices()  # registers the plugins


def answers() -> list[tuple[Any, str, Callable[[], Any]]]:
    """(module, name of a function, its replacement): JAX's and this library's queries of the attached GPU's generation
    and cuDNN, answered as on a Hopper GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    from cogvideox_flax.attention import nvidia

    found: list[tuple[Any, str, Callable[[], Any]]] = [
        (fused_attention_stablehlo, "check_cudnn_version", lambda: 91001),
        (nvidia, "present", lambda: True),
    ]
    with suppress(ImportError):  # JAX from 0.11 on; before, Triton assumes a Hopper GPU without a GPU
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
        hopper = gpu_info.GpuInfo(gpu_version=None, arch_name="9.0", compute_capability=90)
        found.append((gpu_info, "get_gpu_info", lambda: hopper))
    return found


def device(gpu: Gpu) -> jax.Device:
    """A device of this kind, as a compile target."""
    from jax.experimental import topologies

    return topologies.get_topology_desc("one GPU", "cuda", target_config=gpu.config(), topology="1x1x1").devices[0]
