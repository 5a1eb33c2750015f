"""Stacks of identical layers as one pytree: construction, scan and shallow copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import Array

T = TypeVar("T")


def stack(n: int, make: Callable[..., T], rngs: nnx.Rngs) -> T:
    """n modules as one pytree; every parameter has a leading layer axis for `jax.lax.scan`."""
    keys = jax.random.split(rngs.params(), n)
    return jax.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)


def scan_layers(body: Callable[[Array, Any], tuple[Array, None]], x: Array, layers: Any) -> Array:
    """Run x through all layers.

    Args:
        body: the body of the scan.
        layers: a stack, which is scanned; or an `nnx.List` of layers from `nn.cpu.unstack_layers`.
    """
    if isinstance(layers, nnx.List):
        for layer in layers:
            x, _ = body(x, layer)
        return x
    return jax.lax.scan(body, x, layers)[0]


def same_arrays(module: T) -> T:
    """New modules around the same arrays."""
    return jax.tree.map(lambda leaf: leaf, module)
