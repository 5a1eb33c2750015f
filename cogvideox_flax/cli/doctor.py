"""`cogvideox doctor`: what is installed, what the machine has, what fits, and what to try next. Loads no weights."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from huggingface_hub.constants import HF_HUB_CACHE

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import install_extra
from cogvideox_flax.io.paths import cache_dir, free_bytes, size_text
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.runtime.devices import host_memory, memory_limit
from cogvideox_flax.sharding.devices import accelerators, find_devices
from cogvideox_flax.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "libtpu", "numpy", "safetensors", "tokenizers", "av", "optax", "orbax-checkpoint")

SHARE = 0.8
"""Of the memory that weights may take; the rest is for activations."""


def doctor(args: argparse.Namespace) -> None:
    """Print a report, or one JSON object."""
    found = report()
    print(json.dumps(found, indent=2) if args.json else "\n".join(_lines(found)))


def report() -> dict[str, Any]:
    """What `doctor` prints, as JSON values; bytes are whole numbers, and a missing thing is None."""
    find_devices()
    devices, limit = jax.local_devices(), memory_limit(None)
    kind, count = devices[0].device_kind, len(devices)
    memory = host_memory() if limit is None else limit * count
    home = cache_dir()
    return {
        "cogvideox-flax": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": {"platform": devices[0].platform, "kind": kind, "count": count, "bytes": limit},
        "host": {"cores": os.cpu_count(), "bytes": host_memory()},
        "caches": _caches(home),
        "free": {"folder": str(home), "bytes": free_bytes(home)},
        "fits": _fits(memory),
        "unused": _unused(devices[0].platform),
        "next": _next(devices[0].platform, memory),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _caches(home: Path) -> dict[str, Any]:
    programs = _size(home / "programs")
    return {
        "compiled programs": {"folder": str(home / "programs"), "bytes": programs},
        "converted checkpoints": {"folder": str(home), "bytes": _size(home) - programs},
        "downloads": {"folder": HF_HUB_CACHE, "bytes": _size(Path(HF_HUB_CACHE))},
    }


def _size(folder: Path) -> int:
    """Bytes of all files below a folder; links are not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return total


def _fits(memory: int) -> dict[str, str]:
    """Release -> how its weights, in the default dtype, go into this memory."""
    found = {}
    for name, release in RELEASES.items():
        manifest = Manifest.of_release(release)
        width = jnp.dtype(manifest.default_dtype).itemsize
        sizes = [
            component.num_parameters(manifest.configs[part]) * width
            for part, component in manifest.model.components.items()
            if part in manifest.configs
        ]
        if sum(sizes) < SHARE * memory:
            found[name] = "whole"
        else:
            found[name] = "in stages" if max(sizes) < SHARE * memory else "no"
    return found


def _unused(used: str) -> str | None:
    """A line on hardware that JAX does not use."""
    for name, extra in accelerators().items():
        if used == "cpu":
            return f"there is {name}, which JAX does not use: {install_extra(extra)}"
    return None


def _next(used: str, memory: int) -> str:
    """The command to try."""
    small, fits = 'cogvideox generate "a small red circle moves to the left"', _fits(memory)
    if used == "cpu" or fits["cogvideox-2b"] == "no":
        return small
    best = "5b" if fits["cogvideox-5b"] != "no" else "2b"
    return f'cogvideox generate "A panda plays guitar by a quiet stream" --model zai-org/CogVideoX-{best}'


def _lines(found: dict[str, Any]) -> list[str]:
    devices, host, fits = found["devices"], found["host"], found["fits"]
    each = f", {size_text(devices['bytes'])} each" if devices["bytes"] else ""
    packages = [f"{name} {version or '-'}" for name, version in found["packages"].items()]
    rows = [
        ("installed", f"cogvideox-flax {found['cogvideox-flax']}, Python {found['python']}"),
        ("", ", ".join(packages[:5])),
        ("", ", ".join(packages[5:])),
        ("devices", f"{devices['count']} x {devices['kind']} ({devices['platform']}){each}"),
        *([("", found["unused"])] if found["unused"] else []),
        ("host", f"{host['cores']} cores, {size_text(host['bytes'])} of memory to be had"),
        *(
            ("caches" if i == 0 else "", f"{size_text(cache['bytes'])} of {name}: {cache['folder']}")
            for i, (name, cache) in enumerate(found["caches"].items())
        ),
        ("", f"{size_text(found['free']['bytes'])} of the disk are free"),
    ]
    words = {
        "whole": "weights fit, all at once",
        "in stages": "weights fit, one part at a time, as `generate` has them",
        "no": "do not fit: split over more devices (--mesh), or `cogvideox quantize`",
    }
    names = {how: [name for name, verdict in fits.items() if verdict == how] for how in words}
    fitting = [f"{said}: {', '.join(names[how])}" for how, said in words.items() if names[how]]
    rows += [("releases" if i == 0 else "", line) for i, line in enumerate(fitting)]
    rows += [("", "longer and larger videos need more beside the weights: `cogvideox plan`"), ("next", found["next"])]
    wrapped = [(name, textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)) for name, text in rows]
    return [f"{name if i == 0 else '':10} {line}" for name, lines in wrapped for i, line in enumerate(lines)]
