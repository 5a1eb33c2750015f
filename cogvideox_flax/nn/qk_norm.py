"""QK norm: the norm of each head of queries and keys, and their rotation, on a TPU as a Pallas kernel.

XLA writes several float32 copies of all queries and keys between the product and the exchange of heads, since a norm
over a head, a rotation of its halves and the exchange each want another layout. The kernel reads and writes them once.
Channels lie along the sublanes there, so that a norm adds whole registers and the halves of a head are registers too;
attention wants queries like that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from cogvideox_flax import sharding
from cogvideox_flax.nn.layers import LayerNorm, Permutation, RMSNorm, permuted, rms_factor, standardize
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.rope import Rotary, rotate
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES, with_gradient_of

NAME = "cogvideox_qk_norm"

_ROWS = 256
"""Tokens of a grid step: by its schedule the kernel then computes for no longer than it reads and writes."""

Settings = tuple[float, bool]
"""What is added to the mean square; whether the mean is subtracted first, as in a layer norm."""


def qk_norm(
    x: Float[Array, "B S D"], norm: LayerNorm | RMSNorm, permutation: Permutation | None, rotary: Rotary | None
) -> Float[Array, "B S N K"]:
    """The norm of each head of queries or keys x, rotated as `rope.rotate` does.

    Args:
        norm: over a head, in the checkpoint's order of channels.
        permutation: of the channels of a head, from the checkpoint's order to x's.
        rotary: cos and sin of the tokens; None: no rotation.

    Returns:
        In x's dtype. It is rounded once by the kernel, and in the plain form before the rotation too, as in diffusers.

    Raises:
        InputError: on a TPU, batch, tokens or heads do not divide over their mesh axes.
    """
    if rotary is None:
        return norm(x.reshape(*x.shape[:2], -1, norm.scale.size), permutation)
    centered, scale = isinstance(norm, LayerNorm), permuted(norm.scale[...], permutation)
    bias = permuted(norm.bias[...], permutation) if isinstance(norm, LayerNorm) else jnp.zeros_like(scale)
    settings = norm.eps, centered
    plain, split = partial(_plain, settings), partial(on_each_device, settings)
    width = x.shape[-1] // sharding.devices_of("heads")
    if LANES % scale.size or scale.size % 16 or width % LANES or x.dtype not in KERNEL_DTYPES:
        return plain(x, scale, bias, *rotary)
    return by_platform(x, scale, bias, *rotary, default=plain, tpu=split)


def _plain(settings: Settings, x: Array, scale: Array, bias: Array, cos: Array, sin: Array) -> Float[Array, "B S N K"]:
    eps, centered = settings
    heads, scale = x.reshape(*x.shape[:2], -1, scale.size), scale.astype(jnp.float32)
    if centered:
        y = standardize(heads, eps) * scale + bias.astype(jnp.float32)
    else:
        wide = heads.astype(jnp.float32)
        y = wide * rms_factor(wide, eps) * scale
    return rotate(y.astype(x.dtype), (cos, sin))


def on_each_device(
    settings: Settings, x: Array, scale: Array, bias: Array, cos: Array, sin: Array
) -> Float[Array, "B S N K"]:
    """With the kernel, on each device's part of x."""
    axes = (("batch", "tokens", "heads"), (), (), ("tokens",), ("tokens",))
    run = sharding.on_each_shard(partial(kernel, settings), axes, ("batch", "heads", None, "tokens"))
    return run(x, scale, bias, cos, sin).transpose(0, 3, 1, 2)


@with_gradient_of(lambda settings, *args: _plain(settings, *args).transpose(0, 2, 3, 1))
def kernel(
    settings: Settings,
    x: Float[Array, "B S D"],
    scale: Float[Array, " K"],
    bias: Float[Array, " K"],
    cos: Float32[Array, "S half"],
    sin: Float32[Array, "S half"],
) -> Float[Array, "B N K S"]:
    """`qk_norm`, channels before tokens; its gradient is that of the plain form."""
    return call(settings, x, scale, bias, cos, sin)


def call(settings: Settings, x: Array, *args: Array, interpret: bool = False) -> Float[Array, "B N K S"]:
    """The kernel's call; arguments as for `kernel`."""
    (batch, tokens, width), dim = x.shape, args[0].size
    scale, bias = (w.astype(jnp.float32)[:, None] for w in args[:2])
    cos, sin = (table.T for table in args[2:])
    of_head, table = (pl.BlockSpec((dim, 1), lambda i, b: (0, 0)), pl.BlockSpec((dim // 2, _ROWS), lambda i, b: (0, i)))
    return pl.pallas_call(
        partial(_body, settings),
        grid=(pl.cdiv(tokens, _ROWS), batch),
        in_specs=[pl.BlockSpec((1, _ROWS, width), lambda i, b: (b, i, 0)), of_head, of_head, table, table],
        out_specs=pl.BlockSpec((1, width // dim, dim, _ROWS), lambda i, b: (b, 0, 0, i)),
        out_shape=jax.ShapeDtypeStruct((batch, width // dim, dim, tokens), x.dtype),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * x.nbytes + cos.nbytes + sin.nbytes
        ),
        interpret=interpret,
        name=NAME,
    )(x, scale, bias, cos, sin)


def _body(settings: Settings, x: Any, scale: Any, bias: Any, cos: Any, sin: Any, out: Any) -> None:
    """The heads of one register's width after the other."""
    (eps, centered), dim = settings, out.shape[2]
    half, together = dim // 2, LANES // dim
    for group in range(out.shape[1] // together):
        columns = x[0, :, group * LANES : (group + 1) * LANES].astype(jnp.float32).T
        for i in range(together):
            y = columns[i * dim : (i + 1) * dim]
            if centered:
                y = y - y.mean(0, keepdims=True)
            y = y * rms_factor(y, eps, 0) * scale[...] + bias[...]
            first, second, head = y[:half], y[half:], group * together + i
            out[0, head, :half] = (first * cos[...] - second * sin[...]).astype(out.dtype)
            out[0, head, half:] = (second * cos[...] + first * sin[...]).astype(out.dtype)
