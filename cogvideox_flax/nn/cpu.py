"""Layers on a CPU: MLPs in pieces of tokens, large layers without a scan, and products of bfloat16."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.stack import same_arrays

T = TypeVar("T")

PIECE_TOKENS = 2048
"""About how many tokens go through an MLP at a time. Larger products are slower in bfloat16, not faster in float32, and
need more memory."""

MIN_LAYER_BYTES = 2**25
"""The minimum bytes of one layer's weights for `unstack_layers`."""


def map_tokens(f: Callable[[Array], Array], x: Float[Array, "B S D"]) -> Float[Array, "B S O"]:
    """f(x) for a function of single tokens; on one CPU in pieces of about `PIECE_TOKENS` tokens."""
    pieces = round(x.shape[0] * x.shape[1] / PIECE_TOKENS)
    # a mesh already splits the tokens
    if pieces < 2 or not jax.sharding.get_abstract_mesh().empty:
        return f(x)

    def in_pieces(x: Float[Array, "B S D"]) -> Float[Array, "B S O"]:
        tokens = x.reshape(-1, x.shape[-1])
        padded = jnp.pad(tokens, ((0, -len(tokens) % pieces), (0, 0))).reshape(pieces, 1, -1, x.shape[-1])
        out = jax.lax.map(f, padded)
        return out.reshape(-1, out.shape[-1])[: len(tokens)].reshape(*x.shape[:-1], -1)

    return by_platform(x, cpu=in_pieces, default=f)


@cache
def instruction_set() -> frozenset[str]:
    """This CPU's instruction set extensions as Linux names them; elsewhere only the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        extensions = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return frozenset([platform.processor()])
    return frozenset(extensions.partition(":")[2].split())


BFLOAT16_PRODUCTS = frozenset(["avx512_bf16", "amx_bf16"])
"""Extensions of x86 that multiply bfloat16, as Linux names them."""

MIN_WIDENED_ROWS = 512
"""Rows of x from which `product_dtype` is float32. On a CPU with AVX2, both products took the same time with 226 rows
(4096 inputs, 8192 outputs); with 1024 rows float32 saved a seventh (1920 inputs, 7680 outputs)."""


def product_dtype(x: Float[Array, "*batch in"]) -> Any:
    """The dtype in which this CPU multiplies x by a matrix: x's, or float32 for many rows of bfloat16 on an x86 CPU
    that has no instructions for bfloat16.

    There, XLA's product of bfloat16 takes longer than converting both operands and multiplying in float32. Results
    differ in the order of sums alone: a product of two bfloat16 numbers is exact in float32, and both forms sum in it.
    """
    extensions = instruction_set()
    is_slow = "avx2" in extensions and not extensions & BFLOAT16_PRODUCTS
    is_large = x.size >= MIN_WIDENED_ROWS * x.shape[-1]
    return jnp.float32 if x.dtype == jnp.bfloat16 and is_slow and is_large else x.dtype


MAX_UNSTACKED_TOKENS = 4096
"""`unstack_layers` unstacks below this number of tokens, where a layer's products take no longer than copying its
weights."""


def unstack_layers(module: T, tokens: int) -> T:
    """The model with its stack `blocks` as a list of layers, for a program on one CPU.

    In a scan, XLA for CPUs copies each layer's weights out of their stack; for the text encoder that is a tenth of the
    time of a prompt. Weights that are separate arguments are used in place; here they share the memory of the stack.
    With thousands of tokens, the copy takes little of the time, and a scan needs less memory.

    Args:
        tokens: how many go through each layer.

    Returns:
        The module itself if it is unstacked already, if there are many tokens, or if one layer's weights are less than
        `MIN_LAYER_BYTES`: those stay in the CPU's cache, and a program without a scan takes longer to compile.
    """
    stack = getattr(module, "blocks", None)
    if stack is None or isinstance(stack, nnx.List) or tokens >= MAX_UNSTACKED_TOKENS:
        return module
    leaves, structure = jax.tree.flatten(stack)
    if sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves) < MIN_LAYER_BYTES:
        return module
    result = same_arrays(module)
    layers = zip(*map(_unstack, leaves), strict=True)
    result.blocks = nnx.List(jax.tree.unflatten(structure, layer) for layer in layers)  # type: ignore[attr-defined]
    return result


def _unstack(stacked: Array | jax.ShapeDtypeStruct) -> list[Any]:
    """The layers of one parameter, without a copy if it is an array on a CPU."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)] * stacked.shape[0]
    return jax.device_put(list(np.asarray(stacked)), may_alias=True)
