"""libtpu, the TPU's runtime and compiler, on a machine without a TPU: for compiling only, and without its warnings."""

from __future__ import annotations

import importlib.util
import os

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
}
"""Variables that a TPU host sets. Without them, libtpu prints warnings to stderr when JAX looks for TPUs."""


def is_installed() -> bool:
    """Whether libtpu can be loaded."""
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def quiet_without_tpu() -> None:
    """Set libtpu's environment if it is installed and JAX finds no TPU. Call this before JAX looks for devices."""
    if not is_installed():
        return
    try:
        from jax._src.hardware_utils import num_available_tpu_chips_and_device_id
    except ImportError:  # another version of JAX: libtpu prints its warnings
        return
    if num_available_tpu_chips_and_device_id()[0] == 0:
        prepare_to_compile()


def prepare_to_compile() -> None:
    """Set libtpu's environment, except for variables that are set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
