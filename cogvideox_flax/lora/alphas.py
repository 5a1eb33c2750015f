"""The alpha with which an adapter was trained: the product of its matrices is multiplied by alpha / rank."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.values import is_finite_number, load_json
from cogvideox_flax.lora.layouts import LoRAKey, unsupported_kind

METADATA_KEY = "lora_adapter_metadata"
FINETRAINERS_KEY = "lora_config"
KOHYA_KEY = "ss_network_alpha"
PEFT_CONFIG = "adapter_config.json"
"""Beside a file that PEFT wrote: what the adapter is, its alpha among it."""

_OTHER_FORMULAS = (
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
)
"""Entries of PEFT's `LoraConfig` with which an adapter is no sum alpha / rank * B A for all inputs."""
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""PEFT's `init_lora_weights` that leave the model's own weights as they are."""


class Alphas:
    """The alphas of a file, and in `source`, in words, where they come from."""

    def __init__(self, file: TensorFile, component: str, given: float | None, keys: Sequence[LoRAKey]):
        self._file, self._given = file, given
        self._config = _config(file.path, file.metadata, component)
        self._beside = {} if self._config else _config_beside(file.path)
        self._default = 1.0 if any(key.layout == "SAT" for key in keys) else _kohya(file.metadata)
        if given is not None:
            self.source = "alpha as given"
        elif any(key.part == "alpha" for key in keys):
            self.source = "alpha from its tensors"
        elif self._config:
            self.source = "alpha from its metadata"
        elif self._beside:
            self.source = f"alpha from {PEFT_CONFIG}"
        elif self._default is None:
            self.source = "no alpha in the file, taken as the rank; :alpha=A after its name states it"
        else:
            self.source = "alpha from its metadata" if KOHYA_KEY in file.metadata else "alpha 1, SAT's default"

    def of(self, modules: Sequence[str], parts: Mapping[str, str], rank: int) -> float:
        """The alpha of a map.

        Args:
            modules: the map's name in the file, and diffusers' names of it.

        Raises:
            CheckpointError: not a finite number; or the config beside the file is another adapter's.
        """
        if self._beside:
            self._check_beside(modules, rank)
        if self._given is not None:
            alpha = self._given
        elif "alpha" in parts:
            alpha = float(self._file.read(parts["alpha"]).reshape(()))
        elif config := self._config or self._beside:
            alpha = _of_map(config, "lora_alpha", "alpha_pattern", modules)
            alpha *= math.sqrt(rank) if config.get("use_rslora") else 1
        else:
            alpha = rank if self._default is None else self._default
        if not is_finite_number(alpha):
            raise CheckpointError(f"{self._file.path} has alpha {alpha} for {parts['A']}; expected a finite number")
        return alpha

    def _check_beside(self, modules: Sequence[str], rank: int) -> None:
        """Refuse a config whose rank or targets are not the file's: its alpha would be wrong, too."""
        expected = _of_map(self._beside, "r", "rank_pattern", modules)
        targets = self._beside.get("target_modules")
        if expected != rank:
            what = f"says rank {expected} for {modules[0]}, whose matrices are of rank {rank}"
        elif isinstance(targets, list) and not any(_matches(name, module) for name in targets for module in modules):
            what = f"does not name {modules[0]} among its target_modules, {', '.join(map(str, targets))}"
        else:
            return
        where = self._file.path.with_name(PEFT_CONFIG)
        raise CheckpointError(
            f"{where} is not of {self._file.path.name}: it {what}. Put the config of this adapter there, or none"
        )


def _config(path: Path, metadata: Mapping[str, str], component: str) -> dict[str, Any]:
    """PEFT's `LoraConfig` in a file's metadata; {} if there is none."""
    key = METADATA_KEY if METADATA_KEY in metadata else FINETRAINERS_KEY
    prefix = f"{component}."
    try:
        raw = json.loads(metadata.get(key) or "{}")
        config = {name.removeprefix(prefix): value for name, value in raw.items() if name.startswith(prefix)}
    except (ValueError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path} has damaged {key} ({type(e).__name__}: {e})") from e
    if not config and "lora_alpha" in raw:  # of the model itself, not of a pipeline
        config = raw
    return _checked(config, f"{path} has damaged {key}", f"{path}, by its metadata,") if config else {}


def _config_beside(path: Path) -> dict[str, Any]:
    """PEFT's config in an adapter's folder; {} if there is none."""
    where = path.with_name(PEFT_CONFIG)
    if not where.is_file():
        return {}
    try:
        config = load_json(where)
        kind = config.get("peft_type", "LORA")
    except (OSError, ValueError, AttributeError) as e:
        raise CheckpointError(f"{where} is damaged ({type(e).__name__}: {e})") from e
    if kind != "LORA":
        raise CheckpointError(f"{path.name} is an adapter of PEFT's kind {kind}, says {where}; the kind LORA is read")
    return _checked({"r": 8, "lora_alpha": 8} | config, f"{where} is damaged", f"{path}, by {PEFT_CONFIG},")


def _checked(config: dict[str, Any], damaged: str, what: str) -> dict[str, Any]:
    """The config, whose numbers are numbers, of an adapter that adds alpha / rank * B A."""
    try:
        patterns = [dict(config.get(name) or {}) for name in ("alpha_pattern", "rank_pattern")]
        numbers = [config["lora_alpha"], *(value for pattern in patterns for value in pattern.values())]
    except (ValueError, TypeError, KeyError) as e:
        raise CheckpointError(f"{damaged} ({type(e).__name__}: {e})") from e
    if not all(isinstance(number, float) or is_finite_number(number) for number in numbers):
        raise CheckpointError(f"{damaged}: lora_alpha, alpha_pattern and rank_pattern must hold numbers")
    expressions = [name for pattern in patterns for name in pattern if not re.fullmatch(r"\^?[\w.]+", name)]
    if expressions:
        raise CheckpointError(
            f"{what} has regular expressions in its patterns ({', '.join(expressions)}); only names of modules are read"
        )
    if config.get("use_dora"):
        raise CheckpointError(f"{what} is {unsupported_kind('dora_scale')}; plain LoRA is read")
    if other := [name for name in _OTHER_FORMULAS if config.get(name)]:
        raise CheckpointError(f"{what} is a LoRA with {', '.join(other)}; plain LoRA is read")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{what} began as {start!r}, which changes the model's own weights; have PEFT convert it to a plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)"
        )
    return config


def _kohya(metadata: Mapping[str, str]) -> float | None:
    """The alpha in kohya's metadata; None, as for kohya, stands for the rank, as do 0 and what is no number."""
    try:
        return float(metadata.get(KOHYA_KEY, "")) or None
    except ValueError:
        return None


def _of_map(config: Mapping[str, Any], name: str, pattern: str, modules: Sequence[str]) -> Any:
    """A number of PEFT's config for one map: of the first pattern that matches, else the common one."""
    patterns = config.get(pattern) or {}
    found = (value for key, value in patterns.items() if any(_matches(key, module) for module in modules))
    return next(found, config[name])


def _matches(name: Any, module: str) -> bool:
    """PEFT's rule: a name matches the end of a module's from any dot on; after a `^`, the full name."""
    return f"^{module}" == name or f".{module}".endswith(f".{name}")
