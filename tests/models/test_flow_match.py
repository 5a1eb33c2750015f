"""Flow matching: our tables and steps against diffusers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.schedulers import FlowMatchConfig, FlowMatchScheduler
from tests.support.reference import random


@pytest.mark.parametrize("shift", [5.0, 9.0, 1.0])
@pytest.mark.parametrize("steps", [8, 50])
def test_a_run_equals_diffusers(shift, steps):
    """The timesteps, and the sample after each step of a model that predicts something else each time."""
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    ours = FlowMatchScheduler(FlowMatchConfig(shift=shift))
    plan, sample = ours.plan(steps), random(0, 1, 2, 4, 4, 3)
    np.testing.assert_allclose(plan.timesteps, theirs.timesteps.numpy(), rtol=1e-6)
    step = jax.jit(ours.step)
    expected = torch.from_numpy(np.array(sample))
    for i, t in enumerate(theirs.timesteps):
        prediction = random(i + 1, 1, 2, 4, 4, 3)
        sample, _ = step(plan, i, prediction, sample)
        expected = theirs.step(torch.from_numpy(np.array(prediction)), t, expected, return_dict=False)[0]
        np.testing.assert_allclose(sample, expected.numpy(), atol=3e-6)


def test_a_run_with_the_true_velocity_ends_at_the_clean_sample():
    """A straight path is followed exactly, from any step on."""
    scheduler = FlowMatchScheduler(FlowMatchConfig(shift=7.0))
    clean, noise = random(0, 2, 3), random(1, 2, 3)
    plan = scheduler.plan(10, start=4)
    assert len(plan) == 6
    x = scheduler.start_from(clean, noise, plan.timesteps[0])
    for i in range(6):
        x, _ = scheduler.step(plan, i, scheduler.velocity(clean, noise, plan.timesteps[i]), x)
    np.testing.assert_allclose(x, clean, atol=1e-5)


def test_noise_at_a_timestep_per_item():
    scheduler = FlowMatchScheduler(FlowMatchConfig())
    clean, noise = jnp.ones((2, 4)), jnp.full((2, 4), 3.0)
    x = scheduler.add_noise(clean, noise, jnp.array([0.0, 250.0]))
    np.testing.assert_allclose(x, [[1.0] * 4, [1.5] * 4])


def test_configs_that_compute_something_else_are_refused():
    assert FlowMatchConfig.from_hf(dict(FlowMatchEulerDiscreteScheduler(shift=5.0).config)).shift == 5.0
    for change in ({"use_dynamic_shifting": True}, {"shift_terminal": 0.1}, {"invert_sigmas": True}):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            FlowMatchConfig.from_hf(dict(FlowMatchEulerDiscreteScheduler(**change).config))
    with pytest.raises(CheckpointError, match="expected one of FlowMatchEulerDiscreteScheduler"):
        FlowMatchConfig.from_hf({"_class_name": "CogVideoXDDIMScheduler"})
    with pytest.raises(InputError, match="num_inference_steps is 0"):
        FlowMatchScheduler(FlowMatchConfig()).plan(0)
