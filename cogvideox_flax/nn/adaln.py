"""AdaLN: a layer norm whose scale and shift come from the timestep, on a TPU as a Pallas kernel.

XLA reads the residual stream three times for it: for the mean, for the variance and for the result. The kernel reads it
once. It also reads it token by token, and so fixes its layout: left to itself, XLA may choose one with tokens along the
lanes, in which the products before and after the norm are a tenth slower by their schedules.

The gradient of x is a kernel too, which reads x and the gradient of the result once; those of scale and shift are
another, for programs that use them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32

from cogvideox_flax import sharding
from cogvideox_flax.nn.layers import LayerNorm, Linear, standardize
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES, with_gradient

NAME = "cogvideox_adaln"

FEW = 4096
"""Up to so many tokens, such as a prompt's, the kernel is not worth it."""

MAX_WIDTH = 3072
"""Wider rows in float32 would not fit into a v5e's fast memory."""

_ROWS = 256
"""Tokens of a grid step, half of them in a gradient, which reads two arrays: more would not fit into fast memory. By
their schedules the kernels compute for no longer than they read and write."""

_SUBLANES = 8
"""Of a register of 32-bit numbers."""

_IN_REGISTERS = 16
"""Tokens at a time: a tile of 16-bit rows."""

Settings = tuple[float, Any]
"""What is added to the variance; the dtype of the result."""


class AdaLNZero(nnx.Module):
    """Layer norm with shift, scale and gate from the timestep: one set for video, one for text.

    Source: DiT (arXiv 2212.09748); diffusers `CogVideoXLayerNormZero`, which shares one norm between both streams.
    """

    def __init__(self, time_width: int, width: int, *, eps: float, rngs: nnx.Rngs):
        self.linear = Linear(time_width, 6 * width, zero=True, rngs=rngs)
        self.norm = LayerNorm(width, eps=eps)

    def __call__(
        self, x: Float32[Array, "B S D"], emb: Float32[Array, "B E"], is_text: Bool[Array, "S 1"], dtype: Any
    ) -> tuple[Float[Array, "B S D"], Float32[Array, "B 2 D"]]:
        """Returns the modulated x, in this dtype, and the gates (video, text) for the residual branch."""
        modulation = self.linear(jax.nn.silu(emb), out_dtype=jnp.float32).reshape(emb.shape[0], 2, 3, -1)
        shift, scale, gate = jnp.moveaxis(modulation, 2, 0)
        # the norm's own affine map and the timestep's are one
        weight, bias = (p[...].astype(jnp.float32) for p in (self.norm.scale, self.norm.bias))
        scale, shift = weight * (1 + scale), bias * (1 + scale) + shift
        return modulated_norm(x, scale, shift, is_text, eps=self.norm.eps, dtype=dtype), gate


def per_stream(table: Float[Array, "B R D"], is_text: Bool[Array, "S 1"] | None) -> Float[Array, "B S D"]:
    """Broadcast one row for video and one for text over the joint sequence; without is_text, the row for all tokens.

    A select on the token index fuses into its consumer, so the sequence is never split and concatenated.
    """
    return table if is_text is None else jnp.where(is_text, table[:, 1:], table[:, :1])


def modulated_norm(
    x: Float32[Array, "B S D"],
    scale: Float32[Array, "B R D"],
    shift: Float32[Array, "B R D"],
    is_text: Bool[Array, "S 1"] | None = None,
    *,
    eps: float,
    dtype: Any,
) -> Float[Array, "B S D"]:
    """A layer norm of x without weights, times scale, plus shift (arXiv 2212.09748); float32 statistics.

    Args:
        x: the residual stream; its tokens are split over sp, or few.
        scale, shift: for all tokens (R = 1), or with is_text for video and for text (R = 2).
        eps: is added to the variance.
        dtype: of the result.

    Raises:
        InputError: on a TPU, batch or tokens do not divide over their mesh axes.
    """
    settings = eps, dtype
    plain, split = partial(_plain, settings), partial(on_each_device, settings)
    _, tokens, width = x.shape
    if tokens <= FEW or width % LANES or width > MAX_WIDTH or dtype not in KERNEL_DTYPES:
        y = plain(x, scale, shift, is_text)
    else:
        y = by_platform(x, scale, shift, is_text, default=plain, tpu=split)
    # the barrier writes it to memory in `dtype`, since several products read it
    return jax.lax.optimization_barrier(y)


def _plain(settings: Settings, x: Array, scale: Array, shift: Array, is_text: Array | None) -> Float[Array, "B S D"]:
    eps, dtype = settings
    return (standardize(x, eps) * per_stream(scale, is_text) + per_stream(shift, is_text)).astype(dtype)


def on_each_device(
    settings: Settings, x: Array, scale: Array, shift: Array, is_text: Array | None
) -> Float[Array, "B S D"]:
    """With the kernel, on each device's part of x."""
    args = (x, scale, shift) if is_text is None else (x, scale, shift, is_text)
    axes = (("batch", "tokens"), ("batch",), ("batch",), ("tokens",))[: len(args)]
    return sharding.on_each_shard(partial(kernel, settings), axes, ("batch", "tokens"))(*args)


def _gradient(settings: Settings, args: Any, grad: Array) -> tuple[Array | None, ...]:
    x, scale, _, is_text = args
    of_scale, of_shift = call_weights_gradient(settings, x, grad, scale, is_text)
    return call_gradient(settings, x, grad, scale, is_text), of_scale, of_shift, None


@with_gradient(_gradient)
def kernel(
    settings: Settings,
    x: Float32[Array, "B S D"],
    scale: Float32[Array, "B R D"],
    shift: Float32[Array, "B R D"],
    is_text: Bool[Array, "S 1"] | None = None,
) -> Float[Array, "B S D"]:
    """`modulated_norm`."""
    return call(settings, x, scale, shift, is_text)


def call(settings: Settings, x: Array, scale: Array, shift: Array, is_text: Array | None) -> Float[Array, "B S D"]:
    """The kernel's call; arguments as for `kernel`."""
    eps, dtype = settings
    result = jax.ShapeDtypeStruct(x.shape, dtype)
    return _call(partial(_body, eps), (x,), (scale, shift), is_text, result)


def call_gradient(
    settings: Settings,
    x: Float32[Array, "B S D"],
    grad: Float[Array, "B S D"],
    scale: Float32[Array, "B R D"],
    is_text: Bool[Array, "S 1"] | None,
) -> Float32[Array, "B S D"]:
    """That of x, from that of the result."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call(partial(_gradient_body, settings[0]), (x, grad), (scale,), is_text, result)


def call_weights_gradient(
    settings: Settings,
    x: Float32[Array, "B S D"],
    grad: Float[Array, "B S D"],
    scale: Float32[Array, "B R D"],
    is_text: Bool[Array, "S 1"] | None,
) -> tuple[Float32[Array, "B R D"], Float32[Array, "B R D"]]:
    """Those of scale and shift."""
    batch, streams, width = scale.shape
    result = jax.ShapeDtypeStruct((batch, 2, streams, _SUBLANES, width), jnp.float32)
    body = partial(_weights_gradient_body, settings[0], x.shape[1])
    of_scale, of_shift = _call(body, (x, grad), (), is_text, result).sum(3).swapaxes(0, 1)
    return of_scale, of_shift


def _call(
    body: Any,
    activations: tuple[Array, ...],
    tables: tuple[Array, ...],
    is_text: Array | None,
    result: jax.ShapeDtypeStruct,
    interpret: bool = False,
) -> Array:
    """A kernel over batch and tokens. [B, S, D]: activations and result, which may be sums; [B, R, D]: tables."""
    batch, tokens, width = activations[0].shape
    rows = _ROWS // len(activations)
    of_tokens = pl.BlockSpec((1, rows, width), lambda b, i: (b, i, 0))
    text = [] if is_text is None else [is_text.astype(jnp.float32)]
    of_text = pl.BlockSpec((rows, 1), lambda b, i: (i, 0))

    def of_batch(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *a.shape[1:]), lambda b, i: (b,) + (0,) * (a.ndim - 1))

    arrays: list[Any] = [*activations, result]
    return pl.pallas_call(
        body,
        grid=(batch, pl.cdiv(tokens, rows)),
        in_specs=[*[of_tokens] * len(activations), *map(of_batch, tables), *[of_text] * len(text)],
        out_specs=of_tokens if result.ndim == 3 else of_batch(result),
        out_shape=result,
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=sum(a.size * a.dtype.itemsize for a in arrays)
        ),
        interpret=interpret,
        name=NAME,
    )(*activations, *tables, *text)


def _body(eps: float, x: Any, scale: Any, shift: Any, *refs: Any) -> None:
    *text, out = refs

    def some_tokens(at: Any) -> None:
        is_text = text[0][at] != 0 if text else None
        y, _ = _normed(eps, x[0, at])
        y = y * per_stream(scale[...], is_text)[0] + per_stream(shift[...], is_text)[0]
        out[0, at] = y.astype(out.dtype)

    _for_all_tokens(x.shape[1], some_tokens)


def _gradient_body(eps: float, x: Any, grad: Any, scale: Any, *refs: Any) -> None:
    *text, out = refs

    def some_tokens(at: Any) -> None:
        is_text = text[0][at] != 0 if text else None
        y, factor = _normed(eps, x[0, at])
        g = grad[0, at].astype(jnp.float32) * per_stream(scale[...], is_text)[0]
        out[0, at] = factor * (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True))

    _for_all_tokens(x.shape[1], some_tokens)


def _weights_gradient_body(eps: float, tokens: int, x: Any, grad: Any, *refs: Any) -> None:
    """Adds to the sums over tokens, of which one register's rows are left."""
    *text, sums = refs
    first = pl.program_id(1) * x.shape[1]

    @pl.when(first == 0)
    def _start() -> None:
        sums[...] = jnp.zeros_like(sums)

    def some_tokens(at: Any) -> None:
        token = first + at.start + jax.lax.broadcasted_iota(jnp.int32, (_IN_REGISTERS, 1), 0)
        streams = [token < tokens]
        if text:
            is_text = text[0][at] != 0
            streams = [streams[0] & ~is_text, streams[0] & is_text]
        y, _ = _normed(eps, x[0, at])
        g = grad[0, at].astype(jnp.float32)
        for i, term in enumerate((g * y, g)):
            for j, stream in enumerate(streams):
                part = jnp.where(stream, term, 0.0)
                sums[0, i, j] += sum(part[k : k + _SUBLANES] for k in range(0, _IN_REGISTERS, _SUBLANES))

    _for_all_tokens(x.shape[1], some_tokens)


def _for_all_tokens(tokens: int, some_tokens: Callable[[Any], None]) -> None:
    """some_tokens(which) for the tokens of a grid step, as many as are in registers."""

    def step(i: Array, _: None) -> None:
        some_tokens(pl.ds(pl.multiple_of(i * _IN_REGISTERS, _IN_REGISTERS), _IN_REGISTERS))

    jax.lax.fori_loop(0, tokens // _IN_REGISTERS, step, None, unroll=2)


def _normed(eps: float, x: Float32[Array, "rows D"]) -> tuple[Float32[Array, "rows D"], Float32[Array, "rows 1"]]:
    """The layer norm, and what the centred x was multiplied by."""
    y = x - x.mean(-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return y * factor, factor
