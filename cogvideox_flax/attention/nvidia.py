"""Whether there is an NVIDIA GPU to run on."""

from __future__ import annotations

from functools import cache

import jax

AMPERE = 8.0
"""The least compute capability that knows bfloat16 and copies to shared memory in the background."""


@cache
def present() -> bool:
    """Whether JAX runs on an NVIDIA GPU of the Ampere generation or later."""
    if jax.default_backend() != "gpu" or "cuda" not in jax.devices()[0].client.platform_version.lower():
        return False
    return float(getattr(jax.devices()[0], "compute_capability", 0)) >= AMPERE
