"""Small pieces that the models share: linear maps, norms, AdaLN-zero, MLP, timestep embedding, stacking."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Num

T = TypeVar("T")
Order = Callable[[Float[Array, "*batch n"]], Float[Array, "*batch n"]]
"""Puts the entries of the last axis in another order."""

APART_FROM = 2**25
"""Bytes of a layer's weights from which `apart` takes a stack apart."""

CPU_TOKENS = 2048
"""About how many tokens go through an MLP at a time on a CPU, whose products of more rows are slower in bfloat16 and no
faster in float32: less is held, too."""


def _as_it_is(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    return x


def precision(dtype: Any) -> jax.lax.Precision:
    """float32 means float32: without HIGHEST, a TPU multiplies in bfloat16 and a GPU in TF32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else jax.lax.Precision.DEFAULT


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is n or more."""
    return -(-n // multiple) * multiple


def stack(n: int, make: Callable[..., T], rngs: nnx.Rngs) -> T:
    """n modules as one pytree; every parameter gains a leading layer axis, ready for `jax.lax.scan`."""
    keys = jax.random.split(rngs.params(), n)
    return jax.vmap(lambda key: make(rngs=nnx.Rngs(params=key)))(keys)


def through(layer: Callable[[Array, Any], tuple[Array, None]], x: Array, blocks: Any) -> Array:
    """x through all layers, `layer` being the body of a scan: by a scan over a stack, one by one after `apart`."""
    if isinstance(blocks, nnx.List):
        for block in blocks:
            x, _ = layer(x, block)
        return x
    return jax.lax.scan(layer, x, blocks)[0]


def apart(module: T) -> T:
    """A model whose stack `blocks` is taken apart into layers, for a program on one CPU that runs them one by one.

    A scan cuts each layer's weights out of their stack, which XLA does for a CPU by copying them: every prompt would
    read and write all of the text encoder's once more, a tenth of its time. Arguments of their own are used where they
    lie, which is where the stack has them: nothing is copied here either. (Where thousands of tokens go through a
    layer, the copy takes no time that shows, and a scan needs less memory beside it.)

    Returns:
        The module itself where a layer's weights are less than `APART_FROM` bytes: those stay in the cache, and what
        is not scanned takes longer to compile. And where it is taken apart already.
    """
    if isinstance(module.blocks, nnx.List):  # type: ignore[attr-defined]
        return module
    leaves, structure = jax.tree.flatten(module.blocks)  # type: ignore[attr-defined]
    if sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in leaves) < APART_FROM:
        return module
    result = same_arrays(module)
    blocks = zip(*map(_rows, leaves), strict=True)
    result.blocks = nnx.List(jax.tree.unflatten(structure, block) for block in blocks)  # type: ignore[attr-defined]
    return result


def _rows(stacked: Array | jax.ShapeDtypeStruct) -> list[Any]:
    """Its layers, in the same memory where it is an array of a CPU."""
    if isinstance(stacked, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype)] * stacked.shape[0]
    return jax.device_put(list(np.asarray(stacked)), may_alias=True)


def same_arrays(module: T) -> T:
    """New modules around the same arrays."""
    return jax.tree.map(lambda leaf: leaf, module)


class Linear(nnx.Module):
    """y = x @ kernel + bias, summed in float32 whatever the dtype. kernel: [in, out]."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool = True, zero: bool = False, rngs: nnx.Rngs):
        scale = 0.0 if zero else in_width**-0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (in_width, out_width)))
        self.bias = nnx.Param(jnp.zeros(out_width)) if bias else None

    def float32(self, x: Float[Array, "*batch in"], order: Order | None = None) -> Float32[Array, "*batch out"]:
        """The sum before rounding to the input's dtype, for callers that compute on."""
        order = order or _as_it_is
        kernel = order(self.kernel[...]).astype(x.dtype)
        y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32, precision=precision(x.dtype))
        if self.bias is not None:
            y = y + order(self.bias[...]).astype(jnp.float32)
        return y

    def __call__(self, x: Float[Array, "*batch in"], order: Order | None = None) -> Float[Array, "*batch out"]:
        """order: puts the outputs in another order by doing so to the weights, which are smaller."""
        return self.float32(x, order).astype(x.dtype)


class TransposedLinear(nnx.Module):
    """y = x @ weight.T, summed in float32 whatever the dtype. weight: [out, in].

    Weights lie so where x has few rows, as a prompt has: a CPU sums what lies together, and so need not lay them out
    for every call. Accelerators take either.
    """

    def __init__(self, in_width: int, out_width: int, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(in_width**-0.5 * jax.random.normal(rngs.params(), (out_width, in_width)))

    def float32(self, x: Float[Array, "*batch in"]) -> Float32[Array, "*batch out"]:
        """The sum before rounding to the input's dtype."""
        return times_transposed(x, self.weight[...])


def times_transposed(x: Float[Array, "*batch in"], weight: Num[Array, "out in"]) -> Float32[Array, "*batch out"]:
    """x @ weight.T in x's dtype, summed in float32."""
    axes = ((x.ndim - 1,), (1,)), ((), ())
    exact = precision(x.dtype)
    return jax.lax.dot_general(x, weight.astype(x.dtype), axes, precision=exact, preferred_element_type=jnp.float32)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, float32 statistics and affine."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.eps = eps

    def float32(self, x: Float[Array, "*batch width"], order: Order | None = None) -> Float32[Array, "*batch width"]:
        """The norm before rounding to the input's dtype, for callers that compute on."""
        order = order or _as_it_is
        mean = x.astype(jnp.float32).mean(-1, keepdims=True)
        # behind the barriers each pass reads x again; the compiler would write x - mean, in float32, for all of them
        x, mean = jax.lax.optimization_barrier((x, mean))
        variance = jnp.square(x.astype(jnp.float32) - mean).mean(-1, keepdims=True)
        x, mean, factor = jax.lax.optimization_barrier((x, mean, jax.lax.rsqrt(variance + self.eps)))
        y = (x.astype(jnp.float32) - mean) * factor
        return y * order(self.scale[...]).astype(jnp.float32) + order(self.bias[...]).astype(jnp.float32)

    def __call__(self, x: Float[Array, "*batch width"], order: Order | None = None) -> Float[Array, "*batch width"]:
        """order: the order that x's channels were put in."""
        return self.float32(x, order).astype(x.dtype)


class MLP(nnx.Module):
    """width -> 4 width -> width, tanh-approximate GELU."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(width, 4 * width, rngs=rngs)
        self.down = Linear(4 * width, width, rngs=rngs)

    def float32(self, x: Float[Array, "B S D"]) -> Float32[Array, "B S D"]:
        pieces = round(x.shape[0] * x.shape[1] / CPU_TOKENS)
        # on a mesh tokens are shared out already
        if pieces < 2 or not jax.sharding.get_abstract_mesh().empty:
            return self._at_once(x)
        return jax.lax.platform_dependent(x, cpu=lambda x: self._in_pieces(x, pieces), default=self._at_once)

    def _in_pieces(self, x: Float[Array, "B S D"], pieces: int) -> Float32[Array, "B S D"]:
        tokens = x.reshape(-1, x.shape[-1])
        padded = jnp.pad(tokens, ((0, -len(tokens) % pieces), (0, 0))).reshape(pieces, 1, -1, x.shape[-1])
        out = jax.lax.map(self._at_once, padded)
        return out.reshape(-1, x.shape[-1])[: len(tokens)].reshape(x.shape)

    def _at_once(self, x: Float[Array, "B S D"]) -> Float32[Array, "B S D"]:
        hidden = jax.nn.gelu(self.up.float32(x), approximate=True).astype(x.dtype)
        # The barrier has it written in x's dtype; the compiler would keep it in float32 and round it where it is read.
        # And it has the weights copied out of their stack: cut out on the way, they cost a TPU 1.6 times the product.
        hidden, down = jax.lax.optimization_barrier((hidden, self.down))
        return down.float32(hidden)


class AdaLNZero(nnx.Module):
    """Layer norm whose shift, scale and gate come from the timestep; one set for video, one for text.

    Source: DiT (arXiv 2212.09748); diffusers `CogVideoXLayerNormZero`, which shares one norm between both streams.
    """

    def __init__(self, time_width: int, width: int, *, eps: float, rngs: nnx.Rngs):
        self.linear = Linear(time_width, 6 * width, zero=True, rngs=rngs)
        self.norm = LayerNorm(width, eps=eps)

    def __call__(
        self, x: Float32[Array, "B S D"], emb: Float32[Array, "B E"], is_text: Bool[Array, "S 1"]
    ) -> tuple[Float[Array, "B S D"], Float32[Array, "B 2 1 D"]]:
        """Returns the modulated x, in the weights' dtype, and the gates (video, text) for the residual branch."""
        modulation = self.linear.float32(jax.nn.silu(emb)).reshape(emb.shape[0], 2, 3, 1, -1)
        shift, scale, gate = jnp.moveaxis(modulation, 2, 0)
        y = self.norm.float32(x) * (1 + per_stream(scale, is_text)) + per_stream(shift, is_text)
        return jax.lax.optimization_barrier(y.astype(self.linear.kernel.dtype)), gate


def per_stream(table: Float[Array, "B 2 1 D"], is_text: Bool[Array, "S 1"]) -> Float[Array, "B S D"]:
    """Spread one row for video and one for text over the joint sequence.

    A select on the token index fuses into its consumer, so the sequence is never cut and concatenated.
    """
    return jnp.where(is_text, table[:, 1], table[:, 0])


class TimestepMLP(nnx.Module):
    """Linear, SiLU, linear: from sinusoids to the conditioning vector."""

    def __init__(self, in_width: int, width: int, *, rngs: nnx.Rngs):
        self.linear_1 = Linear(in_width, width, rngs=rngs)
        self.linear_2 = Linear(width, width, rngs=rngs)

    def __call__(self, x: Float32[Array, "B I"]) -> Float32[Array, "B E"]:
        return self.linear_2.float32(jax.nn.silu(self.linear_1.float32(x)))


def sinusoid(t: Float[Array, " B"], width: int) -> Float32[Array, "B width"]:
    """[cos | sin] of t at `width // 2` frequencies 10000^(-k / half), float32 (diffusers `get_timestep_embedding`)."""
    half = width // 2
    frequency = np.exp(-np.log(10000.0, dtype=np.float32) * np.arange(half, dtype=np.float32) / np.float32(half))
    angle = t.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
