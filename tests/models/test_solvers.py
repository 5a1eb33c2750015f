"""The schedulers by ComfyUI's names against diffusers', over whole trajectories with the same noise injected.

diffusers' classes ignore `snr_shift_scale`, so they are given the betas of the shifted schedule; and the timesteps of a
flow are whole numbers there, so theirs are compared apart from the samples.
"""

from __future__ import annotations

import dataclasses
import json
import types

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.schedulers import (
    scheduling_dpm_cogvideox,
    scheduling_dpmsolver_multistep,
    scheduling_euler_ancestral_discrete,
    scheduling_euler_discrete,
    scheduling_lcm,
)

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.events import Step
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.preview import Preview
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.store import StateKeeper
from cogvideox_flax.schedulers import (
    FLOW_SCHEDULERS,
    SCHEDULERS,
    DDIMScheduler,
    DPMScheduler,
    FlowMatchConfig,
    FlowMatchScheduler,
)
from cogvideox_flax.schedulers.config import SchedulerConfig

pytest_plugins = ["tests.support.commands"]
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SHAPE = (2, 3, 4, 5)
STEP_COUNTS = (50, 30, 7, 4, 1)
KINDS = {
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler_ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {}),
    "dpmpp_2m_sde": (diffusers.DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
    "uni_pc": (diffusers.UniPCMultistepScheduler, {}),
    "lcm": (diffusers.LCMScheduler, {}),
}
"""Name -> diffusers' class, and its options."""

TOLERANCE = 2e-5  # of the samples' deviation

NOISY = [scheduling_dpmsolver_multistep, scheduling_euler_ancestral_discrete, scheduling_lcm]


def betas(shift: float) -> np.ndarray:
    """Of the shifted schedule, before its terminal SNR is made zero."""
    abar = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    abar = abar / (shift + (1 - shift) * abar)
    return 1 - abar / np.concatenate([[1], abar[:-1]])


def model(x, t):
    """A stand-in for a denoiser: smooth, and different at each timestep."""
    return jnp.tanh(1.3 * x + 0.5 * jnp.cos(t / 150)) - 0.4 * x


def noises(n: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n + 1, *SHAPE)).astype(np.float32)


def ours(scheduler, plan, n: int) -> np.ndarray:
    """All samples of one run, jitted."""
    noise = noises(n)
    step = jax.jit(scheduler.step)
    x, samples = jnp.asarray(noise[-1]), []
    state = scheduler.init_state(x)
    for i in range(len(plan)):
        x, state = step(
            plan, i, model(x, float(plan.timesteps[i])), x, state, noise[i] if scheduler.needs_noise else None
        )
        samples.append(np.asarray(x))
    return np.stack(samples)


def in_float64(monkeypatch) -> None:
    """Let diffusers' Euler classes compute in float64: 4096 times the noise plus x0 leaves three digits of x0."""
    for module in (scheduling_euler_discrete, scheduling_euler_ancestral_discrete):
        wide = types.SimpleNamespace(**{**vars(torch), "float32": torch.float64})
        monkeypatch.setattr(module, "torch", wide)


def theirs(scheduler, timesteps, n: int, monkeypatch, scale: float) -> np.ndarray:
    """The same with diffusers' class. scale: of its first sample."""
    noise = noises(n)
    kind = torch.float64 if scale > 1 else torch.float32
    x, samples = torch.from_numpy(noise[-1]).to(kind) * scale, []
    for i, t in enumerate(scheduler.timesteps):
        for module in NOISY:
            monkeypatch.setattr(module, "randn_tensor", lambda *_, i=i, **__: torch.from_numpy(noise[i]))
        seen = getattr(scheduler, "scale_model_input", lambda x, _: x)(x, t).float()
        v = torch.from_numpy(np.array(model(seen.numpy(), float(timesteps[i])))).to(kind)
        x = scheduler.step(v, t, x, return_dict=False)[0]
        samples.append(x.float().numpy())
    return np.stack(samples)


def diffusion_reference(kind: str, shift: float):
    """diffusers' class on the shifted schedule."""
    cls, options = KINDS[kind]
    return cls(
        trained_betas=betas(shift).tolist(),
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        **options,
        **({"clip_sample": False, "original_inference_steps": 1000} if kind == "lcm" else {}),
    )


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("n", STEP_COUNTS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_trajectory_on_the_diffusion_schedule(kind, n, shift, monkeypatch):
    reference = diffusion_reference(kind, shift)
    scheduler = SCHEDULERS[kind](SchedulerConfig(snr_shift_scale=shift))
    if kind == "lcm":  # its own list is another, of the distillation
        steps = scheduler.plan(n).timesteps.tolist()
        reference.set_timesteps(timesteps=steps)
    else:
        reference.set_timesteps(n)
    if kind.startswith("euler"):
        reference.sigmas = reference.sigmas.double()
        in_float64(monkeypatch)
    plan = scheduler.plan(n)
    assert plan.timesteps.tolist() == [int(t) for t in reference.timesteps]
    scale = float(getattr(reference, "init_noise_sigma", 1.0))
    found, expected = ours(scheduler, plan, n), theirs(reference, plan.timesteps, n, monkeypatch, scale)
    if kind.startswith("euler"):  # their samples are x0 + sigma noise
        sigmas = reference.sigmas.numpy()[1:].reshape(-1, *[1] * len(SHAPE))
        expected = expected / np.sqrt(1 + sigmas**2)
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("n", STEP_COUNTS)
@pytest.mark.parametrize("kind", ["dpmpp_2m", "dpmpp_2m_sde", "uni_pc"])
def test_trajectory_on_a_flow(kind, n, monkeypatch):
    cls, options = KINDS[kind]
    reference = cls(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0, **options)
    reference.set_timesteps(n)
    scheduler = FLOW_SCHEDULERS[kind](FlowMatchConfig(shift=5.0))
    plan = scheduler.plan(n)
    assert [int(t) for t in plan.timesteps] == [int(t) for t in reference.timesteps]
    found, expected = ours(scheduler, plan, n), theirs(reference, plan.timesteps, n, monkeypatch, 1.0)
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("kind", [*KINDS, "ddim"])
def test_a_config_of_another_class_of_diffusers_is_mapped(kind, tmp_path, monkeypatch):
    """scheduler_config.json as diffusers writes it; the trajectory is that of the class that it names."""
    cls, options = KINDS.get(kind, (diffusers.DDIMScheduler, {"clip_sample": False}))
    options = options | ({"clip_sample": False, "original_inference_steps": 1000} if kind == "lcm" else {})
    schedule = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    schedule |= {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    cls(**schedule, **options).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "scheduler_config.json").read_text())
    config = SchedulerConfig.from_hf(raw)
    assert (config.kind, config.snr_shift_scale) == (kind, 1.0)
    scheduler, reference = SCHEDULERS[config.kind](config), cls.from_pretrained(tmp_path)
    plan = scheduler.plan(7)
    reference.set_timesteps(timesteps=plan.timesteps.tolist()) if kind == "lcm" else reference.set_timesteps(7)
    assert plan.timesteps.tolist() == [int(t) for t in reference.timesteps]
    if kind.startswith("euler"):
        reference.sigmas = reference.sigmas.double()
        in_float64(monkeypatch)
    scale = float(getattr(reference, "init_noise_sigma", 1.0))
    found, expected = ours(scheduler, plan, 7), theirs(reference, plan.timesteps, 7, monkeypatch, scale)
    if kind.startswith("euler"):
        expected = expected / np.sqrt(1 + reference.sigmas.numpy()[1:].reshape(-1, *[1] * len(SHAPE)) ** 2)
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("kind", ["dpmpp_2m", "dpmpp_2m_sde", "uni_pc"])
def test_a_config_of_another_class_on_a_flow_is_mapped(kind, tmp_path, monkeypatch):
    cls, options = KINDS[kind]
    cls(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=7.0, **options).save_pretrained(tmp_path)
    config = FlowMatchConfig.from_hf(json.loads((tmp_path / "scheduler_config.json").read_text()))
    assert (config.kind, config.shift) == (kind, 7.0)
    scheduler, reference = FLOW_SCHEDULERS[config.kind](config), cls.from_pretrained(tmp_path)
    reference.set_timesteps(7)
    plan = scheduler.plan(7)
    found, expected = ours(scheduler, plan, 7), theirs(reference, plan.timesteps, 7, monkeypatch, 1.0)
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (
            "EDMEulerScheduler",
            {},
            "names EDMEulerScheduler, which has no counterpart here; expected one of CogVideoXDDIM",
        ),
        ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}, "use_karras_sigmas: got True, supported is False"),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}, "solver_order: got 3, supported is 2"),
        ("UniPCMultistepScheduler", {"solver_type": "bh1"}, "solver_type: got 'bh1', supported is 'bh2'"),
        ("DDIMScheduler", {"beta_schedule": "linear", "clip_sample": False}, "beta_schedule: got 'linear'"),
        ("DDIMScheduler", {}, "clip_sample: got True, supported is False"),
        ("UniPCMultistepScheduler", {"use_flow_sigmas": True}, "use_flow_sigmas: got True, supported is False"),
    ],
)
def test_what_has_no_counterpart_is_named(cls, options, message):
    schedule = {"beta_schedule": "scaled_linear", "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
    with pytest.raises(InputError, match=message):
        SchedulerConfig.from_hf({"_class_name": cls, **schedule, **options})


def test_ancestral_steps_on_a_flow_keep_the_noise_level():
    """Of x0 = 0 and a perfect model, each sample is noise of the level of its timestep."""
    scheduler = FLOW_SCHEDULERS["euler_ancestral"](FlowMatchConfig(shift=3.0))
    plan = scheduler.plan(6)
    x = np.random.default_rng(0).standard_normal((400, 500)).astype(np.float32) * plan.sigma[0]
    for i in range(5):
        noise = np.random.default_rng(1 + i).standard_normal(x.shape).astype(np.float32)
        x, _ = scheduler.step(plan, i, x / plan.sigma[i], x, scheduler.init_state(x), noise)
        np.testing.assert_allclose(np.asarray(x).std(), plan.sigma[i + 1], rtol=0.02)


def test_euler_is_ddim_where_both_lead_to_the_same_timesteps():
    config = SchedulerConfig()
    euler, ddim = SCHEDULERS["euler"](config).plan(50), DDIMScheduler(config).plan(50)
    for name in ("from_sample", "from_x0", "signal"):
        np.testing.assert_allclose(getattr(euler, name)[1:], getattr(ddim, name)[1:], atol=1e-6)
    assert FLOW_SCHEDULERS["euler"] is FlowMatchScheduler


# --- timesteps of one's own


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULERS if kind != "one_step"])
def test_given_timesteps(kind):
    """Each leads to the next; those of the scheduler's own list give its own tables, where it leads to the next too."""
    scheduler = SCHEDULERS[kind](SchedulerConfig())
    plan = scheduler.plan(4, timesteps=[999, 856, 665, 399])
    assert plan.timesteps.tolist() == [999, 856, 665, 399]
    assert plan.next_timesteps.tolist() == [856, 665, 399, 0]
    own = scheduler.plan(50)
    same = scheduler.plan(50, timesteps=own.timesteps.tolist())
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    later = scheduler.plan(4, start=2, timesteps=[999, 856, 665, 399])
    assert later.timesteps.tolist() == [665, 399]


def test_the_published_coefficients_of_a_four_step_distillation():
    """Source: the spec of TDM's list with DDIM, shift 3."""
    plan = DDIMScheduler(SchedulerConfig()).plan(4, timesteps=[999, 856, 665, 399])
    np.testing.assert_allclose(plan.signal**2, [0, 0.002372, 0.026151, 0.178615], atol=1e-6)
    np.testing.assert_allclose(plan.from_sample, [0.998813, 0.988011, 0.918391, 0], atol=1e-6)
    np.testing.assert_allclose(plan.from_x0, [0.048706, 0.113590, 0.274114, 1], atol=1e-6)


@pytest.mark.parametrize("kind", FLOW_SCHEDULERS)
def test_given_timesteps_of_a_flow(kind):
    plan = FLOW_SCHEDULERS[kind](FlowMatchConfig(shift=5.0)).plan(4, timesteps=[999.0, 937.5, 833.3, 625.0])
    np.testing.assert_allclose(plan.timesteps, [999.0, 937.5, 833.3, 625.0], rtol=1e-6)
    np.testing.assert_allclose(plan.sigma, [0.999, 0.9375, 0.8333, 0.625], rtol=1e-6)
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(plan)])).all()


def is_finite(plan) -> bool:
    return np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(plan)])).all()


ENDS = [[999], [0], [1], [999, 0], [999, 998], [1, 0], [500, 499], [999, 998, 997], [2, 1, 0], [999, 998, 500, 1, 0]]
FLOW_ENDS = [[1000.0], [0.1], [1000.0, 0.1], [1000.0, 999.0], [1.0, 0.1], [1000.0, 999.0, 998.0], [3.0, 2.0, 1.0]]
FLOW_ENDS += [[1000.0, 937.5, 833.3, 625.0], [1000.0, 999.0, 500.0, 1.0, 0.1]]
CLOSE = [[500.0, 499.9999], [1000.0, 999.99], [1000.0, 1e-30], [1e-5, 1e-6], [500.0, 499.9999, 400.0]]


def assert_equals(plan, expected):
    for a, b in zip(jax.tree.leaves(plan), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("scheduler", "lists"),
    [
        *[(SCHEDULERS[kind](SchedulerConfig(snr_shift_scale=1.0)), ENDS) for kind in SCHEDULERS if kind != "one_step"],
        *[(cls(SchedulerConfig(rescale_betas_zero_snr=False)), ENDS) for cls in (DDIMScheduler, DPMScheduler)],
        *[(cls(FlowMatchConfig(shift=5.0)), FLOW_ENDS + CLOSE) for cls in FLOW_SCHEDULERS.values()],
    ],
    ids=repr,
)
def test_timesteps_at_the_ends_of_the_range(scheduler, lists):
    """All entries are finite; a late start is a run of the timesteps that are left."""
    for timesteps in lists:
        n = len(timesteps)
        for start in range(n):
            plan = scheduler.plan(n, start=start, timesteps=timesteps)
            assert is_finite(plan), (timesteps, start)
            assert (np.diff(plan.timesteps) < 0).all(), timesteps
            assert_equals(plan, scheduler.plan(n - start, timesteps=timesteps[start:]))
        assert plan.from_sample[-1] == 0 or scheduler.kind == "lcm", "the last step leads to x0"


@pytest.mark.parametrize(
    "scheduler",
    [
        *[SCHEDULERS[kind](SchedulerConfig()) for kind in SCHEDULERS if kind != "one_step"],
        *[FLOW_SCHEDULERS[kind](FlowMatchConfig(shift=shift)) for kind in FLOW_SCHEDULERS for shift in (1.0, 9.0)],
    ],
    ids=repr,
)
def test_tables_of_any_number_of_steps_are_finite(scheduler):
    for n in (*range(1, 33), *range(33, 1000, 31), 1000):
        assert is_finite(scheduler.plan(n)), n
        assert is_finite(scheduler.plan(n, start=n // 2)), n


def given(reference, timesteps, sigmas) -> None:
    """Have diffusers' scheduler run through a list, also where it takes none; its coefficients in float64, since
    between close neighbours they are small differences."""
    reference.set_timesteps(len(timesteps))
    reference.timesteps = torch.tensor(timesteps, dtype=torch.float32)
    reference.sigmas = torch.tensor([*sigmas, 0.0], dtype=torch.float64)
    reference.set_begin_index(0)


@pytest.mark.parametrize("timesteps", ENDS, ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
def test_given_timesteps_on_the_diffusion_schedule_against_diffusers(kind, timesteps, monkeypatch):
    reference, scheduler = diffusion_reference(kind, 3.0), SCHEDULERS[kind](SchedulerConfig(snr_shift_scale=3.0))
    abar, n = np.maximum(scheduler.alphas_cumprod[timesteps], 2.0**-24), len(timesteps)  # theirs are float32
    sigmas = np.sqrt((1 - abar) / abar)
    if kind == "lcm":
        reference.set_timesteps(timesteps=timesteps)
    else:
        given(reference, timesteps, sigmas)
    if kind.startswith("euler"):
        in_float64(monkeypatch)
    found = ours(scheduler, scheduler.plan(n, timesteps=timesteps), n)
    scale = float(np.sqrt(1 + sigmas[0] ** 2)) if kind.startswith("euler") else 1.0
    expected = theirs(reference, timesteps, n, monkeypatch, scale)
    if kind.startswith("euler"):
        expected = expected / np.sqrt(1 + np.append(sigmas[1:], 0) ** 2).reshape(-1, *[1] * len(SHAPE))
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("timesteps", FLOW_ENDS, ids=str)
@pytest.mark.parametrize("kind", ["flow_match", "dpmpp_2m", "dpmpp_2m_sde", "uni_pc"])
def test_given_timesteps_of_a_flow_against_diffusers(kind, timesteps, monkeypatch):
    sigmas, n = np.array(timesteps) / 1000, len(timesteps)
    if kind == "flow_match":
        reference = diffusers.FlowMatchEulerDiscreteScheduler()
        reference.set_timesteps(sigmas=sigmas)
    else:
        cls, options = KINDS[kind]
        reference = cls(use_flow_sigmas=True, prediction_type="flow_prediction", **options)
        if kind == "uni_pc":
            reference.set_timesteps(sigmas=sigmas)
            reference.set_begin_index(0)
        else:
            given(reference, timesteps, sigmas)
    scheduler = FLOW_SCHEDULERS[kind](FlowMatchConfig(shift=5.0))
    plan = scheduler.plan(n, timesteps=timesteps)
    found, expected = ours(scheduler, plan, n), theirs(reference, plan.timesteps, n, monkeypatch, 1.0)
    assert np.abs(found - expected).max() < TOLERANCE * expected.std()


@pytest.mark.parametrize("kind", ["ddim", "dpm"])
@pytest.mark.parametrize(
    ("timesteps", "stride"), [([999], 1000), ([0], 1000), ([500, 0], 500), ([900, 700, 500, 300, 100], 200)], ids=str
)
def test_given_timesteps_of_the_releases_schedulers_against_diffusers(kind, timesteps, stride, monkeypatch):
    """In its steps of a fixed length."""
    cls = {"ddim": diffusers.CogVideoXDDIMScheduler, "dpm": diffusers.CogVideoXDPMScheduler}[kind]
    reference = cls(
        prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True, clip_sample=False
    )
    reference.set_timesteps(1000 // stride)
    scheduler, n, noise = SCHEDULERS[kind](SchedulerConfig()), len(timesteps), noises(len(timesteps))
    plan = scheduler.plan(n, timesteps=timesteps)
    x, old, found = torch.from_numpy(noise[-1]), None, ours(scheduler, plan, n)
    for i, t in enumerate(timesteps):
        monkeypatch.setattr(scheduling_dpm_cogvideox, "randn_tensor", lambda *_, i=i, **__: torch.from_numpy(noise[i]))
        v = torch.from_numpy(np.array(model(x.numpy(), float(t))))
        if kind == "ddim":
            x = reference.step(v, t, x, return_dict=False)[0]
        else:
            x, old = reference.step(v, old, t, timesteps[i - 1] if i else None, x, return_dict=False)
        assert np.abs(found[i] - x.numpy()).max() < TOLERANCE * x.numpy().std()


@pytest.mark.parametrize(
    ("timesteps", "message"),
    [
        ([999, 500], "expected 3 that fall"),
        ([999, 500, 500], "expected 3 that fall, from 999 to 0"),
        ([1, 2, 3], "expected 3 that fall"),
        ([1000, 2, 1], "from 999 to 0"),
        ([999, 2, -1], "from 999 to 0"),
        ([999, 2.5, 1], "whole numbers"),
        ([float("nan"), 2, 1], "expected 3 that fall"),
    ],
)
def test_timesteps_that_cannot_be_served(timesteps, message):
    with pytest.raises(InputError, match=message):
        SCHEDULERS["euler"](SchedulerConfig()).plan(3, timesteps=timesteps)


@pytest.mark.parametrize("kind", FLOW_SCHEDULERS)
@pytest.mark.parametrize(
    "timesteps",
    [[1000, 500, 0], [1000, 500, 1e-50], [1001, 500, 1], [500, 500, 1], [500, 500 - 1e-6, 1], [1e300, float("nan"), 1]],
    ids=str,
)
def test_timesteps_that_a_flow_cannot_serve(kind, timesteps):
    """Nothing is left to do at 0; neighbours that are one number to the model are one timestep."""
    scheduler = FLOW_SCHEDULERS[kind](FlowMatchConfig(shift=5.0))
    with pytest.raises(InputError, match=rf"expected 3 that fall, from 1000 .*to above 0, for {scheduler.kind}$"):
        scheduler.plan(3, timesteps=timesteps)
    with pytest.raises(InputError, match=r"expected 1 that fall, from 1000 .*to above 0"):
        scheduler.plan(1, timesteps=[0])


def test_timesteps_that_fall_where_log_snr_is_finite():
    """UniPC takes 999.999 for what is higher, so two of these are one."""
    scheduler = FLOW_SCHEDULERS["uni_pc"](FlowMatchConfig())
    assert scheduler.plan(2, timesteps=[1000, 999.9]).timesteps[0] == np.float32(999.999)
    with pytest.raises(InputError, match=r"expected 2 that fall, from 1000 \(taken for 999.999\) to above 0"):
        scheduler.plan(2, timesteps=[1000, 999.9995])


# --- whole runs

PROMPT = "a small red circle moves to the left"


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained(dtype="float32")


@pytest.mark.parametrize("kind", ["euler", "euler_ancestral", "dpmpp_2m", "dpmpp_2m_sde", "uni_pc", "lcm"])
def test_a_run_and_the_loop_as_one_program(pipe, kind):
    how = {"scheduler": kind, "num_inference_steps": 6, "output_type": "latent", "progress": False}
    stepwise, looped = (pipe(PROMPT, compiled_loop=x, **how).frames for x in (False, True))
    np.testing.assert_allclose(looped, stepwise, atol=1e-4)
    assert np.isfinite(stepwise).all()
    assert 0.3 < stepwise.std() < 3


def test_equal_schedulers_are_one_program(pipe):
    """A name, and an object that computes the same; not one with another noise schedule, or of a user's class."""

    class Mine(DDIMScheduler):
        pass

    config = pipe.scheduler.config
    other = dataclasses.replace(config, snr_shift_scale=0.05)
    schedulers = "ddim", DDIMScheduler(config), DDIMScheduler(other), Mine(config), Mine(config)
    found = [pipe.resolve(GenerationRequest(PROMPT, scheduler=each)).denoise for each in schedulers]
    assert found[0] == found[1] and hash(found[0]) == hash(found[1])
    assert len(set(found)) == 4


@pytest.mark.further
def test_schedulers_agree_with_many_steps(pipe):
    """The deterministic ones solve the same equation."""
    how = {"output_type": "latent", "progress": False, "guidance_scale": 1.0, "num_frames": 9, "force": True}
    exact = pipe(PROMPT, scheduler="uni_pc", num_inference_steps=200, **how).frames
    for kind, few in (("euler", 0.12), ("dpmpp_2m", 0.06), ("uni_pc", 0.06)):
        found = pipe(PROMPT, scheduler=kind, num_inference_steps=50, **how).frames
        assert np.sqrt(np.square(found - exact).mean()) < few * exact.std(), kind


def test_a_stopped_run_goes_on_with_the_schedulers_state(pipe):
    """Of several arrays, also from a file."""
    run = pipe.resolve(GenerationRequest(PROMPT, num_inference_steps=8, scheduler="uni_pc"))
    conditioning = pipe.encode(run, progress=False)
    states = list(pipe.denoise(conditioning, run))
    assert len(states[3].scheduler_state) == 3
    again = list(pipe.denoise(conditioning, run, state=states[3]))
    assert [int(state.step) for state in again] == [5, 6, 7, 8]
    assert (np.asarray(again[-1].latents) == np.asarray(states[-1].latents)).all()


def test_a_killed_command_goes_on(paths, run, tmp_path, monkeypatch, caplog):
    argv = ["generate", PROMPT, "--scheduler", "uni_pc", "--steps", 8, "--out"]
    (whole,) = paths(*argv, tmp_path / "whole.npz")
    real, seen = StateKeeper.keep, []

    def killed(self, state):
        seen.append(int(state.step))
        real(self, state)
        if seen[-1] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(StateKeeper, "keep", killed)
    assert run(*argv, tmp_path / "cut.npz")[0] == 130
    seen.append(0)
    (cut,) = paths(*argv, tmp_path / "cut.npz")
    assert seen == [1, 2, 3, 4, 5, 0, 6, 7, 8]
    assert (np.load(cut)["latents"] == np.load(whole)["latents"]).all()


@pytest.mark.parametrize("kind", ["euler_ancestral", "uni_pc", "lcm"])
def test_the_preview_shows_x0(pipe, kind):
    """Late in the run it is the video that comes out, although the sample there still has noise."""
    preview, seen = Preview(pipe.manifest), []
    run = pipe.resolve(GenerationRequest(PROMPT, num_inference_steps=12, scheduler=kind, output_type="latent"))
    for event in preview.watch(pipe.run(run)):
        if isinstance(event, Step):
            seen.append(preview.latest.astype(float))
    late, early = (np.abs(seen[i] - seen[-1]).mean() for i in (-3, 0))
    assert late < 6
    assert late < early / 3


def test_timesteps_of_a_command(paths, refused, run, tmp_path):
    argv = ["generate", PROMPT, "--timesteps", "999,749,499,249", "--out"]
    (file,) = paths(*argv, tmp_path / "four.npz")
    made = json.loads(str(np.load(file)["metadata"]))["settings"]
    assert (made["timesteps"], made["num_inference_steps"]) == ([999, 749, 499, 249], 4)
    (plain,) = paths("generate", PROMPT, "--steps", 4, "--out", tmp_path / "plain.npz")
    assert (np.load(file)["latents"] == np.load(plain)["latents"]).all(), "of DDIM they are its own"
    (again,) = paths("generate", "--like", file, "--out", tmp_path / "again.npz")
    assert (np.load(file)["latents"] == np.load(again)["latents"]).all()
    assert "expected 5 that fall" in refused(*argv, tmp_path / "x.npz", "--steps", 5)
    assert "those of this model are whole numbers" in refused(*argv[:3], "900.5,3", "--out", tmp_path / "x.npz")
    assert "expected a list of numbers" in refused(*argv[:3], "nan", "--out", tmp_path / "x.npz")


def test_timesteps_in_python(pipe):
    how = {"output_type": "latent", "progress": False}
    given = pipe(PROMPT, timesteps=np.array([999, 749, 499, 249]), **how).frames
    assert (given == pipe(PROMPT, timesteps=(999, 749, 499, 249), **how).frames).all()
    for wrong in ("999", [], [[1, 2]], [1, "x"], 3):
        with pytest.raises(InputError, match="expected a list of numbers"):
            pipe(PROMPT, timesteps=wrong, **how)
