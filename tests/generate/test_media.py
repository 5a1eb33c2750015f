"""Image to video and video to video, against diffusers' pipelines, through the converter, and in every kind of run."""

from __future__ import annotations

import re
import shutil

import av
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
)
from diffusers.models.autoencoders import vae as reference_vae
from diffusers.pipelines.cogvideo import pipeline_cogvideox_video2video as reference_v2v
from diffusers.schedulers import scheduling_dpm_cogvideox
from PIL import Image
from transformers import T5EncoderModel

from cogvideox_flax import GenerationRequest, Pipeline, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import journey, media, store
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_metadata, read_video, save_video
from tests.support.inpainting import save_control_model
from tests.support.media import add_sound, smooth, sound_of
from tests.support.reference import SHARED, make_scheduler, save_layout

pytest_plugins = ["tests.support.commands"]

PROMPTS = ["a small red circle moves to the left", "a blue square on white ground"]
NEGATIVE = "black"
SIZE = {"num_frames": 9, "height": 32, "width": 48}
PIXEL_BAR = 2e-3  # of the pixel range
SCHEDULERS = [
    ("ddim", {"num_inference_steps": 4, "guidance_scale": 6.0}),
    ("dpm", {"num_inference_steps": 5, "guidance_scale": 6.0, "use_dynamic_cfg": True}),
    ("dpm", {"num_inference_steps": 3, "guidance_scale": 1.0}),
]


@pytest.fixture(scope="module", params=["cogvideox-5b-i2v", "cogvideox1.5-5b-i2v"])
def image_layout(request, tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["cogvideox-2b", "cogvideox-5b"])
def text_layout(request, tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp(request.param), request.param)


def channels_first(x):
    return torch.tensor(np.asarray(x)).movedim(-1, -4)  # B T h w C -> B C T h w


def run_reference(kind, layout, pipe, scheduler, step_noise, posterior_noise, monkeypatch, **options):
    """A pipeline of diffusers with all of its noise given; one item after the other is encoded."""
    text_encoder = T5EncoderModel.from_pretrained(layout / "text_encoder")
    reference = kind(
        tokenizer=None,
        text_encoder=text_encoder,
        vae=AutoencoderKLCogVideoX.from_pretrained(layout / "vae"),
        transformer=CogVideoXTransformer3DModel.from_pretrained(layout / "transformer"),
        scheduler=scheduler,
    )
    if reference.transformer.config.patch_size_t:  # lift the cap that its nominal size puts on 1.5's positions
        reference.transformer.register_to_config(sample_height=300, sample_width=300)
    steps, items = {"i": 0}, iter(posterior_noise)

    def next_step(pipe, i, t, kwargs):
        steps["i"] = i + 1
        return kwargs

    monkeypatch.setattr(reference_vae, "randn_tensor", lambda *_, **__: channels_first(next(items)[None]))
    monkeypatch.setattr(
        scheduling_dpm_cogvideox, "randn_tensor", lambda *_, **__: channels_first(step_noise[steps["i"]]).movedim(1, 2)
    )
    reference.set_progress_bar_config(disable=True)
    with torch.no_grad():
        ids = (pipe.tokenizer(texts) for texts in (PROMPTS, [NEGATIVE] * 2))
        embeds, negative = (text_encoder(torch.tensor(np.asarray(x)).long())[0] for x in ids)
        video = reference(
            prompt_embeds=embeds,
            negative_prompt_embeds=negative,
            output_type="np",
            callback_on_step_end=next_step,
            **options,
        )
    return video.frames


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS)
def test_image_to_video_against_diffusers(image_layout, kind, options, monkeypatch):
    """Two images of other sizes, with their own posterior noise."""
    pipe = Pipeline.from_pretrained(image_layout, dtype="float32")
    random = np.random.default_rng(0)
    images = [Image.fromarray(smooth(1, 50, 75)), Image.fromarray(smooth(2, 32, 48))]
    size = pipe.resolve(GenerationRequest(PROMPTS, image=images, **SIZE)).size
    shape = size.latent_shape(2)
    assert shape[1] == (4 if "1.5" in str(image_layout) else 3)
    latents = random.normal(size=shape).astype(np.float32)
    noise = random.normal(size=(options["num_inference_steps"], *shape)).astype(np.float32)
    posterior = random.normal(size=(2, 1, *shape[2:])).astype(np.float32)
    ours = pipe(
        PROMPTS,
        NEGATIVE,
        image=images,
        scheduler=kind,
        latents=latents,
        noise=noise if kind == "dpm" else None,
        encoder_noise={"image": posterior},
        output_type="float",
        progress=False,
        **SIZE,
        **options,
    )
    theirs = run_reference(
        CogVideoXImageToVideoPipeline,
        image_layout,
        pipe,
        make_scheduler(kind, pipe.scheduler.config.snr_shift_scale),
        noise,
        posterior,
        monkeypatch,
        image=images,
        latents=channels_first(latents).movedim(1, 2),
        **SIZE,
        **options,
    )
    assert ours.frames.shape == theirs.shape == (2, 9, 32, 48, 3)
    assert theirs.std() > 0.1
    assert np.abs(ours.frames - theirs).max() < PIXEL_BAR


@pytest.mark.parametrize(("scheduler", "strength"), [(0, 0.8), (1, 0.5), (2, 1)])
def test_video_to_video_against_diffusers(text_layout, scheduler, strength, monkeypatch):
    kind, options = SCHEDULERS[scheduler]
    pipe = Pipeline.from_pretrained(text_layout, dtype="float32")
    random = np.random.default_rng(0)
    clips = [smooth(seed, 9, 40, 60) for seed in (1, 2)]
    request = GenerationRequest(PROMPTS, video=clips, strength=strength, **SIZE, **options)
    run = pipe.resolve(request)
    shape = run.size.latent_shape(2)
    latents, posterior = random.normal(size=(2, *shape)).astype(np.float32)
    noise = random.normal(size=(len(run.steps), *shape)).astype(np.float32)
    assert len(run.steps) == int(options["num_inference_steps"] * strength)
    ours = pipe(
        PROMPTS,
        NEGATIVE,
        video=clips,
        strength=strength,
        scheduler=kind,
        latents=latents,
        noise=noise if kind == "dpm" else None,
        encoder_noise={"video": posterior},
        output_type="float",
        progress=False,
        **SIZE,
        **options,
    )
    monkeypatch.setattr(reference_v2v, "randn_tensor", lambda *_, **__: channels_first(latents).movedim(1, 2))
    theirs = run_reference(
        CogVideoXVideoToVideoPipeline,
        text_layout,
        pipe,
        make_scheduler(kind, pipe.scheduler.config.snr_shift_scale),
        noise,
        posterior,
        monkeypatch,
        video=[[Image.fromarray(frame) for frame in clip] for clip in clips],
        strength=strength,
        height=32,
        width=48,
        **options,
    )
    assert ours.frames.shape == theirs.shape == (2, 9, 32, 48, 3)
    assert theirs.std() > 0.1
    assert np.abs(ours.frames - theirs).max() < PIXEL_BAR


@pytest.fixture(scope="module")
def control_model(tmp_path_factory):
    return save_control_model(tmp_path_factory.mktemp("control"), "cogvideox-5b")


@pytest.mark.parametrize("dynamic", [False, True])
def test_control_against_diffusers(control_model, dynamic, monkeypatch):
    """The reference's control pipeline takes DDIM alone."""
    pipe = Pipeline.from_pretrained(control_model, dtype="float32")
    clips = [smooth(seed, 9, 40, 60) for seed in (1, 2)]
    options = {"num_inference_steps": 4, "guidance_scale": 6.0, "use_dynamic_cfg": dynamic}
    latents = np.random.default_rng(0).normal(size=(2, 3, 4, 6, 16)).astype(np.float32)
    how = {"scheduler": "ddim", "latents": latents, "output_type": "float", "progress": False}
    ours = pipe(PROMPTS, NEGATIVE, control_video=clips, height=32, width=48, **how, **options).frames
    theirs = run_reference(
        CogVideoXFunControlPipeline,
        control_model,
        pipe,
        make_scheduler("ddim", pipe.scheduler.config.snr_shift_scale),
        [],
        [],
        monkeypatch,
        control_video=[[Image.fromarray(frame) for frame in clip] for clip in clips],
        latents=channels_first(latents).movedim(1, 2),
        height=32,
        width=48,
        **options,
    )
    assert ours.shape == theirs.shape == (2, 9, 32, 48, 3)
    assert theirs.std() > 0.1
    assert np.abs(ours - theirs).max() < PIXEL_BAR
    inverted = [255 - clip for clip in clips]
    other = pipe(PROMPTS, NEGATIVE, control_video=inverted, height=32, width=48, **how, **options).frames
    assert np.abs(other - ours).max() > 0.01


# --- in every kind of run ---

I2V = {"num_frames": 9, "height": 32, "width": 48, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("media") / "first frame.png"
    Image.fromarray(smooth(5, 32, 48)).save(path)
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """20 frames at 16 per second: 10 at the model's 8."""
    path = tmp_path_factory.mktemp("media") / "clip.mp4"
    save_video(path, smooth(6, 20, 32, 48), fps=16)
    return path


@pytest.fixture(scope="module")
def image_model(tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp("i2v"), "cogvideox1.5-5b-i2v")


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp("1.5"), "cogvideox1.5-5b")


def same_at_once(pipe, prompt, options):
    """The frames of a run, which are the same as one program, in a compiled loop and on a mesh."""
    how = {"output_type": "float", "seed": 3, "progress": False, **options}
    expected = pipe(prompt, **how).frames
    spread = Pipeline.from_pretrained(pipe.native_dir, "float32", sharding.make_mesh(2, 2, 2))
    for each, change in ((pipe, {"one_program": True}), (pipe, {"compiled_loop": True}), (spread, {})):
        np.testing.assert_allclose(each(prompt, **how, **change).frames, expected, atol=1e-4)
    return expected


@pytest.mark.parametrize("kind", ["image", pytest.param("video", marks=pytest.mark.further)])
def test_every_way_of_running_gives_the_same(kind, image_model, text_model, image, clip, paths, tmp_path):
    """In stages by the command, at once, as one program, in a compiled loop, on a mesh."""
    model = image_model if kind == "image" else text_model
    given = {"image": image} if kind == "image" else {"video": clip, "strength": 0.6}
    options = {**I2V, "num_inference_steps": 4} | given
    pipe = Pipeline.from_pretrained(model, "float32")
    expected = same_at_once(pipe, PROMPTS[0], options)
    assert expected.shape == (1, 9, 32, 48, 3)

    run, common = tmp_path / "run", ["--dtype", "float32", "--dir", tmp_path / "run"]
    size = ["--num-frames", 9, "--height", 32, "--width", 48, "--seed", 3]
    paths("encode", PROMPTS[0], "--model", model, *common, *size, f"--{kind}", given[kind])
    with TensorFile(run / store.EMBEDDINGS_FILE) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
    latents = {"image": {"image_latents": (1, 16, 1, 4, 6)}, "video": {"video_latents": (1, 16, 4, 4, 6)}}[kind]
    assert shapes == {"prompt_embeds": (1, 10, 40), "negative_prompt_embeds": (1, 10, 40)} | latents
    strength = [] if kind == "image" else ["--strength", 0.6]
    paths("denoise", *common, "--steps", 4, *strength)
    (video,) = paths("decode", "--dtype", "float32", "--dir", run)
    with TensorFile(run / store.LATENTS_FILE) as file:
        latents = file.read("latents").transpose(0, 2, 3, 4, 1)
    found = pipe.decode(latents, output_type="float", progress=False)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    settings = read_metadata(video)["settings"]
    assert settings[kind][0]["file"] == given[kind].name and len(settings[kind][0]["sha256"]) == 64


def rewrite(path):
    """Save a clip or image again, with other contents of the same kind and size."""
    if path.name == "a.png":
        Image.fromarray(255 - np.asarray(Image.open(path))).save(path)
    else:
        frames, fps = read_video(path)
        save_video(path, 255 - frames, fps)


def test_a_clip_that_is_saved_again_while_a_model_loads(text_model, tmp_path, run, monkeypatch):
    """Its new contents do not become the latents of the old ones."""
    path, folder, real = tmp_path / "clip.gif", tmp_path / "run", OpenModel.component
    save_video(path, smooth(6, 9, 32, 48), fps=16)
    argv = ["encode", PROMPTS[0], "--model", text_model, "--dtype", "float32", "--dir", folder, "--video", path]
    argv += ["--num-frames", 9, "--height", 32, "--width", 48]

    def load(self, name):
        if name == "text_encoder":
            rewrite(path)
        return real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(OpenModel, "component", load)
        code, _, err = run(*argv)
    assert code == 2 and f"error: {path} changed while this run was under way; start it again" in err
    assert not (folder / store.EMBEDDINGS_FILE).exists()
    assert run(*argv)[0] == 0 and (folder / store.EMBEDDINGS_FILE).exists()


@pytest.mark.parametrize("kind", ["a.mp4", "a.gif", "folder", "%d.png", "cut.mp4"])
@pytest.mark.parametrize("name", [*media.CLIPS, media.MASK])
def test_a_clip_that_changed_is_not_read(kind, name, tmp_path):
    path = tmp_path / kind
    save_video(path, smooth(6, 3, 32, 48), fps=8)
    clip = media._check(name, path, 8)
    before = clip.read(3, 32, 48, "crop")
    if kind == "cut.mp4":
        path.write_bytes(path.read_bytes()[:2000])
    else:
        rewrite(path)
    with pytest.raises(InputError, match=f"{kind} changed while this run was under way"):
        clip.read(3, 32, 48, "crop")
    if kind != "cut.mp4":
        again = media._check(name, path, 8)
        assert again.sha256 != clip.sha256 and np.abs(again.read(3, 32, 48, "crop") - before).max() > 0


@pytest.mark.parametrize("name", [*media.IMAGES, media.MASK])
def test_an_image_that_changes_while_it_is_read(name, tmp_path, monkeypatch):
    path, real = tmp_path / "a.png", media.read_image
    Image.fromarray(smooth(5, 32, 48)).save(path)

    def read(path, **how):
        rewrite(path)
        return real(path, **how)

    monkeypatch.setattr(media, "read_image", read)
    with pytest.raises(InputError, match=r"a\.png changed while this run was under way"):
        media._check(name, path, 8)


def test_a_request_is_checked_anew_by_each_run(text_model, tmp_path):
    """A clip may change between two runs of one request."""
    pipe, path = Pipeline.from_pretrained(text_model, "float32"), tmp_path / "clip.mp4"
    save_video(path, smooth(6, 9, 32, 48), fps=16)
    request = GenerationRequest(PROMPTS[0], video=path, output_type="latent", **I2V)
    first = pipe(request, progress=False)
    rewrite(path)
    second = pipe(request, progress=False)
    assert (second.frames != first.frames).any()
    assert second.metadata["settings"]["video"] != first.metadata["settings"]["video"]


def test_stages_of_another_image_are_not_taken_over(image_model, image, paths, run, tmp_path, monkeypatch):
    """A stage says what it was made of; the settings in the directory may be those of a later `encode`."""
    folder, other = ["--dtype", "float32", "--dir", tmp_path / "run"], tmp_path / "other.png"
    size = ["--num-frames", 9, "--height", 32, "--width", 48]
    Image.fromarray(smooth(7, 32, 48)).save(other)
    moved = shutil.copy(image, tmp_path / "moved.png")

    def encode(image, *more):
        return ["encode", PROMPTS[0], "--model", image_model, *folder, *size, "--image", image, *more]

    def refused(*argv):
        code, out, err = run(*argv, *folder)
        assert code == 2 and out == "" and err.count("error: ") == 1
        return err

    paths(*encode(image))
    paths("denoise", *folder)
    paths(*encode(moved))
    paths("decode", *folder)  # the same image in another place
    with monkeypatch.context() as patch:  # the new settings are written, its latents are not
        patch.setattr(journey, "encode", interrupted)
        assert run(*encode(other))[0] == 130
    assert "was made before image changed; run `cogvideox encode` again" in refused("denoise")
    assert "was made before image changed; run `cogvideox denoise` again" in refused("decode")
    paths(*encode(other))
    assert "was made before image changed; run `cogvideox denoise` again" in refused("decode")
    assert "was made before seed changed; run `cogvideox encode` again" in refused("denoise", "--seed", 1)
    paths("denoise", *folder)
    paths("decode", *folder)


def interrupted(*args, **kwargs):
    yield from ()
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["image", "video"])
def test_several_videos_are_those_of_the_following_seeds(kind, image_model, text_model, image, clip, paths, tmp_path):
    """Also in the noise of the latents of images and clips."""
    model, media = (image_model, image) if kind == "image" else (text_model, clip)
    pipe = Pipeline.from_pretrained(model, "float32")
    how = {kind: media, **I2V, "output_type": "latent", "progress": False}
    both = pipe(PROMPTS[0], **how, seed=4, num_videos=2).frames
    for i in range(2):
        np.testing.assert_array_equal(both[i : i + 1], pipe(PROMPTS[0], **how, seed=4 + i).frames)
    size = ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 2, "--dtype", "float32"]
    command = ["generate", PROMPTS[0], "--model", model, *size, f"--{kind}", media, "--out", tmp_path / "x.npz"]
    found = paths(*command, "--num-videos", 2, "--seed", 4)
    extra = both.shape[1] - np.load(found[0])["latents"].shape[1]
    for i in range(2):
        np.testing.assert_array_equal(np.load(found[i])["latents"], both[i : i + 1, extra:])
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".npz"] == []


def test_the_image_and_its_options_matter(image_model, image):
    pipe = Pipeline.from_pretrained(image_model, "float32")

    def run(image, **change):
        options = {**I2V, "output_type": "latent", "progress": False} | change
        return pipe(PROMPTS[0], image=image, **options).frames

    plain, pixels = run(image), np.asarray(Image.open(image))
    assert (run(pixels) == plain).all() and (run(Image.open(image)) == plain).all()
    assert np.abs(run(255 - pixels) - plain).max() > 1e-3
    assert np.abs(run(image, last_image=pixels[::-1]) - plain).max() > 1e-3
    assert np.abs(run(image, image_scale=1.0) - plain).max() > 1e-3
    assert (run(image, image_scale=1 / 0.7) == plain).all()
    wide = np.concatenate([pixels, pixels], 1)
    assert np.abs(run(wide) - run(wide, fit="stretch")).max() > 1e-3
    assert (run(wide[:, 24:72]) == run(wide)).all()


def test_a_video_is_resampled_and_repeated(text_model, clip, caplog):
    pipe = Pipeline.from_pretrained(text_model, "float32")  # 16 frames per second, as the clip
    run = pipe.resolve(GenerationRequest(PROMPTS[0], video=clip, height=32, width=48))
    assert run.size.num_frames == 9 and "the last 11 of 20 frames are not used" in caplog.text  # trained on 9
    run = pipe.resolve(GenerationRequest(PROMPTS[0], video=clip, num_frames=25, height=32, width=48))
    assert "its last frame is repeated 5 times" in caplog.text
    (found,) = run.request.video
    frames = found.read(25, 32, 48, "crop")
    assert (frames[19:] == frames[19]).all() and (frames[18] != frames[19]).any()


def test_the_sound_of_a_clip_is_saved_with_its_video(text_model, clip, tmp_path, caplog):
    loud = add_sound(clip, tmp_path / "loud.mp4", 1)
    pipe = Pipeline.from_pretrained(text_model, "float32")
    how = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "progress": False}
    video = pipe(PROMPTS, video=[loud, clip], **how)
    one, two = video.save(tmp_path / "out.mp4")
    codec, end, packets = sound_of(one)
    assert codec == "aac" and abs(end - 9 / 16) < 0.03
    assert packets == sound_of(loud)[2][: len(packets)]
    with av.open(str(two)) as container:
        assert not container.streams.audio
    assert "is left out" not in caplog.text
    pipe(PROMPTS[0], video=loud, fps=8, **how).save(tmp_path / "slow.mp4")
    assert f"the sound of {loud} is left out: the video is played at 0.5 of its speed" in caplog.text


def test_all_of_the_strength_is_text_to_video(text_model, clip):
    pipe = Pipeline.from_pretrained(text_model, "float32")
    options = {**I2V, "output_type": "latent", "progress": False, "seed": 2}
    alone = pipe(PROMPTS[0], **options).frames
    np.testing.assert_array_equal(pipe(PROMPTS[0], video=clip, strength=1, **options).frames, alone)


def test_noise_is_drawn_apart(text_model, clip):
    """The posterior's noise is not the initial one."""
    pipe = Pipeline.from_pretrained(text_model, "float32")
    run = pipe.resolve(GenerationRequest(PROMPTS[0], video=clip, **I2V))
    _, posterior = run.media(run.visual[0])
    initial, _ = run.initial_noise(np.uint32(0))
    assert abs(np.corrcoef(posterior.ravel(), initial[:, 1:].ravel())[0, 1]) < 0.1


def test_a_conditioning_of_another_request_is_refused(text_model, clip):
    pipe = Pipeline.from_pretrained(text_model, "float32")
    conditioning = pipe.encode(GenerationRequest(PROMPTS[0], **I2V), progress=False)
    with pytest.raises(InputError, match=r"has no latents of images or clips; .* give video_latents"):
        pipe.denoise(conditioning, GenerationRequest(PROMPTS[0], video=clip, **I2V))


def test_learned_positions_stay_at_their_size(tmp_path, image, caplog):
    """5b-I2V at another size runs on its rotary positions alone."""
    pipe = Pipeline.from_pretrained(save_layout(tmp_path / "i2v", "cogvideox-5b-i2v"), "float32")
    options = {"num_frames": 9, "num_inference_steps": 2, "output_type": "latent", "progress": False, "image": image}
    assert pipe(PROMPTS[0], height=32, width=48, **options).frames.shape == (1, 3, 4, 6, 16)
    assert "learned positions" not in caplog.text
    turned = pipe(PROMPTS[0], height=48, width=32, **options).frames  # as many tokens, another grid
    assert caplog.text.count("the learned positions are those of 32x48 and are left out at 48x32") == 1
    pipe.transformer.pos_embedding = None
    assert (pipe(PROMPTS[0], height=48, width=32, **options).frames == turned).all()


# --- bad input ---


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """File name -> file."""
    folder = tmp_path_factory.mktemp("bad")
    pixels = smooth(7, 32, 48)
    Image.fromarray(pixels).save(folder / "whole.png")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:300])
    first, second = Image.fromarray(pixels), Image.fromarray(255 - pixels)
    first.save(folder / "animated.webp", save_all=True, append_images=[second], lossless=True)
    first.save(folder / "moving.gif", save_all=True, append_images=[second])
    Image.new("1", (40000, 40000)).save(folder / "huge.png")
    (folder / "notes.txt").write_text("not an image")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("image", [], r"an image-to-video model; give it --image \(image=\)"),
        ("control", [], r"a control model; give it --control-video \(control_video=\)"),
        (
            "control",
            ["--control-video", "{bad}/whole.png", "--num-frames", "9"],
            "whole.png is one image, and a clip was expected",
        ),
        ("image", ["--image", "nowhere.png"], "there is no image nowhere.png"),
        ("image", ["--image", "{bad}/cut.png"], "cannot read .*cut.png"),
        ("image", ["--image", "{bad}/animated.webp"], "is animated, 2 frames; .* or it as a video"),
        ("image", ["--image", "{bad}/moving.gif"], "cannot read .*moving.gif"),
        ("image", ["--image", "{bad}/huge.png"], "huge.png has more than 33,554,432 pixels"),
        ("image", ["--image", "{bad}/notes.txt"], "cannot read .*notes.txt"),
        ("image", ["--image", "{bad}/whole.png", "--image", "{bad}/whole.png"], "image: 2 for 1 prompts"),
        ("image", ["--image", "{bad}/whole.png", "--strength", "0.5"], "give --video, or leave strength out"),
        ("image", ["--image", "{bad}/whole.png", "--video", "{bad}/moving.gif"], "takes no video; it takes image"),
        ("image", ["--image", "{bad}/whole.png", "--image-scale", "0"], "image_scale is 0.0; expected a number above"),
        ("text", ["--image", "{bad}/whole.png"], "a text-to-video model, which takes no image; it takes video"),
        ("text", ["--video", "{bad}/empty"], "there are no frames"),
        ("text", ["--video", "{bad}/notes.txt"], "notes.txt"),
        (
            "text",
            ["--video", "{bad}/moving.gif", "--strength", "1.5"],
            "strength is 1.5; expected a number above 0 to 1",
        ),
        ("text", ["--video", "{bad}/moving.gif", "--strength", "0.01"], "is less than one step; use 0.02 or more"),
        ("text", ["--strength", "0.5"], "give --video, or leave strength out"),
        ("text", ["--image-scale", "1"], "image_scale is a factor of an image's latents"),
    ],
)
def test_bad_input_is_refused_before_anything_loads(
    kind, options, message, image_model, text_model, control_model, bad, refused
):
    model = {"image": image_model, "text": text_model, "control": control_model}[kind]
    err = refused("generate", PROMPTS[0], "--model", model, *[part.format(bad=bad) for part in options])
    assert re.search(message, err), err


def test_python_values_of_other_kinds_are_refused(image_model):
    pipe = Pipeline.from_pretrained(image_model, "float32")
    for image, message in ((5, "got int"), (np.zeros((4, 4), np.uint8), r"got uint8 \[4, 4\]")):
        with pytest.raises(InputError, match=message):
            pipe(PROMPTS[0], image=image, **I2V)


def test_real_media(text_model, image_model, paths, tmp_path):
    """The authors' own inputs, of another size and rate than the model's."""
    folder = SHARED / "data" / "media"
    if not folder.exists():
        pytest.skip("no real data beside the checkout")
    common = ["--steps", 1, "--num-frames", 9, "--height", 32, "--width", 48, "--dtype", "float32"]
    for name, model, option in (
        ("beach_480x720.png", image_model, "--image"),
        ("horse_480x720_49f.mp4", text_model, "--video"),
        ("hiker_240x368_49f.mp4", text_model, "--video"),
    ):
        more = ["--strength", 1] if option == "--video" else []
        (video,) = paths(
            "generate", PROMPTS[0], "--model", model, option, folder / name, "--out", tmp_path / "v.mp4", *common, *more
        )
        assert read_video(video)[0].shape == (9, 32, 48, 3)
