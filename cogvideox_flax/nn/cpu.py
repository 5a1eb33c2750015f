"""What layers do differently on a CPU: many tokens in pieces, and large layers without a scan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax.nn.stack import same_arrays

T = TypeVar("T")

PIECE_TOKENS = 2048
"""About how many tokens go through an MLP at a time. Products of more rows are slower in bfloat16 and no faster in
float32, and they need more memory."""

UNSTACK_FROM = 2**25
"""The least bytes of one layer's weights for which `unstack_layers` unstacks."""


def map_tokens(f: Callable[[Array], Array], x: Float[Array, "B S D"]) -> Float[Array, "B S O"]:
    """f(x) of a function that treats every token alone; on one CPU in pieces of about `PIECE_TOKENS` tokens."""
    pieces = round(x.shape[0] * x.shape[1] / PIECE_TOKENS)
    # a mesh has divided the tokens already
    if pieces < 2 or not jax.sharding.get_abstract_mesh().empty:
        return f(x)

    def in_pieces(x: Float[Array, "B S D"]) -> Float[Array, "B S O"]:
        tokens = x.reshape(-1, x.shape[-1])
        padded = jnp.pad(tokens, ((0, -len(tokens) % pieces), (0, 0))).reshape(pieces, 1, -1, x.shape[-1])
        out = jax.lax.map(f, padded)
        return out.reshape(-1, out.shape[-1])[: len(tokens)].reshape(*x.shape[:-1], -1)

    return jax.lax.platform_dependent(x, cpu=in_pieces, default=f)


FEW_TOKENS = 4096
"""The number of tokens below which `unstack_layers` unstacks: a layer's products then take no longer than a copy of its
weights."""


def unstack_layers(module: T, tokens: int) -> T:
    """The model with its stack `blocks` as a list of layers, for a program on one CPU.

    In a scan, XLA for CPUs copies each layer's weights out of their stack: the text encoder would read and write all of
    its weights once more for every prompt, a tenth of its time. Weights that are arguments of their own are used in
    place, and here they share the memory of the stack. Where thousands of tokens go through a layer, the copy takes
    little of the time and a scan needs less memory.

    Args:
        tokens: how many go through each layer.

    Returns:
        The module itself where it is unstacked already, where tokens are many, or where one layer's weights are less
        than `UNSTACK_FROM` bytes: those stay in the cache, and without a scan a program takes longer to compile.
    """
    stack = getattr(module, "blocks", None)
    if stack is None or isinstance(stack, nnx.List) or tokens >= FEW_TOKENS:
        return module
    leaves, structure = jax.tree.flatten(stack)
    if sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves) < UNSTACK_FROM:
        return module
    result = same_arrays(module)
    layers = zip(*map(_unstack, leaves), strict=True)
    result.blocks = nnx.List(jax.tree.unflatten(structure, layer) for layer in layers)  # type: ignore[attr-defined]
    return result


def _unstack(stacked: Array | jax.ShapeDtypeStruct) -> list[Any]:
    """The layers of one parameter, in the same memory where it is an array of a CPU."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)] * stacked.shape[0]
    return jax.device_put(list(np.asarray(stacked)), may_alias=True)
