"""attend() against the textbook formula in float64, and its promise never to hold the score matrix."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import stock_attention
from cogvideox_flax import sharding
from cogvideox_flax.attention import TileSizes, attend, cpu, splash, splash_backward, triton, xla
from cogvideox_flax.attention.gradient import Static
from cogvideox_flax.attention.tile_lists import TileLists
from cogvideox_flax.attention.tile_sizes import choose_tile_sizes
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.plan import gpu
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.sharding.sequence_parallel import ulysses_group

pytestmark = pytest.mark.optimized


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


jitted_attend = jax.jit(attend)


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (7, 7), (300, 1), (1, 300), (600, 7), (1024, 1024), (1025, 1025), (1500, 2100)]
)
def test_exact(queries, keys):
    args = random(queries, keys)
    np.testing.assert_allclose(jitted_attend(*args), textbook(*args), atol=2e-6)


@cache
def in_float32(form):
    return jax.jit(partial(form, dtype=jnp.float32))


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (300, 1), (1025, 1500), (60, 2100)])
@pytest.mark.parametrize("kv_len", [None, [1, 1], [1, 1200]])
def test_form_for_cpus_is_that_for_others(queries, keys, kv_len, monkeypatch):
    """Both for lengths of any block, on whatever the test runs."""
    monkeypatch.setattr(cpu, "TILE", 2**18)
    lengths = None if kv_len is None else jnp.minimum(jnp.asarray(kv_len), keys)
    args = *random(queries, keys), lengths
    out, log_sum_exp = in_float32(cpu.attend)(*args)
    expected, expected_lse = in_float32(xla.tiled)(*args)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(log_sum_exp, expected_lse, atol=2e-5)
    np.testing.assert_allclose(out, textbook(*args[:3], kv_len and [min(n, keys) for n in kv_len]), atol=2e-6)


@cache
def whole(form):
    """All keys, in the dtype of the queries."""
    return jax.jit(lambda q, k, v: form(q, k, v, None, dtype=q.dtype))


@cache
def gradients(form):
    """Of the weighted sum of the result, in q, k and v."""
    return jax.jit(lambda weight, *args: jax.grad(lambda *args: (weight * form(*args)).sum(), (0, 1, 2))(*args))


@pytest.mark.parametrize("above", [0, 30, 55, 65, 100, 127, 150, 3000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_scores_far_below_their_bound(above, dtype):
    """In powers of two: up to where the sums relative to it, and their reciprocals, are too small for float32."""
    q, k, v = random(200, 1300, batch=1, heads=2, dim=64)
    # across all else, so that no score has it and the bound of all has
    q, k = q.at[..., 0].set((8 * above * np.log(2)) ** 0.5).at[..., 1].set(0), k.at[..., 0].set(0)
    k = k.at[..., 1].set((8 * above * np.log(2)) ** 0.5)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    expected = textbook(q, k, v)
    exact = {"atol": 5e-6} if dtype == jnp.float32 else {"atol": 0.004, "rtol": 2**-8}
    out, log_sum_exp = whole(cpu.attend)(q, k, v)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, **exact)
    expected_lse = whole(xla.tiled)(q, k, v)[1]
    # each term of bfloat16's sums is rounded, as in the products that the sums divide
    np.testing.assert_allclose(log_sum_exp, expected_lse, atol=np.log2(1 + 2**-8) if dtype == jnp.bfloat16 else 3e-5)
    if dtype == jnp.float16:
        return
    scale = random(200, 1, batch=1, heads=2, dim=64)[0]
    found = gradients(xla.attend)(scale, q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    dense = gradients(plainly)(scale, *wide)
    rounding = 1e-4 if dtype == jnp.float32 else 2**-6
    for a, b in zip(found, dense, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=rounding * float(jnp.abs(b).max()))


def test_powers_of_two_in_bfloat16():
    x = np.linspace(-126, 2, 100_001, dtype=np.float32)
    found = np.asarray(jax.jit(cpu._exp2_bfloat16)(x), np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert np.abs(found / expected - 1).max() < 2**-8 + 5e-5
    assert (found == expected.astype(jnp.bfloat16)).mean() > 0.985  # all but those that lie between two numbers
    ends = jnp.asarray([-127, -127.5, -3e38, -np.inf, np.nan], jnp.float32)
    np.testing.assert_array_equal(cpu._exp2_bfloat16(ends).astype(jnp.float32), [0, 0, 0, 0, np.nan])


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


@pytest.mark.parametrize("rise", [1.0, 30.0, 3000.0])
@pytest.mark.parametrize("kv_len", [None, 1250])
def test_later_keys_that_score_far_higher(rise, kv_len):
    """Where sums relative to the first keys would overflow."""
    q, k, v = random(600, 1300, batch=1, heads=1, dim=64)
    q = jnp.abs(q)
    k = jnp.abs(k) * jnp.where(jnp.arange(1300) < 900, jnp.arange(1300) / 900, rise)[:, None, None]
    largest = np.abs(np.einsum("bqnk,bsnk->bnqs", q, k)).max() / 8
    first = np.einsum("bqnk,bsnk->bnqs", q, k[:, :500]).max(-1).min() / 8
    assert (largest - first > 128) == (rise > 1)  # more than float32 holds
    expected = textbook(q, k, v, kv_len)
    found = jitted_attend(q, k, v, kv_len=None if kv_len is None else jnp.array([kv_len]))
    np.testing.assert_allclose(found, expected, atol=largest * 2**-21 * np.abs(v).max())


@pytest.mark.parametrize("excess", [0, 50, 62, 80, 126.5, 127.5, 260])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_two_later_keys_far_above_the_first(excess, dtype):
    """In powers of two: up to those whose sums, or the sums' reciprocals, float32 does not hold."""
    q, k, v = random(600, 1300, batch=1, heads=1, dim=64, scale=0.1)
    q = q.at[..., 0].set(8.0)
    k = k.at[..., 0].set(0.0).at[0, 1100:1102, 0, 0].set(excess * np.log(2))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    expected = textbook(q, k, v)
    exact = {"atol": 2e-5, "rtol": 2e-5} if dtype == jnp.float32 else {"atol": 4e-3, "rtol": 2**-7}
    np.testing.assert_allclose(jitted_attend(q, k, v).astype(jnp.float32), expected, **exact)
    if dtype == jnp.float32:
        weight = random(600, 1, batch=1, heads=1, dim=64)[0]
        found = gradients(xla.attend)(weight, q, k, v)
        dense = gradients(plainly)(weight, q, k, v)
        for a, b in zip(found, dense, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


def plainly(q, k, v):
    scores = jnp.einsum("bqnk,bsnk->bnqs", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bnqs,bsnk->bqnk", jax.nn.softmax(scores), v)


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


def listed(q, k, v, *_, dtype):
    """Each tile of queries attends to the first three tiles of keys."""
    batch, tokens, heads, _ = q.shape
    n = tokens // 128
    lists = TileLists(jnp.broadcast_to(jnp.arange(3), (batch, heads, n, 3)), jnp.full((batch, heads, n), 3))
    return (xla.attend_to_listed(128, q, k, v, lists, jnp.full(batch, k.shape[1])),)


@pytest.mark.parametrize("tokens", [17_792, 45_184])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("form", ["tiled", "cpu", "listed", "first", "splash", "triton"])
def test_the_gradient_holds_no_scores(form, dtype, tokens):
    """What it keeps of the forward pass is at most six times the queries."""
    of_lists = {"listed": listed, "first": partial(xla.tiled, share=0.5)}
    run, shape = (FORMS | of_lists)[form], jax.ShapeDtypeStruct((1, tokens, 2, 64), dtype)
    length = jnp.int32(tokens) if form == "first" else None
    f = lambda *args: jax.vjp(lambda *qkv: run(*qkv, length, dtype=dtype), *args)[1]  # noqa: E731
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(f, shape, shape, shape)))
    assert kept <= 6 * shape.size * shape.dtype.itemsize


@pytest.mark.parametrize("form", ["tiled", "cpu", "listed"])
def test_the_gradient_that_recomputes_is_that_which_does_not(form, monkeypatch):
    monkeypatch.setattr(cpu, "TILE", 2**18)
    q, k, v = random(1280, 2304, batch=1, heads=2, dim=32)

    def gradient():
        run = lambda *qkv: (FORMS | {"listed": listed})[form](*qkv, None, dtype=jnp.float32)[0]  # noqa: E731
        return jax.jit(jax.grad(lambda *qkv: (run(*qkv) * jnp.arange(32)).sum(), (0, 1, 2)))(q, k, v)

    found = gradient()
    monkeypatch.setattr(jax, "checkpoint", lambda f, **_: f)
    # on a CPU, XLA fuses what is recomputed with what it is for, and rounds in other places
    rounding = 1e-6 if form == "cpu" else 1e-7
    for a, b in zip(found, gradient(), strict=True):
        np.testing.assert_allclose(a, b, atol=rounding * float(jnp.abs(b).max()))


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 2)])
def test_same_on_a_mesh(mesh):
    q, k, v = random(37, 37, heads=4)
    with jax.set_mesh(sharding.make_mesh(*mesh)):
        out = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=jnp.array([37, 20])))(q, k, v)
    np.testing.assert_allclose(out, textbook(q, k, v, [37, 20]), atol=2e-6)


@pytest.mark.parametrize(
    ("mesh", "heads"), [((1, 2, 1), 4), ((1, 4, 1), 6), ((1, 4, 1), 3), ((1, 4, 1), 11), ((1, 1, 2), 4), ((2, 2, 2), 4)]
)
@pytest.mark.parametrize("kv_len", [None, [700, 250]])
def test_long_sequences_on_a_mesh(mesh, heads, kv_len):
    """More than are attended to at once: heads that divide, rings of groups and of devices, and heads of zeros."""
    assert (ulysses_group(heads // mesh[2], mesh[1]) < mesh[1]) == (heads in (6, 3))
    args = random(700, 700, heads=heads)
    lengths = jnp.array(kv_len) if isinstance(kv_len, list) else kv_len
    with jax.set_mesh(sharding.make_mesh(*mesh)):
        found = jax.jit(lambda q, k, v: attend(q, k, v, kv_len=lengths))(*args)
    np.testing.assert_allclose(found, textbook(*args, kv_len), atol=2e-6)


@pytest.mark.parametrize("heads", [2, 6, 10])
def test_many_tokens_come_back_some_heads_at_a_time(heads):
    """One head, three and five on each device."""
    args = random(2100, 2100, heads=heads)
    with jax.set_mesh(sharding.make_mesh(1, 2, 1)):
        compiled = jax.jit(partial(attend, kv_len=2050)).lower(*args).compile()
    assert compiled.as_text().count(" all-to-all(") == 3 + min(heads // 2, 4)
    np.testing.assert_allclose(compiled(*args), textbook(*args, 2050), atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "magic"}, "known are auto, xla, splash, cudnn"),
        ({"interpret": True}, "needs a Pallas backend"),
        ({"tile_sizes": TileSizes(128, 128, 128, 128)}, "tile_sizes are of backend 'splash'"),
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


# --- the Pallas kernels, interpreted

SMALL = TileSizes(q=128, kv=512, chunk=256, slice=128)


def interpreted(q, k, v, kv_len=None, backend="splash", **options):
    options = {"tile_sizes": SMALL} | options if backend == "splash" else options
    lengths = None if kv_len is None else jnp.broadcast_to(jnp.asarray(kv_len), q.shape[:1])
    return interpreted_program(backend, tuple(options.items()), splash._modes)(q, k, v, lengths)


@cache
def interpreted_program(backend, options, modes):
    """modes: what `splash._modes` is, which tests replace."""
    return jax.jit(
        lambda q, k, v, kv_len: attend(q, k, v, kv_len=kv_len, backend=backend, interpret=True, **dict(options))
    )


@pytest.mark.parametrize("backend", ["splash", "triton"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (130, 1), (1, 300), (256, 1024), (300, 1100)])
def test_kernel_is_exact(backend, queries, keys):
    args = random(queries, keys, batch=1, heads=2, dim=64)
    np.testing.assert_allclose(interpreted(*args, backend=backend), textbook(*args), atol=5e-6)


@pytest.mark.parametrize("backend", ["splash", "triton"])
@pytest.mark.parametrize("kv_len", [1, 128, 511, 513, [1, 700], [640, 512]])
def test_kernel_never_attends_past_the_length(backend, kv_len):
    q, k, v = random(140, 700, heads=1, dim=64)
    end = np.broadcast_to(kv_len, 2)
    past = jnp.arange(700)[None, :, None, None] >= end[:, None, None, None]
    k, v = jnp.where(past, 30.0, k), jnp.where(past, 1e4, v)
    np.testing.assert_allclose(interpreted(q, k, v, kv_len, backend), textbook(q, k, v, kv_len), atol=5e-6)


@pytest.mark.parametrize("kv_len", [None, [700, 130]])
def test_the_kernel_of_the_benchmark_computes_the_same(kv_len):
    q, k, v = random(140, 700, heads=1, dim=64)
    lengths = None if kv_len is None else jnp.array(kv_len)
    found = stock_attention.attend(q, k, v, lengths, interpret=True)
    np.testing.assert_allclose(found, textbook(q, k, v, kv_len), atol=5e-6)


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_kernel_with_and_without_running_maximum(scale):
    """Small scores run without, large ones would overflow: both kinds of head in one call."""
    q, k, v = random(200, 600, batch=1, heads=2, dim=64)
    q = q.at[:, :, 1].multiply(scale)
    k = k.at[:, :, 1].multiply(scale)
    bound = np.linalg.norm(q, axis=-1).max(1) * np.linalg.norm(k, axis=-1).max(1) * np.log2(np.e) / 8
    assert (bound <= splash.BOUND).tolist() == [[True, scale < 1]]
    largest = np.abs(np.einsum("bqnk,bsnk->bnqs", q, k)).max() / 8
    atol = max(5e-6, largest * 2**-21 * np.abs(v).max())
    np.testing.assert_allclose(interpreted(q, k, v), textbook(q, k, v), atol=atol)


def test_kernel_at_the_bound():
    """Scores as large and as small as heads without a running maximum may have."""
    q, k, v = random(128, 512, batch=1, heads=1, dim=64)
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = jnp.where(jnp.arange(512)[:, None, None] % 2 == 0, q[:, :1], -q[:, :1]).astype(jnp.float32)
    q = jnp.where(jnp.arange(128)[:, None, None] % 2 == 0, q[:, :1], -q[:, :1]) * splash.BOUND * 0.999 * np.log(2) * 8
    np.testing.assert_allclose(interpreted(q, k, v), textbook(q, k, v), atol=2e-4)


def test_kernel_of_equal_keys_averages_the_values():
    q, k, v = random(5, 700, heads=1, dim=64)
    out = interpreted(q, jnp.ones_like(k), v)
    np.testing.assert_allclose(out, jnp.broadcast_to(v.mean(1, keepdims=True), out.shape), atol=2e-6)


@pytest.mark.parametrize("backend", ["splash", "triton"])
@pytest.mark.parametrize("dim", [48, 64, 128])
def test_kernel_in_bfloat16(backend, dim):
    args = random(200, 700, batch=1, heads=2, dim=dim, dtype=jnp.bfloat16)
    out = interpreted(*args, backend=backend)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), textbook(*args), atol=0.006, rtol=2**-7)


def test_kernel_gradient_is_that_of_the_formula():
    q, k, v = random(130, 300, batch=1, heads=1, dim=64)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def gradient(backend, **options):
        return jax.grad(lambda args: (weight * attend(*args, backend=backend, **options)).sum())((q, k, v))

    expected = gradient("xla")
    for found in (gradient("splash", interpret=True, tile_sizes=SMALL), gradient("triton", interpret=True)):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_kernel_reads_some_heads_of_all_keys(batch):
    """Heads 1 and 2 of 4, the first 300 of 400 keys, and their gradient."""
    q, k, v = random(130, 400, batch=batch, heads=4, dim=64)
    q, v = q[:, :, 1:3], v[:, :300, 1:3]
    k = k.at[:, 300:].set(1e30)
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)
    kernel = partial(splash.attend, first_head=1, interpret=True, tile_sizes=SMALL)

    def plain(q, k, v):
        return xla.attend(q, k[:, :300, 1:3], v, None)

    found, wanted = (
        jax.value_and_grad(lambda *args, f=f: (weight * f(*args)).sum(), (0, 1, 2))(q, k, v) for f in (kernel, plain)
    )
    np.testing.assert_allclose(kernel(q, k, v), plain(q, k, v), atol=5e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize(
    ("dim", "dtype", "calls"),
    [(64, jnp.float32, 3), (128, jnp.float32, 1), (64, jnp.bfloat16, 1), (128, jnp.bfloat16, 3)],
)
def test_the_kernel_of_the_gradient(dim, dtype, calls, monkeypatch):
    """Of the result and of log_sum_exp, for heads 1 and 2 of 3 and the first 690 of 700 keys: whole blocks of keys, one
    in part and one that is not attended; blocks of four pieces; queries in one call and in several. Keys and values
    that are not attended may be NaN."""
    for name, size in {"QUERIES": 256, "FLOAT32_QUERIES": 256, "KEYS": 256, "PIECE": 128}.items():
        monkeypatch.setattr(splash_backward, name, size)
    q, k, v = random(650, 700, heads=3, dim=dim, dtype=dtype)
    q, v = q[:, :, 1:], v[:, :690, 1:]
    lengths = jnp.array([690, 300])
    weights, lse_weights = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(1).normal(size=(2, *q.shape)))
    weights = weights, lse_weights[..., 0].swapaxes(1, 2)
    static = Static(SMALL, interpret=True, with_lse=True, dtype=jnp.float32, first_head=1)
    choose = splash_backward.Blocks.choose
    assert choose(650, 690, dim, dtype) == splash_backward.Blocks(256, 256, 768, 1)
    in_calls = splash_backward.Blocks(256, 256, 768 // calls, calls)
    monkeypatch.setattr(splash_backward.Blocks, "choose", lambda *_: in_calls)

    def plain(q, k, v):
        k = k[:, :690, 1:]
        scores = jnp.einsum("bqnk,bsnk->bnqs", q, k) / np.sqrt(dim)
        scores = jnp.where(jnp.arange(690) < lengths[:, None, None, None], scores, -jnp.inf)
        return jnp.einsum("bnqs,bsnk->bqnk", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, -1) / np.log(2)

    @jax.jit
    def found(q, k, v):
        q, k, v, *saved = splash._forward(static, q, k, v, lengths)[1]
        attended = (jnp.arange(700) < lengths[:, None])[..., None, None]
        k, v = jnp.where(attended, k, jnp.nan), jnp.where(attended[:, :690], v, jnp.nan)
        return splash._backward(static, (q, k, v, *saved), weights)[:3]

    expected = jax.vjp(plain, *(x.astype(jnp.float32) for x in (q, k, v)))[1](weights)
    for a, b in zip(found(q, k, v), expected, strict=True):
        assert a.dtype == dtype
        rounding = 2**-7 if dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=rounding * float(jnp.abs(b).max()))


def test_blocks_of_the_gradient_fit_fast_memory():
    choose = splash_backward.Blocks.choose
    assert choose(45_106, 45_106, 64, jnp.bfloat16).calls == 1
    assert choose(112_856, 112_856, 128, jnp.bfloat16).calls == 4
    for tokens, dim, dtype in ((1, 48, jnp.float32), (17_776, 64, jnp.float32), (500_000, 128, jnp.float32)):
        blocks = choose(tokens, tokens, dim, dtype)
        assert tokens <= blocks.calls * blocks.queries < tokens + blocks.q * blocks.calls
        assert blocks.queries * 3 * dim * jnp.dtype(dtype).itemsize < splash_backward.VMEM


@pytest.mark.parametrize("power", [14, 57])
def test_the_kernel_of_the_gradient_at_large_scores(power):
    """Where a score differs by far more than 1 between two products of the same numbers."""
    q, k, v = random(140, 600, batch=1, heads=1, dim=64)
    q, k = q * 2.0**power, k * 2.0**power
    kernel = partial(splash.attend, tile_sizes=SMALL, interpret=True)
    assert all(jnp.isfinite(x).all() for x in jax.jit(jax.grad(lambda *args: kernel(*args).sum(), (0, 1, 2)))(q, k, v))


def test_kernels_return_log_sum_exp():
    q, k, v = random(130, 300, heads=2, dim=48)
    lengths = jnp.array([300, 70])
    expected = xla.attend_with_lse(q, k, v, lengths)
    for found in (
        splash.attend_with_lse(q, k, v, lengths, tile_sizes=SMALL, interpret=True),
        triton.attend_with_lse(q, k, v, lengths, interpret=True),
    ):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)


def test_tile_sizes_are_checked_and_fit_every_length():
    for tokens in (1, 600, 17776, 39826, 45106, 180_000):
        for dim in (48, 64, 128):
            for dtype in (jnp.bfloat16, jnp.float32):
                chosen = choose_tile_sizes(tokens, tokens, dim, dtype)
                chosen.check(tokens, dim, dtype)
                assert chosen.q < tokens + 128 and chosen.slice < tokens + 128
    with pytest.raises(InputError, match="slice must divide chunk"):
        TileSizes(128, 512, 300, 128).check(10**5, 64, jnp.bfloat16)
    with pytest.raises(InputError, match="multiples of 128"):
        TileSizes(100, 512, 256, 128).check(10**5, 64, jnp.bfloat16)
    with pytest.raises(InputError, match=r"needs about \d+ MiB .* head size 64; 96 MiB is the most"):
        TileSizes(32768, 65536, 4096, 256).check(10**5, 64, jnp.bfloat16)


@pytest.mark.parametrize("rise", [30.0, 300.0, 3000.0])
def test_kernel_when_later_keys_score_far_higher(rise):
    """Scores relative to the first keys' grow past what is scaled down, and past what float32 holds."""
    q, k, v = random(128, 1300, batch=1, heads=1, dim=64)
    q = jnp.abs(q)
    k = jnp.abs(k) * jnp.where(jnp.arange(1300) < 900, jnp.arange(1300) / 900, rise)[:, None, None]
    largest = np.abs(np.einsum("bqnk,bsnk->bnqs", q, k)).max() / 8
    assert largest > splash.BOUND
    np.testing.assert_allclose(interpreted(q, k, v), textbook(q, k, v), atol=largest * 2**-21 * np.abs(v).max())


def test_a_last_narrow_block_of_queries():
    assert splash.query_parts(45106, 1536) == [(44544, 1536), (562, 640)]
    assert splash.query_parts(1500, 1536) == [(1500, 1536)] and splash.query_parts(300, 1536) == [(300, 384)]
    assert splash.query_parts(3072, 1536) == [(3072, 1536)] and splash.query_parts(3000, 1536) == [(3000, 1536)]
    q, k, v = random(700, 300, batch=1, heads=1, dim=64)
    sizes = TileSizes(q=512, kv=384, chunk=256, slice=128)
    np.testing.assert_allclose(interpreted(q, k, v, tile_sizes=sizes), textbook(q, k, v), atol=5e-6)


# --- NVIDIA GPUs ---


@pytest.fixture
def with_cudnn(monkeypatch):
    """Lowers for an NVIDIA GPU that is not there."""
    pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    for module, name, answer in gpu.answers():
        monkeypatch.setattr(module, name, answer)

    def lowered(*args, **options):
        with compiling_for(None):
            return jax.jit(partial(attend, **options)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    return lowered


@pytest.mark.parametrize(("kv_len", "mask"), [(None, "NO_MASK"), (1000, "NO_MASK"), ((3, 1000), "PADDING")])
def test_auto_is_cudnn_on_an_nvidia_gpu(with_cudnn, kv_len, mask):
    length = jnp.array(kv_len) if isinstance(kv_len, tuple) else kv_len
    text = with_cudnn(*random(600, 1030, dim=64, dtype=jnp.bfloat16), kv_len=length)
    assert "__cudnn$fmhaSoftmax" in text
    assert f"mask_type\\22: \\22{mask}\\22" in text


def test_cudnn_is_left_alone_where_it_would_not_be_exact_or_not_worth_it(with_cudnn):
    assert "__cudnn$" not in with_cudnn(*random(600, 1030, dim=64))  # float32
    assert "__cudnn$" not in with_cudnn(*random(100, 104, dim=64, dtype=jnp.bfloat16))


def test_what_cudnn_does_not_serve_is_our_kernel_on_an_nvidia_gpu(with_cudnn):
    assert triton.NAME in with_cudnn(*random(600, 1030, dim=20, dtype=jnp.bfloat16))
    assert triton.NAME not in with_cudnn(*random(600, 1030, dim=20))  # float32


def test_a_jax_without_triton_has_the_plain_form(with_cudnn, monkeypatch):
    monkeypatch.setattr(triton, "plgpu", None)
    assert triton.NAME not in with_cudnn(*random(600, 1030, dim=20, dtype=jnp.bfloat16))
    for interpret in (False, True):
        with pytest.raises(InputError, match=r"compiles no Pallas kernels with Triton\. Take 'auto'"):
            attend(*random(8, 8), backend="triton", interpret=interpret)


@pytest.mark.parametrize(("dim", "ours"), [(64, False), (20, True)])
def test_rings_on_nvidia_gpus_are_where_cudnn_does_not_serve(with_cudnn, dim, ours):
    with jax.set_mesh(sharding.make_mesh(1, 4, 1)):  # 6 heads: 2 groups of 2 devices
        text = with_cudnn(*random(4096, 4096, batch=1, heads=6, dim=dim, dtype=jnp.bfloat16))
    assert (triton.NAME in text, "__cudnn$fmhaSoftmax" in text) == (ours, not ours)
    assert ("collective_permute" in text) == ours


@pytest.mark.parametrize(
    ("dim", "dtype", "message"),
    [
        (64, jnp.float32, "computes in bfloat16 or float16; got float32"),
        (20, jnp.bfloat16, "multiples of 8; got 20"),
        (136, jnp.bfloat16, "up to 128; got 136"),
    ],
)
def test_cudnn_says_what_it_does_not_serve(with_cudnn, dim, dtype, message):
    with pytest.raises(InputError, match=message):
        with_cudnn(*random(8, 8, dim=dim, dtype=dtype), backend="cudnn")


@pytest.mark.parametrize("backend", ["cudnn", "triton"])
def test_kernels_for_gpus_without_one_are_refused(backend):
    with pytest.raises(InputError, match=f"'{backend}': it needs an NVIDIA GPU"):
        attend(*random(8, 8, dtype=jnp.bfloat16), backend=backend)


# --- values and scores as large and as small as float32 holds


FORMS = {
    "tiled": xla.tiled,
    "dense": lambda *args, dtype: (xla.dense(*args),),
    "cpu": cpu.attend,
    "splash": lambda *args, dtype: (splash.attend(*args, tile_sizes=SMALL, interpret=True),),
    "triton": lambda *args, dtype: (triton.attend(*args, interpret=True),),
}
"""All exact forms of one device: f(q, k, v, kv_len, dtype=) -> the result, and of some log_sum_exp."""


def as_in_runs(f):
    """Compiled with the options of runs, and optimised: XLA then fuses other operations, and rounds in other places."""
    options = compiler_options("float32", platform="cpu") | {"xla_backend_optimization_level": 3}
    return jax.jit(f, compiler_options=options)


def attend_by(form, q, k, v, kv_len=None):
    return program_of(form, q.dtype)(q, k, v, kv_len)[0]


@cache
def program_of(form, dtype):
    return as_in_runs(partial(FORMS[form], dtype=dtype))


@pytest.mark.parametrize("form", [name for name in FORMS if name != "splash"])
@pytest.mark.parametrize("gain", [1.0, 1.3, 3.0])
@pytest.mark.parametrize("kv_len", [None, 555])
def test_float16(form, gain, kv_len):
    """Queries and keys as layer norm leaves them, times a gain: from 1.3 on, 2^score may be more than float16 holds."""
    q, k, v = random(140, 600, batch=1, heads=2, dim=64)
    q, k = (gain * (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) for x in (q, k))
    q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
    found = attend_by(form, q, k, v, None if kv_len is None else jnp.array([kv_len]))
    assert found.dtype == jnp.float16
    # a probability is rounded to 2^-11 of itself, or to 2^-25 where float16 is subnormal, and then the result is
    atol = (2.0**-11 + 600 * 2.0**-25) * float(jnp.abs(v).max())
    np.testing.assert_allclose(np.asarray(found, np.float64), textbook(q, k, v, kv_len), atol=atol, rtol=2**-11)


def test_the_kernel_for_tpus_refuses_float16():
    args = random(600, 600, dim=64, dtype=jnp.float16)
    with pytest.raises(InputError, match=r"'splash': it computes in bfloat16 or float32; got float16. Take 'auto'"):
        attend(*args, backend="splash", interpret=True)
    with pytest.raises(InputError, match="bfloat16 or float32; got float16"):
        splash.attend_with_lse(*args, jnp.array([600, 600]), interpret=True)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 4, 1)])  # whole, and a ring of two groups
def test_auto_is_no_kernel_for_float16_on_a_tpu(mesh):
    args = random(1200, 1200, heads=6, dim=64, dtype=jnp.float16)
    with jax.set_mesh(sharding.make_mesh(*mesh)), compiling_for(None):
        text = jax.jit(attend).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call @tpu_custom_call" not in text


LARGE_SCORES = [12, 14, 31, 47, 57]
"""Powers of 2 of queries and of keys: scores of about 1e9, 1e10, 1e20, 1e30, and the largest that are served."""


def with_large_scores(dim, dtype, kv_len):
    """A clip per entry of LARGE_SCORES. All products are exact in float32, each key is there three times, and for all
    queries but few the best keys are far above the others."""
    random = np.random.default_rng(0)
    q, k = (np.round(4 * random.normal(size=(n, 1, dim))) for n in (140, 200))
    q, k = (np.stack([x * 2.0**n for n in LARGE_SCORES]) for x in (q, np.repeat(k, 3, 0)))
    v = random.normal(size=k.shape)
    bound = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
    assert 2.0**124 < bound < 2.0**126
    length = None if kv_len is None else jnp.full(len(q), kv_len)
    past = np.arange(600)[:, None, None] >= (kv_len or 600)
    k, v = np.where(past, 30 * k, k), np.where(past, 1e4, v)
    return *(jnp.asarray(x, dtype) for x in (q, k, v)), length


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dim", "kv_len"),
    [(48, None), (64, 555), (128, 555), pytest.param(64, None, marks=pytest.mark.further)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_up_to_the_largest(form, dim, dtype, kv_len):
    q, k, v, length = with_large_scores(dim, dtype, kv_len)
    found = np.asarray(attend_by(form, q, k, v, length), np.float32)
    v = np.asarray(v[:, :kv_len], np.float32)
    assert np.isfinite(found).all()
    # in bfloat16 probabilities and the result are rounded
    room = (2.0**-22 if dtype == jnp.float32 else 2.0**-8) * np.abs(v).max()
    assert (found <= v.max(1, keepdims=True) + room).all() and (found >= v.min(1, keepdims=True) - room).all()

    scores = np.einsum("bqnk,bsnk->bqns", *(np.asarray(x[:, :kv_len], np.float64) for x in (q, k)))[..., ::3]
    best, second = np.moveaxis(np.sort(scores, -1)[..., :-3:-1], -1, 0)
    # a score may be off by 2^-9 of |q| |k| in one form, which is less than half of this
    clear = best - second > 0.1 * scores.std(-1)
    assert clear.mean() > 0.7
    np.testing.assert_allclose(found[clear], textbook(q, k[:, :kv_len], v)[clear], atol=room)


@pytest.mark.parametrize("form", ["tiled", "cpu"])
def test_gradients_at_large_scores(form):
    q, k, v, _ = with_large_scores(64, jnp.float32, None)
    found = as_in_runs(jax.grad(lambda *args: FORMS[form](*args, None, dtype=q.dtype)[0].sum(), (0, 1, 2)))(q, k, v)
    # of dq and dk, what is left after rounding is times 2^57
    assert all(jnp.isfinite(x).all() for x in found)
    scores = np.einsum("bqnk,bsnk->bnqs", *(np.asarray(x, np.float64) for x in (q, k))) / 8
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (p / p.sum(-1, keepdims=True)).sum(2).swapaxes(1, 2)
    np.testing.assert_allclose(found[2], np.broadcast_to(expected[..., None], v.shape), atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [-70, 70])
def test_norms_that_float32_does_not_hold(form, power):
    """Squares of queries are 0 or infinity, and those of keys the other; scores are ordinary."""
    q, k, v = random(140, 600, batch=1, heads=2, dim=64)
    expected = textbook(q, k, v)
    found = attend_by(form, q * 2.0**power, k * 2.0**-power, v)
    np.testing.assert_allclose(found, expected, atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bound", [28.0, 99.0])
@pytest.mark.parametrize("value", [1e-30, 1e-24, 1e-6, 1.0, 1e6, 1e20, 1e33])
def test_values_of_any_size(form, bound, value):
    """Queries whose every score is the largest that the head may have, and others for which it is the least; powers
    of 2. Channels of other sizes beside, and one of zeros."""
    _, _, v = random(1, 600, batch=1, heads=1, dim=64)
    sizes = jnp.ones(64).at[0].set(0).at[1].set(1e-3).at[2].set(1e3)
    u = jnp.zeros(64).at[3].set(1)
    q = jnp.where(jnp.arange(140) % 2, 1, -1)[:, None] * u * bound * np.log(2) * 8
    k = jnp.broadcast_to(u, (600, 64))
    expected = textbook(q[None, :, None], k[None, :, None], np.asarray(v * sizes, np.float64))
    found = attend_by(form, q[None, :, None], k[None, :, None], v * sizes * value)
    sizes = np.where(sizes > 0, sizes, 1)
    np.testing.assert_allclose(np.asarray(found, np.float64) / value / sizes, expected / sizes, atol=1e-5)


def modes(bound, value=1.0, least=None, keys=600, length=None):
    """The mode of a head with this bound of its scores and these values."""
    q = jnp.zeros((1, 8, 1, 64)).at[0, 3, 0, 5].set(bound)
    k = jnp.zeros((1, keys, 1, 64)).at[0, 2, 0, 5].set(1)
    v = jnp.full((1, keys, 1, 64), value)
    v = v if least is None else v.at[..., 7].set(least)
    if length is not None:  # what is past it does not count
        past = (jnp.arange(keys) >= length)[:, None, None]
        k, v = jnp.where(past, 1e30, k), jnp.where(past, 1e30, v)
    lengths = jnp.array([keys if length is None else length])
    return int(splash._modes(q, k, splash._columns(v, 128), lengths)[0])


def test_modes_of_heads():
    online, shifted, bounded = splash.ONLINE, splash.SHIFTED, splash.BOUNDED
    assert modes(99) == modes(10, 1e6) == modes(99, 1e-0, least=0.0) == modes(90, least=1e-3) == bounded
    assert modes(101) == modes(99, 1e6) == modes(99, least=1e-3) == modes(99, 1e-3) == modes(2.0**17) == shifted
    assert modes(2.0**18) == modes(200, 2.0**40) == modes(np.inf) == modes(np.nan) == modes(10, np.inf) == online
    assert modes(99, length=500) == bounded and modes(101, length=500) == shifted
    # sums of values stay below 2^127
    assert modes(99, 2.0**17, keys=600) == bounded and modes(99, 2.0**17, keys=1100) == shifted
    assert modes(0, 2.0**116, keys=600) == bounded and modes(0, 2.0**116, keys=1100) == online


@cache
def always(which):
    return lambda q, *_: jnp.full(q.shape[0] * q.shape[2], which, jnp.int32)


@pytest.fixture(params=["online", "shifted", "bounded"])
def mode(request, monkeypatch):
    """All heads run in this mode, whatever their bounds."""
    monkeypatch.setattr(splash, "_modes", always(getattr(splash, request.param.upper())))
    return request.param


@pytest.mark.parametrize("kv_len", [1, 128, 513, [1, 700], [640, 512]])
def test_kernel_in_every_mode(mode, kv_len):
    q, k, v = random(140, 700, heads=1, dim=64)
    past = jnp.arange(700)[None, :, None, None] >= np.broadcast_to(kv_len, 2)[:, None, None, None]
    k, v = jnp.where(past, 30.0, k), jnp.where(past, 1e4, v)
    np.testing.assert_allclose(interpreted(q, k, v, kv_len), textbook(q, k, v, kv_len), atol=5e-6)
    lengths = jnp.broadcast_to(jnp.asarray(kv_len), 2)
    out, log_sum_exp = interpreted_with_lse(splash._modes)(q, k, v, lengths)
    expected, expected_lse = jitted_with_lse(q, k, v, lengths)
    np.testing.assert_allclose(out, expected, atol=5e-6)
    np.testing.assert_allclose(log_sum_exp, expected_lse, atol=2e-5)


jitted_with_lse = jax.jit(xla.attend_with_lse)


@cache
def interpreted_with_lse(modes):
    """As `interpreted_program`."""
    return jax.jit(partial(splash.attend_with_lse, tile_sizes=SMALL, interpret=True))


@pytest.mark.parametrize("excess", [58, 62, 79, 81, 95, 99])
@pytest.mark.parametrize("value", [1.0, 2.0**39])
def test_kernel_with_large_values_of_keys_far_above_the_first(excess, value):
    """Sums that are scaled down or recomputed, since they would overflow when multiplied by the values."""
    q, k, v = random(128, 1300, batch=1, heads=1, dim=64, scale=0.1)
    q = q.at[..., 0].set(80.0)
    k = k.at[..., 0].set(-20.0).at[0, 1100:1102, 0, 0].set(-20.0 + excess * np.log(2) / 10)
    expected = textbook(q, k, v)
    found = interpreted(q, k, v * value)
    np.testing.assert_allclose(found / value, expected, atol=5e-5)


@pytest.mark.parametrize("kv_len", [1, 900, 1024, 2000, 2100])
def test_keys_past_the_length_are_left_out(kv_len):
    """In tiles, and on a CPU by its own form; keys that are left out may hold anything."""
    q, k, v = (jax.random.normal(jax.random.key(i), (2, n, 1, 32)) for i, n in enumerate((1100, 2100, 2100)))
    far = jnp.arange(2100)[:, None, None] >= kv_len
    expected = xla.attend(q, k[:, :kv_len], v[:, :kv_len])
    attend_first = partial(xla.attend_to_first, share=0.5)
    found = jax.jit(attend_first)(q, k, jnp.where(far, 1e4, v), jnp.int32(kv_len))
    tiles = jax.jit(partial(xla.tiled, dtype=jnp.float32, share=0.5))(q, k, jnp.where(far, 1e4, v), jnp.int32(kv_len))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(tiles[0], expected, atol=1e-5)


def test_tiles_past_the_length_are_not_computed():
    """A choice, not a selection between two results; its scope says how often it is taken."""
    q, k = (jax.ShapeDtypeStruct((2, n, 1, 32), jnp.float32) for n in (1100, 4096))
    f = partial(xla.tiled, dtype=jnp.float32, share=0.25)
    length = jax.ShapeDtypeStruct((), jnp.int32)
    assert "runs_in_0.2500/cond" in jax.jit(f).lower(q, k, k, length).compile().as_text()
    whole = count_flops(partial(xla.tiled, kv_len=None, dtype=jnp.float32), q, k, k).total
    assert count_flops(f, q, k, k, length).total == pytest.approx(whole * (1 + 0.25 * 3) / 4, rel=1e-6)
