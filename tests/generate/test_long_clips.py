"""Clips longer than a model's: RIFLEx positions, windows of time, and decoding in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.models import embeddings
from diffusers.pipelines.cogvideo import pipeline_cogvideox

from cogvideox_flax import GenerationRequest, Pipeline, sharding
from cogvideox_flax.checkpoint import load_transformer
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.predict.plain import StepInfo
from cogvideox_flax.generate.predict.windows import Windowed
from cogvideox_flax.generate.tiles import Windows
from cogvideox_flax.io.video import read_video
from cogvideox_flax.nn import rope
from tests.support.reference import convert_component, make_transformer, random, relative_error, save_layout

pytest_plugins = ["tests.support.commands"]

PROMPT = "a small red circle moves to the left"
SMALL = {"height": 32, "width": 48, "num_inference_steps": 2, "progress": False}


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A checkpoint of the 1.5 architecture: time in patches of 2, extra latent frames."""
    folder = tmp_path_factory.mktemp("long")
    convert(save_layout(folder / "hf", "cogvideox1.5-5b"), folder / "native")
    return folder / "native"


@pytest.fixture(scope="module")
def pipe(native):
    return Pipeline.from_pretrained(native, "float32")


# --- RIFLEx


def reference_rotary(frames, k, monkeypatch):
    """diffusers' tables for 5b at 480x720, with one frequency of time lowered as the paper says."""
    original = embeddings.get_1d_rotary_pos_embed

    def lowered(dim, pos, *args, **kwargs):
        if dim != 16:
            return original(dim, pos, *args, **kwargs)
        frequencies = 1 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        frequencies[k - 1] = 0.9 * 2 * np.pi / frames
        angle = torch.outer(torch.as_tensor(pos).double(), frequencies).repeat_interleave(2, 1)
        return angle.cos().float(), angle.sin().float()

    monkeypatch.setattr(embeddings, "get_1d_rotary_pos_embed", lowered)
    crop = pipeline_cogvideox.get_resize_crop_region_for_grid((30, 45), 45, 30)
    return embeddings.get_3d_rotary_pos_embed(
        embed_dim=64, crops_coords=crop, grid_size=(30, 45), temporal_size=frames, device="cpu"
    )


def test_riflex_lowers_the_second_frequency_of_5b(monkeypatch):
    """97 frames are 25 latent ones; the period of the second frequency is 20. Source: the authors' settings for 5b."""
    ours = rope.rotary((25, 30, 45), 64, (30, 45), riflex_from=13)
    reference = reference_rotary(25, 2, monkeypatch)
    for mine, theirs in zip(ours, reference, strict=True):
        np.testing.assert_allclose(mine, theirs[:, ::2], atol=2e-5)
    plain = rope.rotary((25, 30, 45), 64, (30, 45))
    changed = [np.abs(np.asarray(a) - np.asarray(b)).max(0) > 1e-3 for a, b in zip(ours, plain, strict=True)]
    assert [np.flatnonzero(each).tolist() for each in changed] == [[1], [1]]


def test_riflex_changes_nothing_where_nothing_repeats():
    for frames in (1, 13, 17):  # 0.9 of the period is 17.9
        for a, b in zip(
            rope.rotary((frames, 2, 2), 64, (2, 2), 13), rope.rotary((frames, 2, 2), 64, (2, 2)), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_riflex_in_the_transformer_against_diffusers(tmp_path):
    reference = make_transformer("cogvideox-5b")
    native = convert_component("transformer", reference, tmp_path)
    ours = load_transformer(native, dtype="float32")
    config = ours.config
    base = config.sample_height // 2, config.sample_width // 2
    latents = np.asarray(random(0, 1, 40, 2 * base[0], 2 * base[1], config.in_channels))
    context = np.asarray(random(1, 1, config.text_length, config.text_width))
    tables = rope.rotary((40, *base), config.head_dim, base, config.trained_positions)
    with torch.no_grad():
        theirs = reference(
            torch.tensor(latents).permute(0, 1, 4, 2, 3),
            torch.tensor(context),
            torch.tensor([500]),
            image_rotary_emb=tuple(torch.tensor(np.repeat(np.asarray(x), 2, 1)) for x in tables),
        ).sample.permute(0, 1, 3, 4, 2)
    assert relative_error(ours(latents, context, 500, riflex=True), theirs) < 1e-4
    assert relative_error(ours(latents, context, 500), theirs) > 1e-3


def test_riflex_is_a_request(pipe, tmp_path):
    """For rotary models alone; a clip that does not repeat is the same."""
    short, long = {"num_frames": 9, **SMALL}, {"num_frames": 169, **SMALL, "output_type": "latent"}
    np.testing.assert_array_equal(pipe(PROMPT, **short, positions="riflex").frames, pipe(PROMPT, **short).frames)
    assert np.abs(pipe(PROMPT, **long, positions="riflex").frames - pipe(PROMPT, **long).frames).max() > 1e-3
    with pytest.raises(InputError, match="positions is 'riflex'; this model has none"):
        Pipeline.from_pretrained(None, "float32").resolve(GenerationRequest(PROMPT, positions="riflex"))


# --- windows


@pytest.mark.parametrize(
    "windows", [Windows(13, 5, 2), Windows(14, 6, 4), Windows(23, 8, 1), Windows(6, 5, 3)], ids=str
)
def test_noise_of_windows(windows):
    """Each frame has noise of the first window, and no window has a frame of it twice."""
    order, size = Windowed(None, windows).noise_order, windows.size
    assert len(order) == windows.length and order[:size] == list(range(size))
    for start in windows.starts:
        assert len(set(order[start : start + size])) == size


def test_windows_of_a_prediction_that_looks_at_each_frame_alone():
    """Then windows change nothing; features with a row per frame are cut alike, others are not."""
    latents, control, text = random(0, 2, 13, 2, 2, 3), random(1, 2, 13, 2, 2, 3), random(2, 2, 5)

    def predict(model, x, features, info, cache):
        assert x.shape[1] == features["control"].shape[1]
        return model * x + features["control"] ** 2 + features["text"].sum() + info.timestep, cache

    given = 2.0, latents, {"control": control, "text": text}, StepInfo(7, 0), None
    (whole, _), (found, _) = predict(*given), Windowed(predict, Windows(13, 5, 2))(*given)
    np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.further
def test_a_long_clip_in_every_kind_of_run(pipe, native, tmp_path, paths):
    """57 frames in windows of 25: at once, as one program, in stages on disk with the frames streamed to the file."""
    options = {"num_frames": 57, "window": 25, "window_overlap": 8, **SMALL}
    programs = pipe.resolve(GenerationRequest(PROMPT, **{k: v for k, v in options.items() if k != "progress"}))
    assert programs.windows == Windows(16, 8, 2) and programs.size.latent_frames == 16
    stepped = pipe(PROMPT, **options, output_type="float").frames
    assert stepped.shape == (1, 57, 32, 48, 3)
    for how in ({"compiled_loop": True}, {"one_program": True}):
        np.testing.assert_allclose(pipe(PROMPT, **options, **how, output_type="float").frames, stepped, atol=1e-4)
    flags = ["--num-frames", 57, "--window", 25, "--window-overlap", 8, "--height", 32, "--width", 48, "--steps", 2]
    (path,) = paths("generate", PROMPT, "--model", native, *flags, "--dtype", "float32", "--out", tmp_path / "%04d.png")
    expected = pipe(PROMPT, **options).frames[0]
    assert np.abs(read_video(path)[0].astype(int) - expected).max() <= 1
    short = {"num_frames": 25, **SMALL}  # no longer than its window
    np.testing.assert_array_equal(pipe(PROMPT, window=25, **short).frames, pipe(PROMPT, **short).frames)


def test_memory_of_a_step_does_not_grow_with_the_clip(pipe):
    """By some copies of the latents alone, which are small beside what a window needs in a model of real width."""

    def needed(num_frames, window):
        size = {"num_frames": num_frames, "height": 32, "width": 48, "num_inference_steps": 2}
        run = pipe.resolve(GenerationRequest(PROMPT, window=window, **size))
        ((spec, args, _),) = run.abstract("denoise")
        memory = pipe._compiled.get(spec).prepare(*args).memory_analysis()
        return memory.temp_size_in_bytes, 4 * np.prod(run.size.latent_shape(1))

    (short, few), (long, many), (whole, _) = needed(49, 25), needed(193, 25), needed(193, None)
    assert long - short < 6 * (many - few)
    assert long < 0.6 * whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 24}, "window is 24; it must be 8 n"),
        ({"window": 25, "window_overlap": 25}, "window_overlap is 25; expected a multiple of 4 below the window's 25"),
        ({"window": 25, "window_overlap": 6}, "window_overlap is 6; expected a multiple of 4"),
        ({"window_overlap": 8}, "give --window too"),
        ({"window": 25, "tiling": True}, "leave tiling or the window out"),
        ({"positions": "yarn"}, "positions is 'yarn'; expected riflex"),
    ],
)
def test_refusals(pipe, options, message):
    with pytest.raises(InputError, match=message):
        pipe.resolve(GenerationRequest(PROMPT, num_frames=57, height=32, width=48, **options))


# --- decoding in chunks


@pytest.mark.parametrize("frames", [1, 2, 6, *(pytest.param(n, marks=pytest.mark.further) for n in (3, 5))])
def test_pieces_are_the_whole(pipe, frames):
    latents = np.asarray(random(0, 2, frames, 4, 6, 16))
    whole = np.asarray(pipe.decode(latents, output_type="float", progress=False))
    clips = pipe.decode(latents, output_type="float", in_chunks=True, progress=False)
    for clip, expected in zip(clips, whole, strict=True):
        assert (clip.shape, len(clip), clip.dtype) == (expected.shape, len(expected), expected.dtype)
        np.testing.assert_allclose(np.stack(list(clip)), expected, atol=1e-5)  # sums in other orders


@pytest.mark.further
def test_pieces_on_a_mesh(native, pipe):
    """Caches stay split over the devices from chunk to chunk; what was compiled from shapes is what runs."""
    on_mesh = Pipeline.from_pretrained(native, "float32", sharding.make_mesh(2, 2, 2))
    latents = np.asarray(random(0, 1, 7, 8, 8, 16))
    (clip,) = on_mesh.decode(latents, in_chunks=True, progress=False)
    (expected,) = np.asarray(pipe.decode(latents, progress=False))
    assert np.abs(np.stack(list(clip)).astype(int) - expected).max() <= 1
