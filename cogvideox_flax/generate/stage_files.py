"""The files between stages: safetensors that say in their metadata what they were made of, written atomically.

On several hosts they are process 0's: it alone writes and reads them, and sends the others what they hold.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.tensor_file import TensorFile, write_tensors
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)


def one_or_all(prompts: list[str]) -> str | list[str]:
    """A single prompt is written as the reference system does, as a string."""
    return prompts[0] if len(prompts) == 1 else prompts


def _as_text(value: Any) -> str:
    """A metadata value: strings and numbers as they are, several prompts and records as JSON."""
    value = one_or_all(value) if isinstance(value, list) else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def check_made_for(path: Path, metadata: dict[str, str], settings: dict[str, Any], again: str) -> None:
    """Compare what a file says it was made with and the run's settings, where both say something.

    Raises:
        InputError: they differ; with the differences, and `again`, what to do.
    """
    differ = [name for name, value in settings.items() if metadata.get(name, _as_text(value)) != _as_text(value)]
    if differ:
        found = ", ".join(f"{name} {metadata[name]!r} is now {_as_text(settings[name])!r}" for name in differ)
        raise InputError(f"{path} was made with other settings than this run's ({found}); {again}")


def check_unchanged(
    path: Path, metadata: dict[str, str], settings: dict[str, Any], again: str, model: dict[str, str] | None = None
) -> None:
    """Compare all that this library says a file was made of, and the run's; files of other systems say less.

    settings: JSON values; None stands for none.
    model: part of the checkpoint -> its fingerprint.

    Raises:
        InputError: they differ; with what, and `again`.
    """
    try:
        made = json.loads(metadata.get("settings", "null"))
    except ValueError:
        return  # written by another system
    if not isinstance(made, dict) or not isinstance(made.get("model"), dict):
        return  # the same
    differ = [name for name, value in settings.items() if made.get(name) != value]
    differ += [f"the {name}" for name, part in made["model"].items() if model is not None and model.get(name) != part]
    if differ:
        raise InputError(f"{path} was made before {' and '.join(differ)} changed; {again}")


@hosts.on_process_0
def save(path: Path, tensors: dict[str, Float[np.ndarray, "*shape"]], metadata: dict[str, Any]) -> None:
    """Write a stage file as the reference system does: bfloat16 as float32, its name kept in the metadata."""
    kinds = json.dumps({name: str(value.dtype) for name, value in tensors.items()})
    texts = {name: _as_text(value) for name, value in metadata.items()}
    whole = {name: value.astype(np.float32) for name, value in tensors.items()}
    write_tensors(path, whole, {"dtype_info": kinds, **texts})


@hosts.broadcast_result
def is_fresh(path: Path, key: str) -> bool:
    """Whether a stage file is there, whole, and made from these settings, which are JSON."""
    if not path.exists():
        return False
    try:
        with TensorFile(path) as file:
            file.check(required=True)
            same = json.loads(file.metadata.get("settings", "null")) == json.loads(key)
    except (CheckpointError, ValueError) as e:
        log.warning("making %s again: %s", path.name, e)
        return False
    log.info("reusing %s" if same else "making %s again: it is of other settings", path)
    return same


@hosts.broadcast_result
def load(
    path: Path, names: tuple[str, ...] | None, maker: str
) -> tuple[dict[str, Float32[np.ndarray, "*shape"]], dict[str, str]]:
    """Tensors and metadata of a stage file; `maker` is the command that makes it, `names` None are all tensors.

    Raises:
        InputError: the file is missing, damaged, or holds NaN or infinity.
    """
    if not path.exists():
        raise InputError(f"{path} is missing; run `{maker}` first")
    try:
        with TensorFile(path) as file:
            file.check()
            names = tuple(file.tensors) if names is None else names
            if missing := [name for name in names if name not in file.tensors]:
                raise InputError(f"{path} holds no {' and no '.join(missing)}; run `{maker}` again")
            tensors = {name: file.read(name).astype(np.float32) for name in names}
            metadata = file.metadata
    except CheckpointError as e:
        raise InputError(f"{e} Or run `{maker}` again.") from e
    if bad := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
        raise InputError(f"{path} holds NaN or infinity in {' and '.join(bad)}; run `{maker}` again")
    return tensors, metadata
