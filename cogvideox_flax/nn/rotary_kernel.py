"""RMS norm and rotation of queries and keys as a Pallas TPU kernel: they are read once and written once, head by head.

XLA writes several float32 copies of all queries and keys between the product and the exchange of heads, since a norm
over a head, a rotation of its halves and the exchange each want another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from cogvideox_flax import sharding
from cogvideox_flax.nn.layers import rms_factor
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.rope import Rotary, rotate

NAME = "cogvideox_rotary"

LANES = 128
"""The head size of the kernel: a head is whole registers, so that none of its numbers moves but within them."""

DTYPES = (jnp.bfloat16, jnp.float32)
"""The dtypes that the TPU compiler supports in a kernel."""

_ROWS = 256
"""Tokens of a grid step: by its schedule the kernel then computes for less time than it reads and writes."""


def norm_and_rotate(
    x: Float[Array, "B S D"], scale: Float[Array, " K"], rotary: Rotary, eps: float
) -> Float[Array, "B S N K"]:
    """Each head of x, divided by its root mean square, times scale, and rotated as `rope.rotate` does.

    Args:
        scale: of the channels of a head, in the order of x's.
        rotary: cos and sin of the tokens.
        eps: added to the mean square.
    """
    plain = partial(_plain, eps)
    if scale.size != LANES or x.dtype not in DTYPES:
        return plain(x, scale, *rotary)
    return by_platform(x, scale, *rotary, default=plain, tpu=partial(on_each_device, eps))


def _plain(eps: float, x: Array, scale: Array, cos: Array, sin: Array) -> Float[Array, "B S N K"]:
    wide = x.reshape(*x.shape[:2], -1, scale.size).astype(jnp.float32)
    return rotate((wide * rms_factor(wide, eps) * scale.astype(jnp.float32)).astype(x.dtype), (cos, sin))


def on_each_device(eps: float, x: Array, scale: Array, cos: Array, sin: Array) -> Float[Array, "B S N K"]:
    """With the kernel, on each device's part of x."""
    run = sharding.on_each_shard(
        partial(kernel, eps),
        (("batch", "tokens", "heads"), (), ("tokens",), ("tokens",)),
        ("batch", "heads", "tokens"),
    )
    return run(x, scale, cos, sin).swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def kernel(
    eps: float, x: Float[Array, "B S D"], scale: Float[Array, " K"], cos: Array, sin: Array
) -> Float[Array, "B N S K"]:
    """`norm_and_rotate`, heads before tokens; its gradient is that of the plain form."""
    return call(eps, x, scale, cos, sin)


def call(
    eps: float,
    x: Float[Array, "B S D"],
    scale: Float[Array, " K"],
    cos: Float32[Array, "S half"],
    sin: Float32[Array, "S half"],
    *,
    interpret: bool = False,
) -> Float[Array, "B N S K"]:
    """The kernel's call."""
    batch, tokens, width = x.shape
    heads = width // LANES
    # the rotation of a pair (i, i + half) as products with the channels and with their other halves
    cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
    table = pl.BlockSpec((_ROWS, LANES), lambda i, b: (i, 0))
    return pl.pallas_call(
        partial(_body, eps, heads),
        grid=(pl.cdiv(tokens, _ROWS), batch),
        in_specs=[
            pl.BlockSpec((1, _ROWS, width), lambda i, b: (b, i, 0)),
            pl.BlockSpec((1, LANES), lambda i, b: (0, 0)),
            table,
            table,
        ],
        out_specs=pl.BlockSpec((1, heads, _ROWS, LANES), lambda i, b: (b, 0, i, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, tokens, LANES), x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * x.nbytes + cos.nbytes + sin.nbytes
        ),
        interpret=interpret,
        name=NAME,
    )(x, scale.astype(jnp.float32)[None], cos, sin)


def _body(eps: float, heads: int, x: Any, scale: Any, cos: Any, sin: Any, out: Any) -> None:
    """One head after the other. The scale is in the tables, since it is the same for all heads."""
    half = LANES // 2
    cos, sin = cos[...] * scale[...], sin[...] * jnp.roll(scale[...], half, 1)
    for head in range(heads):
        y = x[0, :, head * LANES : (head + 1) * LANES].astype(jnp.float32)
        rotated = y * cos + pltpu.roll(y, half, 1) * sin
        out[0, head] = (rotated * rms_factor(y, eps)).astype(out.dtype)


def _forward(eps: float, *args: Array) -> tuple[Array, tuple[Array, ...]]:
    return kernel(eps, *args), args


def _backward(eps: float, args: tuple[Array, ...], grad: Array) -> tuple[Array, ...]:
    plain: Callable[..., Array] = partial(_plain, eps)
    return jax.vjp(plain, *args)[1](grad.swapaxes(1, 2))


kernel.defvjp(_forward, _backward)
