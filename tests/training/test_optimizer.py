"""Learning rates, what decays, and Muon's steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from cogvideox_flax.checkpoint import parameters
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.sharding import make_mesh
from cogvideox_flax.training.config import OPTIMIZERS, LoopConfig, OptimizerConfig
from cogvideox_flax.training.moments import _value, scale_by_adam_8bit
from cogvideox_flax.training.optimizer import learning_rate, make_optimizer, weight_decay_mask
from tests.support.training import SMALL, TEXT, train


def test_learning_rate_warms_up_and_decays():
    config = OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=10)
    rates = [float(learning_rate(config, 100)(step)) for step in range(100)]
    assert np.argmax(rates) == 10 and rates[10] == pytest.approx(1e-3)
    assert 0 < rates[0] < 2e-4 and rates[99] == pytest.approx(1e-5, rel=0.1)
    assert (np.diff(rates[:11]) > 0).all() and (np.diff(rates[10:]) < 0).all()


def test_a_cosine_is_optax_own():
    """As in earlier versions, bit for bit."""
    for warmup, steps in ((10, 100), (0, 30), (100, 4), (5, 1)):
        config = OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=warmup)
        warmup = min(warmup, steps - 1)
        expected = optax.warmup_cosine_decay_schedule(
            1e-3 / (warmup + 1), 1e-3, warmup, max(steps, warmup + 1), end_value=1e-5
        )
        ours = learning_rate(config, steps)
        assert [float(ours(step)) for step in range(steps)] == [float(expected(step)) for step in range(steps)]


@pytest.mark.parametrize(("schedule", "end"), [("linear", 1e-5), ("constant_with_warmup", 1e-3)])
def test_other_schedules_warm_up_too(schedule, end):
    config = OptimizerConfig(schedule=schedule, learning_rate=1e-3, final_learning_rate=1e-5, warmup_steps=10)
    rates = [float(learning_rate(config, 100)(step)) for step in range(101)]
    np.testing.assert_allclose(rates[:10], np.interp(range(10), [0, 10], [1e-3 / 11, 1e-3]), rtol=1e-5)
    np.testing.assert_allclose(rates[10:], np.linspace(1e-3, end, 91), rtol=1e-5)


def test_only_kernels_and_embeddings_decay():
    mask = parameters(
        weight_decay_mask({"t": Transformer(SMALL, rngs=nnx.Rngs(0)), "e": TextEncoder(TEXT, rngs=nnx.Rngs(0))})
    )
    decayed = {name for name, value in mask.items() if value}
    assert all(name.endswith(("kernel", "weight", "embedding")) for name in decayed)
    assert not any(name.endswith(("kernel", "weight")) for name in set(mask) - decayed)


def test_muon_steps_are_orthogonal_where_they_should_be():
    model = {"transformer": Transformer(SMALL, rngs=nnx.Rngs(0)), "text_encoder": TextEncoder(TEXT, rngs=nnx.Rngs(0))}
    model = jax.tree.map(jnp.asarray, model)
    config = OptimizerConfig(kind="muon", learning_rate=0.01, warmup_steps=0, weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(config, 10)
    noise = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(noise.normal(size=x.shape) ** 3, jnp.float32), model)
    steps, _ = jax.jit(optimizer.update)(gradients, optimizer.init(model), model)
    moved = {name: np.asarray(step) for part in steps.values() for name, step in parameters(part).items()}
    for name in ("blocks.attn.q.kernel", "blocks.mlp.down.kernel", "blocks.mlp.gate.weight"):  # each layer by itself
        for layer in moved[name]:
            singular = np.linalg.svd(layer, compute_uv=False)
            assert singular[0] < 2 * singular[-3], name  # the very smallest of a square matrix take more iterations
            assert np.sqrt(np.square(layer).mean()) == pytest.approx(0.2 * 0.01, rel=0.3)  # as large as AdamW's
    for name in ("blocks.attn.q.bias", "blocks.norm1.linear.kernel", "patch_embed.kernel"):
        sizes = abs(moved[name])  # Adam's first step is of one size; Nesterov's momentum makes it half as long again
        assert 0.01 < sizes.max() < 0.015 and np.percentile(sizes, 5) > 0.999 * sizes.max()


WIDE = {"transformer": {"blocks.mlp.up.kernel": np.zeros((2, 128, 512), np.float32)}}
STATE_BYTES = {"adamw": 8, "adamw_bfloat16": 6, "adamw_8bit": 2 + 8 / 256, "adafactor": 4 / 128 + 4 / 512, "muon": 4}
OTHERS = [kind for kind in OPTIMIZERS if kind != "adamw_8bit"]


def fit(params, _, batch, key):
    """A linear map of each layer, of inputs of several sizes; the noise of the target depends on the key."""
    x = batch["x"] * jnp.linspace(0.1, 2.0, 128)
    out = jnp.einsum("bi,lio->blo", x, params["transformer"]["blocks.mlp.up.kernel"])
    target = jnp.sin(jnp.roll(x, 1, -1)).sum(-1)[:, None, None] * jnp.linspace(-1.0, 1.0, 512)
    return jnp.square(out - target + 0.1 * jax.random.normal(key, out.shape)).mean(), {}


def fit_batches(step):
    return {"x": np.random.default_rng(step).normal(size=(8, 128)).astype(np.float32)}


def fit_config(kind, **settings):
    optimizer = OptimizerConfig(kind=kind, learning_rate=3e-3, warmup_steps=3)
    return LoopConfig(steps=8, log_every=100, optimizer=optimizer, **settings)


@pytest.mark.parametrize("kind", ["adamw_8bit", *(pytest.param(k, marks=pytest.mark.further) for k in OTHERS)])
def test_each_optimizer_resumes_exactly_and_trains_on_a_mesh(tmp_path, kind):
    """Stopped and resumed gives the same bits, with the moments sharded over all devices."""
    config, mesh = fit_config(kind), make_mesh(2, 1, 2, True)
    whole = train(WIDE, fit, fit_batches, config, tmp_path / "whole", mesh=mesh)
    moments = [x for x in jax.tree.leaves(whole.opt_state) if x.size > 3]
    size = WIDE["transformer"]["blocks.mlp.up.kernel"].size
    assert sum(x.nbytes for x in moments) == STATE_BYTES[kind] * size
    for x in moments:
        if x.size == size:
            assert x.addressable_shards[0].data.size == size // 4
    train(WIDE, fit, fit_batches, config, tmp_path / "cut", mesh=mesh, stop_after=5)
    resumed = train(WIDE, fit, fit_batches, config, tmp_path / "cut", mesh=mesh)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        assert np.array_equal(ours, theirs) and ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    alone = train(WIDE, fit, fit_batches, config, tmp_path / "alone")
    ours, theirs = (np.asarray(jax.tree.leaves(state.params)[0]) for state in (alone, whole))
    assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(ours)


def losses(optimizer, steps=240):
    """The loss of a small network on inputs and outputs of many sizes, whose gradients are."""
    random = np.random.default_rng(0)
    truth = [jnp.asarray(random.normal(size=shape) / 8, jnp.float32) for shape in ((64, 128), (128, 128))]
    sizes = [jnp.asarray(10 ** random.uniform(-2, 1, n), jnp.float32) for n in (64, 128)]
    start = [0.1 * jnp.asarray(random.normal(size=(64, 128)), jnp.float32), jnp.zeros((128, 128))]

    def network(weights, x):
        return jnp.tanh((x * sizes[0]) @ weights[0]) @ weights[1] * sizes[1]

    def step(carry, key):
        weights, state = carry
        x = jax.random.normal(key, (64, 64))
        loss, grads = jax.value_and_grad(lambda w: jnp.square(network(w, x) - network(truth, x)).mean())(weights)
        updates, state = optimizer.update(grads, state, weights)
        return (optax.apply_updates(weights, updates), state), loss

    keys = jax.random.split(jax.random.key(0), steps)
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), keys)[1])())


@pytest.mark.parametrize("b2", [0.999, pytest.param(0.95, marks=pytest.mark.further)])
def test_smaller_moments_have_the_loss_of_float32(b2):
    config = OptimizerConfig(learning_rate=3e-3, warmup_steps=3, b2=b2)
    within = {"adamw_bfloat16": 0.01, "adamw_8bit": 0.01, "adafactor": 0.1}
    exact, *others = (losses(make_optimizer(replace(config, kind=kind), 240)) for kind in ("adamw", *within))
    assert exact[-40:].mean() < 0.5 * exact[:40].mean()
    for kind, loss in zip(within, others, strict=True):
        means = [x.reshape(6, 40).mean(1) for x in (loss, exact)]
        assert not np.array_equal(loss, exact)
        np.testing.assert_allclose(*means, rtol=within[kind], err_msg=kind)


def test_moments_in_8_bit_fall_as_they_should():
    """Beside a value whose gradient stays, the others' second moment falls by less than half a level in a step."""
    params, betas = jnp.zeros((16, 256)), (0.9, 0.99)
    grads = jnp.asarray(10 ** np.random.default_rng(0).uniform(-3, 0, params.shape), jnp.float32).at[:, 0].set(1.0)
    later = jnp.zeros_like(grads).at[:, 0].set(1.0)

    @partial(jax.jit, static_argnums=0)
    def second_moment(optimizer):
        state = optimizer.update(grads, optimizer.init(params))[1]
        return jax.lax.fori_loop(0, 100, lambda _, state: optimizer.update(later, state)[1], state)

    state, exact = map(second_moment, (scale_by_adam_8bit(*betas, 1e-8), optax.scale_by_adam(*betas, 1e-8)))
    errors = np.log2(_value(state.root_nu, state.root_nu_scale) / jnp.sqrt(exact.nu))
    assert abs(errors.mean()) < 0.02 and errors.std() < 0.3


def test_moments_in_8_bit_of_a_parameter_without_gradients_are_zero():
    params, optimizer = jnp.ones((16, 256)), scale_by_adam_8bit(0.9, 0.99, 1e-8)
    updates, state = jax.jit(optimizer.update)(jnp.zeros_like(params), optimizer.init(params))
    assert not np.any(updates) and not any(np.any(moment) for moment in state[1:])


def test_settings_are_checked_together():
    with pytest.raises(InputError, match=r"(?s)learning_rate.*b1.*clip_norm"):
        OptimizerConfig(learning_rate=0, b1=1.0, clip_norm=-1)
    with pytest.raises(InputError, match=r"(?s)steps.*accumulate.*dtype"):
        LoopConfig(steps=0, accumulate=0, dtype="float16")
