"""The adapters of a model by name: those that were loaded, and those of them that are in use."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import is_finite_number, short_repr
from cogvideox_flax.lora.files import LoRARecord


@dataclass(frozen=True)
class ActiveAdapters:
    """Adapters by name. Immutable, so that an adapter that cannot be merged leaves everything as it was.

    loaded: all of them, as they were loaded.
    active: those in use, with their strengths.
    """

    loaded: Mapping[str, LoRARecord] = field(default_factory=dict)
    active: Mapping[str, LoRARecord] = field(default_factory=dict)

    @property
    def records(self) -> list[LoRARecord]:
        """Those in use, in the order in which they are added to the weights."""
        return list(self.active.values())

    def add(self, record: LoRARecord, name: str | None = None) -> ActiveAdapters:
        """One more adapter in use; default: by the first of default_0, default_1, ... that is free.

        Raises:
            InputError: the name is taken.
        """
        if name in self.loaded:
            raise InputError(f"there is an adapter {name!r} already; give another name")
        if name is None:
            name = next(free for i in itertools.count() if (free := f"default_{i}") not in self.loaded)
        return ActiveAdapters({**self.loaded, name: record}, {**self.active, name: record})

    def use(self, names: str | Sequence[str], weights: float | Sequence[float] | None = None) -> ActiveAdapters:
        """These adapters in use, and no others; arguments and errors as for `Pipeline.set_adapters`."""
        names = [names] if isinstance(names, str) else list(names)
        if unknown := [name for name in names if name not in self.loaded]:
            known = ", ".join(self.loaded) or "none"
            raise InputError(f"there is no adapter {', '.join(map(repr, unknown))}; loaded are: {known}")
        records = [self.loaded[name] for name in names]
        if weights is None:
            weights = [record["scale"] for record in records]
        elif not isinstance(weights, Sequence):
            weights = [weights] * len(names)
        if len(weights) != len(names) or not all(map(is_finite_number, weights)):
            raise InputError(
                f"weights is {short_repr(weights)}; expected a finite number for each of {len(names)} adapters"
            )
        scaled: list[LoRARecord] = [{**a, "scale": float(w)} for a, w in zip(records, weights, strict=True)]
        return replace(self, active=dict(zip(names, scaled, strict=True)))
