"""The base of every component's config: a frozen dataclass whose values are checked when it is made."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.values import is_count, is_finite_number, short_repr, typed


def require(component: str, raw: Mapping[str, Any], **expected: Any) -> None:
    """Refuse config values that the implementation does not cover, all at once.

    A missing key is accepted: merge the reference's default into `raw` where that is not covered. So is null where
    the covered value is off, which the reference takes for off too.
    """
    faults = [
        f"  {key}: got {raw[key]!r}, supported is {value!r}"
        for key, value in expected.items()
        if key in raw and raw[key] != value and (value or raw[key] is not None)
    ]
    if faults:
        raise CheckpointError(f"{component} config asks for what is not implemented:\n" + "\n".join(faults))


def check_compression(name: str, ratio: int, most: int) -> None:
    """Refuse a VAE's compression that its levels, which halve one after the other, do not make."""
    if ratio & (ratio - 1) or ratio > most:
        raise CheckpointError(f"vae config: {name} compression is {ratio}; expected a power of two, at most {most}")


MAX = {"layers": 1000, "refiner_layers": 1000, "layers_per_block": 100, "temporal_compression": 64}
"""Field -> its largest value, where that decides how much is looped over."""

DEFAULT_MAX = 2**24

_EXPECTED = {
    "int": "a whole number from 1 to {most}",
    "int | None": "a whole number from 1 to {most}, or null",
    "float": "a finite number above 0",
    "bool": "true or false",
    "str": "a text",
    "tuple[int, ...]": "up to 16 whole numbers from 1 to {most}",
}


def _is_valid(kind: Any, value: Any, most: int) -> bool:
    """Whether a value that came out of a JSON file is of this type, and not beyond the largest."""
    try:
        value = typed(kind, value)
    except ValueError:
        return False
    if isinstance(value, tuple):
        return 0 < len(value) <= 16 and all(is_count(n, most) for n in value)
    if value is None or isinstance(value, bool | str):
        return True
    return is_finite_number(value) and value > 0 if isinstance(value, float) else is_count(value, most)


@cache
def _field_types(config_type: Any) -> dict[str, Any]:
    return typing.get_type_hints(config_type)


def hf(default: Any, key: str | None) -> Any:
    """A field with this default and this key in the JSON that diffusers or transformers write; None: it is not there.

    Other fields have their name as the key.
    """
    return dataclasses.field(default=default, metadata={"hf": key})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The config of one component: checked values, dict in, dict out. Fields have one of the types in `_EXPECTED`.

    Attributes:
        hf_values: keys of the JSON that diffusers or transformers write with the one value that is supported, where it
            is not the reference's default.
    """

    hf_values: ClassVar[Mapping[str, Any]] = {}

    def __post_init__(self) -> None:
        config_type: Any = type(self)
        faults, hints = [], _field_types(config_type)
        for field in dataclasses.fields(self):
            kind, value, most = str(field.type), getattr(self, field.name), MAX.get(field.name, DEFAULT_MAX)
            if not _is_valid(hints[field.name], value, most):
                faults.append(f"  {field.name}: got {short_repr(value)}, expected {_EXPECTED[kind].format(most=most)}")
        if faults:
            raise CheckpointError(f"{type(self).__name__} read from a config file is invalid:\n" + "\n".join(faults))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON that diffusers or transformers wrote: unknown keys are dropped, missing ones get the
        reference's class defaults.

        Raises:
            CheckpointError: a value that would change the computation in a way that is not implemented.
        """
        raise NotImplementedError

    @classmethod
    def named(cls, raw: Mapping[str, Any], **fields: Any) -> Self:
        """The config of the values in `raw` by their keys (see `hf`), and of these fields in place of them."""
        return cls(**{field: raw[key] for field, key in cls._hf_keys().items() if key in raw} | fields)

    def to_hf(self) -> dict[str, Any]:
        """The JSON of which `from_hf` makes this config."""
        values = {key: getattr(self, field) for field, key in self._hf_keys().items()}
        return {**self.hf_values, **{key: list(x) if isinstance(x, tuple) else x for key, x in values.items()}}

    @classmethod
    def _hf_keys(cls) -> dict[str, str]:
        keys = {field.name: field.metadata.get("hf", field.name) for field in dataclasses.fields(cls)}
        return {name: key for name, key in keys.items() if key is not None}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; unknown and missing keys are errors, since we wrote the file ourselves."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(raw) - set(fields))
        missing = sorted(n for n, f in fields.items() if n not in raw and f.default is dataclasses.MISSING)
        if unknown or missing:
            raise CheckpointError(f"{cls.__name__}: unknown keys {unknown}, missing keys {missing}")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def architecture(self) -> Self:
        """This config without what weights of the same architecture may differ in, such as nominal sizes."""
        return self

    def check_dtype(self, dtype: str | None) -> None:
        """Refuse a dtype that the component does not survive."""
