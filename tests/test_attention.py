"""attend() against the textbook formula in float64, and its promise never to hold the score matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax import sharding
from cogvideox_flax.attention import attend
from cogvideox_flax.errors import InputError


def textbook(q, k, v, kv_len=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("bqnk,bsnk->bnqs", q, k) / np.sqrt(q.shape[-1])
    if kv_len is not None:
        lengths = np.broadcast_to(kv_len, q.shape[:1])
        scores = np.where(np.arange(k.shape[1]) < lengths[:, None, None, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnqs,bsnk->bqnk", p / p.sum(-1, keepdims=True), v)


def random(queries, keys, batch=2, heads=3, dim=16, scale=1.0, dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = [(batch, n, heads, dim) for n in (queries, keys, keys)]
    return [jnp.asarray(scale * random.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (300, 1), (1, 300), (1024, 1024), (1500, 2100)])
def test_exact(queries, keys):
    args = random(queries, keys)
    np.testing.assert_allclose(jax.jit(attend)(*args), textbook(*args), atol=2e-6)


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_large_logits(scale):
    args = random(130, 1300, scale=scale)
    # float32 knows a logit to a few 2^-24 of itself, which is the relative error of its probability
    q, k, v = (np.asarray(x) for x in args)
    largest = np.abs(np.einsum("bqnk,bsnk->bnqs", q, k)).max() / np.sqrt(q.shape[-1])
    np.testing.assert_allclose(attend(*args), textbook(*args), atol=largest * 2**-22 * np.abs(v).max())


def test_equal_keys_average_the_values():
    q, k, v = random(5, 1111)
    out = attend(q, jnp.ones_like(k), v)
    np.testing.assert_allclose(out, jnp.broadcast_to(v.mean(1, keepdims=True), out.shape), atol=1e-6)


@pytest.mark.parametrize("kv_len", [1, 9, 1024, 1030, [3, 1100]])
def test_keys_past_the_length_are_not_attended(kv_len):
    q, k, v = random(20, 1100)
    length = kv_len if isinstance(kv_len, int) else jnp.array(kv_len)
    expected = textbook(q, k, v, kv_len)
    np.testing.assert_allclose(attend(q, k, v, kv_len=length), expected, atol=2e-6)
    # not even if they hold nonsense
    end = kv_len if isinstance(kv_len, int) else max(kv_len)
    np.testing.assert_allclose(attend(q, k.at[:, end:].set(1e4), v, kv_len=length), expected, atol=2e-6)


def test_lengths_beyond_the_keys_are_clipped():
    q, k, _ = random(3, 1100)
    out = attend(q, k, jnp.ones_like(k), kv_len=jnp.array([1300, 0]))  # the kernel's own padding is never attended
    np.testing.assert_allclose(out, 1, atol=1e-6)


def test_bfloat16_rounds_only_inputs_and_probabilities():
    args = random(200, 2100, dtype=jnp.bfloat16)
    out = attend(*args)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), textbook(*args), atol=0.004, rtol=2**-8)


def test_never_holds_the_score_matrix():
    shape = jax.ShapeDtypeStruct((1, 17776, 48, 64), jnp.float32)
    memory = jax.jit(attend).lower(shape, shape, shape).compile().memory_analysis()
    scores = 48 * 17776**2 * 4
    copies = 5 * 17776 * 48 * 64 * 4  # q, k, v and the result by heads, and one to spare
    assert memory.temp_size_in_bytes < copies < scores / 30


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2)])
def test_same_on_a_mesh(mesh):
    q, k, v = random(37, 37, heads=4)
    with jax.set_mesh(sharding.make_mesh(*mesh)):
        out = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=jnp.array([37, 20])))(q, k, v)
    np.testing.assert_allclose(out, textbook(q, k, v, [37, 20]), atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "magic"}, "known are auto, xla"),
        ({"interpret": True}, "needs a Pallas backend"),
        ({"kv_len": 0}, "between 1 and"),
        ({"kv_len": 8}, "between 1 and"),
        ({"kv_len": jnp.array([1, 2, 3])}, "one int per batch element"),
        ({"v": jnp.zeros((2, 6, 3, 16))}, "expects q"),
        ({"k": jnp.zeros((2, 7, 3, 16), jnp.bfloat16)}, "one dtype"),
    ],
)
def test_refuses(change, message):
    q, k, v = random(7, 7)
    with pytest.raises(InputError, match=message):
        attend(**({"q": q, "k": k, "v": v} | change))


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    q, k, v = random(8, 8, heads=3)
    with jax.set_mesh(sharding.make_mesh(1, 1, 2)), pytest.raises(InputError, match=r"3 does not divide .* size 2"):
        attend(q, k, v)


@pytest.mark.parametrize("kv_len", [7, [3, 300]])
def test_keys_past_kv_len_of_a_short_sequence_are_never_attended(kv_len):
    q, k, v = random(20, 300)
    lengths = np.broadcast_to(kv_len, 2)
    poisoned = jnp.arange(300)[None, :, None, None] >= lengths[:, None, None, None]
    k, v = jnp.where(poisoned, 50.0, k), jnp.where(poisoned, 1e4, v)
    length = kv_len if isinstance(kv_len, int) else jnp.asarray(kv_len)
    np.testing.assert_allclose(attend(q, k, v, kv_len=length), textbook(q, k, v, kv_len), atol=2e-5)
