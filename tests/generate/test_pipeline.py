"""Tokens to frames against diffusers' pipeline, and what users rely on around it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from diffusers.schedulers import scheduling_dpm_cogvideox
from transformers import T5EncoderModel

import cogvideox_flax
from cogvideox_flax import sharding
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError, NonFiniteError
from cogvideox_flax.io.video import read_metadata, read_video
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.runtime import compile as compiling
from cogvideox_flax.runtime.compile import compiler_options
from tests.support.reference import make_scheduler, make_transformer, make_vae, save_layout

PROMPTS = ["a small red circle moves to the left", "a blue square on white ground"]
NEGATIVE = "black"
SIZE = {"num_frames": 9, "height": 32, "width": 48}
PIXEL_BAR = 2e-3  # of the pixel range


@pytest.fixture(scope="module", params=["cogvideox-2b", "cogvideox-5b", "cogvideox1.5-5b"])
def layout(request, tmp_path_factory):
    return save_layout(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    convert(save_layout(folder / "hf", "cogvideox-5b"), folder / "native")
    return folder / "native"


@pytest.fixture(scope="module")
def pipe(native):
    return cogvideox_flax.CogVideoXPipeline.from_pretrained(native, dtype="float32")


def run_reference(layout, ids, scheduler, latents, noise, monkeypatch, tiling=False, change=None, **options):
    text_encoder = T5EncoderModel.from_pretrained(layout / "text_encoder")
    pipe = CogVideoXPipeline(
        tokenizer=None,
        text_encoder=text_encoder,
        vae=AutoencoderKLCogVideoX.from_pretrained(layout / "vae"),
        transformer=CogVideoXTransformer3DModel.from_pretrained(layout / "transformer"),
        scheduler=scheduler,
    )
    if pipe.transformer.config.patch_size_t:  # lift the cap that the reference's nominal size puts on 1.5's positions
        pipe.transformer.register_to_config(sample_height=300, sample_width=300)
    if tiling:
        pipe.vae.enable_tiling()
    step = {"i": 0}

    def next_step(pipe, i, t, kwargs):
        step["i"] = i + 1
        return kwargs if change is None else {"latents": change(i, kwargs["latents"])}

    monkeypatch.setattr(
        scheduling_dpm_cogvideox, "randn_tensor", lambda *_, **__: torch.tensor(noise[step["i"]]).permute(0, 1, 4, 2, 3)
    )
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        embeds, negative = (text_encoder(torch.tensor(np.asarray(x)).long())[0] for x in ids)
        video = pipe(
            prompt_embeds=embeds,
            negative_prompt_embeds=negative,
            latents=torch.tensor(latents).permute(0, 1, 4, 2, 3),
            output_type="np",
            callback_on_step_end=next_step,
            **options,
        )
    return video.frames


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddim", {"num_inference_steps": 4, "guidance_scale": 6.0}),
        ("dpm", {"num_inference_steps": 7, "guidance_scale": 6.0, "use_dynamic_cfg": True}),
        ("dpm", {"num_inference_steps": 3, "guidance_scale": 1.0}),
    ],
)
def test_against_diffusers(layout, kind, options, monkeypatch):
    pipe = cogvideox_flax.CogVideoXPipeline.from_pretrained(layout, dtype="float32")
    random = np.random.default_rng(0)
    shape = pipe.resolve(cogvideox_flax.GenerationRequest(PROMPTS, **SIZE)).size.latent_shape(2)
    assert shape[1] == (4 if "1.5" in str(layout) else 3)
    latents = random.normal(size=shape).astype(np.float32)
    noise = random.normal(size=(options["num_inference_steps"], *shape)).astype(np.float32)
    ours = pipe(
        PROMPTS,
        [NEGATIVE, ""],
        scheduler=kind,
        latents=latents,
        noise=noise if kind == "dpm" else None,
        output_type="float",
        progress=False,
        **SIZE,
        **options,
    )
    reference = make_scheduler(kind, pipe.scheduler.config.snr_shift_scale)
    ids = pipe.tokenizer(PROMPTS), pipe.tokenizer([NEGATIVE, ""])
    theirs = run_reference(layout, ids, reference, latents, noise, monkeypatch, **SIZE, **options)
    assert ours.frames.shape == theirs.shape == (2, 9, 32, 48, 3)
    assert theirs.std() > 0.1  # a video, not a clipped plane
    assert np.abs(ours.frames - theirs).max() < PIXEL_BAR


def generate(pipe, prompt=PROMPTS[0], **changes):
    return pipe(prompt, **({"num_inference_steps": 3, "progress": False} | SIZE | changes))


def test_uint8_is_the_rounded_float(pipe):
    exact = generate(pipe, output_type="float").frames
    frames = generate(pipe).frames
    assert frames.dtype == np.uint8
    assert np.abs(frames - 255 * exact).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("scheduler", ["ddim", "dpm"])
def test_compiled_loop_is_the_same_loop(pipe, scheduler):
    options = {"output_type": "latent", "scheduler": scheduler, "use_dynamic_cfg": True}
    by_step, at_once = (generate(pipe, compiled_loop=x, **options).frames for x in (False, True))
    np.testing.assert_allclose(at_once, by_step, atol=1e-5 * by_step.std())


def test_seed_decides_and_batch_does_not(pipe):
    options = {"output_type": "latent", "scheduler": "dpm"}
    batch = generate(pipe, PROMPTS, **options).frames
    alone = generate(pipe, PROMPTS[0], **options).frames
    np.testing.assert_allclose(batch[:1], alone, atol=1e-4 * alone.std())
    assert (generate(pipe, PROMPTS[0], **options).frames == alone).all()
    assert np.abs(generate(pipe, PROMPTS[0], seed=1, **options).frames - alone).max() > 0.1


def test_prompt_and_guidance_matter(pipe):
    base = generate(pipe, output_type="latent").frames
    for change in ({"prompt": PROMPTS[1]}, {"negative_prompt": "red"}, {"guidance_scale": 3.0}, {"scheduler": "dpm"}):
        assert np.abs(generate(pipe, output_type="latent", **change).frames - base).max() > 1e-3, change


def test_negative_prompt_is_unused_without_guidance(pipe):
    a, b = (generate(pipe, guidance_scale=1.0, negative_prompt=n, output_type="latent").frames for n in ("", "red"))
    assert (a == b).all()


def test_dynamic_guidance_variants_differ(pipe):
    runs = [generate(pipe, use_dynamic_cfg=x, output_type="latent").frames for x in (False, True, "index")]
    assert all(np.abs(runs[i] - runs[j]).max() > 1e-3 for i, j in ((0, 1), (1, 2), (0, 2)))


def test_tiled_against_diffusers(tmp_path, monkeypatch):
    # the official tile is half the sample size: 48x40 here, 2 x 3 tiles
    layout = save_layout(tmp_path / "hf", "cogvideox-2b", vae=make_vae(sample_height=96, sample_width=80))
    pipe = cogvideox_flax.CogVideoXPipeline.from_pretrained(layout, dtype="float32")
    size = {"num_frames": 9, "height": 64, "width": 96}
    options = {"num_inference_steps": 2, "guidance_scale": 6.0}
    shape = pipe.resolve(cogvideox_flax.GenerationRequest(PROMPTS[0], **size)).size.latent_shape(1)
    latents = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    runs = [
        pipe(PROMPTS[0], latents=latents, tiling=tiling, output_type="float", progress=False, **size, **options).frames
        for tiling in (True, False)
    ]
    ids = pipe.tokenizer(PROMPTS[:1]), pipe.tokenizer([""])
    scheduler = make_scheduler("ddim", 3.0)
    theirs = run_reference(layout, ids, scheduler, latents, None, monkeypatch, tiling=True, **size, **options)
    assert np.abs(runs[0] - theirs).max() < PIXEL_BAR
    assert np.abs(runs[0] - runs[1]).max() > 10 * PIXEL_BAR


def test_tiles_that_do_not_add_up_are_refused_first(pipe):
    with pytest.raises(InputError, match="tile"):  # 32x48, half of this checkpoint's sample size
        generate(pipe, tiling=True)


def test_callback_reads_latents_and_stops_the_run(pipe):
    seen = []

    def callback(step, timestep, latents):
        seen.append((step, timestep, np.asarray(latents)))
        return step == 1

    video = generate(pipe, num_inference_steps=5, callback=callback, output_type="latent")
    assert [(s, t) for s, t, _ in seen] == [(0, 999), (1, 799)]
    assert (video.frames == seen[-1][2]).all()
    assert video.metadata["steps_done"] == 2


@pytest.mark.parametrize("kind", ["ddim", "dpm"])
def test_latents_of_a_callback_against_diffusers(pipe, native, kind, monkeypatch):
    random = np.random.default_rng(0)
    shape = pipe.resolve(cogvideox_flax.GenerationRequest(PROMPTS, **SIZE)).size.latent_shape(2)
    latents, noise = (random.normal(size=(*n, *shape)).astype(np.float32) for n in ((), (4,)))

    def change(i, x):
        return 0.9 * x + 0.2 if i % 2 else x

    options = {"num_inference_steps": 4, "guidance_scale": 6.0, **SIZE}
    given = {"noise": noise} if kind == "dpm" else {}
    ours = pipe(
        PROMPTS,
        [NEGATIVE, ""],
        scheduler=kind,
        latents=latents,
        output_type="float",
        callback=lambda i, t, x: change(i, x),
        progress=False,
        **given,
        **options,
    ).frames
    ids = [pipe.tokenizer(texts) for texts in (PROMPTS, [NEGATIVE, ""])]
    scheduler = make_scheduler(kind, pipe.scheduler.config.snr_shift_scale)
    theirs = run_reference(native.parent / "hf", ids, scheduler, latents, noise, monkeypatch, change=change, **options)
    assert np.abs(ours - theirs).max() < PIXEL_BAR


def test_progress_says_when_it_compiles(native, capfd, monkeypatch):
    monkeypatch.setattr(compiling, "_PROGRAMS", {})  # as in a new process
    pipe = cogvideox_flax.CogVideoXPipeline.from_pretrained(native, dtype="float32")
    generate(pipe, progress=True)
    lines = capfd.readouterr().err
    for name in ("text encoder", "denoising step", "VAE decoder"):
        assert lines.count(f"compiling the {name}") == 1
        assert lines.count(f"compiled the {name} in ") == 1
    assert "denoising: 3 of 3 steps in " in lines
    assert "made in " in lines
    generate(pipe, progress=True)
    assert "compiling" not in capfd.readouterr().err


def test_nan_from_the_vae_is_not_a_black_video(pipe, monkeypatch):
    broken = jax.tree.map(lambda x: x * jnp.nan, pipe.vae)
    monkeypatch.setitem(pipe._loaded, "vae", broken)
    with pytest.raises(InputError, match="VAE gives NaN"):
        generate(pipe)


def test_nan_names_the_step(layout, tmp_path):
    if "2b" not in str(layout):
        pytest.skip("one architecture is enough")
    model = make_transformer("cogvideox-2b")
    with torch.no_grad():
        model.proj_out.bias[3] = torch.nan
    broken = save_layout(tmp_path / "broken", "cogvideox-2b", transformer=model)
    pipe = cogvideox_flax.CogVideoXPipeline.from_pretrained(broken, dtype="float32")
    for compiled_loop in (False, True):
        with pytest.raises(NonFiniteError, match=r"after step 1 of 3 \(timestep 999\)"):
            generate(pipe, compiled_loop=compiled_loop)


@pytest.mark.parametrize("guidance_scale", [1.0, 6.0])
def test_one_program_is_the_same_run(pipe, guidance_scale):
    options = {"guidance_scale": guidance_scale, "output_type": "float", "num_inference_steps": 3}
    staged, at_once = (generate(pipe, one_program=x, **options) for x in (False, True))
    np.testing.assert_allclose(staged.frames, at_once.frames, atol=1e-4)  # as on another mesh: sums in other orders
    assert staged.metadata == at_once.metadata


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(layout, dtype):
    if dtype == "float16" and "2b" not in str(layout):
        with pytest.raises(InputError, match="float16 gives NaN"):
            cogvideox_flax.CogVideoXPipeline.from_pretrained(layout, dtype=dtype)
        return
    exact, rounded = (
        generate(cogvideox_flax.CogVideoXPipeline.from_pretrained(layout, dtype=d), output_type="float").frames
        for d in ("float32", dtype)
    )
    assert np.sqrt(np.square(exact - rounded).mean()) < (0.02 if dtype == "bfloat16" else 0.004)


def test_half_precision_weights_are_not_all_widened_at_once():
    config = TransformerConfig(layers=16, heads=8, rotary=True, text_width=64, text_length=8)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), CogVideoX.components["transformer"].abstract(config)
    )
    latents, context = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1, 4, 4, 16), (1, 8, 64)))
    call = jax.jit(lambda m, x, c: m(x, c, 999), compiler_options=compiler_options("bfloat16"))
    memory = call.lower(shapes, latents, context).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.5 * memory.argument_size_in_bytes


def test_same_video_on_a_mesh_of_some_devices(pipe, native):
    on_mesh = cogvideox_flax.CogVideoXPipeline.from_pretrained(native, "float32", sharding.make_mesh(1, 1, 2))
    options = {"output_type": "float", "scheduler": "dpm"}
    np.testing.assert_allclose(generate(on_mesh, **options).frames, generate(pipe, **options).frames, atol=1e-4)


def test_components_are_loaded_when_needed_and_let_go(native):
    pipe = cogvideox_flax.CogVideoXPipeline.from_pretrained(native, dtype="float32")
    assert not pipe._loaded
    pipe.encode(cogvideox_flax.GenerationRequest(PROMPTS, guidance_scale=1), progress=False)
    assert set(pipe._loaded) == {"text_encoder"}
    pipe.release("text_encoder")
    assert not pipe._loaded


def test_video_is_saved_with_its_metadata(pipe, tmp_path):
    video = generate(pipe, PROMPTS, negative_prompt=NEGATIVE, seed=7)
    paths = video.save(tmp_path / "out.mp4")
    assert [p.name for p in paths] == ["out-0.mp4", "out-1.mp4"]
    for path, prompt in zip(paths, PROMPTS, strict=True):
        frames, fps = read_video(path)
        assert frames.shape == (9, 32, 48, 3)
        assert fps == 8
        metadata = read_metadata(path)
        assert metadata["prompt"] == prompt
        assert metadata["negative_prompt"] == NEGATIVE
        assert metadata["seed"] == 7
        assert metadata["settings"]["num_inference_steps"] == 3
        assert metadata["version"].endswith(cogvideox_flax.__version__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "list of prompts is empty"),
        ({"prompt": ["a", 3]}, r"prompt is \['a', 3\]; expected a text or a list of texts"),
        ({"prompt": ["a", "b"], "negative_prompt": ["c"]}, "2 prompts but 1 negative"),
        ({"num_frames": 10}, "Nearest: 9 and 17"),
        ({"num_frames": 0}, "Smallest: 1 and 9"),
        ({"height": 60}, "Nearest: 48 and 64"),
        ({"width": 8}, "width is 8"),
        ({"height": 60, "width": 61, "num_frames": 4}, "(?s)num_frames.*height.*width"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"scheduler": "heun"}, "known are ddim, dpm"),
        ({"output_type": "pt"}, "of which torch.from_numpy"),
        ({"latents": np.zeros((1, 3, 4, 6, 15))}, r"latents must be .* \(1, 3, 4, 6, 16\)"),
        ({"noise": np.zeros((3, 1, 3, 4, 6, 16))}, "ddim does not"),
        ({"noise": np.zeros((2, 1, 3, 4, 6, 16)), "scheduler": "dpm"}, r"noise must be .* \(3, 1, 3, 4, 6, 16\)"),
        ({"compiled_loop": True, "callback": print}, "leave compiled_loop off"),
        ({"one_program": True, "output_type": "latent"}, "leave one_program off"),
    ],
)
def test_refuses(pipe, change, message):
    with pytest.raises(InputError, match=message):
        generate(pipe, **change)


def test_refuses_models_of_other_kinds(tmp_path):
    layout = save_layout(tmp_path / "hf", "cogvideox-5b", transformer=make_transformer("cogvideox-5b", in_channels=40))
    with pytest.raises(InputError, match=r"takes 40 channels; .* inpainting 33"):
        cogvideox_flax.CogVideoXPipeline.from_pretrained(layout)


def test_mesh_of_too_many_devices():
    with pytest.raises(InputError, match="needs 64 devices; there are 8"):
        sharding.make_mesh(4, 4, 4)
    assert jax.device_count() == 8
