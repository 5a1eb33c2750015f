"""The one product of an adapted linear map, and its gradient.

Adapters are trained in float32. They are rounded to the dtype of x here, where they are multiplied, and their gradients
are not rounded: a mesh sums them in float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from cogvideox_flax.nn.layers import matmul, precision

_Gradients = tuple[Array, ...]


@jax.custom_vjp
def adapted_product(
    x: Float[Array, "*batch in"],
    a: Float[Array, "in rank"],
    b: Float[Array, "rank out"],
    kernel: Float[Array, "in out"],
) -> Float32[Array, "*batch out"]:
    """x @ kernel + (x @ a) @ b as one longer product, [x | x a] @ [kernel; b], and so is the gradient of x.

    On a TPU a product sums in float32 and writes its result once. The sum of two products is written to memory in
    float32 between them, which takes as long as the product. Gradients of a and b are as in `nn.layers.product`.
    """
    return _adapted_forward(x, a, b, kernel)[0]


def _adapted_forward(
    x: Array, a: Array, b: Array, kernel: Array
) -> tuple[Float32[Array, "*batch out"], tuple[Array, ...]]:
    thin = matmul(x, a.astype(x.dtype)).astype(x.dtype)
    y = matmul(jnp.concatenate((x, thin), -1), _written((kernel, b.astype(x.dtype)), 0))
    return y, (x, thin, a, b, kernel)


def _adapted_backward(args: tuple[Array, ...], grad: Float32[Array, "*batch out"]) -> _Gradients:
    x, thin, a, b, kernel = args
    grad = grad.astype(x.dtype)
    of_thin = _of_input(grad, b.astype(x.dtype)).astype(x.dtype)
    of_x = _of_input(jnp.concatenate((grad, of_thin), -1), _written((kernel, a.astype(x.dtype)), 1))
    of_a, of_b = _of_weights(x, of_thin), _of_weights(thin, grad)
    of_kernel = _of_weights(x, grad)  # not computed where the kernel is not trained
    return of_x.astype(x.dtype), of_a.astype(a.dtype), of_b.astype(b.dtype), of_kernel.astype(kernel.dtype)


adapted_product.defvjp(_adapted_forward, _adapted_backward)


def _written(parts: tuple[Array, Array], axis: int) -> Array:
    """Weights side by side, in memory: a product that joins them itself takes 1.4 times as long. It joins its rows
    itself without taking longer."""
    return jax.lax.optimization_barrier(jnp.concatenate(parts, axis))


def _of_input(grad: Array, weights: Array) -> Float32[Array, "*batch in"]:
    """The gradient of x, of the product of x and weights."""
    return _dot(grad, weights, (((grad.ndim - 1,), (1,)), ((), ())), precision=precision(weights.dtype))


def _of_weights(x: Array, grad: Array) -> Float32[Array, "in out"]:
    """The gradient of the weights, of the product of x and weights."""
    rows = tuple(range(x.ndim - 1))
    return _dot(grad, x, ((rows, rows), ((), ())), precision=precision(x.dtype)).T


_dot = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
