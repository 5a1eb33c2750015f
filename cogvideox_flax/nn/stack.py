"""Stacks of identical layers as one pytree: construction, scan and shallow copy."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

T = TypeVar("T")


def stack(n: int, make: Callable[..., T], rngs: nnx.Rngs) -> T:
    """n modules as one pytree; every parameter has a leading layer axis for `jax.lax.scan`."""
    keys = jax.random.split(rngs.params(), n)
    return jax.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)


def scan_layers(
    body: Callable[[Any, Any], tuple[Any, None]], x: Any, layers: Any, start: int = 0, stop: int | None = None
) -> Any:
    """Run x, any pytree of arrays, through layers.

    Args:
        body: the body of the scan.
        layers: a stack, which is scanned; or an `nnx.List` of layers from `nn.cpu.unstack_layers`.
        start, stop: which layers, as of a slice: start=-1 is the last one. Their weights are not copied out of the
            stack: the scan is over their indices.
    """
    if isinstance(layers, nnx.List):
        for layer in list(layers)[start:stop]:
            x, _ = body(x, layer)
        return x
    count = jax.tree.leaves(layers)[0].shape[0]
    first, end, _ = slice(start, stop).indices(count)
    if (first, end) == (0, count):
        return jax.lax.scan(body, x, layers)[0]

    def at_index(x: Any, i: Int[Array, ""]) -> tuple[Any, None]:
        return body(x, jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), layers))

    return jax.lax.scan(at_index, x, jnp.arange(first, end))[0]


def scan_attended(
    layer: Callable[..., Any], attend: Callable[..., Any], x: Any, layers: Any, attended: Any = None
) -> tuple[Any, Any]:
    """Run x through all layers and keep what their attentions return, or take that in place of the attentions.

    Args:
        layer: layer(x, weights, attend) -> x.
        attend: the attention function: an array [B, S, N, K], or a pytree of them. A layer calls it once.
        attended: what it returned, from an earlier call. Queries, keys and values are then unused, so the compiler
            leaves them out.

    Returns:
        x; and what the attentions returned, [layers, B, S, N K], or None with `attended`.

    Raises:
        ValueError: a layer calls its attention function not at all, or more than once.
    """

    def body(x: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
        weights, kept = given
        if kept is not None:
            return layer(x, weights, lambda *_, **__: kept), None
        returned: list[Any] = []

        def recorded(*args: Any, **settings: Any) -> Any:
            returned.append(attend(*args, **settings))
            return returned[-1]

        x = layer(x, weights, recorded)
        if len(returned) != 1:
            raise ValueError(
                f"a layer attends {len(returned)} times; expected once, since one result is kept for each layer"
            )
        return x, jax.tree.map(lambda a: a.reshape(*a.shape[:2], -1), returned[0])

    if not isinstance(layers, nnx.List):
        return jax.lax.scan(body, x, (layers, attended))
    each = []
    for i, weights in enumerate(layers):
        x, kept = body(x, (weights, jax.tree.map(itemgetter(i), attended)))
        each.append(kept)
    return x, None if attended is not None else jax.tree.map(lambda *a: jnp.stack(a), *each)


def same_arrays(module: T) -> T:
    """New modules around the same arrays."""
    return jax.tree.map(lambda leaf: leaf, module)
