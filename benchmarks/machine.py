"""Describes the machine of a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

VECTORS = ("avx512f", "avx2", "asimd")
"""Vector instructions, widest first, by their names in Linux. They determine how fast a CPU multiplies."""


def machine(packages: tuple[str, ...] = ("jax", "flax", "numpy")) -> dict[str, Any]:
    """The CPU, its widest vector instructions, its cores, and versions of Python and of these packages."""
    cpuinfo = Path("/proc/cpuinfo")
    return {
        **cpu(cpuinfo.read_text() if cpuinfo.exists() else ""),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def cpu(info: str) -> dict[str, str | None]:
    """Name and vectors from the text of /proc/cpuinfo; vectors are None if it does not list them."""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in info.splitlines())}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "vectors": next((name for name in VECTORS if name in flags), None),
    }
