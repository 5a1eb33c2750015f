"""CogVideoX video generation in JAX.

The public names are imported when they are first used, so that importing one room of the library costs only that room.
"""

from __future__ import annotations

import cogvideox_flax.io.interrupts  # isort: skip  (before all other imports)

from importlib import import_module
from typing import TYPE_CHECKING, Any

import cogvideox_flax.version  # noqa: F401  (it looks at the source files as they are now)

if TYPE_CHECKING:
    from cogvideox_flax.errors import InputError
    from cogvideox_flax.generate.pipeline import CogVideoXPipeline, Pipeline
    from cogvideox_flax.generate.request import GenerationRequest
    from cogvideox_flax.generate.result import GenerationResult
    from cogvideox_flax.models.registry import RELEASES
    from cogvideox_flax.version import __version__

_HOME = {
    "CogVideoXPipeline": "generate.pipeline",
    "GenerationRequest": "generate.request",
    "GenerationResult": "generate.result",
    "InputError": "errors",
    "Pipeline": "generate.pipeline",
    "RELEASES": "models.registry",
    "__version__": "version",
}

__all__ = [
    "RELEASES",
    "CogVideoXPipeline",
    "GenerationRequest",
    "GenerationResult",
    "InputError",
    "Pipeline",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
