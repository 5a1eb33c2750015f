"""JAX's own cache of compiled programs, on disk: what `executables` does not hold is at least not compiled again."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import jax

LIMIT = 4 * 2**30
"""Bytes, here and in `executables` each; what was not used for longest goes first."""


def keep_compiled(folder: Path) -> Path | None:
    """Use `folder` for JAX's persistent compilation cache, unless the user has chosen another or has switched it off.

    Programs of one kind of host stay apart from those of another, since a CPU's have its instructions in them.

    Returns:
        Where they are kept; None if the choice was the user's.
    """
    config: Any = jax.config  # its attributes are made at run time
    place = folder / host()
    if config.jax_compilation_cache_dir not in (None, "", str(place)) or not config.jax_enable_compilation_cache:
        return None
    config.update("jax_compilation_cache_dir", str(place))
    config.update("jax_compilation_cache_max_size", LIMIT)
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return place


def host() -> str:
    """A short name for this kind of machine: its instruction set with all extensions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
