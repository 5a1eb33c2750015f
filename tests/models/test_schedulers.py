"""The schedulers against diffusers': every step, with the same predictions and the same noise injected."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler
from diffusers.schedulers import scheduling_dpm_cogvideox

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.guidance import guidance_scales
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.schedulers import (
    FLOW_SCHEDULERS,
    SCHEDULERS,
    DDIMScheduler,
    DPMScheduler,
    FlowMatchConfig,
    FlowMatchScheduler,
)
from cogvideox_flax.schedulers.config import SchedulerConfig

STEP_COUNTS = (1, 2, 4, 6, 7, 10, 25, 28, 30, 50, 61, 64, 100, 103, 1000)
SHAPE = (2, 3, 4, 5, 2)
TOLERANCE = 1e-5  # of the largest value of the step; float32 rounding of the sums, nothing else


def reference(kind: str, shift: float, **config):
    cls = {"ddim": CogVideoXDDIMScheduler, "dpm": CogVideoXDPMScheduler}[kind]
    return cls(
        **{
            "snr_shift_scale": shift,
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
            "rescale_betas_zero_snr": True,
            "clip_sample": False,
        }
        | config
    )


def random(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, *SHAPE)).astype(np.float32)


def reference_run(scheduler, kind, steps, predictions, noises, start, monkeypatch) -> np.ndarray:
    """All samples of one run of the reference's own loop; the second draw of a step, if any, gets the step's noise."""
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps[start:steps]
    sample, old, samples = torch.from_numpy(noises[-1]), None, []
    for i, t in enumerate(timesteps):
        monkeypatch.setattr(scheduling_dpm_cogvideox, "randn_tensor", lambda *_, i=i, **__: torch.from_numpy(noises[i]))
        prediction = torch.from_numpy(predictions[i])
        if kind == "ddim":
            sample = scheduler.step(prediction, t, sample, return_dict=False)[0]
        else:
            back = timesteps[i - 1] if i else None
            sample, old = scheduler.step(prediction, old, t, back, sample, return_dict=False)
        samples.append(sample.numpy())
    return np.stack(samples)


@partial(jax.jit, static_argnums=0)
def run(scheduler, plan, predictions, noises):
    """All samples of one run of ours, the step's index traced."""

    def body(carry, x):
        sample, state = scheduler.step(plan, x[0], x[1], *carry, x[2])
        return (sample, state), sample

    n = predictions.shape[0]
    initial = noises[-1], scheduler.init_state(noises[-1])
    return jax.lax.scan(body, initial, (jnp.arange(n), predictions, noises[:n]))[1]


def assert_runs_agree(kind, shift, steps, monkeypatch, start=0, **config):
    predictions, noises = random(steps - start, 1), random(steps - start + 1, 2)
    scheduler = SCHEDULERS[kind](SchedulerConfig(kind=kind, snr_shift_scale=shift, **config))
    ours = np.asarray(run(scheduler, scheduler.plan(steps, start=start), predictions, noises))
    theirs = reference_run(
        reference(kind, shift, **config), kind, steps, predictions, noises, start=start, monkeypatch=monkeypatch
    )
    assert np.isfinite(ours).all()
    worst = (abs(ours - theirs).reshape(len(ours), -1).max(1) / abs(theirs).reshape(len(ours), -1).max(1)).max()
    assert worst < TOLERANCE, worst


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", STEP_COUNTS)
@pytest.mark.parametrize("kind", ["ddim", "dpm"])
def test_every_step_equals_reference(kind, steps, shift, monkeypatch):
    assert_runs_agree(kind, shift, steps, monkeypatch)


@pytest.mark.parametrize("kind", ["ddim", "dpm"])
@pytest.mark.parametrize(("steps", "start"), [(50, 10), (30, 29), (7, 2)])
def test_late_start_equals_reference(kind, steps, start, monkeypatch):
    """Video-to-video: the steps left out do not count as "the step before" of the first one run."""
    assert_runs_agree(kind, 1.0, steps, monkeypatch, start=start)


@pytest.mark.parametrize("kind", ["ddim", "dpm"])
@pytest.mark.parametrize("config", [{"rescale_betas_zero_snr": False}, {"set_alpha_to_one": False}])
def test_other_schedules_equal_reference(kind, config, monkeypatch):
    assert_runs_agree(kind, 1.0, 25, monkeypatch, **config)


def test_timesteps_equal_reference_for_every_step_count():
    ours, theirs = DDIMScheduler(SchedulerConfig()), reference("ddim", 3.0)
    one_too_many = 0
    for n in range(1, 1001):
        theirs.set_timesteps(n)
        one_too_many += len(theirs.timesteps) != n
        plan = ours.plan(n)
        assert plan.timesteps.dtype == np.int32
        assert len(plan) == n
        assert plan.timesteps.min() >= 0
        np.testing.assert_array_equal(plan.timesteps, theirs.timesteps[:n])
    assert one_too_many == 62  # the reference's rounding fault, which ours must not have


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (1.0, {0: 0.99915, 499: 0.2423591666, 979: 8.5788e-5}),
        (3.0, {0: 0.9974543276, 499: 0.0959695617, 979: 2.71944e-5}),
    ],
)
def test_noise_schedule(shift, expected):
    abar = DDIMScheduler(SchedulerConfig(snr_shift_scale=shift)).alphas_cumprod
    assert abar.dtype == np.float64
    np.testing.assert_allclose(abar, reference("ddim", shift).alphas_cumprod.numpy(), rtol=1e-11)
    assert abar[999] == 0
    for t, value in expected.items():
        np.testing.assert_allclose(abar[t], value, rtol=1e-5)


def test_dpm_coefficients_where_log_snr_is_infinite():
    scheduler = DPMScheduler(SchedulerConfig(snr_shift_scale=1.0))
    plan, abar = scheduler.plan(50), scheduler.alphas_cumprod
    # pure noise (t = 999): the sample is dropped, x0 = -v
    first = plan.row(0)
    assert (first.signal, first.sigma, first.from_sample, first.from_previous_x0) == (0, 1, 0, 0)
    np.testing.assert_allclose([first.from_x0, first.from_noise], np.sqrt([abar[979], 1 - abar[979]]), rtol=1e-6)
    # t = 979: the step before had no finite log-SNR, so it does not count
    assert plan.from_previous_x0[1] == 0
    assert plan.from_previous_x0[2] < 0
    # the last step returns x0
    last = plan.row(49)
    assert (last.from_sample, last.from_x0, last.from_previous_x0, last.from_noise) == (0, 1, 0, 0)


def test_noise_in_the_last_step_depends_on_the_step_count():
    scheduler = DPMScheduler(SchedulerConfig())
    silent = {n for n in (4, 5, 8, 10, 20, 25, 30, 32, 40, 45, 50, 75, 100) if scheduler.plan(n).from_noise[-1] == 0}
    noisy = {n for n in (6, 7, 15, 28, 35, 60, 64) if scheduler.plan(n).from_noise[-1] > 0}
    assert len(silent) == 13
    assert len(noisy) == 7


@pytest.mark.parametrize("kind", ["ddim", "dpm"])
def test_low_precision_sample_keeps_its_dtype_and_float32_state(kind):
    scheduler = SCHEDULERS[kind](SchedulerConfig(kind=kind))
    plan = scheduler.plan(10)
    sample, noise = (jnp.asarray(x, jnp.bfloat16) for x in random(2, 3))
    prediction = jnp.asarray(random(1, 4)[0])
    low, state = scheduler.step(plan, 4, prediction, sample, scheduler.init_state(sample), noise)
    high, _ = scheduler.step(
        plan, 4, prediction, sample.astype(jnp.float32), scheduler.init_state(sample), noise.astype(jnp.float32)
    )
    assert low.dtype == jnp.bfloat16
    assert state is None if kind == "ddim" else state.dtype == jnp.float32
    # computed in float32, rounded once
    np.testing.assert_array_equal(np.asarray(low, np.float32), np.asarray(high.astype(jnp.bfloat16), np.float32))


def test_plan_is_a_pytree_with_one_compilation_per_length():
    scheduler = DPMScheduler(SchedulerConfig())
    calls = []

    @jax.jit
    def step(plan, i, x):
        calls.append(1)
        return scheduler.step(plan, i, x, x, scheduler.init_state(x), x)[0]

    x = random(1, 5)[0]
    results = [step(scheduler.plan(10), jnp.int32(i), x) for i in range(10)]
    step(DPMScheduler(SchedulerConfig(snr_shift_scale=1.0)).plan(10), jnp.int32(3), x)
    assert len(calls) == 1
    closed_over = jax.jit(lambda i: scheduler.step(scheduler.plan(10), i, x, x, scheduler.init_state(x), x)[0])(3)
    np.testing.assert_allclose(closed_over, results[3], rtol=1e-6)


@pytest.mark.parametrize("timestep", [0, 499, 999])
def test_add_noise_equals_reference(timestep):
    sample, noise = random(2, 6)
    ours = DDIMScheduler(SchedulerConfig()).add_noise(sample, noise, timestep)
    theirs = reference("ddim", 3.0).add_noise(
        torch.from_numpy(sample), torch.from_numpy(noise), torch.tensor([timestep] * len(sample))
    )
    # the reference squares and roots abar in float32
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)


def test_add_noise_takes_one_timestep_per_item_and_computes_in_float32():
    scheduler = DDIMScheduler(SchedulerConfig())
    sample, noise = random(2, 7)
    each = jax.jit(scheduler.add_noise)(sample, noise, jnp.array([3, 700]))
    for item, t in enumerate((3, 700)):
        np.testing.assert_allclose(each[item], scheduler.add_noise(sample, noise, t)[item], rtol=1e-6)
    low = scheduler.add_noise(jnp.asarray(sample, jnp.bfloat16), jnp.asarray(noise, jnp.bfloat16), 999)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(low, np.float32), np.asarray(jnp.asarray(noise, jnp.bfloat16), np.float32))


@pytest.mark.parametrize("steps", STEP_COUNTS)
def test_dynamic_guidance_equals_released_formula(steps):
    timesteps = DDIMScheduler(SchedulerConfig()).plan(steps).timesteps
    expected = [1 + 6.0 * ((1 - math.cos(math.pi * ((steps - t) / steps) ** 5.0)) / 2) for t in timesteps.tolist()]
    scales = guidance_scales(timesteps, 6.0, dynamic=True)
    assert scales.dtype == np.float32
    np.testing.assert_allclose(scales, expected, rtol=1e-7)


def test_guidance_values():
    timesteps = DDIMScheduler(SchedulerConfig()).plan(50).timesteps
    dynamic = dict(zip(timesteps.tolist(), guidance_scales(timesteps, 6.0, dynamic=True).tolist(), strict=True))
    for t, value in {999: 2.291, 979: 2.544, 899: 4.272, 499: 1.521, 99: 6.864, 19: 1.123}.items():
        assert dynamic[t] == pytest.approx(value, abs=5e-4)
    np.testing.assert_array_equal(guidance_scales(timesteps, 6.0), np.full(50, 6, np.float32))
    ramp = guidance_scales(timesteps, 6.0, dynamic="index")
    assert ramp[0] == 1
    assert (np.diff(ramp) >= 0).all()
    assert ramp[-1] == pytest.approx(1 + 6 * (1 - math.cos(math.pi * 0.98**5)) / 2)
    assert 6.8 < ramp[-1] < 7


@pytest.mark.parametrize("steps", [0, -3, 1001])
def test_bad_step_count(steps):
    with pytest.raises(InputError, match=f"num_inference_steps is {steps}; expected 1 to 1000"):
        DDIMScheduler(SchedulerConfig()).plan(steps)


def test_bad_start_and_kind():
    with pytest.raises(InputError, match="leaves none of 10 steps"):
        DDIMScheduler(SchedulerConfig()).plan(10, start=10)
    with pytest.raises(InputError, match=r"unknown scheduler 'heun'; known are ddim, dpm, euler"):
        CogVideoX({"scheduler": SchedulerConfig()}).scheduler("heun")


EVERY = [(SCHEDULERS, SchedulerConfig, name) for name in SCHEDULERS]
EVERY += [(FLOW_SCHEDULERS, FlowMatchConfig, name) for name in FLOW_SCHEDULERS]


@pytest.mark.parametrize(("table", "config", "name"), EVERY, ids=[f"{each[1].__name__}-{each[2]}" for each in EVERY])
def test_a_scheduler_says_what_it_is(table, config, name):
    """Whatever kind its config names: the checkpoint's may be of another scheduler."""
    for kind in ("ddim", "dpm", "flow_match"):
        scheduler = table[name](config(kind=kind))
        assert scheduler.kind == scheduler.config.kind == scheduler.identity["kind"]
        assert repr(scheduler) == repr(table[name](config()))
    assert scheduler.kind == ("flow_match" if (config, name) == (FlowMatchConfig, "euler") else name)
    assert table[scheduler.kind] is table[name]


def test_equal_schedulers_compute_the_same():
    """So do those of equal identities, which are JSON and hold the noise schedule."""
    made = [table[name](config()) for table, config, name in EVERY]
    made += [DDIMScheduler(SchedulerConfig(snr_shift_scale=1.0)), FlowMatchScheduler(FlowMatchConfig(shift=5.0))]
    texts = [json.dumps(each.identity) for each in made]
    assert len(set(texts)) == len(set(made)) == len(made) - 1, "a flow has two names for Euler's steps"
    for one, text in zip(made, texts, strict=True):
        again = type(one)(dataclasses.replace(one.config, kind="of another"))
        assert again == one and hash(again) == hash(one) and json.dumps(again.identity) == text
    one, other = (CogVideoX({"scheduler": SchedulerConfig(kind="ddim")}) for _ in range(2))
    assert isinstance(one.scheduler("dpm"), DPMScheduler)
    assert one.scheduler() is other.scheduler("ddim")  # also of classes from elsewhere, whose programs are known by it


def test_the_code_of_a_users_scheduler_is_not_known():
    class Mine(DDIMScheduler):
        """Of the kind "ddim", which it may not be."""

    mine = Mine(SchedulerConfig())
    assert mine.identity is None
    assert mine == mine != Mine(SchedulerConfig())
    assert mine != DDIMScheduler(SchedulerConfig()) != mine


def test_dpm_without_noise_is_an_error():
    scheduler = DPMScheduler(SchedulerConfig())
    assert scheduler.needs_noise and not DDIMScheduler.needs_noise
    x = jnp.zeros(SHAPE)
    with pytest.raises(TypeError, match="noise"):
        scheduler.step(scheduler.plan(4), 0, x, x, scheduler.init_state(x))
