"""Facts of this machine: the GPU, its driver, the libraries and their cuDNN. Importing it starts no device."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.gpu_proof.errors import NotTried
from benchmarks.machine import machine

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "flax",
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "accelerate",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)

EITHER = (("jax-cuda13-plugin", "jax-cuda12-plugin"), ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"))
"""Pairs of packages of which one is enough."""

SMI = ("name", "driver_version", "compute_cap", "memory.total", "memory.used", "clocks.max.sm", "power.limit")
"""What `nvidia-smi` is asked; memory in MiB."""

CUDNN_CONV3D_FIXED = (9, 15)
"""The first cuDNN whose 3-D convolutions are right in bfloat16 on large shapes (pytorch/pytorch#163539)."""

DRIVER = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as e:
    sys.exit(f"no driver: {e}")
status, count = cuda.cuInit(0), ctypes.c_int()
if status or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
    sys.exit(f"the driver finds no GPU (cuInit says {status})")
print(count.value)
"""
"""Runs in a separate process: a driver that hangs must not hang this one."""


def packages(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Version of each package, None where it is not installed."""

    def one(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: one(name) for name in names}


def missing(found: dict[str, str | None]) -> list[str]:
    """Packages that are not installed; of `EITHER`, "a or b" where neither is."""
    alone = [name for name, known in found.items() if known is None and not any(name in pair for pair in EITHER)]
    return alone + [" or ".join(pair) for pair in EITHER if not any(found.get(name) for name in pair)]


def facts() -> dict[str, Any]:
    """All facts, for the record."""
    found = packages()
    smi, why = nvidia_smi()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        **machine(()),
        "host_gib": round(memory, 1),
        "platform": platform.platform(),
        "packages": found,
        "missing": missing(found),
        "nvidia_smi": smi or why,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS"),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def no_gpu(timeout: float = 60) -> str | None:
    """Why there is no NVIDIA GPU to use, by the driver and by `nvidia-smi`; None if there is one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides them all"
    why = _of_driver(timeout)
    return None if why is None or nvidia_smi()[0] is not None else why


def _of_driver(timeout: float) -> str | None:
    try:
        asked = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"the NVIDIA driver did not answer in {timeout:.0f} s"
    return None if asked.returncode == 0 else asked.stderr.strip() or f"exit status {asked.returncode}"


def first_gpu() -> str:
    """The id, for `nvidia-smi`, of the GPU that the rows run on."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"


def nvidia_smi(fields: tuple[str, ...] = SMI) -> tuple[dict[str, str] | None, str]:
    """(field -> what `nvidia-smi` says of the GPU, "") or (None, why it says nothing)."""
    query = ["nvidia-smi", "-i", first_gpu(), f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        return None, f"nvidia-smi: {e}"
    values = [value.strip() for value in asked.stdout.strip().split(",")]
    if asked.returncode or len(values) != len(fields):
        return None, f"nvidia-smi: {(asked.stderr or asked.stdout).strip()[:200]}"
    return dict(zip(fields, values, strict=True)), ""


def used_mib() -> float | None:
    """MiB of GPU memory used by all processes; None if unknown."""
    found, _ = nvidia_smi(("memory.used",))
    try:
        return float(found["memory.used"]) if found else None
    except ValueError:
        return None


def free_gib() -> float | None:
    """GiB of free GPU memory; None if unknown."""
    found, _ = nvidia_smi(("memory.total", "memory.used"))
    try:
        return (float(found["memory.total"]) - float(found["memory.used"])) / 1024 if found else None
    except ValueError:
        return None


def cudnn_tuple(number: int | None) -> tuple[int, int, int] | None:
    """(major, minor, patch) of cuDNN's version number: 91501 is 9.15.1, 8907 is 8.9.7."""
    if number is None:
        return None
    large = 10000 if number >= 90000 else 1000
    return number // large, number % large // 100, number % 100


def of_cudnn(found: tuple[int, ...] | None, effect: str = "this library uses none") -> str:
    """The version, with a note and the effect if its 3-D convolutions are wrong."""
    if found is None:
        return "cuDNN's version is not known"
    name = ".".join(map(str, found))
    if found[:2] >= CUDNN_CONV3D_FIXED:
        return f"cuDNN {name}"
    return f"cuDNN {name}: 3-D convolutions wrong in bfloat16 on large shapes before 9.15; {effect}"


def jax_sees(report: Callable[..., None], *, dry_run: bool = False, **_: Any) -> dict[str, Any]:
    """What JAX finds on this machine; a row, in a process of its own.

    Raises:
        NotTried: no GPU.
    """
    import jax

    from cogvideox_flax.attention import nvidia

    found: dict[str, Any] = {"jax": jax.__version__}
    try:
        device = jax.devices()[0]
    except RuntimeError as e:
        raise NotTried(f"JAX {jax.__version__} sees no NVIDIA GPU: {' '.join(str(e).split())[:600]}") from e
    cudnn = nvidia.cudnn_version()
    found |= {"platform": device.platform, "device": device.device_kind, "cudnn": cudnn, "cudnn_says": of_cudnn(cudnn)}
    found["kernels"] = nvidia.why_not(64) or "yes"
    if device.platform == "cpu":
        if dry_run:
            return found | {"status": "ok", "note": "dry run on the CPU"}
        raise NotTried(f"JAX {jax.__version__} sees no NVIDIA GPU: it runs on the CPU (pip install 'jax[cuda13]')")
    stats = device.memory_stats() or {}
    found |= {"capability": getattr(device, "compute_capability", None), "client": device.client.platform_version}
    found["limit_gib"] = stats.get("bytes_limit", 0) / 2**30
    note = f"{device.device_kind}, capability {found['capability']}, {of_cudnn(cudnn)}, {found['limit_gib']:.0f} GiB"
    return found | {"status": "ok", "note": note}
