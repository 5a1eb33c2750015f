"""The reference models in small: random weights, written in the released layout, taken through the real converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from cogvideox_flax.conversion.convert import convert
from tests.support.released_layout import ARCHITECTURES, build, make_scheduler, randomise, save_layout

__all__ = ["ARCHITECTURES", "make_scheduler", "save_layout"]

SHARED = Path(__file__).resolve().parents[3] / "shared"
"""Real data that is not part of the project; tests that want it skip where it is missing."""


ROUNDING_BAR = 1e-5
"""Relative error of two programs for the same float32 numbers."""


def random(key: int, *shape: int) -> jax.Array:
    """Standard normal, float32."""
    return jax.random.normal(jax.random.key(key), shape)


def make_transformer(release: str, seed: int = 0, **changes: Any) -> Any:
    """A transformer with the release's architecture, small unless `changes` (diffusers' config keys) say otherwise."""
    return randomise(build("transformer", release, small=True, **changes), seed)


def make_vae(seed: int = 0, **changes: Any) -> Any:
    """A video autoencoder, small unless `changes` say otherwise."""
    return randomise(build("vae", "cogvideox-2b", small=True, **changes), seed)


def make_text_encoder(seed: int = 0, **changes: Any) -> Any:
    """A T5 v1.1 encoder, small unless `changes` say otherwise."""
    return randomise(build("text_encoder", "cogvideox-2b", small=True, **changes), seed)


def convert_component(
    component: str, module: Any, folder: Path, *, dtype: str | None = None, max_shard_size: str = "10GB"
) -> Path:
    """Save a reference module in the released layout below `folder`, convert it, return the native directory."""
    module.save_pretrained(folder / "hf" / component, max_shard_size=max_shard_size)
    native = folder / "native"
    convert(folder / "hf", native, components=[component], dtype=dtype)
    return native


def relative_error(ours: Any, reference: Any) -> float:
    """Largest difference, in units of the reference's standard deviation."""
    ours, reference = (np.asarray(x, np.float64) for x in (ours, reference))
    assert ours.shape == reference.shape, f"shape {ours.shape}, reference {reference.shape}"
    return float(np.abs(ours - reference).max() / reference.std())


def rms_error(ours: Any, reference: Any) -> float:
    """Root mean square difference, in units of the reference's standard deviation."""
    ours, reference = (np.asarray(x, np.float64) for x in (ours, reference))
    assert ours.shape == reference.shape, f"shape {ours.shape}, reference {reference.shape}"
    return float(np.sqrt(np.square(ours - reference).mean()) / reference.std())
