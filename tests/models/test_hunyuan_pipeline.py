"""HunyuanVideo-1.5, whole runs: against diffusers, and the same run in every way there is to run it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import cogvideox_flax
from cogvideox_flax.attention import SparseTiles
from cogvideox_flax.conversion.configs import read_configs
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.generate.recipe import request_values
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.io.video import save_video
from cogvideox_flax.models.hunyuan_video15 import model as family
from cogvideox_flax.models.hunyuan_video15.tokenizer import TokenizersConfig
from cogvideox_flax.models.registry import get_family
from cogvideox_flax.sharding import make_mesh
from tests.support.hunyuan_layout import run_reference, save_layout
from tests.support.runs import files_in, latents_of, stop_after

pytest_plugins = ["tests.support.commands"]

PIXEL_BAR = 2e-3
"""The largest difference of a pixel, in the range 0 to 1."""

PROMPTS = ['a sign says "OPEN" and “CLOSED” over a door', "a cat"]
NEGATIVE = ["", 'blurry "text"']
SIZE = {"num_frames": 9, "height": 32, "width": 48}


@pytest.fixture(scope="module")
def layout(tmp_path_factory, home):
    return save_layout(tmp_path_factory.mktemp("t2v"))


@pytest.fixture(scope="module")
def image_layout(tmp_path_factory, home):
    return save_layout(tmp_path_factory.mktemp("i2v"), image=True)


def convert_for_short_prompts(layout, folder):
    """A native checkpoint whose transformer gets few tokens of a prompt: 1256 are most of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenizersConfig, "from_hf", classmethod(lambda cls, raw: cls(max_length=60, glyph_length=24)))
        convert(layout, folder / "native")
    return folder / "native"


@pytest.fixture(scope="module")
def checkpoint(layout, tmp_path_factory):
    return convert_for_short_prompts(layout, tmp_path_factory.mktemp("short-t2v"))


@pytest.fixture(scope="module")
def image_checkpoint(image_layout, tmp_path_factory):
    return convert_for_short_prompts(image_layout, tmp_path_factory.mktemp("short-i2v"))


@pytest.fixture(scope="module")
def released_lengths(layout):
    """With room for as many tokens as the released pipeline has, for comparisons with it."""
    return cogvideox_flax.Pipeline.from_pretrained(layout, dtype="float32")


@pytest.fixture(scope="module")
def pipe(checkpoint):
    return cogvideox_flax.Pipeline.from_pretrained(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def image_pipe(image_checkpoint):
    return cogvideox_flax.Pipeline.from_pretrained(image_checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def image():
    """Smooth, and of another aspect ratio than any bucket."""
    rows, columns = np.mgrid[:50, :70] / 70
    return np.stack([rows, columns, 1 - rows], -1).__mul__(255).astype(np.uint8)


def noise_for(pipe, prompts, **options):
    shape = pipe.resolve(GenerationRequest(prompts, **options)).size.latent_shape(len(prompts))
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def generate(pipe, prompt=PROMPTS[0], **changes):
    return pipe(prompt, **({"num_inference_steps": 2, "progress": False} | SIZE | changes))


@pytest.mark.parametrize(
    ("prompts", "guidance"), [(PROMPTS, 6.0), (PROMPTS[1:], 6.0), (PROMPTS[1:], 0.5)], ids=["two", "unquoted", "weak"]
)
def test_text_to_video_against_diffusers(released_lengths, layout, prompts, guidance):
    """Guidance is off at 1 alone."""
    pipe = released_lengths
    negative = NEGATIVE[: len(prompts)]
    latents = noise_for(pipe, prompts, **SIZE)
    options = {"num_inference_steps": 4, "guidance_scale": guidance, **SIZE}
    ours = pipe(prompts, negative, latents=latents, output_type="float", progress=False, **options)
    theirs = run_reference(layout, prompts, negative, latents, **options)
    assert ours.frames.shape == theirs.shape == (len(prompts), 9, 32, 48, 3)
    assert theirs.std() > 0.1  # a video, not a clipped plane
    assert np.abs(ours.frames - theirs).max() < PIXEL_BAR
    assert ours.fps == 24


@pytest.mark.parametrize("distilled", [False, True])
def test_image_to_video_against_diffusers(image_layout, image, tmp_path, distilled):
    """One image for two prompts; a step-distilled checkpoint takes a second timestep and no guidance."""
    folder = image_layout
    if distilled:
        folder = save_layout(tmp_path / "distilled", image=True, guidance_scale=1.0, use_meanflow=True)
    pipe = cogvideox_flax.Pipeline.from_pretrained(folder, dtype="float32")
    size = {"num_frames": 5}
    latents = noise_for(pipe, PROMPTS, image=image, **size)
    options = {"num_inference_steps": 3, **size}
    ours = pipe(PROMPTS, NEGATIVE, image=image, latents=latents, output_type="float", progress=False, **options)
    theirs = run_reference(folder, PROMPTS, NEGATIVE, latents, image=Image.fromarray(image), **options)
    assert ours.frames.shape == theirs.shape
    assert np.abs(ours.frames - theirs).max() < PIXEL_BAR


def test_defaults_are_those_of_the_checkpoint(pipe, tmp_path):
    request = pipe.resolve(GenerationRequest("a cat")).request
    assert (request.num_frames, request.fps, request.num_inference_steps) == (121, 24, 50)
    assert request.guidance_scale == 6.0
    assert request.scheduler == "flow_match"
    folder = save_layout(tmp_path, image=True, guidance_scale=1.0, use_meanflow=True)
    distilled = cogvideox_flax.Pipeline.from_pretrained(folder, dtype="float32")
    run = distilled.resolve(GenerationRequest("a cat", image=np.zeros((30, 20, 3), np.uint8)))
    request = run.request
    assert (request.num_inference_steps, request.guidance_scale) == (12, 1.0)
    assert request.height > request.width
    assert not run.guided


@pytest.mark.parametrize(("name", "recorded"), [("uni_pc", "uni_pc"), ("euler", "flow_match"), (None, "flow_match")])
def test_a_scheduler_is_recorded_by_what_it_computes(pipe, name, recorded):
    run = pipe.resolve(GenerationRequest("a cat", scheduler=name, **SIZE))
    assert request_values(run)["scheduler"] == recorded


def test_timesteps_from_the_top(pipe):
    """Where the log SNR of UniPC would be infinite."""
    assert np.isfinite(generate(pipe, scheduler="uni_pc", timesteps=[1000, 500], output_type="latent").frames).all()
    with pytest.raises(InputError, match="from 1000 to above 0, for flow_match"):
        generate(pipe, timesteps=[1000, 0])


def test_inputs_that_the_checkpoint_does_not_take(pipe, image_pipe, image):
    with pytest.raises(InputError, match="text-to-video model, which takes no image"):
        generate(pipe, image=image)
    with pytest.raises(InputError, match="give it --image"):
        generate(image_pipe)
    with pytest.raises(InputError, match=r"num_frames is 10; it must be 4 n \+ 1. Nearest: 9 and 13"):
        generate(pipe, num_frames=10)
    with pytest.raises(InputError, match="height is 60; it must be a multiple of 16"):
        generate(pipe, height=60)


@pytest.mark.parametrize(
    "how", [{"compiled_loop": True, "output_type": "latent"}, {"one_program": True, "output_type": "float"}]
)
def test_every_kind_of_run_is_the_same_run(pipe, image_pipe, image, how):
    for model, more in ((pipe, {}), (image_pipe, {"image": image})):
        exact = generate(model, output_type=how["output_type"], **more).frames
        np.testing.assert_allclose(generate(model, **more, **how).frames, exact, atol=1e-4)


@pytest.mark.parametrize("form", ["deepcache", "residual"])
def test_step_cache(pipe, form):
    """Both streams are kept: with full steps alone the run is the exact one, with cached steps it is another."""
    how = {"output_type": "latent", "num_inference_steps": 6}
    exact = generate(pipe, **how).frames
    same = generate(pipe, step_cache=form, step_cache_schedule=[6, 6, 1], **how).frames
    np.testing.assert_allclose(same, exact, atol=1e-5 * exact.std())
    cached = generate(pipe, step_cache=form, step_cache_schedule=[2, 5, 2], **how).frames
    assert 0 < np.abs(cached - exact).max() < 2 * exact.std()


def test_sparse_attention(checkpoint, pipe, monkeypatch):
    """With a window over the whole video it is the exact run; with fewer tiles another, the same on a mesh."""
    settings = {
        False: SparseTiles(tile=(1, 2, 3), window=(3, 3, 3)),
        True: SparseTiles(tile=(1, 2, 3), window=(1, 1, 1), selected=2),
    }
    monkeypatch.setattr(family, "sparse_tiles", lambda frames, *, selective: settings[selective])
    exact = generate(pipe, output_type="latent").frames
    sliding = generate(pipe, output_type="latent", sparse_attention="sliding").frames
    np.testing.assert_allclose(sliding, exact, atol=1e-4 * exact.std())
    selective = generate(pipe, output_type="latent", sparse_attention="selective").frames
    assert 1e-3 * exact.std() < np.abs(selective - exact).max() < 2 * exact.std()
    split = cogvideox_flax.Pipeline.from_pretrained(checkpoint, dtype="float32", mesh=make_mesh(2, 2, 1))
    same = generate(split, output_type="latent", sparse_attention="selective").frames
    np.testing.assert_allclose(same, selective, atol=1e-3 * exact.std())


def test_sparse_attention_as_released():
    assert family.sparse_tiles(31, selective=True) == SparseTiles((6, 8, 8), (3, 3, 3), selected=32, similarity=0.7)
    assert family.sparse_tiles(61, selective=True).selected == 64
    assert family.sparse_tiles(1, selective=False) == SparseTiles((1, 16, 24), (1, 1, 1))


def test_other_forms_of_attention_are_refused(pipe):
    embedded = cogvideox_flax.Pipeline.from_pretrained(None, "float32")
    with pytest.raises(InputError, match="sparse_attention is 'sliding'; this model has none"):
        embedded.resolve(GenerationRequest("a red circle", sparse_attention="sliding"))
    with pytest.raises(InputError, match="sparse_attention is 'all'; expected sliding or selective"):
        pipe.resolve(GenerationRequest("a cat", sparse_attention="all"))


def test_a_batch_does_not_change_its_videos(pipe):
    batch = generate(pipe, PROMPTS, output_type="latent").frames
    alone = generate(pipe, PROMPTS[0], output_type="latent").frames
    np.testing.assert_allclose(batch[:1], alone, atol=1e-4 * alone.std())


@pytest.mark.parametrize("mesh", [(2, 2, 2, True), pytest.param((2, 4, 1), marks=pytest.mark.further)])
def test_meshes(checkpoint, pipe, mesh):
    split = cogvideox_flax.Pipeline.from_pretrained(checkpoint, dtype="float32", mesh=make_mesh(*mesh))
    options = {"output_type": "float", "num_frames": 5}
    np.testing.assert_allclose(generate(split, **options).frames, generate(pipe, **options).frames, atol=PIXEL_BAR)


def test_a_clip_to_start_from(pipe):
    """With all steps it is forgotten, but for its noise level; with few it stays."""
    clip = np.random.default_rng(0).integers(0, 255, (9, 32, 48, 3), dtype=np.uint8)
    how = {"num_inference_steps": 4, "output_type": "latent"}
    few, other = generate(pipe, video=clip, strength=0.5, **how).frames, generate(pipe, **how).frames
    assert few.shape == other.shape and not np.array_equal(few, other)


@pytest.mark.parametrize("kind", ["text", "image"])
def test_stages_on_disk(checkpoint, image_checkpoint, image, tmp_path, run, kind):
    """The eight tensors of stage 1 have the names of the reference system; the frames are those of one run."""
    model, flags = (checkpoint, []) if kind == "text" else (image_checkpoint, ["--image", tmp_path / "first.png"])
    Image.fromarray(image).save(tmp_path / "first.png")
    where = ["--dir", tmp_path / "stages"]
    size = ["--num-frames", 5, "--height", 32, "--width", 48]
    encode = ["encode", PROMPTS[0], "--model", model, "--dtype", "float32", *size, *flags, *where]
    for command in (encode, ["denoise", "--steps", 2, *where], ["decode", *where, "--out", tmp_path / "frames"]):
        code, _, err = run(*command)
        assert code == 0, err
    text = {"prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2"}
    found = load_file(tmp_path / "stages" / "stage1_embeddings.safetensors")
    of_image = {"image_latents", "image_embeds"} if kind == "image" else set()
    assert found.keys() == text | {f"negative_{name}" for name in text} | of_image


def test_adapters_on_both_streams_are_trained(checkpoint, pipe, tmp_path, run, image):
    """A step on a clip; the file has diffusers' names and changes the video."""
    save_video(tmp_path / "clips" / "a", np.stack([np.resize(image, (32, 48, 3))] * 5), fps=24)
    (tmp_path / "clips" / "a.txt").write_text('a sign says "OPEN"')
    (tmp_path / "sign.toml").write_text(f"""
        model = "{checkpoint}"
        clips = "{tmp_path}/clips"
        out = "{tmp_path}/run"
        num_frames = 5
        height = 32
        width = 48
        [loop]
        steps = 1
        [lora]
        rank = 2
        targets = ["q", "text_q", "down"]
    """)
    code, out, err = run("train", "--config", tmp_path / "sign.toml", "--quiet")
    assert code == 0, err
    assert "transformer.transformer_blocks.1.attn.add_q_proj.lora_A.weight" in load_file(out.strip())
    size = {"num_frames": 5, "height": 32, "width": 48, "output_type": "latent"}
    assert not np.array_equal(generate(pipe, lora=[out.strip()], **size).frames, generate(pipe, lora=[], **size).frames)


def test_info_knows_the_family(layout, run):
    code, out, err = run("info", layout)
    assert code == 0 and "text_encoder_2" in out and "image_encoder" not in out, err


def test_the_license_is_said_at_a_download(layout, monkeypatch, capsys):
    from cogvideox_flax.conversion import download
    from cogvideox_flax.models.hunyuan_video15.model import LICENSE, HunyuanVideo15

    asked = []
    monkeypatch.setattr(download, "download", lambda *args, **how: asked.append(args))
    download.download_model("a/b", download.Download(layout, {"revision": "c"}), HunyuanVideo15)
    assert capsys.readouterr().err == LICENSE + "\n"
    assert "tokenizer/vocab.json" in asked[0][2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_mean": [0.48, 0.46, 0.41]}, r"image_mean: got \[0.48, 0.46, 0.41\], supported is \[0.5, 0.5, 0.5\]"),
        ({"resample": 2}, "resample: got 2, supported is 3"),
        ({"size": {"height": 28, "width": 28}}, "size: got .*28.*supported is {'height': 42, 'width': 42}"),
        ({"do_normalize": False}, "do_normalize: got False"),
        ({"do_center_crop": True}, "do_center_crop: got True, supported is False"),
    ],
    ids=str,
)
def test_images_that_are_prepared_otherwise_are_refused(image_layout, tmp_path, changes, message):
    for each in image_layout.iterdir():
        if each.name != "feature_extractor":
            (tmp_path / each.name).symlink_to(each)
    path = Path("feature_extractor", "preprocessor_config.json")
    (tmp_path / path.parent).mkdir()
    raw = json.loads((image_layout / path).read_text())
    (tmp_path / path).write_text(json.dumps(raw | changes))
    with pytest.raises(ConversionError, match=f"preprocessor_config.json: feature_extractor config.*\n.*{message}"):
        read_configs(tmp_path, get_family("hunyuan_video15_i2v"), ["image_encoder"])


def test_guidance_of_the_guider_is_in_the_checkpoint(pipe, tmp_path):
    assert pipe.manifest.guidance_scale == 6.0
    folder = save_layout(tmp_path, guidance_scale=1.0)
    assert cogvideox_flax.Pipeline.from_pretrained(folder).manifest.guidance_scale == 1.0
    path = folder / "guider" / "guider_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"guidance_rescale": 0.7}))
    with pytest.raises(InputError, match=r"guider config.*\n.*guidance_rescale"):
        cogvideox_flax.Pipeline.from_pretrained(folder)


WAYS = {
    "flow_match": {},
    "uni_pc": {"scheduler": "uni_pc"},
    "dpmpp_2m_sde": {"scheduler": "dpmpp_2m_sde"},
    "euler_ancestral": {"scheduler": "euler_ancestral"},
    "no guidance": {"guidance_scale": 1.0},
    "taylorseer": {"step_cache": "taylorseer"},
    "first_block": {"step_cache": "first_block", "step_cache_threshold": 0.2, "scheduler": "uni_pc"},
    "pab": {"step_cache": "pab"},
    "residual": {"step_cache": "residual"},
    "sliding": {"sparse_attention": "sliding"},
}
"""Name -> options; CogVideoX's are in test_composition."""


@pytest.fixture(scope="module")
def ways(pipe):
    """Name -> the run, and its latents when nothing interrupts it."""
    runs = {
        name: pipe.resolve(GenerationRequest(PROMPTS[1], num_inference_steps=6, **SIZE, **how))
        for name, how in WAYS.items()
    }
    return {name: (run, latents_of(pipe, run)) for name, run in runs.items()}


@pytest.mark.parametrize("name", WAYS)
def test_killed_and_resumed(pipe, ways, tmp_path, name):
    """After each step, one after the other."""
    run, expected = ways[name]
    files = files_in(pipe, tmp_path)
    for stop in range(1, run.num_steps):
        stop_after(pipe, run, files, stop)
    np.testing.assert_array_equal(latents_of(pipe, run, files), expected)


def test_one_folder_after_other_schedulers(pipe, ways, tmp_path):
    """What another scheduler or step cache left there, finished or in the middle, is not taken."""
    files = files_in(pipe, tmp_path)
    for run, expected in ways.values():
        np.testing.assert_array_equal(latents_of(pipe, run, files), expected)
    (tmp_path / "stage2_latents.safetensors").unlink()
    for run, _ in ways.values():
        stop_after(pipe, run, files, 4)
    for run, expected in ways.values():
        stop_after(pipe, ways["flow_match"][0], files, 3)
        np.testing.assert_array_equal(latents_of(pipe, run, files), expected)
        (tmp_path / "stage2_latents.safetensors").unlink()
