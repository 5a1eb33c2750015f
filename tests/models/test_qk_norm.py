"""QK norm: its TPU kernel, interpreted on the CPU, and the plain form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_flax import sharding
from cogvideox_flax.nn import qk_norm
from cogvideox_flax.nn.layers import LayerNorm, RMSNorm

EPS = 1e-6
KINDS = {"layer norm": (64, True), "rms norm": (128, False)}
"""Head size, and whether the mean is subtracted."""

SIZES = [(1, 300, 4), (2, 256, 2), (2, 70, 2)]
"""Batch, tokens, heads."""


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(qk_norm, "_call", partial(qk_norm._call, interpret=True))
    monkeypatch.setattr(qk_norm.pltpu, "pack_elementwise", pack_elementwise)


def pack_elementwise(arrays, *, packed_dtype):
    """Mosaic's operation, as documented, which Pallas' interpreter lacks: the first array fills the lower halves."""
    lower, upper = (jax.lax.bitcast_convert_type(x.astype(packed_dtype), jnp.uint16) for x in arrays)
    return lower.astype(jnp.uint32) | upper.astype(jnp.uint32) << 16


def inputs(kind, size, dtype="float32"):
    """x, scale, bias, cos and sin."""
    (dim, centered), (batch, tokens, heads) = kind, size
    keys = jax.random.split(jax.random.key(0), 4)
    x = 3 * jax.random.normal(keys[0], (batch, tokens, heads * dim), dtype) + 1
    scale, bias = (jax.random.normal(key, (dim,), dtype) for key in keys[1:3])
    angle = 7 * jax.random.uniform(keys[3], (tokens, dim // 2))
    return x, scale, bias if centered else jnp.zeros_like(bias), jnp.cos(angle), jnp.sin(angle)


def exact(kind, x, scale, bias, cos, sin):
    """By complex numbers in float64."""
    x, scale, bias, cos, sin = (np.asarray(a, np.float64) for a in (x, scale, bias, cos, sin))
    y = x.reshape(*x.shape[:2], -1, scale.size)
    y = y - y.mean(-1, keepdims=True) if kind[1] else y
    y = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + EPS) * scale + bias
    turned = (y[..., ::2] + 1j * y[..., 1::2]) * (cos + 1j * sin)[:, None]
    return np.stack([turned.real, turned.imag], -1).reshape(y.shape)


def by_kernel(kind, *args):
    return qk_norm.kernel((EPS, kind[1]), *args).transpose(0, 3, 1, 2)


def plain(kind, x, scale, bias, cos, sin):
    """With the norm of a model."""
    norm = (LayerNorm if kind[1] else RMSNorm)(kind[0], eps=EPS)
    norm.scale = nnx.Param(scale)
    if kind[1]:
        norm.bias = nnx.Param(bias)
    return qk_norm.qk_norm(x, norm, (cos, sin))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_norm_and_the_rotation(kind, size, interpreted):
    args = inputs(kind, size)
    want = exact(kind, *args)
    for f in (by_kernel, plain):
        np.testing.assert_allclose(jax.jit(partial(f, kind))(*args), want, atol=2e-5)


def test_bfloat16_is_rounded_once(kind, interpreted):
    args = inputs(kind, SIZES[0], "bfloat16")
    want = exact(kind, *args)

    def error(found):
        return np.sqrt(np.square(np.asarray(found, np.float64) - want).mean())

    rounding = error(jnp.asarray(want, jnp.bfloat16))
    assert error(by_kernel(kind, *args)) < 1.05 * rounding
    assert error(plain(kind, *args)) < 2 * rounding


def gradients(f, kind, weight, *args):
    """Of x, scale and, in a layer norm, bias."""

    def total(*args):
        return (weight * f(kind, *args).astype(jnp.float32)).sum()

    return jax.jit(jax.grad(total, (0, 1, 2) if kind[1] else (0, 1)))(*args)


def test_its_gradient_is_that_of_the_plain_form(kind, interpreted):
    args = inputs(kind, (2, 150, 2))
    weight = jax.random.normal(jax.random.key(5), (2, 150, 2, kind[0]))
    found, want = (gradients(f, kind, weight, *args) for f in (by_kernel, plain))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_a_bfloat16_gradient_is_rounded_once(kind, interpreted):
    args = inputs(kind, (1, 300, 2), "bfloat16")
    weight = jax.random.normal(jax.random.key(5), (1, 300, 2, kind[0]), "bfloat16").astype(jnp.float32)
    found = gradients(by_kernel, kind, weight, *args)
    want = gradients(plain, kind, weight, *(x.astype(jnp.float32) for x in args))
    for a, b in zip(found, want, strict=True):
        assert a.dtype == jnp.bfloat16
        rounding = np.abs(b - b.astype(jnp.bfloat16).astype(jnp.float32)).max()
        assert np.abs(a.astype(jnp.float32) - b).max() < 1.05 * rounding


@pytest.mark.parametrize(
    "shape", [(2, 2, 2), *(pytest.param(mesh, marks=pytest.mark.further) for mesh in [(1, 4, 1), (8, 1, 1)])], ids=str
)
def test_every_device_has_its_own_part(kind, shape, interpreted):
    args = inputs(kind, (8, 64, 4))
    with jax.set_mesh(sharding.make_mesh(*shape)):
        got = jax.jit(partial(qk_norm.on_each_device, (EPS, kind[1])))(*args)
    np.testing.assert_allclose(got, plain(kind, *args), atol=1e-5)


def test_every_device_has_the_gradients_of_its_own_part(kind, interpreted):
    args = inputs(kind, (2, 64, 4))
    weight = jax.random.normal(jax.random.key(5), (2, 64, 4, kind[0]))
    with jax.set_mesh(sharding.make_mesh(2, 2, 2)):
        found = gradients(lambda kind, *args: qk_norm.on_each_device((EPS, kind[1]), *args), kind, weight, *args)
    for a, b in zip(found, gradients(plain, kind, weight, *args), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("dim", "heads"), [(64, 3), (48, 8), (256, 1)], ids=str)
def test_what_is_not_whole_registers_takes_the_plain_form(dim, heads):
    args = inputs((dim, True), (1, 20, heads))
    np.testing.assert_allclose(plain((dim, True), *args), exact((dim, True), *args), atol=2e-5)
