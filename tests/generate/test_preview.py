"""The linear map from latents to colours, on clips made from a known one."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from benchmarks.latent_preview import fit_linear_map, to_grid
from cogvideox_flax import GenerationRequest, Pipeline, hub
from cogvideox_flax.checkpoint import Manifest, load_vae, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import preview as previews
from cogvideox_flax.generate.events import Step
from cogvideox_flax.generate.preview import Preview, apply_linear_map
from cogvideox_flax.io.video import read_video
from cogvideox_flax.models.registry import get_release
from tests.support.reference import SHARED
from weights.toy_world import world

pytest_plugins = ["tests.support.commands"]

PROMPT = "a large green square moves to the left"


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


def explained(latents, matrix, frames):
    """The share of the averaged frames' variance, of all clips together, that the map explains."""
    seen = np.stack([to_grid(clip) for clip in frames])
    found = np.stack(latents) @ matrix[:-1] + matrix[-1]
    return 1 - np.square(seen - found).sum() / np.square(seen - seen.mean((0, 1, 2, 3))).sum()


def test_the_map_of_the_embedded_autoencoder():
    """On clips that it was not fitted to."""
    matrix = read_manifest(hub.EMBEDDED).preview_matrix
    vae, encode = load_vae(hub.EMBEDDED, dtype="float32"), jax.jit(lambda vae, video: vae.encode(video)[0])
    clips = [world.sample_clip(31, i, "any").video for i in range(8)]
    latents = [np.asarray(encode(vae, (clip[None] / 127.5 - 1).astype(np.float32)))[0] for clip in clips]
    assert explained(latents, matrix, clips) > 0.97


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no latent of the released autoencoder at {SHARED}")
def test_the_map_of_the_released_autoencoder():
    """That latent is of pixels in [0, 1]: of colours from 127.5 to 255."""
    name = SHARED / "data" / "latents" / "input_480x720_49f"
    latents = load_file(f"{name}.latents.safetensors")["latents"][0].astype(np.float32).transpose(1, 2, 3, 0)
    frames = (127.5 + read_video(f"{name}.mp4")[0] / 2).round().astype(np.uint8)
    for release in ("cogvideox-2b", "cogvideox1.5-5b-i2v"):
        assert explained([latents], Manifest.of_release(get_release(release)).preview_matrix, [frames]) > 0.94


@pytest.mark.parametrize("scheduler", ["ddim", "dpm"])
def test_the_estimate_is_the_video_long_before_the_end(scheduler):
    """x0 of each step, from the step before or from the scheduler, by the equations that the scheduler uses."""
    pipe = Pipeline.from_pretrained()
    preview = Preview(pipe.manifest)
    request = GenerationRequest(PROMPT, num_inference_steps=10, scheduler=scheduler, output_type="latent")
    seen = [preview.latest for event in preview.watch(pipe.run(request)) if isinstance(event, Step)]
    last = seen[-1].astype(int)
    assert seen[-1].shape == (1, 5, 8, 8, 3)
    errors = [np.abs(frames - last).mean() for frames in seen[2:]]
    assert errors[0] < 25 and errors[-2] < 3 and errors[-1] == 0
    assert last[0, :, :, :, 1].max() - last[0, :, :, :, 0].min() > 60  # green on a ground


def test_it_is_written_once_a_second_and_at_the_end(run, tmp_path, monkeypatch):
    written, real = [], previews.write_preview
    monkeypatch.setattr(previews, "write_preview", lambda *args: written.append(time.monotonic()) or real(*args))
    how = ("--steps", 12, "--out", tmp_path / "x.mp4", "--quiet")
    code, _, stderr = run("generate", PROMPT, "--preview", tmp_path / "p.png", *how)
    assert code == 0, stderr
    with Image.open(tmp_path / "p.png") as image:
        assert image.size == (5 * 64, 64)
    assert 1 <= len(written) <= 2 + int(written[-1] - written[0])
    code, _, stderr = run("generate", PROMPT, "--preview", tmp_path / "p.webp", *how)
    assert code == 0, stderr
    with Image.open(tmp_path / "p.webp") as image:
        assert (image.n_frames, image.size) == (5, (64, 64))


def test_slow_files_are_rare(tmp_path, monkeypatch):
    """A file that takes long is not written again before fifty times as long has passed, but for the last."""
    written = []
    monkeypatch.setattr(previews, "INTERVAL_S", 0.0)
    monkeypatch.setattr(previews, "write_preview", lambda *args: written.append(time.sleep(0.2)))
    pipe = Pipeline.from_pretrained()
    preview = Preview(pipe.manifest, tmp_path / "p.png")
    request = GenerationRequest(PROMPT, num_inference_steps=10, output_type="latent")
    list(preview.watch(pipe.run(request)))
    assert len(written) == 2


def test_another_file_is_refused_before_anything_is_loaded(run, tmp_path):
    code, _, stderr = run("generate", PROMPT, "--preview", tmp_path / "p.jpg", "--out", tmp_path / "x.mp4")
    assert code == 2 and "a .png or an animated .webp" in stderr and stderr.count("\n") == 1


def test_an_autoencoder_without_a_map_says_so():
    manifest = Manifest.of_release(get_release("hunyuanvideo1.5-480p-t2v"))
    with pytest.raises(
        InputError, match="no map from latents to colours is known for this hunyuan_video15 autoencoder"
    ):
        Preview(manifest)
