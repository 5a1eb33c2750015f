"""Attention of many tokens and few joint ones: the same as attention of all of them in one sequence."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cogvideox_flax.attention import attend, attend_jointly
from cogvideox_flax.errors import InputError
from cogvideox_flax.sharding import make_mesh, pad_tokens
from tests.support.reference import random, relative_error

BATCH, LONG, FEW, HEADS, SIZE = 2, 70, 11, 4, 16
COUNTS = jnp.array([11, 3])


def inputs():
    long, few = random(0, 3, BATCH, LONG, HEADS, SIZE), random(1, 3, BATCH, FEW, HEADS, SIZE)
    return tuple(long), tuple(few)


def in_one_sequence(long, few, counts, kv_len=LONG):
    q = jnp.concatenate([long[0], few[0]], 1)
    k, v = (jnp.concatenate([x[:, :kv_len], y], 1) for x, y in zip(long[1:], few[1:], strict=True))
    out = attend(q, k, v, kv_len=None if counts is None else kv_len + counts, backend="xla")
    return out[:, :LONG], out[:, LONG:]


@pytest.mark.parametrize("how", [{}, {"backend": "xla"}, {"backend": "splash", "interpret": True}])
@pytest.mark.parametrize("counts", [None, COUNTS, jnp.array([0, 11])], ids=["all", "some", "none"])
def test_it_is_attention_of_one_sequence(how, counts):
    long, few = inputs()
    found = jax.jit(partial(attend_jointly, joint_len=counts, **how))(*long, few)
    for mine, expected in zip(found, in_one_sequence(long, few, counts), strict=True):
        assert relative_error(mine, expected) < 1e-5


@pytest.mark.parametrize("mesh", [(1, 8, 1), (2, 2, 2), (1, 3, 2), (2, 4, 1)])
def test_on_meshes(mesh):
    """Heads that do not divide over sp are padded; padding of the long tokens is not attended."""
    long, few = inputs()

    def run(long, few):
        padded = tuple(map(pad_tokens, long))
        out, joint = attend_jointly(*padded, few, kv_len=LONG, joint_len=COUNTS)
        return out[:, :LONG], joint

    with jax.set_mesh(make_mesh(*mesh)):
        found = jax.jit(run)(long, few)
    for mine, expected in zip(found, in_one_sequence(long, few, COUNTS), strict=True):
        assert relative_error(np.asarray(mine), expected) < 1e-5


def test_many_tokens_come_back_in_halves_of_the_heads():
    """Three heads on each device; a quarter of the long keys is not attended."""
    long, few = (tuple(random(seed, 3, 1, tokens, 6, SIZE)) for seed, tokens in ((0, 2100), (1, FEW)))
    counts = jnp.array([5])
    with jax.set_mesh(make_mesh(1, 2, 1)):
        compiled = jax.jit(partial(attend_jointly, kv_len=1600, joint_len=counts)).lower(*long, few).compile()
    assert compiled.as_text().count(" all-to-all(") == 3 + 2
    q, k, v = (
        jnp.concatenate([x, y], 1) for x, y in zip((long[0], long[1][:, :1600], long[2][:, :1600]), few, strict=True)
    )
    expected = attend(q, k, v, kv_len=1600 + counts, backend="xla")
    for mine, part in zip(compiled(*long, few), (expected[:, :2100], expected[:, 2100:]), strict=True):
        assert relative_error(np.asarray(mine), part) < 1e-5


def test_keys_past_kv_len_are_not_attended():
    long, few = inputs()
    found = attend_jointly(*long, few, kv_len=50, joint_len=COUNTS)
    for mine, expected in zip(found, in_one_sequence(long, few, COUNTS, 50), strict=True):
        assert relative_error(mine, expected) < 1e-5


def test_faults():
    long, few = inputs()
    with pytest.raises(InputError, match="joint tokens must be as q"):
        attend_jointly(*long, tuple(x[:1] for x in few))
    with pytest.raises(InputError, match="kv_len must be between 1 and the number of keys, 70; got 71"):
        attend_jointly(*long, few, kv_len=71)
    with pytest.raises(InputError, match="unknown attention backend"):
        attend_jointly(*long, few, backend="flash")
