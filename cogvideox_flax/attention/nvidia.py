"""Whether there is an NVIDIA GPU that the kernels for them run on."""

from __future__ import annotations

from functools import cache

import jax

AMPERE = 8.0
"""The least compute capability that knows bfloat16 and copies to shared memory in the background."""

MAX_HEAD_DIM = 128
"""What all versions of cuDNN and all these GPUs serve, and what our kernel's tiles leave room for."""


def why_not(head_dim: int) -> str | None:
    """Why a kernel cannot run here on heads of this size, or None if it can."""
    if head_dim > MAX_HEAD_DIM:
        return f"its heads go up to {MAX_HEAD_DIM}; got {head_dim}"
    return None if present() else "it needs an NVIDIA GPU of the Ampere generation or later; there is none here"


@cache
def present() -> bool:
    """Whether JAX runs on an NVIDIA GPU of the Ampere generation or later."""
    if jax.default_backend() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version.lower():
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0)) >= AMPERE
