"""Linear maps with 8-bit weights: half of bfloat16's memory, and twice its matrix rate where the hardware multiplies
8-bit numbers and activations are quantized too.

A weight is kernel * scale with one scale per output, which maps the largest absolute value of its column to the end of
the kind's range. In the transformer, rows of x are quantized in the same way at run time, without calibration, and the
result is scaled back. int8 sums are exact integers, float8 sums are float32; on CPUs and NVIDIA GPUs, float8 operands
are widened first. T5 runs once; its weights have 8 bits to save memory, and its activations are not quantized. Only
linear maps inside blocks are quantized: in embeddings, norms, time and output, rounding errors do not average out over
thousands of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Num

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import Linear, TransposedLinear, matmul_transposed, precision
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.stack import same_arrays


@dataclass(frozen=True)
class Kind:
    """dtype of the quantized numbers; largest: the quantized value of the largest number in a row or column."""

    dtype: Any
    largest: float


KINDS: dict[str, Kind] = {"int8": Kind(jnp.int8, 127), "float8": Kind(jnp.float8_e4m3fn, 448)}
"""Name in checkpoints -> kind. int8 is more accurate for rows without outliers, float8 (e4m3) with outliers."""


class QuantizedLinear(nnx.Module):
    """y = x @ (kernel * scale) + bias, with each row of x quantized. kernel: 8 bits [in, out]; scale: [out]."""

    def __init__(
        self,
        kernel: Num[Array, "*layers in out"],
        scale: Float32[Array, "*layers out"],
        bias: Float[Array, "*layers out"] | None,
    ):
        self.kernel = nnx.Param(kernel)
        self.scale = nnx.Param(scale)
        self.bias = nnx.Param(bias) if bias is not None else None

    def __call__(self, x: Float[Array, "*batch in"], *, out_dtype: Any = None) -> Float[Array, "*batch out"]:
        """As for `layers.Linear`."""
        kernel = self.kernel[...]
        kind = kind_of(kernel.dtype)
        assert kind is not None
        rounded, factor = round_to(kind, x, axis=-1)
        return self.finish(_product(rounded, kernel) * factor, out_dtype or x.dtype)

    def finish(self, y: Float32[Array, "*batch out"], dtype: Any) -> Float[Array, "*batch out"]:
        """The result of the map, of the product with the kernel alone."""
        y = y * self.scale[...]
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(dtype)


class WidenedLinear(QuantizedLinear):
    """y = x @ (kernel * scale) + bias, with x not quantized: for training adapters beside it.

    The kernel is widened to x's dtype, which holds its numbers exactly, and multiplied by its scale after the product.
    The gradient of x is that of the same map; through rounded rows of x it would be 0.
    """

    def __call__(self, x: Float[Array, "*batch in"], *, out_dtype: Any = None) -> Float[Array, "*batch out"]:
        """As for `layers.Linear`."""
        kernel = self.kernel[...].astype(x.dtype)
        y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32, precision=precision(x.dtype))
        return self.finish(y, out_dtype or x.dtype)


class QuantizedTransposedLinear(nnx.Module):
    """y = x @ weight.T * scale, with x not quantized. weight: 8 bits [out, in]; scale: float32 [out]."""

    def __init__(self, weight: Num[Array, "*layers out in"], scale: Float32[Array, "*layers out"]):
        self.weight = nnx.Param(weight)
        self.scale = nnx.Param(scale)

    def __call__(self, x: Float[Array, "*batch in"], *, out_dtype: Any = None) -> Float[Array, "*batch out"]:
        """As for `layers.TransposedLinear`."""
        return (matmul_transposed(x, self.weight[...]) * self.scale[...]).astype(out_dtype or x.dtype)


def kind_of(dtype: Any) -> str | None:
    """The kind whose numbers have this dtype, or None."""
    return next((name for name, kind in KINDS.items() if dtype == kind.dtype), None)


def round_to(kind: str, x: Float[Array, "*shape"], axis: int) -> tuple[Num[Array, "*shape"], Float32[Array, "*scales"]]:
    """(n, scale) such that x is about n * scale, with one scale along `axis`, which has size 1 in `scale`."""
    into = KINDS[kind]
    wide = x.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis, keepdims=True) / into.largest
    scale = jnp.where(scale == 0, 1.0, scale)
    n = wide / scale
    return (jnp.rint(n) if jnp.issubdtype(into.dtype, jnp.integer) else n).astype(into.dtype), scale


def _product(x: Num[Array, "*batch in"], kernel: Num[Array, "in out"]) -> Float32[Array, "*batch out"]:
    if x.dtype == jnp.int8:  # on all platforms
        return _narrow_product(x, kernel)
    # On an NVIDIA GPU, XLA's sums of 8-bit floats are not always float32, not even with the highest precision, and XLA
    # tries kernels for more than a minute before it chooses some.
    wide = {"cpu": partial(_wide_product, dtype=jnp.float32), "cuda": partial(_wide_product, dtype=jnp.bfloat16)}
    return by_platform(x, kernel, **wide, default=_narrow_product)


def _narrow_product(x: Array, kernel: Array) -> Array:
    total = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.matmul(x, kernel, preferred_element_type=total).astype(jnp.float32)


def _wide_product(x: Array, kernel: Array, dtype: Any) -> Array:
    """Of 8-bit floats in a wider dtype, which holds their products exactly."""
    # the barrier: else XLA makes one kernel of conversion and product, and is slow to choose it
    wide = jax.lax.optimization_barrier((x.astype(dtype), kernel.astype(dtype)))
    return jnp.matmul(*wide, preferred_element_type=jnp.float32, precision=precision(dtype))


def quantize(module: Any, maps: Iterable[str], kind: str = "int8") -> Any:
    """The module with some stacked linear maps in 8 bits; all other arrays are shared.

    Args:
        maps: their paths, such as "blocks.attn.q".
        kind: "int8" or "float8".

    Raises:
        InputError: the maps have 8-bit weights already.
    """
    return _with_maps(module, maps, partial(_quantized, kind=kind))


def quantize_frozen(module: Any, maps: Iterable[str], kind: str) -> Any:
    """As `quantize`, to train adapters beside the maps (`WidenedLinear`); these may be of this kind already."""

    def widened(linear: Linear | QuantizedLinear) -> WidenedLinear:
        narrow = linear if isinstance(linear, QuantizedLinear) else _quantized(linear, kind)
        assert isinstance(narrow, QuantizedLinear)
        return WidenedLinear(narrow.kernel[...], narrow.scale[...], None if narrow.bias is None else narrow.bias[...])

    return _with_maps(module, maps, widened)


def _with_maps(module: Any, maps: Iterable[str], make: Callable[[Any], nnx.Module]) -> Any:
    """The module with make(map) in the place of some of its maps."""
    result = same_arrays(module)
    for path in maps:
        owner, name = path.rsplit(".", 1)
        part = attrgetter(owner)(result)
        setattr(part, name, make(getattr(part, name)))
    return result


def _quantized(linear: Linear | TransposedLinear, kind: str) -> QuantizedLinear | QuantizedTransposedLinear:
    """A map with a leading layer axis, in 8 bits."""
    if isinstance(linear, TransposedLinear):
        return QuantizedTransposedLinear(*_round_layers(linear.weight[...], kind, axis=1))
    if isinstance(linear, Linear):
        bias = None if linear.bias is None else linear.bias[...]
        return QuantizedLinear(*_round_layers(linear.kernel[...], kind, axis=0), bias)
    (found,) = {kind_of(leaf.dtype) for leaf in jax.tree.leaves(linear)} - {None}
    raise InputError(f"these weights are {found} already")


def _round_layers(
    weights: Float[Array, "layers m n"], kind: str, axis: int
) -> tuple[Num[Array, "layers m n"], Float32[Array, "layers out"]]:
    """Quantize layer by layer: a float32 copy of all layers would take gigabytes. axis: of a layer's inputs."""

    def one(_: None, layer: Array) -> tuple[None, tuple[Array, Array]]:
        rounded, scale = round_to(kind, layer, axis)
        return None, (rounded, scale.squeeze(axis))

    return jax.lax.scan(one, None, weights)[1]
