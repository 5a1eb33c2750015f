"""What Pallas kernels for TPUs have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

LANES = 128
"""Of a register."""

KERNEL_DTYPES = (jnp.bfloat16, jnp.float32)
"""The dtypes that the TPU compiler supports in a kernel."""


def with_gradient_of(plain: Callable[..., Array]) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """A decorator: kernel(settings, *args), differentiable in args, with the gradient of plain(settings, *args).

    settings are static and hashable; an argument may be None.
    """

    def decorate(kernel: Callable[..., Array]) -> Callable[..., Array]:
        def forward(settings: Any, *args: Array | None) -> tuple[Array, tuple[Array | None, ...]]:
            return differentiable(settings, *args), args

        def backward(settings: Any, args: tuple[Array | None, ...], grad: Array) -> tuple[Array | None, ...]:
            return jax.vjp(partial(plain, settings), *args)[1](grad)

        differentiable = partial(jax.custom_vjp, nondiff_argnums=(0,))(kernel)
        differentiable.defvjp(forward, backward)
        return differentiable

    return decorate
