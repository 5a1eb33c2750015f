"""The alpha with which an adapter was trained: the product of its matrices is multiplied by alpha / rank."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.values import is_finite_number
from cogvideox_flax.lora.layouts import LoRAKey, unsupported_kind

METADATA_KEY = "lora_adapter_metadata"
FINETRAINERS_KEY = "lora_config"


class Alphas:
    """The alphas of a file, and in `source`, in words, where they come from."""

    def __init__(self, file: TensorFile, component: str, given: float | None, keys: Sequence[LoRAKey]):
        self._file, self._given = file, given
        self._config = _config(file, component)
        self._default = 1.0 if any(key.layout == "SAT" for key in keys) else None
        if given is not None:
            self.source = "alpha as given"
        elif any(key.part == "alpha" for key in keys):
            self.source = "alpha from its tensors"
        elif self._config:
            self.source = "alpha from its metadata"
        elif self._default is not None:
            self.source = "alpha 1, SAT's default"
        else:
            self.source = "no alpha in the file, taken as the rank; :alpha=A after its name states it"

    def of(self, module: str, parts: Mapping[str, str], rank: int) -> float:
        """The alpha of a map, by diffusers' name.

        Raises:
            CheckpointError: not a finite number.
        """
        if self._given is not None:
            alpha = self._given
        elif "alpha" in parts:
            alpha = float(self._file.read(parts["alpha"]).reshape(()))
        elif self._config:
            alpha = _alpha(self._config, module, rank)
        else:
            alpha = rank if self._default is None else self._default
        if not is_finite_number(alpha):
            raise CheckpointError(f"{self._file.path} has alpha {alpha} for {parts['A']}; expected a finite number")
        return alpha


def _config(file: TensorFile, component: str) -> dict[str, Any]:
    """The entries of PEFT's `LoraConfig` in the file's metadata that set the adapter's strength; {} if none do."""
    key = METADATA_KEY if METADATA_KEY in file.metadata else FINETRAINERS_KEY
    prefix = f"{component}."
    try:
        raw = json.loads(file.metadata.get(key) or "{}")
        config = {name.removeprefix(prefix): value for name, value in raw.items() if name.startswith(prefix)}
        if not config and "lora_alpha" in raw:  # of the model itself, not of a pipeline
            config = raw
        patterns = dict(config.get("alpha_pattern") or {})
        numbers = [*patterns.values(), *([config["lora_alpha"]] if config else [])]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
        raise CheckpointError(f"{file.path} has damaged {key} ({type(e).__name__}: {e})") from e
    if not all(isinstance(number, float) or is_finite_number(number) for number in numbers):
        raise CheckpointError(f"{file.path} has damaged {key}: lora_alpha and alpha_pattern must hold numbers")
    if expressions := [name for name in patterns if not re.fullmatch(r"\^?[\w.]+", name)]:
        raise CheckpointError(
            f"{file.path} gives alpha by regular expressions ({', '.join(expressions)}); only names of modules are read"
        )
    if config.get("use_dora"):
        raise CheckpointError(f"{file.path} is {unsupported_kind('dora_scale')}; its metadata say so")
    return config


def _alpha(config: dict[str, Any], module: str, rank: int) -> float:
    """The alpha that PEFT uses. A pattern matches the end of a name from any dot on; after a `^`, the full name."""
    patterns = config.get("alpha_pattern") or {}
    matches = (x for name, x in patterns.items() if f"^{module}" == name or f".{module}".endswith(f".{name}"))
    alpha = next(matches, config["lora_alpha"])
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
