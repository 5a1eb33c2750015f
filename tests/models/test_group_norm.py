"""The norms: their numbers, gradients and memory."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_flax.nn.norms import GroupNormSiLU, SpatialNormSiLU
from tests.support.reference import ROUNDING_BAR, random, relative_error

pytestmark = pytest.mark.optimized


def naive_spatial_norm(norm, x, z):
    frames, height, width = x.shape[1:4]
    groups = x.reshape(*x.shape[:-1], norm.norm.groups, -1)
    mean, var = groups.mean((1, 2, 3, 5), keepdims=True), groups.var((1, 2, 3, 5), keepdims=True)
    x = ((groups - mean) / jnp.sqrt(var + norm.norm.eps)).reshape(x.shape)
    x = x * norm.norm.scale[...] + norm.norm.bias[...]
    z = z[:, np.r_[0, 1 + np.arange(frames - 1) * (z.shape[1] - 1) // (frames - 1)]]
    z = z[:, :, np.arange(height) * z.shape[2] // height][:, :, :, np.arange(width) * z.shape[3] // width]
    return jax.nn.silu(x * norm.y(z) + norm.b(z))


def test_modulated_norm_and_its_gradient():
    norm = SpatialNormSiLU(8, 16, groups=4, eps=1e-6, rngs=nnx.Rngs(0))
    x, z = 3 + random(0, 2, 5, 4, 6, 8), random(1, 2, 3, 2, 3, 16)
    assert relative_error(jax.jit(norm)(x, z), jax.jit(partial(naive_spatial_norm, norm))(x, z)) < ROUNDING_BAR
    gradients = jax.jit(jax.grad(lambda norm, x, z: jnp.square(norm(x, z)).sum(), (0, 1, 2)))
    expected = jax.jit(jax.grad(lambda norm, x, z: jnp.square(naive_spatial_norm(norm, x, z)).sum(), (0, 1, 2)))
    pairs = zip(*map(jax.tree.leaves, (gradients(norm, x, z), expected(norm, x, z))), strict=True)
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < 10 * ROUNDING_BAR


def test_statistics_survive_a_large_mean():
    x = np.random.default_rng(0).normal(1000, 1, (1, 3, 16, 16, 8)).astype(np.float32)
    groups = x.astype(np.float64).reshape(-1, 4, 2)
    exact = (groups - groups.mean((0, 2), keepdims=True)[..., :]) / groups.std((0, 2), keepdims=True)
    exact = exact.reshape(x.shape)
    _, a, b = GroupNormSiLU(8, groups=4, eps=0.0).affine(jnp.asarray(x))
    # E[x^2] - E[x]^2 would be off by some 10 % here
    assert relative_error(x * np.asarray(a, np.float64) + np.asarray(b, np.float64), exact) < 1e-3


@pytest.mark.parametrize(("dtype", "step"), [(jnp.bfloat16, 2.0**-8), (jnp.float16, 2.0**-11)])
@pytest.mark.parametrize("kind", ["plain", "modulated"])
def test_norms_in_16_bit_round_once(kind, dtype, step):
    """Statistics and sums are float32, so the result is off by half a step of its dtype and little more."""
    x, z = (3 + random(0, 2, 5, 4, 6, 8)).astype(dtype), random(1, 2, 3, 2, 3, 16)
    if kind == "plain":
        norm, rest = GroupNormSiLU(8, groups=4, eps=1e-6), ()
    else:
        norm, rest = SpatialNormSiLU(8, 16, groups=4, eps=1e-6, rngs=nnx.Rngs(0)), (z,)
    norm = jax.tree.map(lambda w: w.astype(dtype), norm)
    found = jax.jit(lambda norm, *args: norm(*args))(norm, x, *rest)
    assert found.dtype == dtype
    affine = norm if kind == "plain" else norm.norm
    groups = np.asarray(x, np.float64).reshape(2, 5, 4, 6, 4, 2)
    mean, var = groups.mean((1, 2, 3, 5), keepdims=True), groups.var((1, 2, 3, 5), keepdims=True)
    expected = ((groups - mean) / np.sqrt(var + 1e-6)).reshape(x.shape)
    expected = expected * np.asarray(affine.scale[...], np.float64) + np.asarray(affine.bias[...], np.float64)
    if kind == "modulated":
        wide = np.asarray(z, np.float64)[:, [0, 1, 1, 2, 2]].repeat(2, 2).repeat(2, 3)
        maps = [
            wide @ np.asarray(part.kernel[...], np.float64) + np.asarray(part.bias[...], np.float64)
            for part in (norm.y, norm.b)
        ]
        expected = expected * maps[0] + maps[1]
    expected = expected / (1 + np.exp(-expected))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=step, atol=2e-5)


@pytest.mark.parametrize("kind", ["plain", "modulated"])
def test_norm_makes_no_float32_copy_of_a_bfloat16_clip(kind):
    x, z = jax.ShapeDtypeStruct((1, 8, 64, 64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((1, 2, 8, 8, 16), jnp.float32)
    if kind == "plain":
        compiled = jax.jit(GroupNormSiLU(32, groups=8, eps=1e-6)).lower(x).compile()
    else:
        compiled = jax.jit(SpatialNormSiLU(32, 16, groups=8, eps=1e-6, rngs=nnx.Rngs(0))).lower(x, z).compile()
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == 2 * x.size
    assert memory.temp_size_in_bytes < 0.2 * 4 * x.size
