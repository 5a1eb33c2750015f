"""Upscaling in one step: the scheduler, one tile against diffusers' parts, the blending of tiles, and the command."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from transformers import T5EncoderModel

from cogvideox_flax import RELEASES, GenerationRequest, Pipeline, sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import upscale as upscaling
from cogvideox_flax.generate.denoise import encoder_noise_key
from cogvideox_flax.generate.predict.plain import standard_normal
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.generate.tiles import Windows, enlarge
from cogvideox_flax.generate.upscale import tile_layout, upscale
from cogvideox_flax.generate.upscale_options import UpscaleOptions
from cogvideox_flax.io.source import VideoInfo
from cogvideox_flax.io.video import open_video, read_metadata, read_video, save_video
from cogvideox_flax.schedulers import OneStepScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from tests.support.media import add_sound, sound_of
from tests.support.reference import make_scheduler, make_transformer, save_layout

pytest_plugins = ["tests.support.commands"]

PIXEL_BAR = 2e-3  # of the pixel range
MANIFEST = Manifest.of_release(RELEASES["cogvideox1.5-5b"])


def clip(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp("1.5"), "cogvideox1.5-5b")


@pytest.fixture(scope="module")
def pipe(model):
    return Pipeline.from_pretrained(model, "float32")


# --- the scheduler ---


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_step_equals_the_reference(shift):
    scheduler, theirs = OneStepScheduler(SchedulerConfig(snr_shift_scale=shift)), make_scheduler("dpm", shift)
    v, latents = np.random.default_rng(0).standard_normal((2, 1, 3, 4, 5, 2)).astype(np.float32)
    plan = scheduler.plan(1)
    assert plan.timesteps.tolist() == [399]
    ours, state = scheduler.step(plan, 0, v, latents, scheduler.init_state(latents))
    expected = theirs.get_velocity(torch.tensor(v), torch.tensor(latents), torch.tensor([399]))
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert state is None and scheduler.start_from(latents, v, 399) is latents


def test_the_scheduler_decides_its_settings():
    media = clip(9, 32, 48)
    how = {"scheduler": "one_step", "num_frames": 9, "height": 32, "width": 48}
    found = resolve(GenerationRequest("", video=media, **how), MANIFEST)
    names = "num_inference_steps", "guidance_scale", "use_dynamic_cfg", "strength"
    assert [getattr(found.request, name) for name in names] == [1, 1, False, 1]
    assert found.first_step == 0 and not found.guided
    same = {"num_inference_steps": 1, "guidance_scale": 1, "use_dynamic_cfg": False, "strength": 1}
    assert resolve(GenerationRequest("", video=media, **how, **same), MANIFEST).request.strength == 1
    wrong = {"num_inference_steps": 50, "guidance_scale": 6.0, "use_dynamic_cfg": True, "strength": 0.8}
    for name, value in wrong.items():
        with pytest.raises(InputError, match=rf"^the one_step scheduler needs {name} .* \(got {value}\)[^\n]*$"):
            resolve(GenerationRequest("", video=media, **how, **{name: value}), MANIFEST)
    with pytest.raises(InputError, match=r"^the one_step scheduler starts from a clip; give --video[^\n]*$"):
        resolve(GenerationRequest("", **how), MANIFEST)


# --- against diffusers' parts ---


def reference(layout, frames, noise, ids):
    """The authors' computation for one window; frames [F, h, w, 3] padded, before they are enlarged by 4."""
    vae = AutoencoderKLCogVideoX.from_pretrained(layout / "vae")
    transformer = CogVideoXTransformer3DModel.from_pretrained(layout / "transformer")
    text = T5EncoderModel.from_pretrained(layout / "text_encoder")(torch.tensor(ids).long())[0]
    video = torch.nn.functional.interpolate(
        torch.tensor(frames).movedim(-1, 1).float(), scale_factor=4, mode="bilinear", align_corners=False
    )
    posterior = vae.encode((video / 255 * 2 - 1).movedim(0, 1)[None]).latent_dist
    latents = (posterior.mean + posterior.std * torch.tensor(noise).movedim(-1, 1)) * vae.config.scaling_factor
    extra = latents.shape[2] % 2
    latents = torch.cat([latents[:, :, :1].repeat(1, 1, extra, 1, 1), latents], 2).movedim(2, 1)
    grid = tuple(side // 2 for side in latents.shape[-2:])
    rotary = get_3d_rotary_pos_embed(
        embed_dim=16, crops_coords=None, grid_size=grid, temporal_size=latents.shape[1] // 2, grid_type="slice",
        max_size=grid,
    )  # fmt: skip
    t = torch.tensor([399])
    v = transformer(latents, text, t, image_rotary_emb=rotary, return_dict=False)[0]
    x0 = make_scheduler("dpm", 1.0).get_velocity(v, latents, t)[:, extra:]
    decoded = vae.decode(x0.movedim(1, 2) / vae.config.scaling_factor).sample
    return (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()


@torch.no_grad()
@pytest.mark.parametrize(("frames", "height", "width"), [(9, 16, 32), (7, 14, 20), (1, 16, 16)])
def test_one_tile_against_diffusers(model, pipe, frames, height, width):
    """The padding of an awkward size included; 9 frames are 3 latent frames, and one more for the patches of two."""
    given = clip(frames, height, width)
    layout = tile_layout(pipe.manifest, VideoInfo(frames, 0, height, width), UpscaleOptions(seed=4))
    count = layout.window[0]
    padded = np.pad(given, ((0, count - frames), (0, 0), (0, 0), (0, 0)), mode="edge")
    padded = np.pad(padded, ((0, 0), (0, -height % 16), (0, -width % 16), (0, 0)))
    shape = (1, (count - 1) // 4 + 1, padded.shape[1] // 2, padded.shape[2] // 2, 16)
    noise = np.asarray(standard_normal(encoder_noise_key(4, 0), shape))
    theirs = reference(model, padded, noise, np.asarray(pipe.tokenizer([""])))
    run = upscaling.tile_runner(pipe, layout, progress=False)
    seen = []
    parts = upscaling.upscale_frames(
        upscaling._Array(given), layout, lambda tile: seen.append(run(tile)) or seen[0], progress=False
    )
    ours = np.concatenate(list(parts))
    assert len(seen) == 1 and seen[0].shape == theirs.shape
    assert theirs.std() > 0.1
    assert np.abs(seen[0] - theirs).max() < PIXEL_BAR
    kept = theirs[:frames, : 4 * height, : 4 * width]
    assert ours.dtype == np.uint8 and ours.shape == kept.shape
    assert np.abs(ours / 255 - kept).max() < PIXEL_BAR + 0.5 / 255


@pytest.mark.further
def test_every_way_of_running_gives_the_same(model, pipe, paths, tmp_path):
    """A request to the ordinary pipeline: in stages, as one program, in a compiled loop, in a batch, on a mesh."""
    media = [clip(9, 32, 48, seed) for seed in (1, 2)]
    how = {"scheduler": "one_step", "height": 32, "width": 48, "output_type": "float", "progress": False}
    expected = pipe(["", ""], video=media, **how).frames
    assert expected.shape == (2, 9, 32, 48, 3)
    for change in ({"one_program": True}, {"compiled_loop": True}):
        np.testing.assert_allclose(pipe(["", ""], video=media, **how, **change).frames, expected, atol=1e-4)
    np.testing.assert_allclose(pipe("", video=media[0], **how).frames[0], expected[0], atol=1e-4)
    spread = Pipeline.from_pretrained(model, "float32", sharding.make_mesh(2, 2, 2))
    np.testing.assert_allclose(spread(["", ""], video=media, **how).frames, expected, atol=1e-4)
    save_video(tmp_path / "in", media[0], fps=16)
    options = ["--scheduler", "one_step", "--height", 32, "--width", 48, "--dtype", "float32"]
    (out,) = paths("generate", "", "--model", model, "--video", tmp_path / "in", "--out", tmp_path / "out", *options)
    assert np.abs(read_video(out)[0] / 255.0 - expected[0]).max() < 0.6 / 255


# --- tiles and chunks ---


WINDOWS = [(64, 64, 0), (65, 64, 32), (200, 48, 16), (193, 48, 47), (97, 32, 0), (33, 9, 8), (13, 5, 2), (23, 8, 1)]


@pytest.mark.parametrize("windows", [Windows(*each) for each in WINDOWS], ids=str)
def test_windows_cover_everything_and_weigh_one(windows):
    length, size, starts, weights = windows.length, windows.size, windows.starts, windows.weights
    assert starts[0] == 0 and starts[-1] == length - size and weights.min() > 0
    assert all(0 < b - a <= size - windows.overlap for a, b in itertools.pairwise(starts))
    total = np.zeros(length)
    for start, own in zip(starts, weights, strict=True):
        total[start : start + size] += own
    np.testing.assert_allclose(total, 1, atol=1e-6)
    if len(starts) == 1:
        assert (weights == 1).all()


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_enlarging_equals_the_reference(scale):
    frames = clip(2, 9, 7)
    given = torch.tensor(frames).movedim(-1, 1).float()
    whole = torch.nn.functional.interpolate(given, scale_factor=scale, mode="bilinear", align_corners=False)
    rows, columns = slice(scale, 6 * scale), slice(2, 7 * scale)
    expected = whole.movedim(1, -1).numpy()[:, rows, columns]
    np.testing.assert_allclose(enlarge(frames, scale, rows, columns), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((9, 16, 32), {}),
        ((5, 23, 37), {"tile": (64, 48), "overlap": 20}),
        ((40, 17, 16), {"tile": (32, 64), "overlap": 31, "chunk": 17, "scale": 2}),
        ((26, 16, 16), {"chunk": 9, "chunk_overlap": 3, "scale": 1}),
        ((1, 50, 70), {"tile": (16, 16), "overlap": 0, "scale": 3}),
    ],
)
def test_tiles_that_are_left_alone_give_the_enlarged_clip(shape, options):
    """Every pixel is covered, with a weight of one; all windows have one shape."""
    given, options = clip(*shape), UpscaleOptions(**options)
    source = upscaling._Array(given)
    layout = tile_layout(MANIFEST, source.info, options)
    shapes = set()

    def run_tile(tile):
        shapes.add(tile.shape)
        return tile / 255

    parts = list(upscaling.upscale_frames(source, layout, run_tile, progress=False))
    found = np.concatenate(parts)
    padded = np.pad(given, ((0, 0), (0, -shape[1] % 16), (0, -shape[2] % 16), (0, 0)))
    height, width = (options.scale * side for side in shape[1:])
    expected = enlarge(padded, options.scale, slice(0, height), slice(0, width))
    assert found.dtype == np.uint8 and found.shape == layout.shape == expected.shape
    assert np.abs(found - expected).max() < 0.51
    assert shapes == {(*layout.window, 3)} and len(parts) == len(layout.axes[0].starts)


# --- the command ---


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """10 frames at 29.97 per second, with a tone."""
    folder = tmp_path_factory.mktemp("film")
    save_video(folder / "silent.mp4", clip(10, 20, 24), fps=30000 / 1001)
    return add_sound(folder / "silent.mp4", folder / "film.mp4", 0.3)


def test_the_command_upscales_a_film(paths, model, pipe, film, tmp_path):
    options = ["--scale", 2, "--tile", "32x48", "--overlap", 8, "--chunk", 9, "--chunk-overlap", 4, "--seed", 3]
    (out,) = paths(
        "upscale", film, "--model", model, *options, "--dtype", "float32", "--quiet", "--out", tmp_path / "out.mp4"
    )
    frames, fps = read_video(out)
    assert frames.shape == (10, 40, 48, 3) and Fraction(fps).limit_denominator(2000) == Fraction(30000, 1001)
    assert read_metadata(out)["settings"]["window"] == [9, 32, 48]
    assert sound_of(out)[2] == sound_of(film)[2]
    given = UpscaleOptions(scale=2, tile=(32, 48), overlap=8, chunk=9, chunk_overlap=4, seed=3)
    ours = upscale(pipe, film, given, progress=False)
    save_video(tmp_path / "same.mp4", ours, fps=30000 / 1001)
    assert (read_video(tmp_path / "same.mp4")[0] == frames).all()
    (folder,) = paths(
        "upscale", film, "--model", model, *options, "--dtype", "float32", "--quiet", "--out", tmp_path / "frames"
    )
    assert (read_video(folder)[0] == ours).all()
    assert (upscale(pipe, read_video(film)[0], given, progress=False) == ours).all()
    other = upscale(pipe, film, UpscaleOptions(**{**vars(given), "seed": 4}), progress=False)
    assert (other != ours).any()


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    transformer = make_transformer("cogvideox-5b", in_channels=32, use_learned_positional_embeddings=True)
    return save_layout(tmp_path_factory.mktemp("i2v"), "cogvideox-5b-i2v", transformer=transformer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tile", "40x64"], "the tile's height is 40; expected a multiple of 16 pixels"),
        (["--tile", "0x64"], "the tile's height is 0; expected a multiple of 16 pixels"),
        (["--tile", "64"], "expected HEIGHTxWIDTH, such as 512x512; got '64'"),
        (["--tile", "64x32"], "overlap is 32; expected less than the tile's width, 32"),
        (["--tile", "64x64", "--overlap", "-1"], "overlap is -1; expected a whole number of 0 or more"),
        (["--chunk", "10"], r"chunk is 10; expected 8 n \+ 1 frames"),
        (["--chunk", "9", "--chunk-overlap", "9"], "chunks of 9 frames overlap by 9; expected fewer"),
        (["--scale", "0"], "scale is 0; expected a whole number from 1 to 16"),
        (["--scale", "17"], "scale is 17"),
        (["--seed", "-1"], "seed is -1; expected a whole number from 0"),
        (["--out", "out.avi"], "known are .mp4"),
        (["--out", "nowhere/../film.txt"], "known are .mp4"),
        (["--mesh", "2,1,1"], "1 does not divide over mesh axis dp of size 2"),
    ],
)
def test_bad_options_are_refused_before_anything_loads(refused, model, film, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    err = refused("upscale", film, "--model", model, "--out", tmp_path / "v.mp4", *options)
    assert re.search(message, err), err


def test_bad_clips_and_models_are_refused(refused, model, image_model, film, tmp_path, monkeypatch):
    (tmp_path / "notes.mp4").write_text("not a video")
    (tmp_path / "empty").mkdir()
    out = ["--out", tmp_path / "v.mp4"]
    for given, message in (("notes.mp4", "its contents are none of"), ("empty", "no frames"), ("no.mp4", "no video")):
        assert message in refused("upscale", tmp_path / given, "--model", model, *out)
    assert "name one with --model" in refused("upscale", film, *out)
    assert "takes a text-to-video model" in refused("upscale", film, "--model", image_model, *out)
    monkeypatch.setattr(upscaling.limits, "MAX_PIXELS", 5000)
    assert "has 16,384 pixels" in refused("upscale", film, "--model", model, *out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 64}, "tile is 64; expected (height, width)"),
        ({"tile": (64,)}, "tile is (64,); expected (height, width)"),
        ({"overlap": "8"}, "overlap is '8'; expected a whole number"),
        ({"scale": 2.0}, "scale is 2.0; expected a whole number"),
    ],
)
def test_python_values_of_other_kinds_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        tile_layout(MANIFEST, VideoInfo(9, 8, 16, 16), UpscaleOptions(**options))
    with pytest.raises(InputError, match=r"got float64 \[9, 16, 16, 3\]"):
        upscaling._Array(np.zeros((9, 16, 16, 3)))


def test_a_failure_midway_leaves_no_file(run, model, film, tmp_path, monkeypatch):
    def broken(tile):
        raise InputError("the disk of clips is gone")

    monkeypatch.setattr(upscaling, "tile_runner", lambda *_: broken)
    code, _, err = run("upscale", film, "--model", model, "--out", tmp_path / "v.mp4")
    assert code == 2 and "the disk of clips is gone" in err
    assert not list(tmp_path.iterdir())


def test_a_film_that_is_saved_again_midway_leaves_no_file(run, model, tmp_path, monkeypatch):
    path, done = tmp_path / "film.gif", []

    def run_tile(tile):
        done.append(tile)
        if len(done) == 1:  # of the first of two chunks
            save_video(path, clip(10, 20, 24, seed=1), fps=8)
        return tile / 255

    monkeypatch.setattr(upscaling, "tile_runner", lambda *_: run_tile)
    save_video(path, clip(10, 20, 24), fps=8)
    out = tmp_path / "out.gif"
    options = ["--chunk", 9, "--chunk-overlap", 0, "--dtype", "float32"]
    code, _, err = run("upscale", path, "--model", model, *options, "--out", out)
    assert code == 2 and f"{path} changed while this run was under way; start it again" in err
    assert len(done) == 1 and not out.exists()


def test_what_was_planned_is_what_is_run(pipe, film):
    """The memory check compiles the program of the visual encoder that then runs: float32 frames."""
    layout = tile_layout(pipe.manifest, open_video(film).info, UpscaleOptions(scale=1))
    ((_, arguments, _),) = layout.run.abstract("encode")[1:]
    assert arguments[1].dtype == np.float32 and arguments[1].shape == (1, *layout.window, 3)
