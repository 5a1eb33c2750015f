"""The causal convolution on every backend, and over the edges of images that are split."""

from __future__ import annotations

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.conv import cpu, cuda, tpu_kernel, winograd, xla
from cogvideox_flax.nn.conv.causal_conv import CausalConv3d, conv3d
from cogvideox_flax.nn.conv.frames import convolve_frames
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.sharding import spatial_parallel
from tests.support.reference import ROUNDING_BAR, random, relative_error

ZEROS = {1: ((1, 1), (1, 1)), 2: ((0, 1), (0, 1))}
"""Stride -> zeros around a whole image."""

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_convolutions_of_all_backends_agree(taps, stride, with_residual):
    x, kernel, bias = random(0, 2, 4 + taps - 1, 6, 10, 5), random(1, taps, 3, 3, 5, 7), random(3, 7)
    residual = random(4, 2, 4, 6 // stride, 10 // stride, 7) if with_residual else None

    def native(x, kernel, bias, residual):
        y = xla.convolve(x, kernel, stride=stride, padding=ZEROS[stride]) + bias
        return y if residual is None else y + residual

    ours = partial(conv3d, stride=stride)
    args = x, kernel, bias, residual
    expected = jax.jit(native)(*args)
    assert expected.shape == (2, 4, 6 // stride, 10 // stride, 7)
    assert relative_error(jax.jit(ours)(*args), expected) < ROUNDING_BAR
    how = {"stride": stride, "padding": ZEROS[stride], "dtype": x.dtype}
    on_gpus = jax.jit(partial(cuda.forward, **how))(x, residual, kernel, bias)
    assert relative_error(on_gpus, expected) < ROUNDING_BAR

    dy = random(2, *expected.shape)
    gradients = [jax.jit(lambda *args, f=f: jax.vjp(f, *args)[1](dy))(*args) for f in (native, ours)]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert relative_error(a, b) < ROUNDING_BAR
    for form in (xla, cuda):
        backward = jax.jit(partial(form.backward, stride=stride, padding=ZEROS[stride]))(x, kernel, dy)
        for a, b in zip(backward, gradients[0][:2], strict=True):
            assert relative_error(a, b) < ROUNDING_BAR


@pytest.mark.parametrize(
    ("shape", "taps", "channels", "strip", "with_residual"),
    [
        ((1, 5, 16, 40, 128), 3, 192, 16, True),
        ((2, 4, 20, 28, 128), 1, 128, 20, False),
        ((1, 3, 12, 600, 128), 3, 128, 6, True),  # two strips
        ((1, 4, 46, 160, 128), 3, 128, 2, False),  # a height that little divides
    ],
)
def test_with_fewer_products_it_is_the_same_convolution(shape, taps, channels, strip, with_residual):
    x, bias = random(0, *shape), random(2, channels)
    kernel = random(1, taps, 3, 3, shape[-1], channels)
    expected = xla.convolve(x, kernel, stride=1, padding=ZEROS[1]) + bias
    assert winograd.strip_rows(expected.shape, shape[-1]) == strip
    residual = random(3, *expected.shape) if with_residual else None
    expected = expected if residual is None else expected + residual

    found = jax.jit(conv3d)(x, kernel, bias, residual)
    assert relative_error(found, expected) < ROUNDING_BAR
    with jax.set_mesh(sharding.make_mesh(1, 2, 1)):
        found = jax.jit(_split_conv)(x, kernel, bias, residual)
    assert relative_error(found, expected) < ROUNDING_BAR
    narrow = [None if a is None else a.astype(jnp.bfloat16) for a in (x, kernel, bias, residual)]
    how = {"stride": 1, "padding": ZEROS[1], "dtype": jnp.float32}
    plainly = convolve_frames(cpu.tap_by_tap, narrow[0], residual, *narrow[1:3], **how)
    assert relative_error(conv3d(*narrow[:3], residual, dtype=jnp.float32), plainly) < ROUNDING_BAR

    work = count_flops(conv3d, x, kernel, bias)
    assert work.total == 2 * expected.size * kernel[..., 0].size


def _split_conv(x, *rest):
    with sharding.spatial_split(x) as x:
        return conv3d(x, *rest)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride"),
    [
        ((1, 4, 32, 32, 128), (3, 3, 3, 128, 16), 1),  # few channels
        ((1, 4, 10, 16, 128), (3, 3, 3, 128, 128), 1),  # few pixels
        ((1, 4, 33, 64, 128), (3, 3, 3, 128, 128), 1),  # odd
        ((1, 2, 64, 64, 128), (1, 3, 3, 128, 128), 2),
    ],
)
def test_where_a_plain_convolution_is_better_a_cpu_does_that(shape, kernel, stride):
    lowered = jax.jit(partial(conv3d, stride=stride)).lower(jnp.zeros(shape), jnp.zeros(kernel), jnp.zeros(kernel[-1]))
    assert lowered.as_text().count("stablehlo.convolution") == kernel[0]


@pytest.mark.parametrize(
    ("shape", "kernel", "residual"),
    [
        ((1, 4, 6, 10, 128), (3, 3, 3, 128, 128), True),
        ((2, 3, 7, 13, 256), (3, 3, 3, 256, 128), False),
        ((1, 2, 5, 33, 128), (1, 3, 3, 128, 512), True),  # more channels than go at a time
        ((1, 3, 11, 700, 128), (3, 3, 3, 128, 128), False),  # rows that only one divides, and more than one product
        ((1, 3, 4, 9, 16), (3, 3, 3, 16, 128), False),  # latents
        ((1, 3, 4, 9, 128), (3, 3, 3, 128, 3), True),  # colours
    ],
)
def test_the_kernel_for_tpus_is_the_convolution(shape, kernel, residual):
    x, kernel, bias = random(0, *shape), random(1, *kernel), random(2, kernel[-1])
    y = xla.convolve(x, kernel, stride=1, padding=ZEROS[1]) + bias
    residual = random(3, *y.shape) if residual else None
    expected = y if residual is None else y + residual
    found = tpu_kernel.convolve(x, kernel, bias, residual, interpret=True)
    assert relative_error(found, expected) < ROUNDING_BAR


BOTH, EDGES, SIDES, NEITHER = ("edges", "sides"), ("edges",), ("sides",), ()
SURROUNDED = [(5, BOTH, 2), (1, BOTH, 1), (2, EDGES, 2), (1, SIDES, 2), (2, NEITHER, 1)]
MORE_SURROUNDED = sorted(set(itertools.product([1, 2, 5], [BOTH, EDGES, SIDES, NEITHER], [1, 2])) - set(SURROUNDED))


@pytest.mark.parametrize(
    ("frames", "surrounded", "blocks"),
    [*SURROUNDED, *(pytest.param(*each, marks=pytest.mark.further) for each in MORE_SURROUNDED)],
    ids=str,
)
def test_the_kernel_for_tpus_reads_frames_rows_and_columns_from_where_they_are(frames, surrounded, blocks, monkeypatch):
    if blocks == 2:
        monkeypatch.setattr(tpu_kernel, "_CHOICES", ((1, 1, 128),))  # MiB; of twelve rows of five frames six fit
    clip, kernel, bias = random(0, 1, frames + 2, 14, 42, 128), random(1, 3, 3, 3, 128, 128), random(2, 128)
    for name, axis in (("edges", 2), ("sides", 3)):
        if name not in surrounded:
            width = [(0, 0)] * 5
            width[axis] = (1, 1)
            clip = jnp.pad(jax.lax.slice_in_dim(clip, 1, -1, axis=axis), width)
    edges = jnp.concatenate([clip[:, :, :1, 1:-1], clip[:, :, -1:, 1:-1]], 2)
    sides = jnp.concatenate([clip[:, :, :, :1], clip[:, :, :, -1:]], 3)
    around = {name: a for name, a in (("edges", edges), ("sides", sides)) if name in surrounded}
    expected = xla.convolve(clip, kernel, stride=1, padding=((0, 0), (0, 0))) + bias
    inner = clip[:, :, 1:-1, 1:-1]
    convolve = partial(tpu_kernel.convolve, kernel=kernel, bias=bias, residual=None, interpret=True)
    assert relative_error(convolve(inner[:, 2:], past=inner[:, :2], **around), expected) < ROUNDING_BAR
    assert relative_error(convolve(inner, **around), expected) < ROUNDING_BAR
    if "edges" in surrounded:  # the image ends two rows before the array: below that is what edges say
        ends = clip.at[:, :, 11].set(clip[:, :, 13])
        expected = xla.convolve(ends, kernel, stride=1, padding=((0, 0), (0, 0))) + bias
        if "sides" in surrounded:
            around["sides"] = sides.at[:, :, 11].set(sides[:, :, 13])
        found = convolve(inner[:, 2:], past=inner[:, :2], end=jnp.int32(10), **around)
        assert relative_error(found[:, :, :10], expected[:, :, :10]) < ROUNDING_BAR


def textbook(x, kernel, bias, residual):
    """Stride 1, zeros around, in float64."""
    x, kernel, bias, residual = (np.asarray(a, np.float64) for a in (x, kernel, bias, residual))
    (taps, *_), (height, width) = kernel.shape, x.shape[2:4]
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))
    frames = x.shape[1] - taps + 1
    y = bias + residual
    for t, h, w in np.ndindex(*kernel.shape[:3]):
        y = y + x[:, t : t + frames, h : h + height, w : w + width] @ kernel[t, h, w]
    return y


@pytest.mark.parametrize(("dtype", "step"), [(jnp.float32, 0), (jnp.bfloat16, 2.0**-8), (jnp.float16, 2.0**-11)])
@pytest.mark.parametrize("where", ["cpu", "cpu with fewer products", "gpu", "elsewhere"])
def test_convolutions_in_every_dtype(where, dtype, step):
    """Sums are float32, rounded once; on a GPU they come in 16 bit and are rounded once more."""
    channels = 128 if "fewer" in where else 8
    shapes = (1, 4, 16, 40, channels), (3, 3, 3, channels, channels), (channels,), (1, 2, 16, 40, channels)
    args = [random(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]
    how = {"stride": 1, "padding": ZEROS[1]}
    x, kernel, bias, residual = args
    if where == "gpu":
        f = partial(cuda.forward, **how, dtype=dtype)
        found = jax.jit(f)(x, residual, kernel, bias)
    elif where == "elsewhere":
        found = jax.jit(partial(xla.forward, **how, dtype=dtype))(x, residual, kernel, bias)
    else:
        assert (winograd.strip_rows(shapes[-1], channels) is not None) == ("fewer" in where)
        found = jax.jit(conv3d)(x, kernel, bias, residual)
    assert found.dtype == dtype
    exact = textbook(*args)
    atol = 10 * ROUNDING_BAR * exact.std()  # a sum of 3456 products in float32
    if where == "gpu":
        atol += step * np.abs(exact - np.asarray(residual, np.float64)).max()
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=step, atol=atol)


def test_the_kernel_for_tpus_refuses_float16():
    x, kernel, bias = random(0, 1, 3, 4, 8, 128), random(1, 3, 3, 3, 128, 128), random(2, 128)
    narrow = x.astype(jnp.float16), kernel.astype(jnp.float16)
    with pytest.raises(InputError, match="kernel for TPUs: it computes in bfloat16 or float32; got float16"):
        tpu_kernel.convolve(*narrow, bias, None, interpret=True)
    with pytest.raises(InputError, match="got float16"):
        tpu_kernel.convolve(x, kernel, bias, None, dtype=jnp.float16, interpret=True)
    call = jax.jit(lambda *args: conv3d(*args))
    for args, by_kernel in (((x, kernel), True), (narrow, False)):
        with compiling_for("tpu"):
            text = call.trace(*args, bias).lower(lowering_platforms=("tpu",)).as_text()
        assert (tpu_kernel.NAME in text) == by_kernel


@pytest.mark.parametrize("f", [conv3d, partial(tpu_kernel.convolve, residual=None, interpret=True)])
def test_a_wider_result_is_not_rounded_on_the_way(f):
    x, kernel, bias = (
        random(i, *s).astype(jnp.bfloat16) for i, s in enumerate(((1, 3, 4, 8, 128), (3, 3, 3, 128, 128), (128,)))
    )
    y = f(x, kernel, bias, dtype=jnp.float32)
    assert y.dtype == jnp.float32 and jnp.mean(y == y.astype(jnp.bfloat16)) < 0.1


def test_on_gpus_16_bit_sums_are_off_by_one_rounding_at_most():
    x, kernel = random(0, 1, 4, 6, 10, 64).astype(jnp.bfloat16), random(1, 3, 3, 3, 64, 32).astype(jnp.bfloat16)
    bias, residual = random(2, 32), random(3, 1, 2, 6, 10, 32)
    exact = xla.convolve(x, kernel, stride=1, padding=ZEROS[1])
    on_gpus = partial(cuda.forward, stride=1, padding=ZEROS[1], dtype=jnp.float32)
    found = jax.jit(on_gpus)(x, residual, kernel, bias) - residual - bias
    assert found.dtype == jnp.float32
    assert jnp.all(jnp.abs(found - exact) <= 2.0**-8 * jnp.abs(exact) + 1e-3)  # where the compiler does round there


def test_the_kernel_rounds_once():
    x, kernel, bias = random(0, 1, 3, 6, 10, 128), random(1, 3, 3, 3, 128, 128), random(2, 128)
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    residual = random(3, 1, 1, 4, 8, 128).astype(jnp.bfloat16)
    sum_ = xla.convolve(x, kernel, stride=1, padding=((0, 0), (0, 0))) + bias + residual.astype(jnp.float32)
    sides = jnp.concatenate([x[:, :, :, :1], x[:, :, :, -1:]], 3)
    edges = jnp.concatenate([x[:, :, :1, 1:-1], x[:, :, -1:, 1:-1]], 2)
    how = {"sides": sides, "edges": edges, "interpret": True}
    found = tpu_kernel.convolve(x[:, :, 1:-1, 1:-1], kernel, bias, residual, **how)
    assert found.dtype == jnp.bfloat16
    assert jnp.mean(found == sum_.astype(jnp.bfloat16)) > 0.999


@pytest.mark.parametrize("alone", [True, False], ids=["traced for it", "traced for all"])
@pytest.mark.parametrize(
    ("platform", "channels", "stride", "operand", "count"),
    [
        ("cpu", 128, 1, "1x6x10x128xf32", 3),
        ("tpu", 128, 1, None, 0),  # the kernel
        ("tpu", 5, 1, None, 0),
        ("tpu", 128, 2, "1x11x6x10x128xbf16", 1),
        ("cuda", 128, 1, "1x6x10x384xbf16", 1),  # taps in time as channels
        ("cuda", 128, 2, "1x6x10x384xbf16", 1),
    ],
)
def test_each_backend_gets_its_convolution(platform, channels, stride, operand, count, alone):
    x = jnp.zeros((1, 9 + 2, 6, 10, channels), jnp.bfloat16)
    kernel = jnp.zeros((3, 3, 3, channels, 128), jnp.bfloat16)
    call = jax.jit(partial(conv3d, stride=stride))
    with compiling_for(platform if alone else None):
        text = call.trace(x, kernel, jnp.zeros(128)).lower(lowering_platforms=(platform,)).as_text()
    assert re.findall(r"stablehlo\.convolution.*?: \(tensor<(\w+)>", text) == [operand] * count
    assert (tpu_kernel.NAME in text) == (platform == "tpu" and not count)
    if platform == "cuda":  # a wider result would be computed in float32
        assert set(re.findall(r"stablehlo\.convolution.*-> tensor<[\dx]+x(\w+)>", text)) == {"bf16"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (1, 1), (1, 2)])
def test_no_3d_convolution_reaches_cudnn(dtype, taps, stride):
    """Before 9.15 it is wrong in bfloat16 on large images: neither forwards nor backwards is one given to it."""
    x, kernel = jnp.zeros((1, 9 + taps - 1, 6, 10, 16), dtype), jnp.zeros((taps, 3, 3, 16, 32), dtype)

    def loss(x, kernel, bias):
        return conv3d(x, kernel, bias, stride=stride).astype(jnp.float32).sum()

    with compiling_for(None):
        step = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, kernel, jnp.zeros(32))
    ranks = {
        platform: {
            operand.count("x")
            for pair in re.findall(
                r"stablehlo\.convolution.*?: \(tensor<(\w+)>, tensor<(\w+)>\)",
                step.lower(lowering_platforms=(platform,)).as_text(),
            )
            for operand in pair
        }
        for platform in ("cuda", "rocm")
    }
    assert ranks == {"cuda": {4}, "rocm": {5}}  # that such a one would be seen


def test_an_image_sees_itself_through_every_tap():
    conv = CausalConv3d(5, 7, rngs=nnx.Rngs(0))
    image = random(0, 1, 1, 6, 10, 5)
    y, cache = conv(image, None)
    again, same = conv(image, jnp.repeat(image, 2, 1))
    assert relative_error(y, again) < ROUNDING_BAR
    np.testing.assert_array_equal(cache, same)


# Images split over devices


def test_gradients_go_back_over_the_edges():
    x, kernel, bias, residual = (
        random(0, 1, 5, 6, 8, 3),
        random(1, 3, 3, 3, 3, 4),
        random(2, 4),
        random(3, 1, 3, 6, 8, 4),
    )

    @jax.jit
    def gradients(*args):
        def loss(x, *rest):
            with sharding.spatial_split(x) as x:
                return jnp.square(conv3d(x, *rest)).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)

    expected = gradients(x, kernel, bias, residual)
    for mesh in ((1, 2, 1), (2, 2, 2)):
        with jax.set_mesh(sharding.make_mesh(*mesh)):
            for ours, theirs in zip(gradients(x, kernel, bias, residual), expected, strict=True):
                assert relative_error(ours, theirs) < ROUNDING_BAR


@pytest.mark.parametrize(
    ("height", "width", "mesh", "rows", "columns"),
    [
        (96, 170, (2, 4, 1), 8, 1),  # 768x1360
        (90, 160, (2, 4, 1), 1, 8),  # 720x1280
        (60, 90, (2, 4, 1), 4, 2),  # 480x720
        (60, 90, (1, 8, 1), 1, 1),  # one axis of eight is never cut in two
        (7, 11, (2, 2, 2), 1, 1),
    ],
)
def test_how_an_image_is_split(height, width, mesh, rows, columns):
    found = spatial_parallel._split(height, width, tuple(n for n in zip(sharding.AXES, mesh, strict=True) if n[1] > 1))
    sizes = dict(zip(sharding.AXES, mesh, strict=True))
    assert tuple(np.prod([sizes[n] for n in names], dtype=int) for names in found) == (rows, columns)
