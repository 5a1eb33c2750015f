"""What figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

VECTORS = ("avx512f", "avx2", "asimd")
"""Vector instructions, widest first, as Linux calls them: how fast a CPU multiplies hangs on them."""


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
    """Name and vectors, of the text of /proc/cpuinfo; vectors are None where it does not say."""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in info.splitlines())}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "vectors": next((name for name in VECTORS if name in flags), None),
    }
