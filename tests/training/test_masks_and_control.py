"""Training of inpainting and control models: masks, a step against the reference modules in PyTorch, whole runs."""

from __future__ import annotations

import dataclasses
import shutil
from functools import cache

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from cogvideox_flax.checkpoint import load_component
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.io.video import open_video, save_video
from cogvideox_flax.models.model import VisualInput
from cogvideox_flax.training.clips import find_clips, load_clip
from cogvideox_flax.training.conditions import CONTROL_MEAN, CONTROL_STD, FRAMES, MaskedClip
from cogvideox_flax.training.config import read_config
from cogvideox_flax.training.finetune import finetune
from cogvideox_flax.training.job import check
from cogvideox_flax.training.masks import random_masks
from cogvideox_flax.training.metrics import read_metrics
from cogvideox_flax.training.prepare import clip_latents
from tests.support.inpainting import reference_mask, save_control_model, save_inpainting_model
from tests.support.media import CAPTION, make_clips
from tests.support.training import settings
from tests.support.training_step import channels_first, check_step, cogvideox_prediction, loss_and_gradient

pytest_plugins = ["tests.support.commands"]

CONFIG = settings(top="remat = false", loop="log_every = 1")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """With a control clip each: the clip upside down."""
    folder = make_clips(tmp_path_factory.mktemp("data") / "clips")
    for name in ("a.mp4", "b.gif", "c"):
        video = open_video(folder / name)
        frames = np.stack([frame for _, frame in video.frames(list(range(video.info.num_frames)))])
        control = {"a.mp4": "a.control.gif", "b.gif": "b.control.mp4", "c": "c.control"}[name]
        if name == "c":
            (folder / control).mkdir()
        save_video(folder / control, frames[:, ::-1], video.info.fps)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, home):
    """Kind -> its layout and its native checkpoint, in small; "noisy" is an inpainting model that saw noise."""

    @cache
    def make(kind):
        layout = tmp_path_factory.mktemp(kind) / "hf"
        if kind == "control":
            save_control_model(layout, "cogvideox-5b")
        else:
            save_inpainting_model(layout, "cogvideox1.5-5b" if kind == "noisy" else "cogvideox-2b", kind == "noisy")
        convert(layout, layout.parent / "native")
        return layout, layout.parent / "native"

    return make


@pytest.fixture
def job_of(models, clips, tmp_path):
    def job_of(kind, text="", folder=None, **changes):
        folder = folder or clips
        if kind != "control":
            folder = tmp_path / "without"
            if not folder.exists():
                shutil.copytree(clips, folder, ignore=shutil.ignore_patterns("*.control*"))
        path = tmp_path / "config.toml"
        where = {"model": models(kind)[1], "clips": folder, "out": tmp_path / "run"}
        path.write_text(CONFIG.format(**where, method=changes.pop("method", "lora")) + text)
        return check(read_config(path, ({"num_frames": 5} if kind == "noisy" else {}) | changes))

    return job_of


# --- masks

drawn_masks = jax.jit(random_masks, static_argnums=(1, 2, 3, 4))


def reference_masks(count, frames, height, width):
    """Masks drawn with NumPy by the rules of VideoX-Fun."""
    random = np.random.default_rng(0)
    odds = [0.05, 0.2, 0.2, 0.2, 0.05, 0.05, 0.05, 0.1, 0.05, 0.05]
    t, y, x = np.ogrid[:frames, :height, :width]
    masks = np.zeros((count, frames, height, width), bool)
    for mask, kind in zip(masks, random.choice(10, count, p=odds), strict=True):
        cy, cx, side = random.integers(height), random.integers(width), min(height, width)
        half_y, half_x = (random.integers(n // 4, n // 4 * 3) // 2 for n in (height, width))
        box = (y >= cy - half_y) & (y < cy + half_y) & (x >= cx - half_x) & (x < cx + half_x)
        k, a, b = random.integers(1, 5), *random.integers(side // 8, side // 4, 2)
        if kind == 6:
            for i in random.permutation(frames)[: random.integers(1, frames // 2 + 1)]:
                h, w = random.integers(1, height // 4 + 1), random.integers(1, width // 4 + 1)
                top, left = random.integers(height - h + 1), random.integers(width - w + 1)
                mask[i, top : top + h, left : left + w] = True
            continue
        mask[:] = [
            box,
            True,
            t >= k,
            (t >= k) & (t < frames - k),
            box & (t >= random.integers(frames // 2)) & (t < random.integers(frames // 2, frames)),
            random.integers(0, 2, mask.shape),
            None,
            (t == 0) & ((y - cy) ** 2 / b**2 + (x - cx) ** 2 / a**2 < 1),
            (t == 0) & ((y - cy) ** 2 + (x - cx) ** 2 < a**2),
            random.random((frames, 1, 1)) > 0.5,
        ][kind]
    return masks


def test_masks_have_the_law_of_the_reference():
    """Averages over 3000 masks: of each pixel, of pixels a block apart in space and time, and of whole frames."""
    ours = np.asarray(drawn_masks(jax.random.key(0), 3000, 9, 16, 24))
    theirs = reference_masks(3000, 9, 16, 24)
    for of in (
        lambda m: m,
        lambda m: m[:, :, 2:] & m[:, :, :-2],
        lambda m: m[:, :, :, 3:] & ~m[:, :, :, :-3],
        lambda m: m[:, 2:] & ~m[:, :-2],
        lambda m: m.all((2, 3)),
        lambda m: m.any((2, 3)),
        lambda m: m.all((1, 2, 3)),
        lambda m: m[:, 1:].any((1, 2, 3)),
        lambda m: m.mean((1, 2, 3)) < 0.25,
    ):
        assert np.abs(of(ours).mean(0) - of(theirs).mean(0)).max() < 0.05
    images = np.asarray(drawn_masks(jax.random.key(1), 2000, 1, 16, 24))
    assert abs(images.all((1, 2, 3)).mean() - 0.7) < 0.04


def test_clips_that_are_masked_all_over_lose_their_condition_at_the_rate():
    """The others keep it, and so do the rest of these, as black clips."""
    seen = {}

    def encode(vae, video, mask, noise, *, statistics):
        seen["mask"] = np.asarray(mask[..., 0])
        return jnp.ones(noise.shape)

    visual = VisualInput(input="image", feature="kept", component="vae", encode=encode, encode_masked=encode)
    batch = {FRAMES: jnp.ones((4000, 5, 8, 8, 3), jnp.uint8)}
    kept = MaskedClip(visual, None, 0.9).features(batch, {"vae": None}, (4000, 2, 1, 1, 1), jax.random.key(0))["kept"]
    kept, everything = np.asarray(kept).all((1, 2, 3, 4)), seen["mask"].all((1, 2, 3))
    assert kept[~everything].all() and 600 < everything.sum() < 1000
    assert abs(kept[everything].mean() - 0.1) < 0.04


# --- a step


def normal(*shape):
    return np.random.default_rng(list(shape)).normal(size=shape).astype(np.float32)


def step_inputs(job, extra):
    """A batch of two clips, what is frozen, and clean latents in the scheduler's scale."""
    latent = job.size.video_latent_shape(2)
    text = {name: normal(*shape) for name, shape in job.model.feature_shapes(2).items()}
    batch = {"mean": normal(*latent), "std": np.zeros(latent, np.float32), "text": text} | extra
    return (
        batch,
        {"empty": {name: x[0] for name, x in text.items()}},
        job.model.codec.statistics.normalize(batch["mean"]),
    )


def check_against_torch(job, layout, native, batch, frozen, clean, key, beside, folder):
    """beside: [B, T, D, h, w]."""
    loss, gradient, x, t = loss_and_gradient(job, native, frozen, batch, key)
    theirs = diffusers.CogVideoXTransformer3DModel.from_pretrained(layout / "transformer").train()
    noise = np.asarray(jax.random.normal(jax.random.split(jax.random.split(key, 3)[2], 3)[0], clean.shape))
    scheduler = diffusers.CogVideoXDDIMScheduler.from_pretrained(layout / "scheduler")
    target = scheduler.get_velocity(torch.tensor(clean), torch.tensor(noise), torch.tensor(t)).numpy()
    prediction = cogvideox_prediction(theirs, beside, x, t, batch["text"])
    check_step(loss, gradient, theirs, prediction, target, folder)


def mask_draws(job, key):
    """Keys of the condition of a loss's key, its masks, and which clips lose it."""
    keys = jax.random.split(jax.random.fold_in(key, 3), 4)
    size = job.size
    masks = np.asarray(drawn_masks(keys[0], 2, size.num_frames, size.height, size.width))
    return keys, masks, masks.all((1, 2, 3)) & np.asarray(jax.random.bernoulli(keys[3], 0.9, (2,)))


@torch.no_grad()
def reference_condition(layout, frames, masks, dropped, pixel_noise, latent_noise):
    """Mask and masked clip [B, T, 17, h, w], as VideoX-Fun's trainer makes them."""
    vae = diffusers.AutoencoderKLCogVideoX.from_pretrained(layout / "vae")
    rows = []
    for clip, mask, is_dropped, in_pixels, in_latents in zip(
        frames, masks, dropped, pixel_noise, latent_noise, strict=True
    ):
        pixels = torch.tensor(clip).float() / 127.5 - 1
        pixels = torch.where(torch.tensor(mask)[..., None], -1.0, pixels)
        pixels = pixels + torch.where(pixels == -1, 0.0, torch.tensor(in_pixels))
        posterior = vae.encode(pixels.movedim(-1, 0)[None]).latent_dist
        latents = posterior.mean + posterior.std * channels_first(in_latents[None])
        kept = torch.cat([reference_mask(1.0 - mask, latents.shape[2:]), latents], 1)
        rows.append(kept * vae.config.scaling_factor * (not is_dropped))
    return torch.cat(rows).movedim(2, 1)


@pytest.mark.parametrize("kind", ["noisy", pytest.param("inpaint", marks=pytest.mark.further)])
def test_a_step_with_masks_is_the_references(models, job_of, kind, tmp_path):
    """Of two clips: one with a part masked, one masked all over without its condition."""
    layout, native = models(kind)
    job = job_of(kind, method="full", caption_dropout=0.0)
    frames = np.random.default_rng(1).integers(0, 256, (2, job.size.num_frames, 32, 48, 3)).astype(np.uint8)
    frames[:, :, :8] = 0  # black, which gets no noise
    batch, frozen, clean = step_inputs(job, {FRAMES: frames})
    frozen["vae"] = load_component("vae", native, dtype="float32")
    key = next(
        key
        for key in map(jax.random.key, range(200))
        for _, masks, dropped in [mask_draws(job, key)]
        if dropped.tolist() == [False, True] and 0.2 < masks[0].mean() < 0.8
    )
    (_, frame_key, latent_key, _), masks, dropped = mask_draws(job, key)
    level_key, pixel_key = jax.random.split(frame_key)
    sigma = np.exp(-3.0 + 0.5 * np.asarray(jax.random.normal(level_key, (2, 1, 1, 1, 1))))
    pixel_noise = sigma * np.asarray(jax.random.normal(pixel_key, frames.shape)) * (kind == "noisy")
    beside = reference_condition(
        layout, frames, masks, dropped, pixel_noise, np.asarray(jax.random.normal(latent_key, clean.shape))
    )
    check_against_torch(job, layout, native, batch, frozen, clean, key, beside, tmp_path)


def test_a_step_with_a_control_clip_is_the_references(models, job_of, tmp_path):
    layout, native = models("control")
    job = job_of("control", method="full", caption_dropout=0.0)
    latent = job.size.video_latent_shape(2)
    mean, std = normal(*latent, 1)[..., 0], np.abs(normal(*latent, 2)[..., 0]).astype(np.float16)
    batch, frozen, clean = step_inputs(job, {CONTROL_MEAN: mean, CONTROL_STD: std})
    key = jax.random.key(0)
    noise = np.asarray(jax.random.normal(jax.random.fold_in(key, 3), latent))
    beside = channels_first(job.model.codec.statistics.normalize(mean + std.astype(np.float32) * noise)).movedim(2, 1)
    check_against_torch(job, layout, native, batch, frozen, clean, key, beside, tmp_path)


# --- runs


SAMPLE = f'[sample]\nprompts = ["{CAPTION}", "a blue square"]\nframes = 3\nnum_inference_steps = 1\n'


@pytest.mark.further
@pytest.mark.parametrize("kind", ["inpaint", "control"])
def test_a_stopped_run_gives_the_same_adapter(job_of, clips, kind, tmp_path):
    """Its samples have the image or the control clip."""
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (40, 60, 3)).astype(np.uint8)).save(tmp_path / "a.png")
    medium = (
        f'control_videos = ["{clips / "b.control.mp4"}"]' if kind == "control" else f'images = ["{tmp_path}/a.png"]'
    )
    job = job_of(kind, SAMPLE + medium)
    assert finetune(job, stop_after=lambda done: done == 2, progress=False) is None
    cut = finetune(check(job.config), progress=False)
    whole = finetune(check(dataclasses.replace(job.config, out=tmp_path / "whole")), progress=False)
    ours, theirs = load_file(cut), load_file(whole)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert max(np.abs(value).max() for name, value in ours.items() if "lora_B" in name) > 1e-2  # no trifle
    lines = [[x for x in read_metrics(p.parent / "training" / "metrics.jsonl") if "loss" in x] for p in (cut, whole)]
    assert [x["loss"] for x in lines[0]] == [x["loss"] for x in lines[1]] and len(lines[0]) == 4
    sheets = [np.asarray(Image.open(whole.parent / "samples" / f"00000{step}.png")) for step in (0, 4)]
    assert sheets[0].shape == (2 * 32 + 2, 3 * 48 + 2 * 2, 3) and (sheets[0] != sheets[1]).any()


def test_a_control_clip_is_prepared_as_its_clip_is(job_of, models):
    """The same part of it in time, encoded alike."""
    job, pipe = job_of("control"), Pipeline.from_pretrained(models("control")[1], "float32")
    found = clip_latents(job, pipe).gather(np.arange(3))
    arrays = job.condition.arrays(job.size)
    assert {name: (found[name].shape[1:], found[name].dtype) for name in arrays} == arrays
    vae = pipe.component("vae")
    for i, clip in enumerate(job.clips):
        assert clip.control is not None and clip.control.name.startswith(f"{clip.path.stem}.control")
        video = load_clip(clip.control, 9, 32, 48, job.fps)
        mean, logvar = vae.encode(video[None] / np.float32(127.5) - 1)
        np.testing.assert_allclose(found[CONTROL_MEAN][i], mean[0], atol=5e-3)
        np.testing.assert_allclose(found[CONTROL_STD][i], np.exp(0.5 * logvar[0]), atol=5e-3)


def test_memory_and_disk_count_what_the_condition_takes(job_of, models):
    """The VAE beside the transformer and three clips of 9x32x48 for masks; twice the latents for control clips."""
    masked, control = job_of("inpaint"), job_of("control")
    vae = load_component("vae", models("inpaint")[1], dtype="float32")
    assert masked.memory()["encoder"] == 4 * sum(x.size for x in jax.tree.leaves(vae))
    assert control.memory()["encoder"] == 0
    latents = 3 * 2 * 2 * 3 * 4 * 6 * 16
    state = [job.disk() - (job.config.loop.keep + 1) * (8 * job.trainable + job.moments) - 4 * job.trainable
             for job in (masked, control)]  # fmt: skip
    texts = 3 * 4 * 10 * 40
    assert state == [texts + latents + 3 * 9 * 32 * 48 * 3, texts + 2 * latents]


@pytest.mark.further
@pytest.mark.parametrize("kind", ["noisy", "control"])
def test_a_mesh_trains_as_one_device(job_of, kind, tmp_path):
    losses = []
    for name, mesh in (("one", {}), ("mesh", {"mesh": "2,1,2,fsdp"})):
        job = job_of(kind, out=tmp_path / name, **{"loop.steps": 2} | mesh)
        finetune(job, progress=False)
        losses.append(
            [line["loss"] for line in read_metrics(job.config.out / "training" / "metrics.jsonl") if "loss" in line]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("control", {"sample.prompts": ["a"]}, r"sample.control_videos: got \(\), expected 1 of them"),
        ("inpaint", {"sample.prompts": ["a", "b"], "sample.images": ["x"] * 3}, "sample.images: .* 0 or 1 or 2"),
        ("inpaint", {"sample.control_videos": ["a.mp4"]}, "sample.control_videos: got .*, expected 0 of them"),
        ("inpaint", {"image_noise": [-3.0, 0.5]}, "image_noise: got .*, expected none"),
        ("noisy", {"image_dropout": 0.1}, "image_dropout: got 0.1, expected none"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(job_of, kind, changes, message):
    with pytest.raises(InputError, match=message):
        job_of(kind, **changes)


def test_a_control_clip_of_a_sample_that_is_too_short(job_of, tmp_path):
    save_video(tmp_path / "short", np.zeros((5, 32, 48, 3), np.uint8), 8)
    with pytest.raises(InputError, match="short controls 5 frames at the model's rate; the video has 9"):
        job_of("control", SAMPLE + f'control_videos = ["{tmp_path}/short"]')


def test_another_control_clip_is_another_run(job_of, clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "other")
    first = job_of("control", folder=folder).clips_fingerprint
    for frame in (folder / "c.control").iterdir():
        frame.unlink()
    save_video(folder / "c.control", np.zeros((9, 40, 40, 3), np.uint8), 8)
    assert job_of("control", folder=folder).clips_fingerprint != first == job_of("control").clips_fingerprint


def test_other_models_train_on_the_same_folder(clips, tmp_path):
    without = shutil.copytree(clips, tmp_path / "without", ignore=shutil.ignore_patterns("*.control*"))
    names = [(clip.name, clip.control) for clip in find_clips(clips, 9, 8)]
    assert names == [(clip.name, None) for clip in find_clips(without, 9, 8)]
    captioned = shutil.copytree(clips, tmp_path / "captioned")
    (captioned / "a.control.txt").write_text("upside down")
    assert "a.control.gif" in [clip.name for clip in find_clips(captioned, 9, 8)]
