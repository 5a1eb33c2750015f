"""Linear maps with int8 weights: half of bfloat16's memory, and twice its matrix rate where products are int8 too.

A weight is kernel * scale with one scale per output, the largest absolute value of its column over 127. With
`activations`, rows of x are rounded to int8 likewise as they come, sums are integers, and the result is scaled back:
nothing is calibrated. Only the maps inside blocks are: embeddings, norms, time and output stay as they are, since there
a rounding is not averaged over thousands of terms.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int8, Int32

from cogvideox_flax.errors import InputError
from cogvideox_flax.layers import Linear, Order, precision, same_arrays

KIND = "int8"
"""How checkpoints call it."""

MAPS: dict[str, tuple[bool, tuple[tuple[str, str], ...]]] = {
    "transformer": (True, (*(("attn", name) for name in ("q", "k", "v", "out")), ("mlp", "up"), ("mlp", "down"))),
    "text_encoder": (
        False,
        (*(("attn", name) for name in ("q", "k", "v", "out")), *(("mlp", name) for name in ("gate", "up", "down"))),
    ),
}
"""Component -> whether activations are int8 too, and the linear maps of its blocks that are quantized."""

_LEVELS = 127


class Int8Linear(nnx.Module):
    """y = x @ (kernel * scale) + bias. kernel: int8 [in, out]; scale: float32 [out]."""

    def __init__(
        self,
        kernel: Int8[Array, "*layers in out"],
        scale: Float32[Array, "*layers out"],
        bias: Float[Array, "*layers out"] | None,
        *,
        activations: bool,
    ):
        self.kernel = nnx.Param(kernel)
        self.scale = nnx.Param(scale)
        self.bias = nnx.Param(bias) if bias is not None else None
        self.activations = activations

    def float32(self, x: Float[Array, "*batch in"], order: Order | None = None) -> Float32[Array, "*batch out"]:
        """The sum before rounding to the input's dtype, for callers that compute on."""

        def put(w: Array) -> Array:
            return w if order is None else order(w)

        kernel, scale = put(self.kernel[...]), put(self.scale[...])
        if self.activations:
            rounded, factor = round_to_int8(x, axis=-1)
            y = _integer_product(rounded, kernel).astype(jnp.float32) * factor
        else:
            y = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32, precision=precision(x.dtype))
        y = y * scale
        if self.bias is not None:
            y = y + put(self.bias[...]).astype(jnp.float32)
        return y

    def __call__(self, x: Float[Array, "*batch in"], order: Order | None = None) -> Float[Array, "*batch out"]:
        """order: as for `layers.Linear`."""
        return self.float32(x, order).astype(x.dtype)


def round_to_int8(x: Float[Array, "*shape"], axis: int) -> tuple[Int8[Array, "*shape"], Float32[Array, "*scales"]]:
    """(n, scale) such that x is about n * scale, with one scale along an axis, which keeps size 1."""
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis, keepdims=True) / _LEVELS
    scale = jnp.where(scale == 0, 1.0, scale)
    return jnp.rint(wide / scale).astype(jnp.int8), scale


def _integer_product(x: Int8[Array, "*batch in"], kernel: Int8[Array, "in out"]) -> Int32[Array, "*batch out"]:
    return jax.lax.platform_dependent(x, kernel, cpu=_float_product, default=_int8_product)


def _int8_product(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=jnp.int32)


def _float_product(x: Array, kernel: Array) -> Array:
    """The same on a CPU, which has no fast product of integers: exact up to 2^24, and far from it in practice."""
    y = jnp.matmul(x.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return jnp.rint(y).astype(jnp.int32)


def quantize(component: str, module: Any) -> Any:
    """The module with int8 maps in its blocks; all else is shared with the one that was given.

    Args:
        component: "transformer" or "text_encoder".

    Raises:
        InputError: they are int8 already.
    """
    activations, maps = MAPS[component]
    result = same_arrays(module)
    for part, name in maps:
        owner = getattr(result.blocks, part)
        setattr(owner, name, _quantized(getattr(owner, name), activations))
    return result


def _quantized(linear: Linear, activations: bool) -> Int8Linear:
    """Layer by layer: a float32 copy of all layers at once would be gigabytes."""
    if isinstance(linear, Int8Linear):
        raise InputError("these weights are int8 already")

    def one(_: None, kernel: Array) -> tuple[None, tuple[Array, Array]]:
        rounded, scale = round_to_int8(kernel, axis=-2)
        return None, (rounded, scale[0])

    _, (kernel, scale) = jax.lax.scan(one, None, linear.kernel[...])
    bias = None if linear.bias is None else linear.bias[...]
    return Int8Linear(kernel, scale, bias, activations=activations)
