"""Block-sparse attention: lists of tiles, against exact attention with a mask."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax import sharding
from cogvideox_flax.attention import SparseTiles, attend, attend_jointly, splash, triton, xla
from cogvideox_flax.attention.sparse_tiles import choose, from_tiles, list_tiles, sliding, to_tiles
from tests.support.reference import relative_error

ROUNDING_BAR = 2e-5


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def masked(q, k, v, mask):
    """Textbook attention in float64; mask [B, N, Q, S]."""
    q, k, v = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v))
    s = np.where(mask, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("scale", "dim"),
    [
        pytest.param(1, 128, id="bounded-128"),
        pytest.param(30, 64, id="online-64"),
        pytest.param(1, 64, id="bounded-64", marks=pytest.mark.further),
        pytest.param(30, 128, id="online-128", marks=pytest.mark.further),
    ],
)
@pytest.mark.parametrize("form", ["xla", "splash", "splash in two blocks of keys", "triton"])
def test_each_tile_attends_to_the_tiles_of_its_list(form, scale, dim, monkeypatch):
    size, (batch, heads, queries, keys) = 128, (2, 3, 3, 7)
    q, k, v = (random(i, batch, n * size, heads, dim) for i, n in enumerate((queries, keys, keys)))
    q = scale * q
    lengths = jnp.array([keys * size, 5 * size + 17], jnp.int32)
    chosen = jax.random.bernoulli(jax.random.key(3), 0.5, (batch, heads, queries, keys)).at[..., 1].set(True)
    lists = list_tiles(chosen, keys, 0)
    if "two" in form:
        monkeypatch.setattr(splash, "fit_key_block", lambda *a, **_: splash.TileSizes(size, 4 * size, size, size))
    module = {"xla": xla, "triton": triton}.get(form, splash)
    run = jax.jit(partial(module.attend_to_listed, size if form == "xla" else (size, True)))
    mask = np.repeat(np.repeat(chosen, size, 2), size, 3) & (np.arange(keys * size) < lengths[:, None, None, None])
    expected = masked(q, k, v, mask)
    assert relative_error(run(q, k, v, lists, lengths), expected) < ROUNDING_BAR * scale
    narrow = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    if scale == 1:
        found = run(*narrow, lists, lengths).astype(jnp.float32)
        exact = masked(*narrow, mask)
        assert np.sqrt(np.square(found - exact).mean()) < 5e-3 * exact.std()


@pytest.mark.parametrize("kernel", [splash, triton], ids=["splash", "triton"])
def test_the_gradient_of_a_kernel_is_that_of_its_list(kernel):
    size = 128
    q, k, v = (random(i, 1, 2 * size, 1, 64) for i in range(3))
    chosen = jnp.array([[[[True, False], [True, True]]]])
    lists, lengths = list_tiles(chosen, 2, 0), jnp.array([2 * size], jnp.int32)
    mask = np.repeat(np.repeat(chosen, size, 2), size, 3)

    def plain(q, k, v):
        s = jnp.where(mask, jnp.einsum("bqnd,bknd->bnqk", q, k) / 8, -jnp.inf)
        return jnp.square(jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(s), v)).sum()

    def ours(*x):
        return jnp.square(kernel.attend_to_listed((size, True), *x, lists, lengths)).sum()

    gradients = (jax.jit(jax.grad(form, (0, 1, 2)))(q, k, v) for form in (ours, plain))
    for found, expected in zip(*gradients, strict=True):
        assert relative_error(found, expected) < ROUNDING_BAR


@pytest.mark.parametrize("grid", [(2, 4, 6), (3, 5, 7)])
def test_tokens_in_the_order_of_tiles(grid):
    tile, x = (2, 2, 3), random(0, 2, int(np.prod(grid)), 1, 4)
    tiles = to_tiles(x, grid, tile)
    np.testing.assert_array_equal(from_tiles(tiles, grid, tile), x)
    clip = np.pad(
        np.asarray(x).reshape(2, *grid, 1, 4),
        [(0, 0), *((0, -n % t) for n, t in zip(grid, tile, strict=True)), (0, 0), (0, 0)],
    )
    np.testing.assert_array_equal(tiles[:, :12], clip[:, :2, :2, :3].reshape(2, 12, 1, 4))
    np.testing.assert_array_equal(tiles[:, 12:24], clip[:, :2, :2, 3:6].reshape(2, 12, 1, 4))


def test_a_window_stays_in_the_video():
    counts, window = (1, 2, 5), (3, 3, 3)
    found = sliding(counts, window)
    places = list(np.ndindex(*counts))
    for i, (_, _, column) in enumerate(places):
        middle = min(max(column, 1), 3)
        expected = [abs(c - middle) <= 1 for _, _, c in places]  # one frame and two rows are in every window
        np.testing.assert_array_equal(found[i], expected)


def test_the_most_important_tiles_are_chosen():
    """By the published formula, written out."""
    sparse = SparseTiles(tile=(1, 2, 2), window=(1, 1, 1), selected=2, similarity=0.7)
    grid = (2, 4, 4)
    q, k = random(0, 1, 32, 2, 8), random(1, 1, 32, 2, 8)
    found = np.asarray(choose(sparse, grid, q, k))
    for head in range(2):
        means = [np.asarray(x[0, :, head], np.float64).reshape(8, 4, 8).mean(1) for x in (q, k)]
        queries, keys = (m / np.linalg.norm(m, axis=1, keepdims=True) for m in means)
        alike = (keys @ keys.T + 1) / 2
        redundancy = [np.mean([alike[i, j] for i in range(8) if i != j]) for j in range(8)]
        importance = 0.7 * (queries @ keys.T + 1) / 2 - 0.3 * np.array(redundancy)
        for i in range(8):
            assert set(np.flatnonzero(found[0, head, i])) == {i, *np.argsort(importance[i])[-2:]}


def test_lists_are_ascending_and_end_with_the_text():
    chosen = jnp.array([[[[False, True, False, True], [True, True, True, False]]]])
    tiles, counts = list_tiles(chosen, 3, 2)
    assert counts.tolist() == [[[4, 5]]]
    assert tiles[0, 0, 0, :4].tolist() == [1, 3, 4, 5] and tiles[0, 0, 1].tolist() == [0, 1, 2, 4, 5]


def joint_inputs(grid, few, padding=0, heads=4, dim=16):
    video = int(np.prod(grid)) + padding
    q, k, v = (random(i, 2, video, heads, dim) for i in range(3))
    joint = tuple(random(3 + i, 2, few, heads, dim) for i in range(3))
    return q, k, v, joint, {"kv_len": video - padding, "joint_len": jnp.array([few, few - 3], jnp.int32)}


def test_with_all_tiles_it_is_the_exact_attention():
    grid = (2, 4, 6)
    *args, lengths = joint_inputs(grid, 10, padding=8)
    sparse = SparseTiles(tile=(1, 2, 3), window=(3, 3, 3))
    forms = (jax.jit(partial(attend_jointly, **lengths, tiles=tiles)) for tiles in ((sparse, grid), None))
    for found, expected in zip(*(form(*args) for form in forms), strict=True):
        size = min(found.shape[1], 48)
        assert relative_error(found[:, :size], expected[:, :size]) < ROUNDING_BAR


def test_tiles_that_reach_out_of_the_video_hold_zeros():
    """A grid that tiles do not divide, against attention over the padded video with a mask."""
    grid, sparse = (2, 3, 5), SparseTiles(tile=(1, 2, 2), window=(1, 3, 1), selected=2)
    q, k, v, joint, lengths = joint_inputs(grid, 6)
    found, of_text = jax.jit(partial(attend_jointly, **lengths, tiles=(sparse, grid)))(q, k, v, joint)
    video = [to_tiles(x, grid, sparse.tile) for x in (q, k, v)]
    chosen = np.asarray(choose(sparse, grid, *video[:2]))
    assert chosen.mean() < 0.7
    keys = [jnp.concatenate(pair, 1) for pair in zip(video, joint, strict=True)]
    real = np.arange(6) < np.asarray(lengths["joint_len"])[:, None]
    mask = np.repeat(np.repeat(chosen, 4, 2), 4, 3)
    text = np.broadcast_to(real[:, None, None], (*mask.shape[:3], 6))
    expected = masked(video[0], keys[1], keys[2], np.concatenate([mask, text], -1))
    assert relative_error(found, from_tiles(jnp.asarray(expected), grid, sparse.tile)) < ROUNDING_BAR
    everything = jnp.int32(keys[1].shape[1] - 6) + lengths["joint_len"]
    assert relative_error(of_text, attend(joint[0], *keys[1:], kv_len=everything)) < ROUNDING_BAR


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 2)])
def test_on_meshes(mesh):
    grid, sparse = (2, 4, 6), SparseTiles(tile=(1, 2, 3), window=(1, 1, 1), selected=2)
    *args, lengths = joint_inputs(grid, 8)
    run = jax.jit(lambda *x: attend_jointly(*x, **lengths, tiles=(sparse, grid)))
    expected = run(*args)
    with jax.set_mesh(sharding.make_mesh(*mesh)):
        for found, same in zip(run(*args), expected, strict=True):
            assert relative_error(found, same) < ROUNDING_BAR
