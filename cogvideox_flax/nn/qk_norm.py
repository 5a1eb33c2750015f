"""QK norm: the norm of each head of queries and keys, and their rotation, on a TPU as a Pallas kernel.

XLA writes several float32 copies of all queries and keys between the product and the exchange of heads, since a norm
over a head, a rotation of pairs of channels and the exchange each want another layout. The kernel reads and writes them
once. Channels lie along the sublanes there: a norm adds whole registers, and attention wants queries like that. The two
channels of a pair, neighbours in the checkpoint's order, then share a word of 32 bits in bfloat16, and are rows of even
and odd numbers in float32.

The gradient is a kernel too, which reads x and the gradient of the result once and recomputes the norm. With g the
gradient before the rotation, times scale, h the normed head and r what it was multiplied by, that of x is

    r (g - mean(g) - h mean(g h))        without mean(g) in an RMS norm.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES, with_gradient

NAME = "cogvideox_qk_norm"

_BYTES = 512
"""That a grid step reads of a channel: by its schedule the kernel then takes no longer than its reads and writes, and
its gradient 1.2 times as long."""

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


def _gradient(settings: Settings, args: tuple[Array, ...], grad: Array) -> tuple[Array | None, ...]:
    x, scale, _, cos, sin = args
    of_scale, of_bias = call_weights_gradient(settings, x, grad, scale, cos, sin)
    return call_gradient(settings, x, grad, scale, cos, sin), of_scale, of_bias, None, None


@with_gradient(_gradient)
def kernel(
    settings: Settings,
    x: Float[Array, "B S D"],
    scale: Float[Array, " K"],
    bias: Float[Array, " K"],
    cos: Float32[Array, "S half"],
    sin: Float32[Array, "S half"],
) -> Float[Array, "B N K S"]:
    """`qk_norm`, channels before tokens; cos and sin are constants."""
    return call(settings, x, scale, bias, cos, sin)


def call(settings: Settings, x: Array, *args: Array) -> Float[Array, "B N K S"]:
    """The kernel's call; arguments as for `kernel`."""
    scale, bias, cos, sin = args
    result = jax.ShapeDtypeStruct((x.shape[0], x.shape[2] // scale.size, scale.size, x.shape[1]), x.dtype)
    return _call(partial(_body, settings), (x,), (scale, bias), (cos, sin), result)


def call_gradient(
    settings: Settings,
    x: Float[Array, "B S D"],
    grad: Float[Array, "B N K S"],
    scale: Float[Array, " K"],
    cos: Float32[Array, "S half"],
    sin: Float32[Array, "S half"],
) -> Float[Array, "B S D"]:
    """That of x, from that of the result."""
    body = partial(_gradient_body, settings)
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call(body, (x, grad), (scale,), (cos, sin), result, columns=True)


def call_weights_gradient(
    settings: Settings,
    x: Float[Array, "B S D"],
    grad: Float[Array, "B N K S"],
    scale: Float[Array, " K"],
    cos: Float32[Array, "S half"],
    sin: Float32[Array, "S half"],
) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    """Those of scale and bias, summed in float32."""
    body = partial(_weights_gradient_body, settings, x.shape[1])
    result = jax.ShapeDtypeStruct((2 * scale.size, _BYTES // x.dtype.itemsize), jnp.float32)
    sums = _call(body, (x, grad), (), (cos, sin), result, columns=True).sum(-1)
    of_scale, of_bias = sums.reshape(2, 2, -1).swapaxes(1, 2).reshape(2, -1).astype(scale.dtype)
    return of_scale, of_bias


def _call(
    body: Any,
    activations: tuple[Array, ...],
    weights: tuple[Array, ...],
    tables: tuple[Array, Array],
    result: jax.ShapeDtypeStruct,
    *,
    columns: bool = False,
    interpret: bool = False,
) -> Array:
    """A kernel over the tokens.

    Args:
        activations: x first; they and the result are [B, S, D] or [B, N, K, S], or the result is of all tokens.
        weights: of a head.
        columns: whether the kernel needs room for one register's width of x, transposed.
    """
    x = activations[0]
    rows = _BYTES // x.dtype.itemsize

    def spec(a: Any) -> pl.BlockSpec:
        if a.ndim == 4:
            return pl.BlockSpec((1, *a.shape[1:3], rows), lambda i, b: (b, 0, 0, i))
        if a.ndim == 3:
            return pl.BlockSpec((1, rows, a.shape[2]), lambda i, b: (b, i, 0))
        return pl.BlockSpec(a.shape, lambda i, b: (0, 0))

    weights = tuple(w.astype(jnp.float32)[:, None] for w in weights)
    cos, sin = (table.T for table in tables)
    table = pl.BlockSpec((cos.shape[0], rows), lambda i, b: (0, i))
    moved: list[Any] = [*activations, cos, sin, result]
    return pl.pallas_call(
        body,
        grid=(pl.cdiv(x.shape[1], rows), x.shape[0]),
        in_specs=[*map(spec, activations), *map(spec, weights), table, table],
        out_specs=spec(result),
        out_shape=result,
        scratch_shapes=[pltpu.VMEM((LANES, rows), x.dtype)] * columns,
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved)
        ),
        interpret=interpret,
        name=NAME,
    )(*activations, *weights, cos, sin)


def _body(settings: Settings, x: Any, scale: Any, bias: Any, cos: Any, sin: Any, out: Any) -> None:
    """The heads of one register's width after the other."""
    dim = out.shape[2]
    together = LANES // dim
    scale, bias = _rows(scale), _rows(bias)
    for group in range(out.shape[1] // together):
        columns = x[0, :, group * LANES : (group + 1) * LANES].T
        for i in range(together):
            head = out.at[0, group * together + i]
            pairs = _pairs(columns[i * dim : (i + 1) * dim], head)
            (first, second), _ = _normed(settings, *pairs)
            first = first * scale[0] + bias[0]
            second = second * scale[1] + bias[1]
            _write_pairs(head, first * cos[...] - second * sin[...], second * cos[...] + first * sin[...])


def _gradient_body(
    settings: Settings, x: Any, grad: Any, scale: Any, cos: Any, sin: Any, out: Any, columns: Any
) -> None:
    scale, dim = _rows(scale), grad.shape[2]
    for group in range(x.shape[2] // LANES):
        for head, normed, factor, grads in _heads(settings, group, x, grad, cos, sin, columns):
            grads = [g * s for g, s in zip(grads, scale, strict=True)]
            along = (grads[0] * normed[0] + grads[1] * normed[1]).sum(0, keepdims=True) / dim
            mean = (grads[0] + grads[1]).sum(0, keepdims=True) / dim if settings[1] else 0.0
            _write_pairs(head, *(factor * (g - mean - h * along) for g, h in zip(grads, normed, strict=True)))
        out[0, :, group * LANES : (group + 1) * LANES] = columns[...].T


def _weights_gradient_body(
    settings: Settings, tokens: int, x: Any, grad: Any, cos: Any, sin: Any, sums: Any, columns: Any
) -> None:
    """Adds to the sums over tokens, of which one register's width is left."""

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _start() -> None:
        sums[...] = jnp.zeros_like(sums)

    token = pl.program_id(0) * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
    for group in range(x.shape[2] // LANES):
        for _, normed, _, grads in _heads(settings, group, x, grad, cos, sin, columns):
            terms = [*(g * h for g, h in zip(grads, normed, strict=True)), *grads]
            for i, term in enumerate(terms):
                sums[pl.ds(i * term.shape[0], term.shape[0])] += jnp.where(token < tokens, term, 0.0)


def _heads(
    settings: Settings, group: int, x: Any, grad: Any, cos: Any, sin: Any, columns: Any
) -> Iterator[tuple[Any, list[Array], Array, list[Array]]]:
    """Of each head of a register's width: its part of columns, the pairs of the normed head and what x was multiplied
    by, and the pairs of the gradient before the rotation."""
    dim = grad.shape[2]
    together = LANES // dim
    wide = x[0, :, group * LANES : (group + 1) * LANES].T
    for i in range(together):
        head = columns.at[i * dim : (i + 1) * dim]
        normed, factor = _normed(settings, *_pairs(wide[i * dim : (i + 1) * dim], head))
        first, second = _pairs(grad[0, group * together + i], head)
        turned = [first * cos[...] + second * sin[...], second * cos[...] - first * sin[...]]
        yield head, normed, factor, turned


def _normed(settings: Settings, first: Array, second: Array) -> tuple[list[Array], Float32[Array, "1 rows"]]:
    """The pairs of a normed head, without scale and bias, and what they were multiplied by."""
    (eps, centered), dim = settings, 2 * first.shape[0]
    if centered:
        mean = (first + second).sum(0, keepdims=True) / dim
        first, second = first - mean, second - mean
    factor = jax.lax.rsqrt((first * first + second * second).sum(0, keepdims=True) / dim + eps)
    return [first * factor, second * factor], factor


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
