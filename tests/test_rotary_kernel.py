"""The TPU kernel of RMS norm and rotation, interpreted on the CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax import sharding
from cogvideox_flax.nn import rotary_kernel as kernel

EPS = 1e-6


def inputs(batch, tokens, heads, dtype="float32", dim=kernel.LANES):
    """x, scale, cos and sin."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = 3 * jax.random.normal(keys[0], (batch, tokens, heads * dim), dtype)
    angle = 7 * jax.random.uniform(keys[2], (tokens, dim // 2))
    return x, jax.random.normal(keys[1], (dim,), dtype), jnp.cos(angle), jnp.sin(angle)


def exact(x, scale, cos, sin):
    """By complex numbers in float64."""
    x, scale, cos, sin = (np.asarray(a, np.float64) for a in (x, scale, cos, sin))
    y = x.reshape(*x.shape[:2], -1, scale.size)
    y = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + EPS) * scale
    first, second = np.split(y, 2, -1)
    turned = (first + 1j * second) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


SIZES = [(1, 300, 3), (2, 256, 2), (2, 70, 1)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_norm_and_the_rotation(size):
    args = inputs(*size)
    got = kernel.call(EPS, *args, interpret=True).swapaxes(1, 2)
    assert got.shape == (*size, kernel.LANES)
    np.testing.assert_allclose(got, exact(*args), atol=2e-5)


@pytest.mark.parametrize("size", SIZES[:1], ids=str)
def test_bfloat16_is_rounded_once(size):
    args = inputs(*size, "bfloat16")
    want = exact(*args)

    def error(found):
        return np.sqrt(np.square(np.asarray(found, np.float64) - want).mean())

    rounding = error(jnp.asarray(want, jnp.bfloat16))
    assert error(kernel.call(EPS, *args, interpret=True).swapaxes(1, 2)) < 1.05 * rounding
    assert rounding < error(kernel.norm_and_rotate(args[0], args[1], args[2:], EPS)) < 2 * rounding


def test_its_gradient_is_that_of_the_plain_form(monkeypatch):
    monkeypatch.setattr(kernel, "call", partial(kernel.call, interpret=True))
    args = inputs(1, 40, 2)
    weight = jax.random.normal(jax.random.key(3), (1, 40, 2, kernel.LANES))

    def loss(f, *args):
        return (weight * f(*args)).sum()

    def by_kernel(*args):
        return kernel.kernel(EPS, *args).swapaxes(1, 2)

    def plain(x, scale, *rotary):
        return kernel.norm_and_rotate(x, scale, rotary, EPS)

    found, want = (jax.grad(partial(loss, f), (0, 1, 2, 3))(*args) for f in (by_kernel, plain))
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 1), (8, 1, 1)], ids=str)
def test_every_device_has_its_own_part(shape, monkeypatch):
    monkeypatch.setattr(kernel, "call", partial(kernel.call, interpret=True))
    x, scale, *rotary = inputs(8, 64, 2)
    want = kernel.norm_and_rotate(x, scale, rotary, EPS)
    with jax.set_mesh(sharding.make_mesh(*shape)):
        got = jax.jit(partial(kernel.on_each_device, EPS))(x, scale, *rotary)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_other_head_sizes_take_the_plain_form():
    args = inputs(1, 20, 2, dim=64)
    got = kernel.norm_and_rotate(args[0], args[1], args[2:], EPS)
    np.testing.assert_allclose(got, exact(*args), atol=2e-5)
