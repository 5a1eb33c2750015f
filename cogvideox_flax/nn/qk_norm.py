"""QK norm: the norm of each head of queries and keys, and their rotation, on a TPU as a Pallas kernel.

XLA writes several float32 copies of all queries and keys between the product and the exchange of heads, since a norm
over a head, a rotation of pairs of channels and the exchange each want another layout. The kernel reads and writes them
once. Channels lie along the sublanes there: a norm adds whole registers, and attention wants queries like that. The two
channels of a pair, neighbours in the checkpoint's order, then share a word of 32 bits in bfloat16, and are rows of even
and odd numbers in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from cogvideox_flax import sharding
from cogvideox_flax.nn.layers import LayerNorm, RMSNorm, rms_factor, standardize
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.rope import Rotary, rotate_interleaved
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES, with_gradient_of

NAME = "cogvideox_qk_norm"

_BYTES = 512
"""That a grid step reads of a channel: by its schedule the kernel then takes no longer than its reads and writes."""

Settings = tuple[float, bool]
"""What is added to the mean square; whether the mean is subtracted first, as in a layer norm."""


def qk_norm(x: Float[Array, "B S D"], norm: LayerNorm | RMSNorm, rotary: Rotary | None) -> Float[Array, "B S N K"]:
    """The norm of each head of queries or keys x, rotated as `rope.rotate_interleaved` does.

    Args:
        norm: over a head.
        rotary: cos and sin of the tokens; None: no rotation.

    Returns:
        In x's dtype. It is rounded once by the kernel, and in the plain form before the rotation too, as in diffusers.

    Raises:
        InputError: on a TPU, batch, tokens or heads do not divide over their mesh axes.
    """
    if rotary is None:
        return norm(x.reshape(*x.shape[:2], -1, norm.scale.size))
    centered, scale = isinstance(norm, LayerNorm), norm.scale[...]
    bias = norm.bias[...] if isinstance(norm, LayerNorm) else jnp.zeros_like(scale)
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
    return rotate_interleaved(y.astype(x.dtype), (cos, sin))


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
    rows = _BYTES // x.dtype.itemsize
    scale, bias = (w.astype(jnp.float32)[:, None] for w in args[:2])
    cos, sin = (table.T for table in args[2:])
    of_head, table = (pl.BlockSpec((dim, 1), lambda i, b: (0, 0)), pl.BlockSpec((dim // 2, rows), lambda i, b: (0, i)))
    return pl.pallas_call(
        partial(_body, settings),
        grid=(pl.cdiv(tokens, rows), batch),
        in_specs=[pl.BlockSpec((1, rows, width), lambda i, b: (b, i, 0)), of_head, of_head, table, table],
        out_specs=pl.BlockSpec((1, width // dim, dim, rows), lambda i, b: (b, 0, 0, i)),
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
    together = LANES // dim
    scale, bias = _rows(scale), _rows(bias)
    for group in range(out.shape[1] // together):
        columns = x[0, :, group * LANES : (group + 1) * LANES].T
        for i in range(together):
            head = out.at[0, group * together + i]
            first, second = _pairs(columns[i * dim : (i + 1) * dim], head)
            if centered:
                mean = (first + second).sum(0, keepdims=True) / dim
                first, second = first - mean, second - mean
            factor = jax.lax.rsqrt((first * first + second * second).sum(0, keepdims=True) / dim + eps)
            first = first * factor * scale[0] + bias[0]
            second = second * factor * scale[1] + bias[1]
            _write_pairs(head, first * cos[...] - second * sin[...], second * cos[...] + first * sin[...])


def _pairs(x: Array, scratch: Any) -> list[Float32[Array, "half rows"]]:
    """The rows of even and those of odd number."""
    if x.dtype == jnp.float32:
        scratch[...] = x
        return _rows(scratch)
    words = pltpu.bitcast(x, jnp.uint32)  # of two rows, the first in the lower half
    return [jax.lax.bitcast_convert_type(w, jnp.float32) for w in (words << 16, words & jnp.uint32(0xFFFF0000))]


def _write_pairs(out: Any, first: Float32[Array, "half rows"], second: Float32[Array, "half rows"]) -> None:
    """Writes the rows of even and those of odd number, in out's dtype."""
    if out.dtype == jnp.float32:
        out[pl.ds(0, first.shape[0], stride=2)] = first
        out[pl.ds(1, first.shape[0], stride=2)] = second
    else:
        out[...] = pltpu.bitcast(pltpu.pack_elementwise([first, second], packed_dtype=out.dtype), out.dtype)


def _rows(x: Any) -> list[Array]:
    """The rows of even and those of odd number, of an array in memory."""
    return [x[pl.ds(i, x.shape[0] // 2, stride=2)] for i in range(2)]
