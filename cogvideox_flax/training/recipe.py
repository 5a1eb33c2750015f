"""What a fine-tuning run is told: a TOML file, read strictly into a frozen dataclass.

model = "zai-org/CogVideoX-2b"      # as --model takes it; left out: the embedded checkpoint
clips = "clips"                     # paths are relative to the working directory
out = "run"
method = "lora"                     # or "full"

[lora]
rank = 64

[loop]
steps = 1000
dtype = "bfloat16"

[optimizer]
learning_rate = 1e-4

[sample]
prompts = ["a red kite over the sea"]
every = 200
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.home import expand_user
from cogvideox_flax.models.cogvideox.family import LORA
from cogvideox_flax.training.loop import LoopConfig
from cogvideox_flax.training.optimizer import OptimizerConfig

METHODS = ("lora", "full")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The adapters of method "lora". alpha: None for the rank; targets: names of the family's `lora.targets`."""

    rank: int = 64
    alpha: float | None = None
    targets: tuple[str, ...] = LORA.default_targets


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What the run draws while it trains, with the weights that it would give out: a sheet with a row per prompt.

    every: steps between two sheets; one is drawn at the end too.
    frames: how many of a video's frames are shown.
    """

    prompts: tuple[str, ...] = ()
    every: int = 200
    frames: int = 6
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """A fine-tuning run.

    model: native or Hugging Face layout directory, or hub id; None for the embedded checkpoint.
    revision: of a hub id: branch, tag or commit.
    clips: folder of clips, see `training.clips`.
    out: folder of everything that the run writes; a run that was stopped goes on from it.
    method: "lora": adapters beside the weights, which stay as they are; "full": all weights of the transformer.
    num_frames, height, width: None for the release's.
    mesh: "DP,SP,TP", or "DP,SP,TP,fsdp" to split weights and moments over all of it; None for one device.
    batch: clips per step, over all micro-batches of `loop.accumulate`.
    caption_dropout: share of captions replaced by the empty one, for guidance.
    remat: compute each block again in the backward pass: a third more time, memory for one block in place of all,
        of its gathered weights too on an FSDP mesh.
    loop: how long and how; its `dtype` is that of all weights that are not trained, and of the preparation.
    """

    clips: Path
    out: Path
    model: str | None = None
    revision: str | None = None
    method: str = "lora"
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    mesh: str | None = None
    batch: int = 1
    caption_dropout: float = 0.1
    remat: bool = True
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    loop: LoopConfig

    def __post_init__(self) -> None:
        lora, sample = self.lora, self.sample
        faults = [
            f"  {name}: got {value!r}, expected {expected}"
            for name, value, holds, expected in (
                ("method", self.method, self.method in METHODS, " or ".join(METHODS)),
                ("batch", self.batch, self.batch >= 1, "1 or more"),
                (
                    "batch",
                    self.batch,
                    self.batch % self.loop.accumulate == 0,
                    f"a multiple of loop.accumulate, {self.loop.accumulate}",
                ),
                ("caption_dropout", self.caption_dropout, 0 <= self.caption_dropout <= 1, "0 to 1"),
                ("lora.rank", lora.rank, lora.rank >= 1, "1 or more"),
                ("lora.alpha", lora.alpha, lora.alpha is None or lora.alpha > 0, "above 0"),
                (
                    "lora.targets",
                    list(lora.targets),
                    bool(lora.targets) and set(lora.targets) <= set(LORA.targets),
                    f"some of {', '.join(LORA.targets)}",
                ),
                ("sample.every", sample.every, sample.every >= 1, "1 or more"),
                ("sample.frames", sample.frames, sample.frames >= 1, "1 or more"),
            )
            if not holds
        ]
        if faults:
            raise InputError("the training settings are invalid:\n" + "\n".join(faults))


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> FinetuneConfig:
    """Read a TOML file.

    Args:
        overrides: dotted key ("loop.steps") -> value in place of the file's.

    Raises:
        InputError: the file cannot be read, or keys that are unknown, missing or of a wrong type or range; all of one
            kind in one message, with the keys that there are.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read the training settings {path}: {e}") from e
    except tomllib.TOMLDecodeError as e:
        raise InputError(f"{path} is not TOML: {e}") from e
    for dotted, value in (overrides or {}).items():
        table, _, key = dotted.rpartition(".")
        target = raw.setdefault(table, {}) if table else raw
        if isinstance(target, dict):
            target[key] = value
    faults: list[str] = []
    # one seed and one place for the optimizer, though the loop holds both
    tables = {"seed": raw.pop("seed", 0), "optimizer": raw.pop("optimizer", {})}
    if isinstance(loop := raw.get("loop", {}), dict):
        faults += [f"  loop.{key}: unknown key; it stands at the top of the file" for key in tables if key in loop]
        raw["loop"] = {key: value for key, value in loop.items() if key not in tables} | tables
    values = _checked(FinetuneConfig, raw, "", faults)
    if faults:
        raise InputError(f"{path} is not a training configuration ({len(faults)} faults):\n" + "\n".join(faults))
    return _build(FinetuneConfig, values)


_PLAIN: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text in quotes"),
    Path: ((str, Path), "a path in quotes"),
}
"""Field type -> what TOML may give for it, and how to say that."""


def _checked(cls: type, raw: Mapping[str, Any], prefix: str, faults: list[str]) -> dict[str, Any]:
    """The values of a dataclass, with Python's types; what is wrong is added to `faults`, by dotted key."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    known = ", ".join(name for name in fields if not (cls is LoopConfig and name in ("seed", "optimizer")))
    if cls is FinetuneConfig:
        known += ", seed, optimizer"
    faults += [f"  {prefix}{key}: unknown key; known are {known}" for key in raw if key not in fields]
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and name not in raw:
            faults.append(f"  {prefix}{name}: missing")
    values = {}
    for name in fields.keys() & raw.keys():
        shown = name if name in ("seed", "optimizer") else f"{prefix}{name}"
        values[name] = _value(hints[name], raw[name], shown, faults)
    return values


def _value(kind: Any, value: Any, name: str, faults: list[str]) -> Any:
    if isinstance(kind, types.UnionType):  # X | None; TOML has no None
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            return _checked(typing.cast(type, kind), value, f"{name}.", faults)
        faults.append(f"  {name}: got {value!r}, expected a table, [{name}]")
        return None
    if typing.get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        faults.append(f"  {name}: got {value!r}, expected a list of texts")
        return None
    accepted, expected = _PLAIN[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        faults.append(f"  {name}: got {value!r}, expected {expected}")
        return None
    try:
        return expand_user(str(value)) if kind is Path else kind(value)
    except (InputError, OverflowError) as e:  # a user that there is not; an integer beyond all floats
        faults.append(f"  {name}: {e}")
        return None


def _build(cls: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    return cls(**{k: _build(hints[k], v) if dataclasses.is_dataclass(hints[k]) else v for k, v in values.items()})


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What a run's result depends on beside its loop, model and clips, as JSON values."""
    adapters = {"lora": dataclasses.asdict(config.lora)} if config.method == "lora" else {}
    return {"method": config.method, "batch": config.batch, "caption_dropout": config.caption_dropout, **adapters}


__all__ = ["FinetuneConfig", "LoRAConfig", "OptimizerConfig", "SampleConfig", "read_config", "settings"]
