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


def with_gradient(gradient: Callable[..., tuple[Array | None, ...]]) -> Callable[[Callable[..., Array]], Any]:
    """A decorator: kernel(settings, *args), differentiable in args.

    settings are static and hashable; an argument may be None. gradient(settings, args, grad) returns the gradient of
    each argument, or None for a constant. Those that a program does not use are not computed if no kernel computes them
    beside others.
    """

    def decorate(kernel: Callable[..., Array]) -> Callable[..., Array]:
        def forward(settings: Any, *args: Array | None) -> tuple[Array, tuple[Array | None, ...]]:
            return differentiable(settings, *args), args

        differentiable = partial(jax.custom_vjp, nondiff_argnums=(0,))(kernel)
        differentiable.defvjp(forward, gradient)
        return differentiable

    return decorate


def with_gradient_of(plain: Callable[..., Array]) -> Callable[[Callable[..., Array]], Any]:
    """`with_gradient`, that of plain(settings, *args)."""
    return with_gradient(lambda settings, args, grad: jax.vjp(partial(plain, settings), *args)[1](grad))
