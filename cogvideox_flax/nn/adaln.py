"""AdaLN: a layer norm whose scale and shift come from the timestep, on a TPU as a Pallas kernel.

XLA reads the residual stream three times for it: for the mean, for the variance and for the result. The kernel reads it
once. It also reads it token by token, and so fixes its layout: left to itself, XLA may choose one with tokens along the
lanes, in which the products before and after the norm are a tenth slower by their schedules.
"""

from __future__ import annotations

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
from cogvideox_flax.nn.tpu import KERNEL_DTYPES, LANES, with_gradient_of

NAME = "cogvideox_adaln"

FEW = 4096
"""Up to so many tokens, such as a prompt's, the kernel is not worth it."""

MAX_WIDTH = 3072
"""Wider rows in float32 would not fit into a v5e's fast memory."""

_ROWS = 256
"""Tokens of a grid step: by its schedule the kernel then computes for no longer than it reads and writes."""

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
        self, x: Float32[Array, "B S D"], emb: Float32[Array, "B E"], is_text: Bool[Array, "S 1"]
    ) -> tuple[Float[Array, "B S D"], Float32[Array, "B 2 D"]]:
        """Returns the modulated x, in the weights' dtype, and the gates (video, text) for the residual branch."""
        modulation = self.linear(jax.nn.silu(emb), out_dtype=jnp.float32).reshape(emb.shape[0], 2, 3, -1)
        shift, scale, gate = jnp.moveaxis(modulation, 2, 0)
        # the norm's own affine map and the timestep's are one
        weight, bias = (p[...].astype(jnp.float32) for p in (self.norm.scale, self.norm.bias))
        scale, shift = weight * (1 + scale), bias * (1 + scale) + shift
        return modulated_norm(x, scale, shift, is_text, eps=self.norm.eps, dtype=self.linear.kernel.dtype), gate


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


@with_gradient_of(_plain)
def kernel(
    settings: Settings,
    x: Float32[Array, "B S D"],
    scale: Float32[Array, "B R D"],
    shift: Float32[Array, "B R D"],
    is_text: Bool[Array, "S 1"] | None = None,
) -> Float[Array, "B S D"]:
    """`modulated_norm`; its gradient is that of the plain form."""
    return call(settings, x, scale, shift, is_text)


def call(
    settings: Settings, x: Array, scale: Array, shift: Array, is_text: Array | None, *, interpret: bool = False
) -> Float[Array, "B S D"]:
    """The kernel's call; arguments as for `kernel`."""
    (eps, dtype), (batch, tokens, width) = settings, x.shape
    rows = pl.BlockSpec((1, _ROWS, width), lambda b, i: (b, i, 0))
    table = pl.BlockSpec((1, *scale.shape[1:]), lambda b, i: (b, 0, 0))
    text = [] if is_text is None else [is_text.astype(jnp.float32)]
    result = jax.ShapeDtypeStruct(x.shape, dtype)
    moved = x.size * (x.dtype.itemsize + result.dtype.itemsize)
    return pl.pallas_call(
        partial(_body, eps),
        grid=(batch, pl.cdiv(tokens, _ROWS)),
        in_specs=[rows, table, table, *[pl.BlockSpec((_ROWS, 1), lambda b, i: (i, 0))] * len(text)],
        out_specs=rows,
        out_shape=result,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=NAME,
    )(x, scale, shift, *text)


def _body(eps: float, x: Any, scale: Any, shift: Any, *refs: Any) -> None:
    *text, out = refs

    def some_tokens(i: Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * _IN_REGISTERS, _IN_REGISTERS), _IN_REGISTERS)
        is_text = text[0][at] != 0 if text else None
        y = x[0, at]
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
        y = y * per_stream(scale[...], is_text)[0] + per_stream(shift[...], is_text)[0]
        out[0, at] = y.astype(out.dtype)

    jax.lax.fori_loop(0, _ROWS // _IN_REGISTERS, some_tokens, None, unroll=2)
