"""Learning rates, what decays, and Muon's steps."""

from __future__ import annotations

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
from cogvideox_flax.training.config import LoopConfig, OptimizerConfig
from cogvideox_flax.training.optimizer import learning_rate, make_optimizer, weight_decay_mask
from tests.training.test_training import SMALL, TEXT


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


def test_settings_are_checked_together():
    with pytest.raises(InputError, match=r"(?s)learning_rate.*b1.*clip_norm"):
        OptimizerConfig(learning_rate=0, b1=1.0, clip_norm=-1)
    with pytest.raises(InputError, match=r"(?s)steps.*accumulate.*dtype"):
        LoopConfig(steps=0, accumulate=0, dtype="float16")
