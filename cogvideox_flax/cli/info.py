"""`cogvideox info`: what a checkpoint, an adapter or a video says of itself."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import CONFIG_FILE, is_native
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.distilled import recognised
from cogvideox_flax.generate.recipe import read_recipe
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.io.source import format_of
from cogvideox_flax.io.values import printable
from cogvideox_flax.lora import (
    EMBEDDED_ADAPTERS,
    SUFFIXES,
    find_adapter,
    fitting_releases,
    is_adapter,
    is_without_effect,
    open_adapter,
)
from cogvideox_flax.models.registry import FAMILIES


def info(args: argparse.Namespace) -> None:
    """Describe a checkpoint without loading or converting it, or an adapter, or say how a video was made."""
    if (made := _stored_recipe(args.where)) is not None:
        _print_recipe(made, args.json)
        return
    if args.where is not None and _print_adapter(args.where, args.json):
        return
    manifest = hub.peek(args.where, args.revision)
    release = manifest.release
    rows = {
        name: {"parameters": component.num_parameters(config), **manifest.weights.get(name, {})}
        for name, component in manifest.model.components.items()
        if (config := manifest.configs.get(name)) is not None
    }
    where = "embedded" if args.where is None else args.where
    result = manifest.to_json() | {"where": where, "components": rows}
    if args.json:
        _print(json.dumps(result, indent=2))
        return
    _print(f"{where}: {release.name if release else 'not a released model'}")
    for name, row in rows.items():
        _print(f"  {name:13} {row['parameters']:>14,} parameters  {_origin(row)}")
    if release is not None:
        _print(
            f"  default       {release.num_frames} frames of {release.height}x{release.width} at {release.fps} fps, "
            f"{release.num_inference_steps} {release.scheduler} steps, guidance {release.guidance_scale:g}"
            + (" (dynamic)" if release.use_dynamic_cfg else "")
        )


def _print(text: str) -> None:
    """Print what a file holds."""
    print(printable(text))


def _stored_recipe(where: str | None) -> dict[str, Any] | None:
    """What a video or a file of latents says of how it was made; None if it is neither."""
    if where is None:
        return None
    path = expand_user(where)
    if not os.path.isfile(path):  # which is False, too, of a name that is too long
        is_other = is_native(path) or os.path.exists(path / hub.TRAINING_RECORD)
        is_made = os.path.isdir(path) and not is_other and any(path.glob("*.png"))
    else:
        is_made = path.suffix.lower() == ".npz" or format_of(path) is not None
    if not is_made:
        return None
    found = read_recipe(path)
    if not found:
        raise InputError(f"{path} does not say how it was made; this library did not write it")
    return found


def _print_recipe(made: dict[str, Any], as_json: bool) -> None:
    """Print a recipe, each of its settings on a line."""
    if as_json:
        _print(json.dumps(made, indent=2, ensure_ascii=False))
        return
    rows = {name: value for name, value in made.items() if name != "settings"}
    for name, value in (rows | made.get("settings", {})).items():
        if value != "":
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            _print(f"{name:20} {text}".replace("\n", "\\n"))


def _print_adapter(where: str, as_json: bool) -> bool:
    """Print what an adapter is and the releases that it fits; False if `where` is not an adapter."""
    if where not in EMBEDDED_ADAPTERS and not os.path.exists(expand_user(where)):  # a hub id is a model's
        return False
    if os.path.isdir(expand_user(where)) and (expand_user(where) / CONFIG_FILE).is_file():  # a model, or a part of one
        return False
    path = find_adapter(where)
    if not path.is_file() or path.suffix not in SUFFIXES:
        return False
    with open_adapter(path) as file:
        if not is_adapter(file):
            return False
        fits = fitting_releases(file)
        idle = is_without_effect(file, next(iter(fits.values())))
    adapter = next(iter(fits.values()))
    if as_json:
        strengths = {name: pair.strength for name, pair in adapter.pairs.items()}
        ranks = {name: pair.rank for name, pair in adapter.pairs.items()}
        found = {"layout": adapter.layout, "alpha": adapter.alpha, "rank": ranks, "alpha_over_rank": strengths}
        _print(json.dumps({"where": str(file.path), **found, "fits": list(fits)}, indent=2))
        return True
    _print(f"{file.path}: {adapter}")
    _print("  targets  " + ", ".join(adapter.targets))
    _print("  fits     " + ", ".join(fits))
    if idle:
        _print("  changes nothing: its B are all zero, as before training")
    for family in FAMILIES.values():
        if (known := recognised(file.path, family)) is not None:
            _print(f"  made for {known}")
    return True


def _origin(row: dict[str, Any]) -> str:
    if "sha256" not in row:
        return "not converted yet"
    row = row | {"dtype": row.get("quantized", row.get("dtype", ""))}
    source = row.get("source", {})
    if "recipe" in source:
        return f"{row.get('dtype', ''):9} trained by {source['recipe']}, {source['steps']} steps"
    revision = f" at {source['revision'][:12]}" if "revision" in source else ""
    return f"{row.get('dtype', ''):9} from {source.get('hub_id', source.get('path', 'an unknown place'))}{revision}"
