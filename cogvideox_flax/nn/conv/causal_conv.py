"""Convolutions of the video autoencoders: causal in time, padded in space, with an explicit feature cache.

The cache of a causal convolution is the last two frames of its padded input. With it, the convolution of a clip chunk
by chunk is exactly the convolution of the whole clip.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax import sharding
from cogvideox_flax.nn.conv import cpu, cuda, tpu_kernel, xla
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.sharding import Padding, WithHalo

TAPS = 3
"""Kernel size in time, height and width. A causal convolution reads a frame and the two before it."""

HALO = {1: (1, 1), 2: (0, 1)}
"""Stride -> the pixels that a convolution reads before and after each."""


class CausalConv3d(nnx.Module):
    """3x3x3 convolution over `B T H W C`; frame t depends on frames t-2, t-1 and t.

    kernel: [kt, kh, kw, in, out]; bias: [out]. A clip is padded in time with two copies of its first frame, not with
    zeros; in space with zeros, or with `repeat_edges` by its edges. Source: diffusers `CogVideoXCausalConv3d`,
    `HunyuanVideo15CausalConv3d`.
    """

    def __init__(self, in_channels: int, out_channels: int, *, repeat_edges: bool = False, rngs: nnx.Rngs):
        scale = (in_channels * TAPS**3) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (TAPS, TAPS, TAPS, in_channels, out_channels)))
        self.bias = nnx.Param(jnp.zeros(out_channels))
        self.repeat_edges = repeat_edges

    def __call__(
        self,
        x: Float[Array, "B T H W I"],
        cache: Float[Array, "B 2 H W I"] | None,
        residual: Float[Array, "B T H W O"] | None = None,
    ) -> tuple[Float[Array, "B T H W O"], Float[Array, "B 2 H W I"]]:
        """Returns the convolution, and the cache for the next chunk in the kernel's dtype.

        Args:
            cache: what the previous chunk returned; None for the first chunk of a clip.
            residual: added in float32. The result has its dtype; without a residual, the kernel's.
        """
        x, kernel, bias = x.astype(self.kernel.dtype), self.kernel[...], self.bias[...]
        past = jnp.concatenate([x[:, :1]] * (TAPS - 1), 1) if cache is None else cache
        conv = partial(conv3d, x, residual=residual, repeat_edges=self.repeat_edges)
        if cache is None and x.shape[1] == 1 and x.dtype == jnp.float32:
            # An image: all taps read the same frame. Only in float32: in 16 bit the summed kernel would be rounded.
            y = conv(kernel.sum(0, keepdims=True), bias)
        else:
            y = conv(kernel, bias, past=past)
        new = x[:, -(TAPS - 1) :]
        if new.shape[1] < TAPS - 1:
            new = jnp.concatenate([past[:, new.shape[1] :], new], 1)
        # for an NVIDIA GPU, XLA would otherwise keep all of x until the cache is read
        return by_platform(y, new, cuda=lambda *both: jax.lax.optimization_barrier(both), default=lambda *both: both)


class SpatialConv(nnx.Module):
    """3x3 convolution of each frame, in the kernel's dtype. kernel: [kh, kw, in, out]; bias: [out].

    stride 1 pads one pixel on every side; stride 2 halves height and width and pads with zeros on the right and bottom.
    """

    def __init__(self, channels: int, *, stride: int = 1, rngs: nnx.Rngs):
        scale = (channels * TAPS**2) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (TAPS, TAPS, channels, channels)))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.stride = stride

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H/s W/s C"]:
        narrow = x.astype(self.kernel.dtype)
        return conv3d(narrow, self.kernel[...][None], self.bias[...], stride=self.stride, dtype=x.dtype)


def conv3d(
    x: Float[Array, "B F H W I"],
    kernel: Float[Array, "kt 3 3 I O"],
    bias: Float[Array, " O"],
    residual: Float[Array, "B T H W O"] | None = None,
    *,
    past: Float[Array, "B kt-1 H W I"] | None = None,
    stride: int = 1,
    dtype: Any = None,
    repeat_edges: bool = False,
) -> Float[Array, "B T H/s W/s O"]:
    """The convolution of all layers: zero-padded in space (see `SpatialConv`), summed in float32.

    Inside `sharding.spatial_split`, devices compute parts of each image. Every platform has its own implementation;
    results differ by rounding only. On an NVIDIA GPU the sum of 16-bit products is rounded to 16 bit before bias and
    residual are added in float32. Reverse-mode differentiable only.

    Args:
        residual: added in float32.
        past: the frames before x; then T = F, else T = F - kt + 1.
        dtype: of the result; None is the residual's, or x's without a residual.
        repeat_edges: pad in space by the image's edges, not with zeros.
    """
    dtype = jnp.dtype(dtype or (x.dtype if residual is None else residual.dtype))
    conv = partial(_conv3d, (stride, dtype))
    return sharding.spatial_parallel_conv(
        conv, x, past, residual, kernel, bias, halo=HALO[stride], repeat_edges=repeat_edges
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _conv3d(
    static: tuple[int, Any], clip: WithHalo, residual: Array | None, kernel: Array, bias: Array, padding: Padding
) -> Array:
    """`conv3d` of full images or parts, with this zero padding. static: stride, dtype."""
    stride, dtype = static
    how: dict[str, Any] = {"stride": stride, "padding": padding, "dtype": dtype}

    def joined(forward: Any) -> Any:
        return lambda clip, *rest: forward(clip.whole(HALO[stride][0]), *rest, **how)

    by_kernel = stride == 1 and tpu_kernel.why_not(clip.x, residual, dtype) is None
    return by_platform(
        clip,
        residual,
        kernel,
        bias,
        cpu=joined(cpu.forward),
        cuda=joined(cuda.forward),
        tpu=partial(tpu_kernel.forward, dtype=dtype) if by_kernel else joined(xla.forward),
        default=joined(xla.forward),
    )


def _conv3d_forward(static: tuple[int, Any], *args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _conv3d(static, *args), args[:-1]


def _conv3d_backward(
    static: tuple[int, Any], padding: Padding, saved: tuple[Any, ...], dy: Array
) -> tuple[WithHalo, Array | None, Array, Array]:
    clip, residual, kernel, bias = saved
    how: dict[str, Any] = {"stride": static[0], "padding": padding}
    joined, split = jax.vjp(lambda clip: clip.whole(HALO[static[0]][0]), clip)
    dx, dkernel = by_platform(
        joined,
        kernel,
        dy,
        cpu=partial(cpu.backward, **how),
        cuda=partial(cuda.backward, **how),
        default=partial(xla.backward, **how),
    )
    dbias = dy.astype(jnp.float32).sum((0, 1, 2, 3)).astype(bias.dtype)
    return *split(dx), None if residual is None else dy.astype(residual.dtype), dkernel, dbias


_conv3d.defvjp(_conv3d_forward, _conv3d_backward)
