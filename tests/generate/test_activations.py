"""docs/activations.md: its script runs, and what it computes is what a run computes."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from cogvideox_flax.errors import InputError
from tests.support.commands import ROOT

STEPS = "num_inference_steps=4"


@pytest.fixture(scope="module")
def page():
    """The names of the page's script, which has run, with fewer frames and steps."""
    text, names = (ROOT / "docs" / "activations.md").read_text(), {"__name__": "page"}
    assert text.count(STEPS) == 1
    text = text.replace(STEPS, "num_inference_steps=2, num_frames=9, force=True")
    for cell in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(cell, "docs/activations.md", "exec"), names)
    return names


def test_activations_are_those_of_the_prediction(page):
    transformer, latents, context = page["pipe"].transformer, page["state"].latents, page["context"]
    expected = jax.jit(lambda transformer, *args: transformer(*args))(transformer, latents, context, 750)
    np.testing.assert_allclose(page["v"], expected, atol=1e-5)
    assert page["after"].shape == (6, 1, 48, 192)
    first = jax.jit(lambda transformer, *args: transformer.run_blocks(transformer.embed(*args), stop=1).video)
    np.testing.assert_allclose(page["after"][0], first(transformer, latents, context, 750), atol=1e-4)


def along(function, x, gradient):
    """The change of a function along its gradient, by differences and by the gradient itself."""
    step = 0.05 * gradient / np.linalg.norm(gradient)
    return float(function(x + step) - function(x - step)), 2 * float((gradient * step).sum())


@pytest.mark.further
def test_gradients_through_the_decoder(page):
    vae, latents = page["pipe"].vae, page["state"].video_latents
    found, expected = along(lambda z: page["redness"](vae, z), latents, np.asarray(page["toward_red"]))
    assert abs(found - expected) < 0.02 * expected
    video = page["pipe"].decode(page["state"], output_type="float", progress=False)
    exact = page["codec"].decode(vae, latents, False)
    np.testing.assert_allclose(video, np.clip(exact / 2 + 0.5, 0, 1), atol=1e-4)


def test_gradients_through_the_loop(page):
    pipe, run, noise = page["pipe"], page["run"], page["noise"]

    def spread(embeds):
        return page["final_latents"](pipe.transformer, embeds, noise).std()

    found, expected = along(spread, page["context"], np.asarray(page["toward_contrast"]))
    assert abs(found - expected) < 0.02 * expected
    *_, last = pipe.denoise(page["conditioning"], run.varied(latents=noise))
    exact = page["final_latents"](pipe.transformer, page["context"], noise)
    np.testing.assert_allclose(exact, last.latents, atol=1e-4)


@pytest.mark.parametrize("transform", [jax.grad, jax.jit], ids=["grad", "jit"])
def test_pipelines_answer_with_the_way(page, transform):
    pipe, conditioning, run = page["pipe"], page["conditioning"], page["run"]
    with pytest.raises(InputError, match=r"pipe\.decode .* pipe\.manifest\.model\.codec\.decode is the function"):
        transform(lambda z: pipe.decode(z))(page["state"].video_latents)

    def denoise(noise):
        return list(pipe.denoise(conditioning, run.varied(latents=noise)))

    with pytest.raises(InputError, match=r"pipe\.denoise .* pipe\.resolve\(request\)\.denoise is the function"):
        transform(denoise)(page["noise"])
