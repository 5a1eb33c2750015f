"""Image-to-video training: a step against the reference's modules in PyTorch, and whole runs."""

from __future__ import annotations

import dataclasses
from functools import cache
from types import SimpleNamespace

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
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.models.hunyuan_video15.tokenizer import TokenizersConfig
from cogvideox_flax.training.clips import load_clip
from cogvideox_flax.training.conditions import FRAME, Condition, FirstFrame, noised
from cogvideox_flax.training.config import LoRAConfig, read_config
from cogvideox_flax.training.finetune import finetune
from cogvideox_flax.training.job import check
from cogvideox_flax.training.metrics import read_metrics
from cogvideox_flax.training.prepare import clip_latents
from tests.support import hunyuan_layout
from tests.support.media import CAPTION, make_clips
from tests.support.reference import relative_error, save_layout
from tests.support.training import settings
from tests.support.training_step import channels_first, check_step, cogvideox_prediction, loss_and_gradient

pytest_plugins = ["tests.support.commands"]

CONFIG = settings(top="remat = false", loop="log_every = 1")
HUNYUAN = "hunyuan_video15_i2v"
RELEASES = (pytest.param("cogvideox-5b-i2v", marks=pytest.mark.further), "cogvideox1.5-5b-i2v", HUNYUAN)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("data") / "clips")


@pytest.fixture(scope="module")
def models(tmp_path_factory, home):
    """Release -> its layout and its native checkpoint, in small."""

    @cache
    def make(release):
        folder = tmp_path_factory.mktemp(release)
        layout, native = folder / "hf", folder / "native"
        with pytest.MonkeyPatch.context() as patch:
            if release == HUNYUAN:
                hunyuan_layout.save_layout(layout, image=True)
                lengths = {
                    "max_length": 60,
                    "glyph_length": 24,
                }  # most of the time would be that of 1256 tokens of text
                patch.setattr(TokenizersConfig, "from_hf", classmethod(lambda cls, raw: cls(**lengths)))
            else:
                save_layout(layout, release)
            convert(layout, native)
        return layout, native

    return make


@pytest.fixture
def job_of(models, clips, tmp_path):
    def job_of(release, text="", **changes):
        path = tmp_path / "config.toml"
        where = {"model": models(release)[1], "clips": clips, "out": tmp_path / "run"}
        path.write_text(CONFIG.format(**where, method=changes.pop("method", "lora")) + text)
        return check(read_config(path, changes))

    return job_of


def test_frames_are_noised_anew_by_a_log_normal_law():
    frames = np.random.default_rng(0).integers(0, 256, (400, 8, 8, 3)).astype(np.uint8)
    clean = frames[:, None] / 127.5 - 1
    clips = jnp.asarray(frames[:, None])
    np.testing.assert_allclose(noised(clips, None, jax.random.key(0)), clean, atol=1e-6)
    noise = np.asarray(noised(clips, (-3.0, 0.5), jax.random.key(0))) - clean
    logs = np.log(noise.std((1, 2, 3, 4)))
    assert abs(logs.mean() + 3) < 0.1 and abs(logs.std() - 0.5) < 0.06
    other = np.asarray(noised(clips, (-3.0, 0.5), jax.random.key(1))) - clean
    assert abs(np.corrcoef(noise.ravel(), other.ravel())[0, 1]) < 0.02


def test_images_are_dropped_at_the_rate():
    prepared = SimpleNamespace(feature="image_embeds", noise=None)
    batch = {"image_embeds": jnp.ones((4000, 2, 3))}
    shape, key = (4000, 1, 1, 1, 1), jax.random.key(0)
    features = FirstFrame([prepared], None, 0.05).features(batch, {}, shape, key)
    kept = np.asarray(features["image_mask"])
    assert abs(kept.mean() - 0.95) < 0.012
    np.testing.assert_array_equal(features["image_embeds"], np.broadcast_to(kept[:, None, None], (4000, 2, 3)))
    assert FirstFrame([prepared], None, 0.0).features(batch, {}, shape, key).keys() == batch.keys()


def cogvideox_image(layout, frames, draws, kept):
    """The first frames' latents [B, 1, C, h, w], as CogVideo's trainers make them."""
    vae = diffusers.AutoencoderKLCogVideoX.from_pretrained(layout / "vae")
    sigma, pixel_noise, latent_noise = draws
    pixels = channels_first(frames[:, None] / 127.5 - 1) + channels_first(sigma * pixel_noise)
    with torch.no_grad():
        posterior = torch.cat([vae.encode(each[None]).latent_dist.parameters for each in pixels])
    mean, logvar = posterior.chunk(2, 1)
    scale = vae.config.scaling_factor
    scale = 1 / scale if vae.config.invert_scale_latents else scale  # as in inference; finetune/ always multiplies
    image = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * channels_first(latent_noise)) * scale
    return (image * torch.tensor(kept).reshape(-1, 1, 1, 1, 1)).movedim(1, 2)


def cogvideox_reference(model, image, x, t, text):
    """The prediction of diffusers' transformer on noised latents and the first frame's."""
    beside = torch.zeros_like(x.movedim(1, 2))
    beside[:, :1] = image
    return cogvideox_prediction(model, beside, x, t, text)


def hunyuan_reference(model, batch, x, t, text, kept):
    """The prediction of diffusers' transformer on noised latents, the first frame's latents and mask, and its image
    features."""
    kept = torch.tensor(kept)
    rows = []
    for i in range(len(x)):  # with or without an image is a property of a whole batch there
        condition, mask = torch.zeros_like(x[i : i + 1]), torch.zeros_like(x[i : i + 1, :1])
        if kept[i]:
            condition[:, :, :1] = channels_first(batch["image_latents"][i : i + 1])
            mask[:, :, :1] = 1
        rows.append(
            model(
                hidden_states=torch.cat([x[i : i + 1], condition, mask], 1),
                timestep=torch.tensor(t[i : i + 1]),
                encoder_hidden_states=torch.tensor(text["prompt_embeds"][i : i + 1]),
                encoder_attention_mask=torch.tensor(text["prompt_embeds_mask"][i : i + 1]),
                encoder_hidden_states_2=torch.tensor(text["prompt_embeds_2"][i : i + 1]),
                encoder_attention_mask_2=torch.tensor(text["prompt_embeds_mask_2"][i : i + 1]),
                image_embeds=torch.tensor(batch["image_embeds"][i : i + 1]) * kept[i],
                return_dict=False,
            )[0]
        )
    return torch.cat(rows)


@pytest.mark.parametrize("release", RELEASES)
def test_a_step_is_the_references(models, job_of, release, tmp_path):
    """The loss and the gradients of all weights, of two clips, one of them without its image; from the same draws."""
    layout, native = models(release)
    job = job_of(release, method="full", image_dropout=0.5, caption_dropout=0.0)
    model, random = job.model, np.random.default_rng(3)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    latent = job.size.video_latent_shape(2)
    text = {name: normal(*shape) for name, shape in model.feature_shapes(2).items()}
    for name in text:
        if "mask" in name:
            text[name] = (np.arange(text[name].shape[1]) < np.array([[9], [5]])).astype(np.float32)
    batch = {"mean": normal(*latent), "std": np.zeros(latent, np.float32), "text": text}
    frames = random.integers(0, 256, (2, 32, 48, 3)).astype(np.uint8)
    batch |= {FRAME: frames} if release != HUNYUAN else {
        "image_latents": normal(2, 1, *latent[2:]),
        "image_embeds": normal(2, *job.condition.visual[1].shape),
    }  # fmt: skip
    frozen = {"empty": {name: x[0] for name, x in text.items()}}
    if release != HUNYUAN:
        frozen["vae"] = load_component("vae", native, dtype="float32")

    # the draws of this key
    key = next(k for k in map(jax.random.key, range(9)) if dropped(k).tolist() == [False, True])
    _, _, noise_key = jax.random.split(key, 3)
    frame_key, latent_key, _ = jax.random.split(jax.random.fold_in(key, 3), 3)
    level_key, pixel_key = jax.random.split(frame_key)
    sigma = np.exp(-3.0 + 0.5 * np.asarray(jax.random.normal(level_key, (2, 1, 1, 1, 1))))
    draws = sigma, jax.random.normal(pixel_key, (2, 1, 32, 48, 3)), jax.random.normal(latent_key, (2, 1, *latent[2:]))

    loss, gradient, x, t = loss_and_gradient(job, native, frozen, batch, key)

    clean = np.concatenate([batch["mean"][:, :1]] * job.size.extra_latents + [batch["mean"]], 1)
    clean = model.codec.statistics.normalize(clean)
    noise = np.asarray(jax.random.normal(jax.random.split(noise_key, 3)[0], clean.shape))
    if release == HUNYUAN:
        theirs = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(layout / "transformer").train()
        prediction = hunyuan_reference(theirs, batch, x, t, text, [1.0, 0.0])
        target = noise - clean
    else:
        theirs = diffusers.CogVideoXTransformer3DModel.from_pretrained(layout / "transformer").train()
        prediction = cogvideox_reference(theirs, cogvideox_image(layout, frames, draws, [1.0, 0.0]), x, t, text)
        scheduler = diffusers.CogVideoXDDIMScheduler.from_pretrained(layout / "scheduler")
        target = scheduler.get_velocity(torch.tensor(clean), torch.tensor(noise), torch.tensor(t)).numpy()
    check_step(loss, gradient, theirs, prediction, target, tmp_path)


def dropped(key):
    """Which of two clips lose their image at a rate of a half."""
    return np.asarray(jax.random.bernoulli(jax.random.split(jax.random.fold_in(key, 3), 3)[2], 0.5, (2,)))


# --- runs ---


@pytest.fixture
def first_frame(tmp_path):
    image = np.random.default_rng(5).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    Image.fromarray(image).save(tmp_path / "first.png")
    return tmp_path / "first.png"


def sampled(image):
    sizes = "frames = 3\nnum_inference_steps = 1\n"
    return f'[sample]\nprompts = ["{CAPTION}", "a blue square"]\nimages = ["{image}"]\n{sizes}'


RUNS = ("cogvideox1.5-5b-i2v", pytest.param(HUNYUAN, marks=pytest.mark.further))


@pytest.mark.parametrize("release", RUNS)
def test_a_stopped_run_gives_the_same_adapter_which_diffusers_reads(models, job_of, first_frame, release, tmp_path):
    layout, native = models(release)
    dropout = {} if release == HUNYUAN else {"image_dropout": 0.3}
    job = job_of(release, out=tmp_path / "cut", **dropout)
    assert finetune(job, stop_after=lambda done: done == 2, progress=False) is None
    cut = finetune(check(job.config), progress=False)
    # samples change nothing of the training
    whole = finetune(job_of(release, sampled(first_frame), out=tmp_path / "whole", **dropout), progress=False)
    ours, theirs = load_file(cut), load_file(whole)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    lines = [[x for x in read_metrics(p.parent / "training" / "metrics.jsonl") if "loss" in x] for p in (cut, whole)]
    assert [x["loss"] for x in lines[0]] == [x["loss"] for x in lines[1]] and len(lines[0]) == 4
    sheets = [np.asarray(Image.open(whole.parent / "samples" / f"00000{step}.png")) for step in (0, 4)]
    assert sheets[0].shape == (2 * 32 + 2, 3 * 48 + 2 * 2, 3) and (sheets[0] != sheets[1]).any()

    # one prediction with the adapter
    random = np.random.default_rng(7)
    x = random.normal(size=job.size.latent_shape(1)).astype(np.float32)
    text = {name: random.normal(size=shape).astype(np.float32) for name, shape in job.model.feature_shapes(1).items()}
    text |= {name: np.ones_like(value) for name, value in text.items() if "mask" in name}
    features = {"image_latents": random.normal(size=(1, 1, *x.shape[2:])).astype(np.float32)}
    if release == HUNYUAN:
        features["image_embeds"] = random.normal(size=(1, *job.condition.visual[1].shape)).astype(np.float32)
    continued = check(dataclasses.replace(job.config, lora=LoRAConfig(init=str(whole))))
    adapted = continued.add_lora(load_component("transformer", native, dtype="float32"), None)
    found = job.model.predict(adapted, jnp.asarray(x), text | features, jnp.array([500]))
    kind = diffusers.CogVideoXTransformer3DModel
    if release == HUNYUAN:
        kind = diffusers.HunyuanVideo15Transformer3DModel
    reference = kind.from_pretrained(layout / "transformer")
    reference.load_lora_adapter(whole.parent, prefix="transformer", weight_name=whole.name)
    with torch.no_grad():
        args = channels_first(x), np.array([500.0 if release == HUNYUAN else 500]), text
        if release == HUNYUAN:
            expected = hunyuan_reference(reference, features, args[0], args[1].astype(np.float32), text, [1.0])
        else:
            image = channels_first(features["image_latents"]).movedim(1, 2)
            expected = cogvideox_reference(reference, image, *args)
    assert relative_error(found, expected.movedim(1, -1)) < 1e-4
    assert max(np.abs(value).max() for name, value in ours.items() if "lora_B" in name) > 1e-2  # no trifle


@pytest.mark.parametrize("release", RUNS)
def test_what_is_prepared_of_the_first_frame_is_what_inference_makes_of_it(models, job_of, release):
    """But for the noise: there the frame itself is kept."""
    job = job_of(release)
    pipe = Pipeline.from_pretrained(models(release)[1], "float32")
    found = clip_latents(job, pipe).gather(np.arange(3))
    of_images = {name: (value.shape[1:], value.dtype) for name, value in found.items() if name not in ("mean", "std")}
    assert of_images == job.condition.arrays(job.size)
    frames = np.stack([load_clip(clip.path, 9, 32, 48, job.fps)[0] for clip in job.clips])
    if release != HUNYUAN:
        np.testing.assert_array_equal(found[FRAME], frames)
        assert not {"image_latents"} & found.keys()
        return
    size: dict = {"num_frames": 9, "height": 32, "width": 48}
    request = GenerationRequest([CAPTION] * 3, image=list(frames), **size)
    for name, value in pipe.encode(request, progress=False).visual.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5)


def test_memory_and_disk_count_what_the_image_takes(job_of, models):
    """The VAE beside the transformer, and a frame of 32x48 of each of three clips."""
    job, text = job_of("cogvideox1.5-5b-i2v"), job_of("cogvideox1.5-5b-i2v")
    vars(text)["condition"] = Condition()
    vae = load_component("vae", models("cogvideox1.5-5b-i2v")[1], dtype="float32")
    assert job.memory()["encoder"] == 4 * sum(x.size for x in jax.tree.leaves(vae))
    assert text.memory()["encoder"] == 0
    assert job.disk() - text.disk() == 3 * 32 * 48 * 3


@pytest.mark.further
def test_a_mesh_trains_as_one_device(job_of, tmp_path):
    """The frames are encoded in the step, over all devices; weights are sharded."""
    losses = []
    for name, mesh in (("one", {}), ("mesh", {"mesh": "2,1,2,fsdp"})):
        job = job_of("cogvideox1.5-5b-i2v", out=tmp_path / name, **{"loop.steps": 2} | mesh)
        finetune(job, progress=False)
        losses.append(
            [line["loss"] for line in read_metrics(job.config.out / "training" / "metrics.jsonl") if "loss" in line]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("release", "changes", "message"),
    [
        ("cogvideox1.5-5b-i2v", {"sample.prompts": ["a", "b"]}, r"sample.images: got \(\), expected 1 or 2 of them"),
        ("cogvideox1.5-5b-i2v", {"num_frames": 1}, "num_frames: got 1, expected more than one frame"),
        ("cogvideox1.5-5b-i2v", {"image_dropout": 1.5}, "image_dropout: got 1.5, expected 0 to 1"),
        ("cogvideox1.5-5b-i2v", {"image_noise": [0.0, -1.0]}, "image_noise: got .*, expected a mean, and a deviation"),
        (HUNYUAN, {"image_noise": [-3.0, 0.5]}, "image_noise: got .*, expected none: no image of this model has noise"),
        ("cogvideox-5b", {"image_dropout": 0.1}, "image_dropout: got 0.1, expected none: this model takes no image"),
        ("cogvideox-5b", {"sample.images": ["a.png"]}, r"sample.images: got \('a.png',\), expected 0 of them"),
    ],
)
def test_settings_of_images_that_are_refused(job_of, release, changes, message):
    with pytest.raises(InputError, match=message):
        job_of(release, **changes)


def test_an_image_that_is_missing_is_known_before_anything_is_prepared(job_of, tmp_path):
    with pytest.raises(InputError, match=r"there is no image .*/none.png"):
        job_of("cogvideox1.5-5b-i2v", sampled(tmp_path / "none.png"))
