"""Whether there is an NVIDIA GPU that the GPU kernels can run on."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import jax

AMPERE = 8.0
"""The least compute capability with bfloat16 and asynchronous copies to shared memory."""

MAX_HEAD_DIM = 128
"""The largest head size that every cuDNN version supports on all these GPUs; also that of the Triton kernel's tiles."""


def why_not(head_dim: int) -> str | None:
    """Why a kernel cannot run here on heads of this size, or None if it can."""
    if head_dim > MAX_HEAD_DIM:
        return f"its heads go up to {MAX_HEAD_DIM}; got {head_dim}"
    return None if present() else "it needs an NVIDIA GPU of the Ampere generation or later; there is none here"


@cache
def present() -> bool:
    """Whether JAX runs on an NVIDIA GPU of the Ampere generation or later."""
    if jax.default_backend() not in ("gpu", "cuda") or "cuda" not in jax.devices()[0].client.platform_version.lower():
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0)) >= AMPERE


def cudnn_version() -> tuple[int, int, int] | None:
    """(major, minor, patch) of the cuDNN that JAX has loaded or would load; None without JAX's plugin for NVIDIA GPUs,
    or if the plugin does not report it."""
    try:
        versions: Any = importlib.import_module("jax._src.lib").cuda_versions
        number = int(versions.cudnn_get_version())
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return None
    large = 10000 if number >= 90000 else 1000  # 9.15.1 is 91501, 8.9.7 was 8907
    return number // large, number % large // 100, number % 100
