"""Convolutions of the video autoencoder: causal in time, zero-padded in space, with an explicit feature cache.

The cache of a causal convolution is the last two frames of its padded input. Passed in again with the next chunk, it
makes a clip cut in chunks convolve exactly like the whole clip.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax.layers import precision

TAPS = 3
"""Kernel size in time, height and width. A causal convolution looks at the frame itself and the two before it."""


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
        """Returns the convolution (plus `residual`, added before the one rounding) and the cache for the next chunk.

        cache: what the previous chunk returned; None for the first chunk of a clip.
        """
        past = [x[:, :1]] * (TAPS - 1) if cache is None else [cache]
        padded = jnp.concatenate([*past, x], 1)
        kernel = self.kernel[...].astype(x.dtype)
        if cache is None and x.shape[1] == 1 and x.dtype == jnp.float32:
            # An image: all taps see the same frame. In a narrower dtype the summed kernel would be rounded once more.
            y = conv3d(x, kernel.sum(0, keepdims=True))
        else:
            y = conv3d(padded, kernel)
        return _finish(y, self.bias, residual, x.dtype), padded[:, -(TAPS - 1) :]


class SpatialConv(nnx.Module):
    """3x3 convolution of every frame by itself. kernel: [kh, kw, in, out]; bias: [out].

    stride 1 pads one pixel all around; stride 2 halves height and width, padded with zeros at the right and the bottom.
    """

    def __init__(self, channels: int, *, stride: int = 1, rngs: nnx.Rngs):
        scale = (channels * TAPS**2) ** -0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (TAPS, TAPS, channels, channels)))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.stride = stride

    def __call__(self, x: Float[Array, "B T H W C"]) -> Float[Array, "B T H/s W/s C"]:
        y = conv3d(x, self.kernel[...][None].astype(x.dtype), self.stride)
        return _finish(y, self.bias, None, x.dtype)


def _finish(y: Array, bias: nnx.Param, residual: Array | None, dtype: jnp.dtype) -> Array:
    y = y + bias[...].astype(jnp.float32)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return y.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv3d(
    x: Float[Array, "B T+kt-1 H W I"], kernel: Float[Array, "kt 3 3 I O"], stride: int = 1
) -> Float[Array, "B T H/s W/s O"]:
    """The one convolution: valid in time, zero-padded in space (see `SpatialConv`), summed and returned in float32.

    The formulation is the backend's: XLA's CPU backend runs three 2-D convolutions per frame two to five times faster
    than one 3-D convolution, in less memory.
    """
    return jax.lax.platform_dependent(
        x,
        kernel,
        cpu=partial(_by_frame, stride=stride, padding=_padding(stride)),
        default=partial(_native, stride=stride),
    )


def _padding(stride: int) -> tuple[int, int]:
    return (1, 1) if stride == 1 else (0, 1)


def _native(x: Array, kernel: Array, *, stride: int, dtype: jnp.dtype | None = jnp.float32) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, stride, stride),
        padding=((0, 0), _padding(stride), _padding(stride)),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


def _conv2d(x: Array, kernel: Array, *, stride: int = 1, padding: tuple[int, int]) -> Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), (padding, padding), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _by_frame(x: Array, kernel: Array, *, stride: int, padding: tuple[int, int]) -> Array:
    kernel = kernel.astype(jnp.float32)
    taps = kernel.shape[0]

    def frame(t: Array) -> Array:
        frames = [jax.lax.dynamic_index_in_dim(x, t + i, 1, keepdims=False) for i in range(taps)]
        return sum(
            _conv2d(frames[i].astype(jnp.float32), kernel[i], stride=stride, padding=padding) for i in range(taps)
        )

    return jnp.moveaxis(jax.lax.map(frame, jnp.arange(x.shape[1] - taps + 1)), 0, 1)


# The backward pass is written out because XLA's CPU backend finds its fast convolution only for operands in NHWC, HWIO
# order, and reorders others only outside of loops: inside a scan over layers, the derived gradient runs 35 times slower.


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
