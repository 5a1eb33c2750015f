"""The products of adapted linear maps, in both forms, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cogvideox_flax.lora import LoRALinear
from cogvideox_flax.nn.layers import Linear
from cogvideox_flax.nn.quantized import quantize_frozen

WIDTH, OUT, RANK = 48, 64, 4


class Owner(nnx.Module):
    """A module with one part."""

    def __init__(self, part):
        self.part = part


def adapted(kind=None):
    """One layer of a map with an adapter."""
    random = np.random.default_rng(0)
    linear = jax.vmap(lambda key: Linear(WIDTH, OUT, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 1))
    linear.bias[...] = jnp.asarray(random.normal(size=(1, OUT)), jnp.float32)
    if kind is not None:
        linear = quantize_frozen(Owner(Owner(linear)), ["part.part"], kind).part.part
    a, b = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((1, WIDTH, RANK), (1, RANK, OUT)))
    return jax.tree.map(lambda x: x[0], LoRALinear(linear, a / 8, b / 8, 6.0))


def rows(seed, width):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 300, width)), jnp.float32)


def gradients(form, x, a, b, weight):
    """Of x, a and b."""
    return jax.grad(lambda x, a, b: (weight * form(x, a, b)).sum(), (0, 1, 2))(x, a, b)


def relative_error(found, exact):
    return float(jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))


@pytest.mark.parametrize("kind", [None, "int8", "float8"])
def test_both_forms_are_the_map_of_the_sum_of_the_weights(kind):
    """In float32, values and gradients; weights of 8 bits are those that they stand for."""
    lora = adapted(kind)
    base, a, b, x, weight = lora.base, lora.a[...], lora.b[...], rows(1, WIDTH), rows(2, OUT)
    kernel = base.kernel[...].astype(jnp.float32) * (1 if kind is None else base.scale[...])

    def exact(x, a, b):
        return jnp.matmul(x, kernel + lora.scale * jnp.matmul(a, b, precision="highest"), precision="highest")

    def form(name):
        return lambda x, a, b: getattr(LoRALinear(base, a, b, lora.alpha), name)(x)

    def results(form):
        return form(x, a, b), *gradients(form, x, a, b, weight)

    names = ("_two_products", "_one_product", "__call__")
    (value, *slopes), found = jax.jit(lambda: (results(exact), [results(form(name)) for name in names]))()
    for name, each in zip(names, found, strict=True):
        assert max(map(relative_error, each, (value + base.bias[...], *slopes))) < 2e-6, name


@pytest.mark.parametrize("form", ["_two_products", "_one_product"])
def test_gradients_of_float32_adapters_are_not_rounded(form):
    """Beside bfloat16, they are nearer to those of float32 than gradients of rounded adapters."""
    lora = adapted()
    x, weight = rows(1, WIDTH).astype(jnp.bfloat16), rows(2, OUT).astype(jnp.bfloat16)
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), lora.base)

    def call(base):
        return lambda x, a, b: getattr(LoRALinear(base, a, b, lora.alpha), form)(x)

    halves = lora.a[...], lora.b[...]
    rounded = tuple(half.astype(jnp.bfloat16) for half in halves)

    def results():
        exact = gradients(call(lora.base), x.astype(jnp.float32), *halves, weight.astype(jnp.float32))
        return exact, gradients(call(narrow), x, *halves, weight), gradients(call(narrow), x, *rounded, weight)

    exact, found, before = jax.jit(results)()
    assert [g.dtype for g in found] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for ours, theirs, expected in zip(found[1:], before[1:], exact[1:], strict=True):
        assert 0 < relative_error(ours, expected) < relative_error(theirs, expected) < 2**-7
