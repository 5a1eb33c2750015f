"""Layers that the models share: linear maps, norms, MLP, timestep embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Num

from cogvideox_flax.nn import cpu
from cogvideox_flax.nn.platforms import by_platform


def precision(dtype: Any) -> jax.lax.Precision:
    """HIGHEST for float32: by default a TPU multiplies float32 in bfloat16, and a GPU in TF32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is n or more."""
    return -(-n // multiple) * multiple


class Linear(nnx.Module):
    """y = x @ kernel + bias, summed in float32 for every dtype. kernel: [in, out].

    On an NVIDIA GPU a 16-bit result is rounded before the bias is added, as in PyTorch: cuBLAS writes float32 more
    slowly, and rounding it would be one more pass over memory. On a CPU without instructions for bfloat16, operands are
    converted to float32 first; see `cpu.product_dtype`.
    """

    def __init__(self, in_width: int, out_width: int, *, bias: bool = True, zero: bool = False, rngs: nnx.Rngs):
        scale = 0.0 if zero else in_width**-0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (in_width, out_width)))
        self.bias = nnx.Param(jnp.zeros(out_width)) if bias else None

    def __call__(self, x: Float[Array, "*batch in"], *, out_dtype: Any = None) -> Float[Array, "*batch out"]:
        """The map of x.

        Args:
            out_dtype: dtype of the result; None is x's. float32 returns the sum without rounding.
        """
        weights = [w[...] for w in (self.kernel, self.bias) if w is not None]
        summed = partial(_linear, jnp.float32, out_dtype or x.dtype)
        if x.dtype.itemsize != 2:
            return summed(x, *weights)
        rounded_first = partial(_linear, x.dtype, x.dtype) if out_dtype is None else summed
        on_cpu = partial(summed, product_dtype=cpu.product_dtype(x))
        return by_platform(x, *weights, default=summed, cuda=rounded_first, cpu=on_cpu)


def _linear(
    sum_dtype: Any,
    out_dtype: Any,
    x: Float[Array, "*batch in"],
    kernel: Num[Array, "in out"],
    *bias: Num[Array, " out"],
    product_dtype: Any = None,
) -> Float[Array, "*batch out"]:
    """The products are summed in float32; `sum_dtype` is that of the sum when a bias is added.

    product_dtype: that both operands are converted to; default: x's.
    """
    y = product(partial(matmul, sum_dtype=sum_dtype, product_dtype=product_dtype), x, kernel)
    return sum((b.astype(sum_dtype) for b in bias), y).astype(out_dtype)


def matmul(
    x: Float[Array, "*batch in"],
    kernel: Float[Array, "in out"],
    *,
    sum_dtype: Any = jnp.float32,
    product_dtype: Any = None,
) -> Float[Array, "*batch out"]:
    """x @ kernel, summed in `sum_dtype`; both are converted to `product_dtype` first, if that is not x's."""
    if product_dtype not in (None, x.dtype):
        x, kernel = x.astype(product_dtype), kernel.astype(product_dtype)
    axes = ((x.ndim - 1,), (0,)), ((), ())
    return jax.lax.dot_general(x, kernel, axes, precision=precision(x.dtype), preferred_element_type=sum_dtype)


def product(
    multiply: Callable[[Array, Array], Array], x: Float[Array, "*batch in"], kernel: Num[Array, "in out"]
) -> Array:
    """multiply(x, kernel) with the kernel in x's dtype.

    A float32 kernel beside x of 16 bits is one that is trained: its gradient is float32, and a mesh sums it in float32.

    Args:
        multiply: linear in both.
    """
    trained = x.dtype.itemsize == 2 and kernel.dtype == jnp.float32
    return _trained_product(multiply, x, kernel) if trained else multiply(x, kernel.astype(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained_product(multiply: Callable[[Array, Array], Array], x: Array, kernel: Float32[Array, "in out"]) -> Array:
    return multiply(x, kernel.astype(x.dtype))


def _trained_product_backward(
    multiply: Callable[[Array, Array], Array], args: tuple[Array, Array], grad: Array
) -> tuple[Array, Float32[Array, "in out"]]:
    x, kernel = args
    (of_x,) = jax.linear_transpose(lambda x: multiply(x, kernel), x)(grad)
    (of_kernel,) = jax.linear_transpose(partial(multiply, x), jax.ShapeDtypeStruct(kernel.shape, jnp.float32))(grad)
    return of_x, of_kernel


def _trained_product_forward(
    multiply: Callable[[Array, Array], Array], x: Array, kernel: Array
) -> tuple[Array, tuple[Array, Array]]:
    kernel = kernel.astype(x.dtype)
    return multiply(x, kernel), (x, kernel)


_trained_product.defvjp(_trained_product_forward, _trained_product_backward)


def in_columns(linear: Any, x: Float[Array, "B S in"]) -> Float[Array, "B S out"]:
    """linear(x), rounded to x's dtype and written to memory, on a TPU with tokens along the lanes.

    There a product writes channels along the lanes, and XLA transposes what is wanted otherwise in one more pass over
    memory; but the product of the transposed weights and x's columns is written like that.
    """
    if not isinstance(linear, Linear):
        return jax.lax.optimization_barrier(linear(x))
    weights = [w[...] for w in (linear.kernel, linear.bias) if w is not None]
    return by_platform(
        x, *weights, default=lambda x, *_: jax.lax.optimization_barrier(linear(x)), tpu=_linear_in_columns
    )


def _linear_in_columns(
    x: Float[Array, "B S in"], kernel: Num[Array, "in out"], *bias: Num[Array, " out"]
) -> Float[Array, "B S out"]:
    y = product(_matmul_in_columns, x, kernel)
    y = sum((b.astype(jnp.float32)[:, None, None] for b in bias), y)
    return jax.lax.optimization_barrier(y.astype(x.dtype)).transpose(1, 2, 0)


def _matmul_in_columns(x: Float[Array, "B S in"], kernel: Float[Array, "in out"]) -> Float32[Array, "out B S"]:
    axes = ((0,), (2,)), ((), ())
    return jax.lax.dot_general(kernel, x, axes, precision=precision(x.dtype), preferred_element_type=jnp.float32)


class TransposedLinear(nnx.Module):
    """y = x @ weight.T, summed in float32 for every dtype. weight: [out, in].

    This layout is for x with few rows, such as a prompt: a CPU sums along contiguous weights and does not transpose
    them in every call. Accelerators are equally fast with either layout.
    """

    def __init__(self, in_width: int, out_width: int, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(in_width**-0.5 * jax.random.normal(rngs.params(), (out_width, in_width)))

    def __call__(self, x: Float[Array, "*batch in"], *, out_dtype: Any = None) -> Float[Array, "*batch out"]:
        """out_dtype: as for `Linear`."""
        return matmul_transposed(x, self.weight[...]).astype(out_dtype or x.dtype)


def matmul_transposed(x: Float[Array, "*batch in"], weight: Num[Array, "out in"]) -> Float32[Array, "*batch out"]:
    """x @ weight.T in x's dtype, summed in float32."""
    axes = ((x.ndim - 1,), (1,)), ((), ())
    exact = precision(x.dtype)
    return jax.lax.dot_general(x, weight.astype(x.dtype), axes, precision=exact, preferred_element_type=jnp.float32)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, float32 statistics and affine."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch width"], *, out_dtype: Any = None) -> Float[Array, "*batch width"]:
        """The norm of x; out_dtype: dtype of the result; None is x's."""
        y = standardize(x, self.eps)
        scale, bias = (p[...].astype(jnp.float32) for p in (self.scale, self.bias))
        return (y * scale + bias).astype(out_dtype or x.dtype)


def standardize(x: Float[Array, "*batch width"], eps: float) -> Float32[Array, "*batch width"]:
    """Mean 0 and variance 1 over the last axis: a layer norm without an affine map."""
    mean = x.astype(jnp.float32).mean(-1, keepdims=True)
    # barriers: each pass reads x again; otherwise the compiler writes x - mean to memory in float32
    x, mean = jax.lax.optimization_barrier((x, mean))
    variance = jnp.square(x.astype(jnp.float32) - mean).mean(-1, keepdims=True)
    x, mean, factor = jax.lax.optimization_barrier((x, mean, jax.lax.rsqrt(variance + eps)))
    return (x.astype(jnp.float32) - mean) * factor


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch width"], *, out_dtype: Any = None) -> Float[Array, "*batch width"]:
        """As for `LayerNorm`."""
        wide = x.astype(jnp.float32)
        y = wide * rms_factor(wide, self.eps) * self.scale[...].astype(jnp.float32)
        return y.astype(out_dtype or x.dtype)


def rms_factor(x: Float32[Array, "*batch width"], eps: float) -> Float32[Array, "*batch 1"]:
    """1 / rms(x) over the last axis."""
    return jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def _gelu(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


@jax.custom_vjp
def gelu(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Tanh-approximate GELU, in float32, of x's dtype."""
    return _gelu(x)


def _gelu_gradient(x: Array, grad: Array) -> tuple[Array]:
    # the barrier writes x to memory in its own dtype; otherwise the compiler writes it in float32
    return jax.vjp(_gelu, jax.lax.optimization_barrier(x))[1](grad)


gelu.defvjp(lambda x: (_gelu(x), x), _gelu_gradient)


class MLP(nnx.Module):
    """width -> hidden (default: 4 width) -> width, tanh-approximate GELU."""

    def __init__(self, width: int, hidden: int | None = None, *, rngs: nnx.Rngs):
        self.up = Linear(width, hidden or 4 * width, rngs=rngs)
        self.down = Linear(hidden or 4 * width, width, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float32[Array, "B S D"]:
        """The result is float32, without rounding."""
        return cpu.map_tokens(self._all_tokens, x)

    def _all_tokens(self, x: Float[Array, "B S D"]) -> Float32[Array, "B S D"]:
        hidden = gelu(self.up(x))
        # The barrier writes `hidden` to memory in x's dtype; otherwise the compiler writes float32 and rounds later.
        # It also copies the weights out of their stack: a product that slices them takes a TPU 1.6 times as long.
        hidden, down = jax.lax.optimization_barrier((hidden, self.down))
        return down(hidden, out_dtype=jnp.float32)


class TimestepMLP(nnx.Module):
    """Linear, SiLU, linear: sinusoids to the conditioning vector."""

    def __init__(self, in_width: int, width: int, *, rngs: nnx.Rngs):
        self.linear_1 = Linear(in_width, width, rngs=rngs)
        self.linear_2 = Linear(width, width, rngs=rngs)

    def __call__(self, x: Float32[Array, "B I"]) -> Float32[Array, "B E"]:
        return self.linear_2(jax.nn.silu(self.linear_1(x)))


def per_sample(value: Array | float | None, batch: int) -> Float32[Array, " B"]:
    """One value for each sample, of one for all or of as many."""
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), (batch,))


def sinusoid(t: Float[Array, " B"], width: int) -> Float32[Array, "B width"]:
    """[cos | sin] of t at `width // 2` frequencies 10000^(-k / half), float32 (diffusers `get_timestep_embedding`)."""
    half = width // 2
    frequency = np.exp(-np.log(10000.0, dtype=np.float32) * np.arange(half, dtype=np.float32) / np.float32(half))
    angle = t.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
