"""ComfyUI nodes over cogvideox-flax. Importing this imports neither JAX nor torch: ComfyUI lists all nodes at start."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory from torch


async def comfy_entrypoint() -> Any:
    """The extension, as ComfyUI's V3 interface asks for it."""
    from .nodes import Extension

    return Extension()
