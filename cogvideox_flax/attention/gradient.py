"""What attention kernels have in common, and a gradient for those without a kernel for it: that of the plain XLA form,
which recomputes attention tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from cogvideox_flax.attention import xla

Kernel = Callable[["Static", Array, Array, Array, Array], tuple[Array, ...]]
"""kernel(static, q, k, v, kv_len) -> the result, and log_sum_exp where `Static.with_lse` is set."""


class Static(NamedTuple):
    """The static arguments of a kernel.

    tile_sizes: None is the kernel's own choice.
    interpret: run the Pallas kernel in interpret mode.
    with_lse: return log_sum_exp too; see `xla.attend_with_lse`.
    dtype: of the result; None: that of the queries.
    first_head: of k; see `own_keys`.
    """

    tile_sizes: Any
    interpret: bool
    with_lse: bool
    dtype: Any = None
    first_head: int | None = None


def own_keys(k: Float[Array, "B T M K"], v: Float[Array, "B S N K"], first_head: int | None) -> Float[Array, "B S N K"]:
    """The keys of v's heads, which are those of k from `first_head` on, and of v's tokens, which are k's first; None: k
    has no others."""
    return k if first_head is None else k[:, : v.shape[1], first_head : first_head + v.shape[2]]


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
            k = own_keys(k, v, static.first_head)
            if static.with_lse:
                return xla.attend_with_lse(q, k, v, kv_len)
            return (xla.attend(q, k, v, kv_len),)

        _, pull = jax.vjp(plain, q, k, v)
        return *pull(grad), None

    attend.defvjp(forward, backward)
    return attend
