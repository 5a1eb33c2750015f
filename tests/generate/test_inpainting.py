"""Inpainting models (CogVideoX-Fun InP) against a reference of diffusers' parts, and in every kind of run."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from diffusers.models import upsampling
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from diffusers.schedulers import scheduling_dpm_cogvideox
from PIL import Image
from transformers import T5EncoderModel

from cogvideox_flax import GenerationRequest, Pipeline
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import store
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_metadata, save_video
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.visual import INPAINT_NOISE, shrink_mask
from cogvideox_flax.models.registry import RELEASES
from tests.generate.test_media import NEGATIVE, PIXEL_BAR, PROMPTS, channels_first, same_at_once
from tests.support.inpainting import reference_mask, save_inpainting_model
from tests.support.media import smooth
from tests.support.reference import make_scheduler, save_layout

pytest_plugins = ["tests.support.commands"]

RELEASES_IN_PARTS = ("cogvideox-2b", "cogvideox-5b", "cogvideox1.5-5b")
"""The architectures of the inpainting models, but for the input channels."""

HEIGHT, WIDTH = 32, 48


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Release -> checkpoint; that of 1.5 was trained with noise."""
    folder = tmp_path_factory.mktemp("inpainting")
    return {name: save_inpainting_model(folder / name, name, "1.5" in name) for name in RELEASES_IN_PARTS}


# --- the reference


def reference_kept(vae, video, mask, noise):
    """Mask and masked video [1, 17, T, h, w] of a video [F, H, W, 3] in [-1, 1]."""
    masked = channels_first(np.where(mask[..., None], -1, video))[None].float()
    if noise is not None:
        masked = masked + torch.where(masked == -1, 0, INPAINT_NOISE * channels_first(noise))
    latents = vae.encode(masked).latent_dist.mode()
    kept = torch.cat([reference_mask(1.0 - mask, latents.shape[2:]), latents], 1) * vae.config.scaling_factor
    return torch.zeros_like(kept) if mask.all() else kept


def reference_rotary(transformer, frames, height, width):
    config, grid = transformer.config, (height // 2, width // 2)
    if not config.use_rotary_positional_embeddings:
        return None
    if config.patch_size_t:
        how = {"crops_coords": None, "temporal_size": frames // 2, "grid_type": "slice", "max_size": grid}
    else:
        crop = get_resize_crop_region_for_grid(grid, config.sample_width // 2, config.sample_height // 2)
        how = {"crops_coords": crop, "temporal_size": frames}
    return get_3d_rotary_pos_embed(config.attention_head_dim, grid_size=grid, **how)


def reference_decode(vae, latents, monkeypatch):
    """Scaled latents [B, C, T, h, w] to frames in [0, 1]; an even T with the first latent alone."""
    latents = latents / vae.config.scaling_factor
    if latents.shape[2] % 2:
        video = vae.decode(latents).sample
    else:
        first, cache = vae.decoder(latents[:, :, :1], conv_cache=None)
        parts, forward = [first], upsampling.CogVideoXUpsample3D.forward

        def double_all(module, x):
            if module.compress_time and x.shape[2] == 1:
                x = F.interpolate(x, scale_factor=2.0)
                b, c, t, h, w = x.shape
                x = module.conv(x.permute(0, 2, 1, 3, 4).reshape(b * t, c, h, w))
                return x.reshape(b, t, *x.shape[1:]).permute(0, 2, 1, 3, 4)
            return forward(module, x)

        monkeypatch.setattr(upsampling.CogVideoXUpsample3D, "forward", double_all)
        for at in range(1, latents.shape[2], 2):
            part, cache = vae.decoder(latents[:, :, at : at + 2], conv_cache=cache)
            parts.append(part)
        video = torch.cat(parts, 2)
    return (video / 2 + 0.5).clamp(0, 1).movedim(1, -1).numpy()


@torch.no_grad()
def run_reference(layout, pipe, kind, kept, start, latents, step_noise, monkeypatch, *, strength=1, **options):
    """The sampling of VideoX-Fun's inpainting pipeline.

    kept: vae -> mask and masked video [1, 17, T, h, w]; start: vae -> the clip's scaled latents, or None.
    """
    vae = AutoencoderKLCogVideoX.from_pretrained(layout / "vae")
    transformer = CogVideoXTransformer3DModel.from_pretrained(layout / "transformer")
    text_encoder = T5EncoderModel.from_pretrained(layout / "text_encoder")
    scheduler = make_scheduler(kind, pipe.scheduler.config.snr_shift_scale)
    embeds = torch.cat(
        [text_encoder(torch.tensor(np.asarray(pipe.tokenizer(t))).long())[0] for t in ([NEGATIVE] * 2, PROMPTS)]
    )
    steps, guidance = options["num_inference_steps"], options["guidance_scale"]
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps[steps - int(steps * strength) :]
    x = channels_first(latents)
    if start is not None and strength < 1:
        x = scheduler.add_noise(start(vae), x, timesteps[:1].repeat(2))
    x = x.movedim(1, 2)  # B T C h w
    beside = kept(vae).movedim(1, 2).expand(4, -1, -1, -1, -1)
    rotary = reference_rotary(transformer, x.shape[1], *x.shape[-2:])
    old = None
    for i, t in enumerate(timesteps):
        output = transformer(torch.cat([torch.cat([x, x]), beside], 2), embeds, t.expand(4), image_rotary_emb=rotary)
        scale = guidance
        if options.get("use_dynamic_cfg"):
            share = (len(timesteps) - t.item()) / len(timesteps)
            scale = 1 + guidance * (1 - np.cos(np.pi * share**5.0)) / 2
        without, with_prompt = output.sample.chunk(2)
        prediction = without + scale * (with_prompt - without)
        if kind == "ddim":
            x = scheduler.step(prediction, t, x, return_dict=False)[0]
        else:
            noise = channels_first(step_noise[i]).movedim(1, 2)
            monkeypatch.setattr(scheduling_dpm_cogvideox, "randn_tensor", lambda *_, noise=noise, **__: noise)
            before = timesteps[i - 1] if i else None
            x, old = scheduler.step(prediction, old, t, before, x, return_dict=False)
    return reference_decode(vae, x.movedim(2, 1), monkeypatch)


def squares(num_frames, height, width):
    """A square that moves: bool [F, H, W]."""
    mask = np.zeros((num_frames, height, width), bool)
    for i, frame in enumerate(mask):
        frame[4 : 4 + height // 2, 3 * i : 3 * i + width // 3] = True
    return mask


def as_frames(mask):
    return np.repeat(np.where(mask, 255, 0).astype(np.uint8)[..., None], 3, -1)


DDIM = {"num_inference_steps": 4, "guidance_scale": 6.0}
DPM = {"num_inference_steps": 3, "guidance_scale": 6.0, "use_dynamic_cfg": True}


@pytest.mark.parametrize(
    ("release", "given", "kind", "options"),
    [
        ("cogvideox-2b", ["image"], "ddim", DDIM),
        ("cogvideox-5b", ["image", "last_image"], "dpm", DPM),
        ("cogvideox-5b", ["video", "mask_video"], "ddim", DDIM),
        ("cogvideox-2b", ["video", "mask_video"], "ddim", DDIM | {"strength": 0.5}),
        ("cogvideox-5b", ["video"], "ddim", DDIM | {"strength": 0.5}),
        ("cogvideox-2b", [], "dpm", DPM),
        ("cogvideox1.5-5b", ["image"], "dpm", DPM),
        ("cogvideox1.5-5b", ["video", "mask_video"], "ddim", DDIM),
    ],
)
def test_against_diffusers(models, release, given, kind, options, monkeypatch):
    pipe = Pipeline.from_pretrained(models[release], "float32")
    noisy = "1.5" in release
    num_frames = 13 if noisy else 9
    clip, mask = smooth(1, num_frames, HEIGHT, WIDTH), squares(num_frames, HEIGHT, WIDTH)
    media = {"image": clip[0], "last_image": clip[-1], "video": clip, "mask_video": as_frames(mask)}
    media = {name: media[name] for name in given}
    if "mask_video" not in given:
        mask = np.ones_like(mask)
        mask[0], mask[-1] = "image" not in given, "last_image" not in given
    random = np.random.default_rng(0)
    shape = (2, (num_frames - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8, 16)
    latents, posterior = random.normal(size=(2, *shape)).astype(np.float32)
    step_noise = random.normal(size=(options["num_inference_steps"], *shape)).astype(np.float32)
    pixel_noise = random.normal(size=(1, num_frames, HEIGHT, WIDTH, 3)).astype(np.float32) if noisy else None
    drawn = {"video": posterior}
    if noisy:
        drawn |= {name: np.repeat(pixel_noise, 2, 0) for name in ("image", "mask_video")}
    ours = pipe(
        PROMPTS,
        NEGATIVE,
        scheduler=kind,
        latents=latents,
        noise=step_noise if kind == "dpm" else None,
        encoder_noise={name: x for name, x in drawn.items() if name in media},
        num_frames=num_frames,
        height=HEIGHT,
        width=WIDTH,
        output_type="float",
        progress=False,
        **media,
        **options,
    ).frames
    video = clip.astype(np.float32) / 127.5 - 1

    def start(vae):
        moments = vae.encode(channels_first(video)[None]).latent_dist
        sample = moments.mean + moments.std * channels_first(posterior)
        return sample * vae.config.scaling_factor

    theirs = run_reference(
        models[release],
        pipe,
        kind,
        lambda vae: reference_kept(vae, video, mask, pixel_noise),
        start if "video" in given else None,
        latents,
        step_noise,
        monkeypatch,
        **options,
    )
    assert ours.shape == theirs.shape == (2, num_frames, HEIGHT, WIDTH, 3)
    assert theirs.std() > 0.1
    assert np.abs(ours - theirs).max() < PIXEL_BAR


@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 16, 24), (9, 32, 48), (13, 48, 80)])
def test_the_mask_shrinks_as_in_torch(num_frames, height, width):
    mask = np.random.default_rng(num_frames).uniform(size=(num_frames, height, width)).astype(np.float32)
    size = (num_frames - 1) // 4 + 1, height // 8, width // 8
    ours = np.asarray(shrink_mask(mask[None, ..., None], size))[0, ..., 0]
    if num_frames == 1:
        theirs = F.interpolate(torch.tensor(mask)[None], size=size[1:], mode="bilinear", align_corners=False)[0]
    else:
        theirs = reference_mask(mask, size)[0, 0]
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)
    pixels = mask[0].reshape(size[1], 8, size[2], 8)[:, 3:5, :, 3:5].mean((1, 3))
    np.testing.assert_allclose(ours[0], pixels, atol=1e-6)


# --- in every kind of run

RUN = {"num_frames": 13, "height": HEIGHT, "width": WIDTH, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """13 frames at the model's 8 per second."""
    path = tmp_path_factory.mktemp("media") / "clip.mp4"
    save_video(path, smooth(6, 13, HEIGHT, WIDTH), fps=8)
    return path


@pytest.fixture(scope="module")
def mask(tmp_path_factory):
    path = tmp_path_factory.mktemp("media") / "mask.png"
    Image.fromarray(as_frames(squares(1, HEIGHT, WIDTH))[0]).save(path)
    return path


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("media") / "first.png"
    Image.fromarray(smooth(5, HEIGHT, WIDTH)).save(path)
    return path


@pytest.mark.further
def test_every_way_of_running_gives_the_same(models, clip, mask, paths, tmp_path):
    """In stages by the command, at once, as one program, in a compiled loop, on a mesh."""
    model = models["cogvideox1.5-5b"]
    options = {**RUN, "num_inference_steps": 4, "video": clip, "mask_video": mask, "strength": 0.6}
    pipe = Pipeline.from_pretrained(model, "float32")
    expected = same_at_once(pipe, PROMPTS[0], options)
    assert expected.shape == (1, 13, HEIGHT, WIDTH, 3)

    run, common = tmp_path / "run", ["--dtype", "float32", "--dir", tmp_path / "run"]
    size = ["--num-frames", 13, "--height", HEIGHT, "--width", WIDTH, "--seed", 3]
    paths("encode", PROMPTS[0], "--model", model, *common, *size, "--video", clip, "--mask-video", mask)
    with TensorFile(run / store.EMBEDDINGS_FILE) as file:
        shapes = {name: info.shape for name, info in file.tensors.items()}
    latents = {"inpaint_latents": (1, 17, 4, 4, 6), "video_latents": (1, 16, 4, 4, 6)}
    assert shapes == {"prompt_embeds": (1, 10, 40), "negative_prompt_embeds": (1, 10, 40)} | latents
    paths("denoise", *common, "--steps", 4, "--strength", 0.6)
    (video,) = paths("decode", "--dtype", "float32", "--dir", run)
    with TensorFile(run / store.LATENTS_FILE) as file:
        latents = file.read("latents").transpose(0, 2, 3, 4, 1)
    found = pipe.decode(latents, output_type="float", progress=False)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    settings = read_metadata(video)["settings"]
    assert settings["mask_video"][0]["file"] == mask.name and len(settings["mask_video"][0]["sha256"]) == 64


def test_planned_arguments_are_those_of_the_run(models, clip, mask, image):
    pipe = Pipeline.from_pretrained(models["cogvideox1.5-5b"], "float32")
    for media, inputs in (
        ({"video": clip, "mask_video": mask}, ["mask_video", "video"]),
        ({"image": image}, ["image"]),
    ):
        run = pipe.resolve(GenerationRequest(PROMPTS[:1], **RUN, **media))
        assert [stage.input for stage in run.visual] == inputs
        planned = [args[1:] for _, args, _ in run.abstract("encode")][-len(inputs) :]
        for stage, shapes in zip(run.visual, planned, strict=True):
            assert [x.shape for x in run.media(stage)] == [x.shape for x in shapes]
        ((_, (_, denoise_inputs, _), _),) = run.abstract("denoise")
        assert denoise_inputs.conditioning.visual["inpaint_latents"].shape == (1, 4, 4, 6, 17)


def test_the_config_is_read(models):
    pipe = Pipeline.from_pretrained(models["cogvideox1.5-5b"], "float32")
    config = pipe.manifest.configs["transformer"]
    assert config.takes == "inpaint" and config.add_noise_in_inpaint_model
    resolved = pipe.resolve(GenerationRequest(PROMPTS[:1])).request
    assert (resolved.num_frames, resolved.fps, resolved.strength) == (5, 8, None)  # its sample_frames are 9
    released = RELEASES["cogvideox-5b"].configs["transformer"].to_dict()
    assert TransformerConfig.from_dict(released | {"add_noise_in_inpaint_model": True}).takes == "text"


def test_masks_of_every_kind(models, clip, mask, tmp_path):
    pipe = Pipeline.from_pretrained(models["cogvideox-2b"], "float32")

    def run(**media):
        options = {**RUN, "num_frames": 9, "output_type": "latent", "progress": False}
        return pipe(PROMPTS[0], **options, **media).frames

    pixels = np.asarray(Image.open(mask))
    plain = run(video=clip, mask_video=mask)
    Image.fromarray(pixels).save(tmp_path / "mask.webp", lossless=True)
    save_video(tmp_path / "frames", np.repeat(pixels[None], 13, 0), fps=8)
    grey = np.where(pixels > 0, 128, 127).astype(np.uint8)
    for same in (pixels, Image.open(mask), tmp_path / "mask.webp", tmp_path / "frames", grey):
        np.testing.assert_array_equal(run(video=clip, mask_video=same), plain)
    assert np.abs(run(video=clip, mask_video=255 - pixels) - plain).max() > 1e-3
    nothing = run()
    assert np.abs(plain - nothing).max() > 1e-3
    white = np.full_like(pixels, 255)
    np.testing.assert_array_equal(run(video=clip, mask_video=white), nothing)  # all of it is made anew
    np.testing.assert_array_equal(run(video=clip, strength=1), nothing)


# --- bad input


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp("text"), "cogvideox-2b")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("1.0", ["--mask-video", "{mask}"], r"mask_video goes with video; give --video \(video=\) too"),
        ("1.0", ["--last-image", "{image}"], r"last_image goes with image; give --image \(image=\) too"),
        ("1.0", ["--image", "{image}", "--video", "{clip}"], "image and video are both given"),
        ("1.0", ["--image", "{image}", "--strength", "0.5"], "give --video, or leave strength out"),
        ("1.0", ["--image", "{image}", "--image-scale", "1"], "image_scale is for image-to-video models"),
        ("1.0", ["--control-video", "{clip}"], "an inpainting model, which takes no control_video; it takes image, "),
        ("1.0", ["--video", "{clip}", "--mask-video", "{bad}/short"], "has 2 frames at the model's rate, .* has 13"),
        ("1.0", ["--video", "{clip}", "--mask-video", "{bad}/wide.png"], "is 96x32, .* 48x32; give a mask of"),
        ("1.0", ["--video", "{clip}", "--mask-video", "nowhere.png"], "there are no frames nowhere.png"),
        ("1.0", ["--video", "{clip}", "--mask-video", "{bad}/cut.png"], "cannot read .*cut.png"),
        ("text", ["--video", "{clip}", "--mask-video", "{mask}"], "a text-to-video model, which takes no mask_video"),
        ("1.5", ["--num-frames", "9"], r"num_frames is 9; it must be 8 n \+ 5. Nearest: 5 and 13"),
        ("1.5", ["--num-frames", "1"], "Smallest: 5 and 13"),
    ],
)
def test_bad_input_is_refused_before_anything_loads(
    kind, options, message, models, text_model, clip, mask, image, tmp_path_factory, refused
):
    bad = tmp_path_factory.mktemp("bad")
    Image.fromarray(as_frames(squares(1, 32, 96))[0]).save(bad / "wide.png")
    (bad / "cut.png").write_bytes(mask.read_bytes()[:60])
    save_video(bad / "short", as_frames(squares(2, HEIGHT, WIDTH)), fps=8)
    model = {"1.0": models["cogvideox-2b"], "1.5": models["cogvideox1.5-5b"], "text": text_model}[kind]
    names = {"bad": bad, "clip": clip, "mask": mask, "image": image}
    err = refused("generate", PROMPTS[0], "--model", model, *[part.format(**names) for part in options])
    assert re.search(message, err), err


def test_python_values_of_other_kinds_are_refused(models, clip):
    pipe = Pipeline.from_pretrained(models["cogvideox-2b"], "float32")
    for mask, message in ((5, "a mask must be .* got int"), (np.zeros((4, 4), np.uint8), r"got uint8 \[4, 4\]")):
        with pytest.raises(InputError, match=message):
            pipe(PROMPTS[0], video=clip, mask_video=mask, **RUN)
