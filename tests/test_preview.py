"""The linear map from latents to colours, on clips made from a known one."""

from __future__ import annotations

import numpy as np
import pytest

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.preview import apply_linear_map, fit_linear_map


def known() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Latents, a map, and frames that have its colours only as means over each latent pixel's frames and block."""
    random = np.random.default_rng(0)
    latents = random.uniform(-1, 1, (5, 6, 7, 16)).astype(np.float16)
    weights = random.uniform(-6, 6, (17, 3))
    weights[-1] += 128
    colours = latents.astype(float) @ weights[:-1] + weights[-1]
    owner = np.concatenate([[0], np.repeat(np.arange(1, 5), 4)])
    in_time = np.concatenate([[0], np.tile([-9, 4, -1, 6], 4)])[:, None, None, None]
    block = random.uniform(-20, 20, (8, 8))
    in_space = np.tile(block - block.mean(), (6, 7))[None, :, :, None]
    frames = colours[owner].repeat(8, 1).repeat(8, 2) + in_time + in_space
    return latents, weights, np.rint(frames).astype(np.uint8)


def test_recovers_a_known_map():
    latents, weights, frames = known()
    fitted, r_squared = fit_linear_map(latents, frames)
    assert fitted.dtype == np.float32
    assert 0.9999 < r_squared <= 1
    np.testing.assert_allclose(fitted, weights, atol=0.02)  # frames are rounded to whole numbers
    exact = latents.astype(float) @ weights[:-1] + weights[-1]
    preview = apply_linear_map(latents, fitted)
    assert preview.dtype == np.uint8
    np.testing.assert_allclose(preview, exact, atol=0.52)  # and so is the preview


@pytest.mark.parametrize("change", [lambda z: z[::-1], lambda z: z[:, ::-1], lambda z: z[:, :, ::-1]])
def test_another_order_does_not_fit(change):
    latents, _, frames = known()
    assert fit_linear_map(change(latents), frames)[1] < 0.2


def test_other_frames_do_not_fit():
    latents, _, frames = known()
    assert fit_linear_map(latents[:-1], frames[3:-1])[1] < 0.9  # as if latent t stood for frames 4t to 4t+3


def test_one_frame_fits():
    latents, _, frames = known()
    assert fit_linear_map(latents[:1], frames[:1])[1] > 0.9999


def test_colours_are_clipped_and_rounded():
    weights = np.array([[100.0, 0, 0], [0, 1, 0], [50, 0.5, -3]])
    preview = apply_linear_map(np.array([[[[3.0, 8.2], [-1, 0]]]]), weights)
    assert preview.tolist() == [[[[255, 9, 0], [0, 0, 0]]]]


def test_what_does_not_belong_together_is_refused():
    latents, weights, frames = known()
    expected = r"belong to frames uint8 \[17, 48, 56, 3\]; got "
    for wrong, message in (
        (frames[1:], r"uint8 \[16, 48, 56, 3\]"),
        (frames.swapaxes(1, 2), r"uint8 \[17, 56, 48, 3\]"),
        (frames / 255, r"float64 \[17, 48, 56, 3\]"),
    ):
        with pytest.raises(InputError, match=expected + message):
            fit_linear_map(latents, wrong)
    with pytest.raises(InputError, match=r"latents must be \[T, h, w, C\]; got \[1, 5, 6, 7, 16\]"):
        fit_linear_map(latents[None], frames)
    with pytest.raises(InputError, match="NaN or infinity"):
        fit_linear_map(latents + np.float16(np.inf), frames)
    with pytest.raises(InputError, match="a single colour"):
        fit_linear_map(latents, np.full_like(frames, 7))
    with pytest.raises(InputError, match=r"weights \[17, 3\] do not fit latents with 15 channels; expected \[16, 3\]"):
        apply_linear_map(latents[..., 1:], weights)
