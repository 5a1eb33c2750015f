"""Finds the devices of this machine."""

from __future__ import annotations

import os
from typing import Any

import jax

from cogvideox_flax.errors import InputError, install_extra


def find_devices() -> list[jax.Device]:
    """The devices that JAX uses.

    Raises:
        InputError: there is none of the platforms that JAX_PLATFORMS asks for, or one that cannot be used.
    """
    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as e:  # AssertionError: no plugin for "cuda" is installed
        config: Any = jax.config  # its attributes are made at run time
        reason = str(e).partition("\n")[0].partition(" (")[0].rstrip(".") or "its plugin is not installed"
        here = "this machine has " + ", ".join(["a CPU", *accelerators()])
        extras = "".join(f"; or, for {name}: {install_extra(extra)}" for name, extra in accelerators().items())
        if not config.jax_platforms:
            raise InputError(f"JAX finds no devices ({reason}); {here}. Set JAX_PLATFORMS=cpu for the CPU") from e
        raise InputError(
            f"JAX_PLATFORMS is {config.jax_platforms!r}, and JAX finds no such device ({reason}); {here}. Leave "
            f"JAX_PLATFORMS out for what JAX finds{extras}"
        ) from e


def accelerators() -> dict[str, str]:
    """The accelerators of this machine -> the extra of this package with which JAX uses them."""
    found = {"an NVIDIA GPU": "cuda"} if os.path.exists("/dev/nvidia0") else {}
    return found | ({"a TPU": "tpu"} if any(os.path.exists(f"/dev/{name}0") for name in ("accel", "vfio/")) else {})
