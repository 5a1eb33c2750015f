"""docs/activations.md: its script runs, and what it computes is what a run computes."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from cogvideox_flax.errors import InputError
from tests.support.commands import ROOT


@pytest.fixture(scope="module")
def page():
    """The names of the page's script, which has run."""
    names = {"__name__": "page"}
    for cell in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "activations.md").read_text(), re.DOTALL):
        exec(compile(cell, "docs/activations.md", "exec"), names)
    return names


def test_activations_are_those_of_the_prediction(page):
    transformer, latents, context = page["pipe"].transformer, page["state"].latents, page["context"]
    np.testing.assert_allclose(page["v"], transformer(latents, context, 750), atol=1e-5)
    assert page["after"].shape == (6, 1, 80, 192)
    first = transformer.run_blocks(transformer.embed(latents, context, 750), stop=1)
    np.testing.assert_allclose(page["after"][0], first.video, atol=1e-4)


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
