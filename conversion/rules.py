"""The rows of a mapping table: which source tensor fills which parameter, and how its axes are permuted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]


def same(x: np.ndarray) -> np.ndarray:
    return x


class Rule(NamedTuple):
    """One row of a mapping table.

    source: a regular expression that must match a source tensor's whole name. A group named `slot` is the position in
        the stacked parameter's leading layer axis (minus `first_slot`); other groups may be used in `target`.
    target: the NNX path, dots between its parts; `\\1` etc. refer to groups.
    transform: from the source array (one layer) to the parameter's layout. It must not depend on the array's values.
    shape: of the source array, from the parameter's (one layer's); None: the parameter's, reversed by np.transpose.
    """

    source: str
    target: str
    transform: Callable[[np.ndarray], np.ndarray] = same
    first_slot: int = 0
    shape: Callable[[Shape], Shape] | None = None

    def source_shape(self, shape: Shape) -> Shape:
        """The shape of the source array of a parameter, or of its layer."""
        if self.shape is not None:
            return self.shape(shape)
        return shape[::-1] if self.transform is np.transpose else shape


class Ignore(NamedTuple):
    """Source tensors that are not needed, with the reason."""

    source: str
    reason: str


class Alias(NamedTuple):
    """A second name of tied weights: a file may have either name, or both.

    source: as in `Rule`. It is ignored if the file has `original`; otherwise it is mapped as `original`.
    """

    source: str
    original: str


Table = tuple[Rule | Ignore | Alias, ...]

Tables = Mapping[str, Callable[[Any], Table]]
"""Component -> the function that gives its mapping table for a config."""


def linear(source: str, target: str, *, bias: bool = True) -> tuple[Rule, ...]:
    """torch's Linear: weight [out, in] -> kernel [in, out], bias unchanged."""
    rules = [Rule(source + r"\.weight", target + ".kernel", np.transpose)]
    if bias:
        rules.append(Rule(source + r"\.bias", target + ".bias"))
    return tuple(rules)


def norm(source: str, target: str) -> tuple[Rule, ...]:
    """An affine norm: weight -> scale, bias unchanged."""
    return Rule(source + r"\.weight", target + ".scale"), Rule(source + r"\.bias", target + ".bias")


def convolution(source: str, target: str) -> tuple[Rule, ...]:
    """torch's convolution: weight [out, in, *window] -> kernel [*window, in, out], bias unchanged."""
    return (
        Rule(source + r"\.weight", target + ".kernel", lambda w: np.moveaxis(w, (0, 1), (-1, -2)), shape=_convolution),
        Rule(source + r"\.bias", target + ".bias"),
    )


def pointwise(source: str, target: str) -> tuple[Rule, ...]:
    """A pointwise convolution: weight [out, in, 1, 1, 1] -> kernel [in, out], bias unchanged."""
    return (
        Rule(source + r"\.weight", target + ".kernel", lambda w: w.reshape(w.shape[:2]).T, shape=pixel),
        Rule(source + r"\.bias", target + ".bias"),
    )


def pixel(shape: Shape) -> Shape:
    """[in, out] -> [out, in, 1, 1, 1]."""
    return (*shape[::-1], 1, 1, 1)


def _convolution(shape: Shape) -> Shape:
    return (shape[-1], shape[-2], *shape[:-2])
