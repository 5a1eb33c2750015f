"""Convolutions of the video autoencoder: causal in time, zero-padded in space, with an explicit feature cache.

The cache of a causal convolution is the last two frames of its padded input. Passed in again with the next chunk, it
makes a clip cut in chunks convolve exactly like the whole clip.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cogvideox_flax import sharding
from cogvideox_flax.nn.conv import conv_kernel, winograd
from cogvideox_flax.nn.layers import precision
from cogvideox_flax.sharding import Padding

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
        """Returns the convolution and the cache for the next chunk, both in the kernel's dtype.

        Args:
            cache: what the previous chunk returned; None for the first chunk of a clip.
            residual: added to the convolution in float32; the result has its dtype.
        """
        x = x.astype(self.kernel.dtype)
        past = [x[:, :1]] * (TAPS - 1) if cache is None else [cache]
        padded = jnp.concatenate([*past, x], 1)
        kernel = self.kernel[...]
        if cache is None and x.shape[1] == 1 and x.dtype == jnp.float32:
            # An image: all taps see the same frame. In a narrower dtype the summed kernel would be rounded once more.
            y = conv3d(x, kernel.sum(0, keepdims=True), self.bias[...], residual)
        else:
            y = conv3d(padded, kernel, self.bias[...], residual)
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
        narrow = x.astype(self.kernel.dtype)
        return conv3d(narrow, self.kernel[...][None], self.bias[...], stride=self.stride, dtype=x.dtype)


def conv3d(
    x: Float[Array, "B T+kt-1 H W I"],
    kernel: Float[Array, "kt 3 3 I O"],
    bias: Float[Array, " O"],
    residual: Float[Array, "B T H W O"] | None = None,
    *,
    stride: int = 1,
    dtype: Any = None,
) -> Float[Array, "B T H/s W/s O"]:
    """The one convolution: valid in time, zero-padded in space (see `SpatialConv`), summed in float32.

    Where pictures are split over devices (`sharding.spatial_split`), neighbours exchange their edges. How it is put to
    the compiler depends on the backend; the numbers differ by rounding only. On an NVIDIA GPU there is one more: a sum
    of 16-bit products comes in 16 bit, before bias and residual are added in float32. It has a reverse-mode
    derivative, no forward-mode one.

    Args:
        residual: added in float32.
        dtype: of the result; None is the residual's, or without one x's.
    """
    halo = (1, 1) if stride == 1 else (0, 1)
    dtype = jnp.dtype(dtype or (x.dtype if residual is None else residual.dtype))
    return sharding.spatial_parallel_conv(partial(_conv3d, (stride, dtype)), x, residual, kernel, bias, halo=halo)


@partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _conv3d(
    static: tuple[int, Any], x: Array, residual: Array | None, kernel: Array, bias: Array, padding: Padding
) -> Array:
    """As `conv3d`, of a picture or a part of one, with these zeros around it. static: stride, dtype."""
    stride, dtype = static
    how: dict[str, Any] = {"stride": stride, "padding": padding}

    def native(x: Array, residual: Array | None, kernel: Array, bias: Array) -> Array:
        return _finish(_native(x, kernel, **how), residual, bias, dtype)

    by_kernel = stride == 1 and conv_kernel.why_not(x, residual, dtype) is None
    return jax.lax.platform_dependent(
        x,
        residual,
        kernel,
        bias,
        cpu=partial(_on_cpu, **how, dtype=dtype),
        cuda=partial(_by_frame, _taps_at_once, **how, dtype=dtype),
        tpu=partial(_on_tpu, padding=padding, dtype=dtype) if by_kernel else native,
        default=native,
    )


def _on_cpu(
    x: Array, residual: Array | None, kernel: Array, bias: Array, *, stride: int, padding: Padding, dtype: Any
) -> Array:
    shape = _result_shape(x, kernel, stride, padding)
    strip = winograd.strip_of(shape, x.shape[-1]) if stride == 1 else None
    if strip is None:
        return _by_frame(_taps_in_turn, x, residual, kernel, bias, stride=stride, padding=padding, dtype=dtype)

    def finish(y: Array, before: Array) -> Array:
        return _finish(y, None if residual is None else before, bias, dtype)

    start = _start(residual, shape, dtype)
    return winograd.convolve(x, kernel, start, finish, strip=strip, padding=padding)


def _result_shape(x: Array, kernel: Array, stride: int, padding: Padding) -> tuple[int, ...]:
    taps, size, *_, channels = kernel.shape
    picture = ((n + sum(zeros) - size) // stride + 1 for n, zeros in zip(x.shape[2:4], padding, strict=True))
    return x.shape[0], x.shape[1] - taps + 1, *picture, channels


def _start(residual: Array | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """What the result is written over: the residual, where it is needed no longer."""
    return jax.lax.empty(shape, dtype) if residual is None else residual.astype(dtype)


def _on_tpu(x: Array, residual: Array | None, kernel: Array, bias: Array, *, padding: Padding, dtype: Any) -> Array:
    return conv_kernel.convolve(x, kernel, bias, residual, padding=padding, dtype=dtype)


def _finish(y: Array, residual: Array | None, bias: Array, dtype: Any) -> Array:
    y = y + bias.astype(jnp.float32)
    return (y if residual is None else y + residual.astype(jnp.float32)).astype(dtype)


def _native(x: Array, kernel: Array, *, stride: int, padding: Padding, dtype: Any = jnp.float32) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1, stride, stride),
        padding=((0, 0), *padding),
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


def _by_frame(
    taps_of: Callable[..., Callable[[list[Array]], Float[Array, "B h w O"]]],
    x: Array,
    residual: Array | None,
    kernel: Array,
    bias: Array,
    *,
    stride: int,
    padding: Padding,
    dtype: Any,
) -> Array:
    """Frame by frame, each finished in its place: in the residual's memory, where that is needed no longer.

    taps_of: from the kernel, made ready once, what takes the frames that the taps in time see to one frame in float32.
    """
    taps = kernel.shape[0]
    convolve = taps_of(kernel, stride=stride, padding=padding)

    def frame(t: Array) -> Array:
        frames = [jax.lax.dynamic_index_in_dim(x, t + i, 1, keepdims=False) for i in range(taps)]
        return convolve(frames)

    def put(t: Array, y: Array) -> Array:
        before = jax.lax.dynamic_index_in_dim(y, t, 1, keepdims=False) if residual is not None else None
        return jax.lax.dynamic_update_index_in_dim(y, _finish(frame(t), before, bias, dtype), t, 1)

    start = _start(residual, _result_shape(x, kernel, stride, padding), dtype)
    return jax.lax.fori_loop(0, start.shape[1], put, start)


def _taps_in_turn(kernel: Array, *, stride: int, padding: Padding) -> Callable[[list[Array]], Array]:
    """One 2-D convolution per tap: on a CPU two to five times faster than one 3-D convolution, and in float32 only."""
    kernel = kernel.astype(jnp.float32)

    def convolve(frames: list[Array]) -> Array:
        wide = [x.astype(jnp.float32) for x in frames]
        return reduce(jnp.add, [_conv2d(x, kernel[i], stride=stride, padding=padding) for i, x in enumerate(wide)])

    return convolve


def _taps_at_once(kernel: Array, *, stride: int, padding: Padding) -> Callable[[list[Array]], Array]:
    """One 2-D convolution, the taps side by side as channels, for NVIDIA GPUs. There, 3-D convolutions are put with the
    channels in front of the pixels, and those with a wider result than their operands are done in float32: neither
    has fast tensor cores (nor are 3-D ones always right: see `_by_tap_backward`). The sum is float32 within it, and is
    rounded to the operands' dtype once, as PyTorch's is.
    """
    size, inputs, outputs = kernel.shape[1], kernel.shape[0] * kernel.shape[3], kernel.shape[4]
    flat = kernel.transpose(1, 2, 0, 3, 4).reshape(size, size, inputs, outputs)

    def convolve(frames: list[Array]) -> Array:
        x = jnp.concatenate(frames, -1)
        return _conv2d(x, flat, stride=stride, padding=padding, dtype=x.dtype).astype(jnp.float32)

    return convolve


def _conv2d(x: Array, kernel: Array, *, stride: int = 1, padding: Padding, dtype: Any = jnp.float32) -> Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(stride, stride),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=precision(x.dtype),
        preferred_element_type=dtype,
    )


# The backward pass is written out because XLA's CPU backend has a fast convolution for operands in NHWC and HWIO order
# only, and reorders others only outside of loops: in a scan over layers, the derived gradient runs 35 times slower.


def _conv3d_forward(
    static: tuple[int, Any], x: Array, residual: Array | None, kernel: Array, bias: Array, padding: Padding
) -> tuple[Array, tuple[Array | None, ...]]:
    return _conv3d(static, x, residual, kernel, bias, padding), (x, residual, kernel, bias)


def _conv3d_backward(
    static: tuple[int, Any], padding: Padding, saved: tuple[Any, ...], dy: Array
) -> tuple[Array, Array | None, Array, Array]:
    x, residual, kernel, bias = saved
    how: dict[str, Any] = {"stride": static[0], "padding": padding}
    dx, dkernel = jax.lax.platform_dependent(
        x,
        kernel,
        dy,
        cpu=partial(_by_frame_backward, **how),
        cuda=partial(_by_tap_backward, **how),
        default=partial(_native_backward, **how),
    )
    dbias = dy.astype(jnp.float32).sum((0, 1, 2, 3)).astype(bias.dtype)
    return dx, None if residual is None else dy.astype(residual.dtype), dkernel, dbias


def _native_backward(x: Array, kernel: Array, dy: Array, *, stride: int, padding: Padding) -> tuple[Array, Array]:
    _, backward = jax.vjp(partial(_native, stride=stride, padding=padding, dtype=None), x, kernel)
    return backward(dy.astype(x.dtype))


def _by_tap_backward(x: Array, kernel: Array, dy: Array, *, stride: int, padding: Padding) -> tuple[Array, Array]:
    """2-D convolutions of all frames, one tap in time after the other, for NVIDIA GPUs: cuDNN's 3-D ones are wrong in
    bfloat16 on large pictures before 9.15 (pytorch/pytorch#163539), so none is given to it."""
    batch, frames = dy.shape[:2]
    dy = dy.astype(x.dtype).reshape(batch * frames, *dy.shape[2:])
    convolve = partial(_conv2d, stride=stride, padding=padding, dtype=None)
    dx, dkernel = jnp.zeros(x.shape, jnp.float32), []
    for i, tap in enumerate(kernel):
        seen = x[:, i : i + frames]
        _, backward = jax.vjp(convolve, seen.reshape(batch * frames, *x.shape[2:]), tap)
        dframes, dtap = backward(dy)
        dx = dx.at[:, i : i + frames].add(dframes.reshape(seen.shape).astype(jnp.float32))
        dkernel.append(dtap)
    return dx.astype(x.dtype), jnp.stack(dkernel)


def _by_frame_backward(x: Array, kernel: Array, dy: Array, *, stride: int, padding: Padding) -> tuple[Array, Array]:
    taps, size = kernel.shape[:2]
    (top, bottom), (left, right) = padding
    batch, frames = dy.shape[:2]
    # zeros between the pixels turn a strided convolution's gradient into that of a plain one
    between = (0, 0, stride - 1)
    dy = jax.lax.pad(dy.astype(jnp.float32), jnp.float32(0), ((0, 0, 0), (0, 0, 0), between, between, (0, 0, 0)))

    dx = _by_frame(
        _taps_in_turn,
        jnp.pad(dy, ((0, 0), (taps - 1, taps - 1), (0, 0), (0, 0), (0, 0))),
        None,
        kernel[::-1, ::-1, ::-1].swapaxes(-1, -2),
        jnp.zeros(kernel.shape[-2]),
        stride=1,
        padding=((size - 1 - top, size - 1 - bottom), (size - 1 - left, size - 1 - right)),
        dtype=x.dtype,
    )

    def as_kernel(y: Array) -> Array:  # B T H W C -> H W (B T) C
        return y.reshape(batch * frames, *y.shape[2:]).transpose(1, 2, 0, 3)

    dkernel = [
        _conv2d(
            as_kernel(x[:, i : i + frames].astype(jnp.float32)).transpose(3, 0, 1, 2), as_kernel(dy), padding=padding
        ).transpose(1, 2, 0, 3)
        for i in range(taps)
    ]
    return dx, jnp.stack(dkernel).astype(kernel.dtype)


_conv3d.defvjp(_conv3d_forward, _conv3d_backward)
