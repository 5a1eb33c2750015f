"""Convolutions of the video autoencoder: causal in time, zero-padded in space, with an explicit feature cache.

The cache of a causal convolution is the last two frames of its padded input. Passed in again with the next chunk, it
makes a clip cut in chunks convolve exactly like the whole clip.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax.layers import precision

TAPS = 3
"""Kernel size in time, height and width. A causal convolution looks at the frame itself and the two before it."""

SUBLANES = 8
"""Rows of a TPU's vector register."""


class CausalConv3d(nnx.Module):
    """3x3x3 convolution over `B T H W C`; frame t depends on frames t-2, t-1 and t.

    kernel: [kt, kh, kw, in, out]; bias: [out]. Before the first frame of a clip stands that frame, repeated (not
    zeros). Source: diffusers `CogVideoXCausalConv3d`.
    """

    def __init__(self, in_channels: int, out_channels: int, *, rngs: nnx.Rngs):
        scale = (in_channels * TAPS**3) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (TAPS, TAPS, TAPS, in_channels, out_channels)))
        self.bias = nnx.Param(jnp.zeros(out_channels))

    def __call__(
        self,
        x: Float[Array, "B T H W I"],
        cache: Float[Array, "B 2 H W I"] | None,
        residual: Float[Array, "B T H W O"] | None = None,
    ) -> tuple[Float[Array, "B T H W O"], Float[Array, "B 2 H W I"]]:
        """Returns the convolution and the cache for the next chunk, both in the kernel's dtype.

        Args:
            cache: what the previous chunk returned; None for the first chunk of a clip.
            residual: added to the convolution before the one rounding, which then is to its dtype.
        """
        x = x.astype(self.kernel.dtype)
        past = [x[:, :1]] * (TAPS - 1) if cache is None else [cache]
        padded = jnp.concatenate([*past, x], 1)
        if cache is None and x.shape[1] == 1 and x.dtype == jnp.float32:
            # An image: all taps see the same frame. In a narrower dtype the summed kernel would be rounded once more.
            y = conv3d(x, self.kernel[...].sum(0, keepdims=True))
        else:
            y = conv3d(padded, self.kernel[...])
        y = y + self.bias[...].astype(jnp.float32)
        y = y.astype(x.dtype) if residual is None else (y + residual.astype(jnp.float32)).astype(residual.dtype)
        return y, padded[:, -(TAPS - 1) :]


class SpatialConv(nnx.Module):
    """3x3 convolution of every frame by itself, in the kernel's dtype. kernel: [kh, kw, in, out]; bias: [out].

    stride 1 pads one pixel all around; stride 2 halves height and width, padded with zeros at the right and the bottom.
    """

    def __init__(self, channels: int, *, stride: int = 1, rngs: nnx.Rngs):
        scale = (channels * TAPS**2) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (TAPS, TAPS, channels, channels)))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.stride = stride

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H/s W/s C"]:
        y = conv3d(x.astype(self.kernel.dtype), self.kernel[...][None], self.stride)
        return (y + self.bias[...].astype(jnp.float32)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv3d(
    x: Float[Array, "B T+kt-1 H W I"], kernel: Float[Array, "kt 3 3 I O"], stride: int = 1
) -> Float[Array, "B T H/s W/s O"]:
    """The one convolution: valid in time, zero-padded in space (see `SpatialConv`), summed and returned in float32.

    How it is put to the compiler depends on the backend; the numbers differ by rounding only. It has a reverse-mode
    derivative, no forward-mode one.
    """
    return jax.lax.platform_dependent(
        x,
        kernel,
        cpu=partial(_by_frame, stride=stride, padding=_padding(stride)),
        tpu=partial(_folded, stride=stride),
        default=partial(_native, stride=stride),
    )


def _padding(stride: int) -> tuple[int, int]:
    return (1, 1) if stride == 1 else (0, 1)


def _native(x: Array, kernel: Array, *, stride: int, dtype: Any = jnp.float32) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, stride, stride),
        padding=((0, 0), _padding(stride), _padding(stride)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


def _folded(x: Array, kernel: Array, *, stride: int) -> Array:
    """One 2-D convolution, the taps in time side by side in the channels and the frames in the batch.

    A TPU lays eight frames on its eight sublanes and then needs no copy of the clip. For other numbers of frames
    (the first chunk) the 3-D convolution is as fast and takes less memory.
    """
    taps = kernel.shape[0]
    batch, frames = x.shape[0], x.shape[1] - taps + 1
    if batch * frames % SUBLANES:
        return _native(x, kernel, stride=stride)
    x = jnp.concatenate([x[:, i : i + frames] for i in range(taps)], -1)
    kernel = jnp.concatenate(list(kernel), -2)
    y = _conv2d(x.reshape(batch * frames, *x.shape[2:]), kernel, stride=stride, padding=_padding(stride))
    return y.reshape(batch, frames, *y.shape[1:])


def _by_frame(x: Array, kernel: Array, *, stride: int, padding: tuple[int, int]) -> Array:
    """One 2-D convolution per frame and tap: on a CPU two to five times faster than one 3-D convolution."""
    kernel = kernel.astype(jnp.float32)
    taps = kernel.shape[0]

    def frame(t: Array) -> Array:
        frames = [jax.lax.dynamic_index_in_dim(x, t + i, 1, keepdims=False) for i in range(taps)]
        parts = [_conv2d(frames[i].astype(jnp.float32), kernel[i], stride=stride, padding=padding) for i in range(taps)]
        return reduce(jnp.add, parts)

    return jnp.moveaxis(jax.lax.map(frame, jnp.arange(x.shape[1] - taps + 1)), 0, 1)


def _conv2d(x: Array, kernel: Array, *, stride: int = 1, padding: tuple[int, int]) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=(padding, padding),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


# The backward pass is written out because XLA's CPU backend has a fast convolution for operands in NHWC and HWIO order
# only, and reorders others only outside of loops: in a scan over layers, the derived gradient runs 35 times slower.


def _conv3d_forward(x: Array, kernel: Array, stride: int) -> tuple[Array, tuple[Array, Array]]:
    return conv3d(x, kernel, stride), (x, kernel)


def _conv3d_backward(stride: int, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    return jax.lax.platform_dependent(
        *saved, dy, cpu=partial(_by_frame_backward, stride=stride), default=partial(_native_backward, stride=stride)
    )


def _native_backward(x: Array, kernel: Array, dy: Array, *, stride: int) -> tuple[Array, Array]:
    _, backward = jax.vjp(partial(_native, stride=stride, dtype=None), x, kernel)
    return backward(dy.astype(x.dtype))


def _by_frame_backward(x: Array, kernel: Array, dy: Array, *, stride: int) -> tuple[Array, Array]:
    lo, hi = _padding(stride)
    taps, size = kernel.shape[:2]
    batch, frames = dy.shape[:2]
    # zeros between the pixels turn a strided convolution's gradient into that of a plain one
    between = (0, 0, stride - 1)
    dy = jax.lax.pad(dy, jnp.zeros((), dy.dtype), ((0, 0, 0), (0, 0, 0), between, between, (0, 0, 0)))

    dx = _by_frame(
        jnp.pad(dy, ((0, 0), (taps - 1, taps - 1), (0, 0), (0, 0), (0, 0))),
        kernel[::-1, ::-1, ::-1].swapaxes(-1, -2),
        stride=1,
        padding=(size - 1 - lo, size - 1 - hi),
    )

    def as_kernel(y: Array) -> Array:  # B T H W C -> H W (B T) C
        return y.reshape(batch * frames, *y.shape[2:]).transpose(1, 2, 0, 3)

    dkernel = [
        _conv2d(
            as_kernel(x[:, i : i + frames].astype(jnp.float32)).transpose(3, 0, 1, 2), as_kernel(dy), padding=(lo, hi)
        ).transpose(1, 2, 0, 3)
        for i in range(taps)
    ]
    return dx.astype(x.dtype), jnp.stack(dkernel).astype(kernel.dtype)


conv3d.defvjp(_conv3d_forward, _conv3d_backward)
