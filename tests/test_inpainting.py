"""Inpainting models (CogVideoX-Fun InP) against a reference of diffusers' parts, and in every kind of run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
from diffusers.models import upsampling
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid
from diffusers.schedulers import scheduling_dpm_cogvideox
from reference import make_scheduler, make_transformer, save_layout
from test_media import NEGATIVE, PIXEL_BAR, PROMPTS, channels_first, smooth
from transformers import T5EncoderModel

from cogvideox_flax import Pipeline
from cogvideox_flax.models.cogvideox.visual import INPAINT_NOISE, shrink_mask

pytest_plugins = ["commands"]

RELEASES_IN_PARTS = ("cogvideox-2b", "cogvideox-5b", "cogvideox1.5-5b")
"""The architectures of the inpainting models, but for the input channels."""

HEIGHT, WIDTH = 64, 96


def save_inpainting_model(folder, release, noisy=False):
    """A checkpoint as CogVideoX-Fun has it: keys in the transformer's config that diffusers does not know."""
    save_layout(folder, release, transformer=make_transformer(release, in_channels=33))
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text()) | {"add_noise_in_inpaint_model": noisy, "time_position_encoding_type": "3d"}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Release -> checkpoint; that of 1.5 was trained with noise."""
    folder = tmp_path_factory.mktemp("inpainting")
    return {name: save_inpainting_model(folder / name, name, "1.5" in name) for name in RELEASES_IN_PARTS}


# --- the reference


def reference_mask(mask, shape):
    """[F, H, W] to [1, 1, T, h, w]: first the first frame alone, then the others."""
    mask = torch.tensor(mask, dtype=torch.float32)[None, None]
    first = F.interpolate(mask[:, :, :1], size=(1, *shape[1:]), mode="trilinear", align_corners=False)
    rest = F.interpolate(mask[:, :, 1:], size=(shape[0] - 1, *shape[1:]), mode="trilinear", align_corners=False)
    return torch.cat([first, rest], 2)


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
        frame[8 : 8 + height // 2, 3 * i : 3 * i + width // 3] = True
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
        ("cogvideox-5b", ["video", "mask"], "ddim", DDIM),
        ("cogvideox-2b", ["video", "mask"], "ddim", DDIM | {"strength": 0.5}),
        ("cogvideox-5b", ["video"], "ddim", DDIM | {"strength": 0.5}),
        ("cogvideox-2b", [], "dpm", DPM),
        ("cogvideox1.5-5b", ["image"], "dpm", DPM),
        ("cogvideox1.5-5b", ["video", "mask"], "ddim", DDIM),
    ],
)
def test_against_diffusers(models, release, given, kind, options, monkeypatch):
    pipe = Pipeline.from_pretrained(models[release], "float32")
    noisy = "1.5" in release
    num_frames = 13 if noisy else 9
    clip, mask = smooth(1, num_frames, HEIGHT, WIDTH), squares(num_frames, HEIGHT, WIDTH)
    media = {"image": clip[0], "last_image": clip[-1], "video": clip, "mask": as_frames(mask)}
    media = {name: media[name] for name in given}
    if "mask" not in given:
        mask = np.ones_like(mask)
        mask[0], mask[-1] = "image" not in given, "last_image" not in given
    random = np.random.default_rng(0)
    shape = (2, (num_frames - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8, 16)
    latents, posterior = random.normal(size=(2, *shape)).astype(np.float32)
    step_noise = random.normal(size=(options["num_inference_steps"], *shape)).astype(np.float32)
    pixel_noise = random.normal(size=(1, num_frames, HEIGHT, WIDTH, 3)).astype(np.float32) if noisy else None
    drawn = {"video": posterior}
    if noisy:
        drawn |= {name: np.repeat(pixel_noise, 2, 0) for name in ("image", "mask")}
    ours = pipe(
        PROMPTS,
        NEGATIVE,
        scheduler=kind,
        latents=latents,
        noise=step_noise if kind == "dpm" else None,
        encoder_noise=drawn,
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


@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 16, 24), (9, 64, 96), (13, 48, 80)])
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
