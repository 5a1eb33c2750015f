"""The gradient of kernels that have none of their own: that of the plain XLA form, computed anew."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from cogvideox_flax.attention import xla

Kernel = Callable[["Static", Array, Array, Array, Array], tuple[Array, ...]]
"""kernel(static, q, k, v, kv_len) -> the result, and of a part its weight."""


class Static(NamedTuple):
    """What is known of a call when it is traced."""

    window: tuple[int, int] | None
    blocks: Any
    """Tile sizes, where the kernel takes any; None for its choice."""
    interpret: bool
    is_part: bool
    """Whether the keys are some of all, and the weight of their scores is wanted; see `xla.attend_part`."""


def with_plain_gradient(kernel: Kernel) -> Kernel:
    """The kernel, differentiable in q, k and v."""
    attend = partial(jax.custom_vjp, nondiff_argnums=(0,))(kernel)

    def forward(
        static: Static, q: Array, k: Array, v: Array, kv_len: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return attend(static, q, k, v, kv_len), (q, k, v, kv_len)

    def backward(static: Static, saved: tuple[Array, ...], grad: tuple[Array, ...]) -> tuple[Array | None, ...]:
        q, k, v, kv_len = saved

        def plain(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
            if static.is_part:
                return xla.attend_part(q, k, v, kv_len)
            return (xla.attend(q, k, v, kv_len, window=static.window),)

        _, pull = jax.vjp(plain, q, k, v)
        return *pull(grad), None

    attend.defvjp(forward, backward)
    return attend
