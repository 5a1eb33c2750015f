"""AdaLN: its TPU kernel, interpreted on the CPU, and the plain form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax import sharding
from cogvideox_flax.nn import adaln
from cogvideox_flax.nn.adaln import modulated_norm

EPS = 1e-5
SIZES = [(1, 300, 256), (2, 256, 384), (2, 70, 128)]
"""Batch, tokens, width: tokens that do and do not fill the kernel's last grid step."""


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(adaln, "_call", partial(adaln._call, interpret=True))


@pytest.fixture(params=[1, 2], ids=["one stream", "text and video"])
def streams(request):
    return request.param


def inputs(size, streams):
    """x, scale, shift and is_text."""
    batch, tokens, width = size
    keys = jax.random.split(jax.random.key(0), 3)
    x = 3 * jax.random.normal(keys[0], size) + jax.random.normal(keys[2], (batch, tokens, 1))
    scale, shift = (jax.random.normal(key, (batch, streams, width)) for key in keys[1:])
    return x, scale, shift, (jnp.arange(tokens) < 37)[:, None] if streams == 2 else None


def exact(x, scale, shift, is_text):
    """In float64, each stream for itself."""
    x, scale, shift = (np.asarray(a, np.float64) for a in (x, scale, shift))
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPS)
    text = 0 if is_text is None else int(is_text.sum())
    parts = [y[:, :text] * scale[:, -1:] + shift[:, -1:], y[:, text:] * scale[:, :1] + shift[:, :1]]
    return np.concatenate(parts, 1)


def by_kernel(*args, dtype="float32"):
    return adaln.kernel((EPS, jnp.dtype(dtype)), *args)


def plain(*args, dtype="float32"):
    return modulated_norm(*args, eps=EPS, dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_norm_modulated(size, streams, interpreted):
    args = inputs(size, streams)
    want = exact(*args)
    for f in (by_kernel, plain):
        np.testing.assert_allclose(jax.jit(f)(*args), want, atol=2e-5)


def test_bfloat16_is_rounded_once(streams, interpreted):
    args = inputs(SIZES[0], streams)
    want = jnp.asarray(exact(*args), jnp.bfloat16).astype(jnp.float32)
    for f in (by_kernel, plain):
        got = f(*args, dtype="bfloat16")
        assert got.dtype == jnp.bfloat16
        assert (got.astype(jnp.float32) == want).mean() > 0.999  # a float32 sum on the edge rounds either way


def gradients(f, x, scale, shift, is_text, weight):
    """Of x, scale and shift."""

    def total(*args):
        return (weight * f(*args, is_text).astype(jnp.float32)).sum()

    return jax.jit(jax.grad(total, (0, 1, 2)))(x, scale, shift)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_gradient_is_that_of_the_plain_form(streams, dtype, interpreted):
    args = inputs((2, 300, 128), streams)
    # numbers of 8 bits, so that no gradient is rounded before the kernel
    weight = jax.random.normal(jax.random.key(5), args[0].shape, "bfloat16").astype(jnp.float32)
    found = gradients(partial(by_kernel, dtype=dtype), *args, weight)
    for a, b in zip(found, gradients(plain, *args, weight), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 1), (8, 1, 1)], ids=str)
def test_every_device_has_its_own_part(shape, streams, interpreted):
    args = inputs((8, 64, 128), streams)
    with jax.set_mesh(sharding.make_mesh(*shape)):
        got = jax.jit(partial(adaln.on_each_device, (EPS, jnp.dtype("float32"))))(*args)
    np.testing.assert_allclose(got, exact(*args), atol=2e-5)


def test_every_device_has_the_gradients_of_its_own_part(streams, interpreted):
    args = inputs((4, 64, 128), streams)
    weight = jax.random.normal(jax.random.key(5), args[0].shape)
    with jax.set_mesh(sharding.make_mesh(2, 2, 2)):
        found = gradients(partial(adaln.on_each_device, (EPS, jnp.dtype("float32"))), *args, weight)
    for a, b in zip(found, gradients(plain, *args, weight), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
