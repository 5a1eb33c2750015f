"""Forms of guidance: against diffusers' guiders, and over whole runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.guiders.adaptive_projected_guidance import normalized_guidance
from diffusers.guiders.classifier_free_zero_star_guidance import cfg_zero_star_scale
from diffusers.guiders.guider_utils import rescale_noise_cfg
from diffusers.guiders.skip_layer_guidance import SkipLayerGuidance

from cogvideox_flax.checkpoint import load_transformer
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.guidance import (
    APG,
    GUIDANCE,
    SKIP_LAYER_SHARES,
    CFGZeroStar,
    ClassifierFree,
    GuidanceInputs,
    SkipLayer,
    steps_between,
)
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.predict.plain import StepInfo
from cogvideox_flax.generate.request import GUIDANCE as NAMES
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.sharding import make_mesh
from tests.models.test_transformer import inputs as transformer_inputs
from tests.models.test_transformer import run_reference
from tests.support import xla_options
from tests.support.reference import convert_component, make_transformer, relative_error

PROMPT = "a small red circle moves to the left"
SHAPE = (2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def given():
    """Predictions without and with the prompt, the sample, and a row of the scheduler's table."""
    rng = np.random.default_rng(0)
    without, change, sample = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(3))
    return without, without + 0.3 * change, sample, DDIMScheduler(SchedulerConfig()).plan(10).row(3)


def guided(form, given, scale=5.0):
    without, with_prompt, sample, row = given
    both = jnp.concatenate([without, with_prompt])
    return np.asarray(jax.jit(form)(both, GuidanceInputs(jnp.float32(scale), sample, row)))


def torched(given):
    return [torch.from_numpy(np.array(x)).double() for x in given[:3]]


def test_skip_layer_is_diffusers(tmp_path):
    """The third prediction is the reference's with a block left out; the formula and the steps are the guider's."""
    reference = make_transformer("cogvideox-5b", num_layers=3)
    model = load_transformer(convert_component("transformer", reference, tmp_path), "float32")
    latents, context, timestep = transformer_inputs(reference, 3, 8, 12)
    exact = run_reference(reference, latents, context, timestep)
    block = reference.transformer_blocks[1]
    block.forward = lambda hidden_states, encoder_hidden_states, *_, **__: (hidden_states, encoder_hidden_states)
    skipped = run_reference(reference, latents, context, timestep)
    info = StepInfo(jnp.array(timestep), jnp.int32(0))
    features = {"prompt_embeds": jnp.array(context)}
    skip = SkipLayer(CogVideoX.embed, 1, 2.8)
    shift = np.asarray(jax.jit(skip)(model, latents.transpose(0, 1, 3, 4, 2), features, info, jnp.array(exact)))
    assert relative_error(shift, 2.8 * (exact - skipped)) < 1e-4

    guider = SkipLayerGuidance(6.0, 2.8, skip_layer_guidance_layers=[1], guidance_rescale=0.5)
    rng = np.random.default_rng(0)
    without = exact + 0.3 * rng.standard_normal(exact.shape).astype(np.float32)
    enabled = []
    for step in range(50):
        guider.set_state(step, 50, torch.tensor(0))
        enabled.append(guider._is_slg_enabled())
    assert steps_between(SKIP_LAYER_SHARES, 50, 0, is_open=True).tolist() == enabled
    guider.set_state(5, 50, torch.tensor(0))
    expected = guider.forward(*(torch.from_numpy(np.array(x)) for x in (exact, without, skipped))).pred
    row = DDIMScheduler(SchedulerConfig()).plan(10).row(3)
    inputs = GuidanceInputs(jnp.float32(6), jnp.array(exact), row, shift)
    ours = ClassifierFree(0.5)(jnp.concatenate([without, exact]), inputs)
    # diffusers' default formulation is u + w (c - u) + g (c - c_skip), its rescaling over all but the batch axis
    assert relative_error(ours, expected) < 1e-4


def test_a_run_with_skip_layer(pipe):
    how = {"num_inference_steps": 12, "output_type": "latent", "progress": False, "num_frames": 9, "force": True}
    plain, skipped = pipe(PROMPT, **how).frames, pipe(PROMPT, skip_layer=2, **how).frames
    assert np.abs(skipped - plain).max() > 1e-2
    np.testing.assert_allclose(pipe(PROMPT, skip_layer=2, compiled_loop=True, **how).frames, skipped, atol=1e-4)
    np.testing.assert_allclose(pipe(PROMPT, skip_layer=2, skip_layer_scale=0.0, **how).frames, plain, atol=1e-5)
    spread = Pipeline.from_pretrained(None, "float32", make_mesh(1, 2, 2))
    np.testing.assert_allclose(spread(PROMPT, skip_layer=2, **how).frames, skipped, atol=1e-3)
    for options, message in (
        ({"skip_layer": 6}, "skip_layer is 6; expected a block from 0 to 5"),
        ({"skip_layer": 1, "step_cache": "residual"}, "skip_layer does not go with step_cache"),
        ({"skip_layer": 1, "skip_layer_scale": float("nan")}, "skip_layer_scale is nan"),
    ):
        with pytest.raises(InputError, match=message):
            pipe(PROMPT, **how, **options)


def test_names_are_those_of_the_options():
    assert tuple(GUIDANCE) == NAMES


def test_plain(given):
    without, with_prompt, *_ = given
    np.testing.assert_allclose(guided(ClassifierFree(), given), without + 5 * (with_prompt - without), atol=1e-5)
    for form in GUIDANCE.values():
        np.testing.assert_allclose(guided(form(), given, 1.0), with_prompt, atol=1e-5)


@pytest.mark.parametrize("rescale", [0.7, 1.0])
def test_rescaled(given, rescale):
    without, with_prompt, _ = torched(given)
    expected = rescale_noise_cfg(without + 5 * (with_prompt - without), with_prompt, rescale)
    np.testing.assert_allclose(guided(ClassifierFree(rescale), given), expected.numpy(), atol=2e-5)


def test_cfg_zero(given):
    without, with_prompt, _ = torched(given)
    alpha = cfg_zero_star_scale(with_prompt.flatten(1), without.flatten(1)).view(-1, 1, 1, 1, 1)
    expected = without * alpha + 5 * (with_prompt - without * alpha)
    np.testing.assert_allclose(guided(CFGZeroStar(), given), expected.numpy(), atol=2e-5)


def test_apg(given):
    """On x0, with eta 0, in the paper's form: from the prediction with the prompt."""
    without, with_prompt, sample = torched(given)
    a, s = (float(x) for x in (given[3].signal, given[3].sigma))
    x0s = [a * sample - s * v for v in (with_prompt, without)]
    x0 = normalized_guidance(*x0s, 4.0, None, eta=0.0, norm_threshold=0.0, use_original_formulation=True)
    expected = (a * sample - x0) / s
    np.testing.assert_allclose(guided(APG(), given), expected.numpy(), atol=5e-5)


@pytest.mark.parametrize(
    ("interval", "steps", "first", "active"),
    [
        ((0, 1), 10, 0, range(10)),
        ((0, 0.6), 10, 0, range(6)),
        ((0.2, 0.5), 10, 0, range(2, 5)),
        ((0.2, 0.5), 10, 4, [0]),  # of the steps that are done
        ((0.25, 0.75), 50, 0, range(12, 37)),
    ],
)
def test_steps_in_an_interval(interval, steps, first, active):
    found = steps_between(interval, steps, first)
    assert len(found) == steps - first
    assert np.flatnonzero(found).tolist() == list(active)


# --- whole runs


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained(dtype="float32")


XLA_OPTIONS = xla_options.AS_USERS
"""As users compile: without them, forms of one program differ in more than the last bit."""

SIZE = {"num_frames": 9, "force": True}
HOW = {"num_inference_steps": 8, "output_type": "latent", "progress": False, "guidance_scale": 4.0} | SIZE


def test_an_interval_is_guidance_in_these_steps_and_none_in_the_others(pipe):
    found = pipe(PROMPT, guidance_interval=(0.25, 0.75), **HOW).frames
    guided = pipe.resolve(GenerationRequest(PROMPT, num_inference_steps=8, guidance_scale=4.0, **SIZE))
    plain = pipe.resolve(GenerationRequest(PROMPT, num_inference_steps=8, guidance_scale=1.0, **SIZE))
    conditioning = pipe.encode(guided, progress=False)
    text = pipe.encode(plain, progress=False)
    state = None
    for one, features, stop in ((plain, text, 2), (guided, conditioning, 6), (plain, text, 8)):
        loop = pipe.denoise(features, one, state=state)
        state = next(each for each in loop if int(each.step) == stop)
    np.testing.assert_allclose(found, np.asarray(state.latents), atol=1e-4)
    whole = pipe(PROMPT, guidance_interval=(0, 1), **HOW).frames
    np.testing.assert_allclose(whole, pipe(PROMPT, **HOW).frames, atol=1e-4)
    assert np.abs(found - whole).max() > 0.05


@pytest.mark.parametrize(
    "how",
    [
        {"guidance": "cfg_zero"},
        pytest.param(
            {"guidance": "apg", "guidance_rescale": 0.5, "guidance_interval": (0.0, 0.5)}, marks=pytest.mark.further
        ),
        pytest.param({"guidance": "apg"}, marks=pytest.mark.further),
        pytest.param({"guidance_rescale": 0.7}, marks=pytest.mark.further),
    ],
)
def test_the_loop_as_one_program_and_a_mesh(pipe, how):
    found = pipe(PROMPT, **how, **HOW).frames
    assert np.abs(found - pipe(PROMPT, **HOW).frames).max() > 0.01
    np.testing.assert_allclose(pipe(PROMPT, compiled_loop=True, **how, **HOW).frames, found, atol=1e-4)
    mesh = (1, 4, 2) if "guidance_interval" in how else (2, 2, 2)
    spread = Pipeline.from_pretrained(dtype="float32", mesh=make_mesh(*mesh))
    np.testing.assert_allclose(spread(PROMPT, **how, **HOW).frames, found, atol=2e-4)


def test_an_interval_does_not_divide_over_what_guidance_alone_fills():
    spread = Pipeline.from_pretrained(dtype="float32", mesh=make_mesh(2, 2, 2))
    with pytest.raises(InputError, match="1 does not divide over mesh axis dp of size 2"):
        spread(PROMPT, guidance_interval=(0, 0.5))
    with pytest.raises(InputError, match="1 does not divide over mesh axis dp of size 2"):
        spread(PROMPT, step_cache="fastercache")


def test_a_run_of_another_mesh_is_checked_again(pipe):
    run = pipe.resolve(GenerationRequest(PROMPT, guidance_scale=1.0))
    spread = Pipeline.from_pretrained(dtype="float32", mesh=make_mesh(2, 1, 1))
    with pytest.raises(InputError, match="1 does not divide over mesh axis dp of size 2"):
        spread.resolve(run)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"guidance_interval": (0.5, 0.5)}, "expected START below STOP"),
        ({"guidance_interval": (0, 0.5), "step_cache": "residual"}, "leave step_cache or guidance_interval out"),
        ({"guidance": "apg", "guidance_scale": 1.0}, "guidance is off at a guidance_scale of 1"),
    ],
)
def test_what_cannot_be_served(pipe, how, message):
    with pytest.raises(InputError, match=message):
        pipe(PROMPT, **how)
