"""Fine-tuning: from a folder of clips to weights that generate uses, stopped and resumed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import tree
from flax import nnx
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from reference import save_layout
from safetensors.numpy import load_file

from cogvideox_flax import checkpoint
from cogvideox_flax.checkpoint import load_transformer, parameters
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.io.video import count_frames, read_video, save_video
from cogvideox_flax.lora import FILE_NAME, add_lora, describe_lora, lora_parameters, with_parameters
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.family import COGVIDEOX
from cogvideox_flax.runtime.execution import compiler_options
from cogvideox_flax.training import finetune as finetuning
from cogvideox_flax.training import loop
from cogvideox_flax.training.clips import find_clips, load_clip
from cogvideox_flax.training.finetune import check, finetune
from cogvideox_flax.training.loop import LoopConfig, train
from cogvideox_flax.training.metrics import read_metrics
from cogvideox_flax.training.objectives import sample_latents
from cogvideox_flax.training.optimizer import OptimizerConfig
from cogvideox_flax.training.recipe import read_config
from conversion.convert import convert

pytest_plugins = ["commands"]

SIZE = (9, 32, 48)
PROMPT = "a small red circle"
CONFIG = """
model = "{model}"
clips = "{clips}"
out = "{out}"
method = "{method}"
num_frames = 9
height = 32
width = 48
batch = 2
caption_dropout = 0.3
seed = 7

[lora]
rank = 2
targets = ["q", "out", "up"]

[loop]
steps = 4
accumulate = 2
dtype = "float32"
ema_decay = 0.9
log_every = 2

[optimizer]
learning_rate = 3e-2
warmup_steps = 0
"""


def make_clips(folder):
    """An mp4 at another rate and size, a gif, and a directory of PNGs, each moving, with captions beside them."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (40, 90, 3)).astype(np.uint8)
    frames = np.stack([np.roll(picture, 3 * i, 1) for i in range(20)])
    save_video(folder / "a.mp4", frames, 16)
    save_video(folder / "b.gif", frames[:10, :32, :48], 8)
    save_video(folder / "c", frames[:9, :, :40], 8)
    for name, caption in (("a", PROMPT), ("b", "a large blue square\n"), ("c", "a white circle")):
        (folder / f"{name}.txt").write_text(caption)
    return folder


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("data") / "clips")


@pytest.fixture(scope="module")
def model(tmp_path_factory, home):
    folder = tmp_path_factory.mktemp("model")
    convert(save_layout(folder / "hf", "cogvideox-5b"), folder / "native")
    return folder / "native"


@pytest.fixture
def write(tmp_path, clips, model):
    """Writes a configuration; returns its path."""

    def write(text=CONFIG, **changes):
        values = {"model": model, "clips": clips, "out": tmp_path / "run", "method": "lora"} | changes
        path = tmp_path / "config.toml"
        path.write_text(text.format(**values))
        return path

    return write


# --- clips ---


def test_clips_are_found_with_their_captions(clips):
    found = find_clips(clips, 9, 8)
    assert [(clip.name, clip.caption) for clip in found] == [
        ("a.mp4", PROMPT),
        ("b.gif", "a large blue square"),
        ("c", "a white circle"),
    ]


def test_captions_may_stand_in_one_file(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    lines = [{"file": "b.gif", "caption": "second"}, {"file": "./c", "caption": "third"}]
    (folder / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(clip.name, clip.caption) for clip in find_clips(folder, 9, 8)] == [("b.gif", "second"), ("c", "third")]


@pytest.mark.parametrize(("count", "fps"), [(9, 8), (30, 30), (81, 16), (1, 8)])
@pytest.mark.parametrize("name", ["v.mp4", "v.gif", "v"])
def test_frames_are_counted_as_they_would_be_read(tmp_path, name, count, fps):
    # every frame is another one: a gif joins equal neighbours
    save_video(
        tmp_path / name,
        np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(16, 1).repeat(16, 2).repeat(3, 3),
        fps,
    )
    frames, own = read_video(tmp_path / name)
    assert count_frames(tmp_path / name) == (len(frames), own)
    assert len(frames) == count


def numbered(count):
    """Frames that say which they are: frame i has the value 5 i."""
    return np.full((count, 16, 16, 3), 1, np.uint8) * (5 * np.arange(count, dtype=np.uint8)).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("own_fps", "expected"),
    [
        (8, [7, 8, 9, 10, 11]),
        (16, [4, 6, 8, 10, 12]),
        (24, [3, 6, 9, 12, 15]),
        (12, [6, 8, 9, 11, 12]),  # 7.5 and 10.5 round up
        (4, [9, 9, 10, 10, 11]),  # a frame for every two
        (0, [7, 8, 9, 10, 11]),  # a sequence that does not say its rate
    ],
)
def test_the_middle_of_a_clip_is_resampled_to_the_nearest_frame(tmp_path, own_fps, expected):
    save_video(tmp_path / "c", numbered(20), own_fps)
    clip = load_clip(tmp_path / "c", 5, 16, 16, 8)
    assert (clip[:, 0, 0, 0] // 5).tolist() == expected


def test_clips_cover_and_are_cropped_around_the_centre(tmp_path):
    wide = np.zeros((1, 20, 60, 3), np.uint8)
    wide[:, :, 20:40] = [200, 100, 0]  # the middle third, square
    save_video(tmp_path / "wide", wide, 8)
    clip = load_clip(tmp_path / "wide", 1, 40, 40, 8)
    assert clip.shape == (1, 40, 40, 3)
    assert (clip[0, :, 8:-8] == [200, 100, 0]).all()
    assert clip[0, :, :, 0].min() > 90  # the black beside it only rings into the border
    tall = wide.transpose(0, 2, 1, 3)
    save_video(tmp_path / "tall", tall, 8)
    assert (load_clip(tmp_path / "tall", 1, 40, 40, 8) == clip.transpose(0, 2, 1, 3)).all()


def test_all_faults_of_a_folder_in_one_message(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    (folder / "a.txt").unlink()
    (folder / "b.txt").write_text(" \n")
    (folder / "d.mp4").write_bytes(b"not a video")
    (folder / "d.txt").write_text("something")
    save_video(folder / "e.mp4", numbered(9), 16)
    (folder / "e.txt").write_text("something")
    (folder / "notes.md").write_text("not a clip")
    with pytest.raises(InputError) as caught:
        find_clips(folder, 9, 8)
    message = str(caught.value)
    assert "(4 faults)" in message
    for part in ("a.mp4: no caption a.txt", "b.txt is empty", "d.mp4: cannot read", "e.mp4: too short, 5 frames"):
        assert part in message
    assert "notes" not in message


def test_all_faults_of_a_caption_file_in_one_message(clips, tmp_path):
    folder = shutil.copytree(clips, tmp_path / "clips")
    lines = [
        '{"file": "../clips/a.mp4", "caption": "x"}',
        json.dumps({"file": str(clips / "a.mp4"), "caption": "x"}),
        '{"file": "c/../../a.mp4", "caption": "x"}',
        '{"file": "a.mp4"}',
        "not json",
        '{"file": "b.gif", "caption": ""}',
        '{"file": "gone.mp4", "caption": "x"}',
        '{"file": "c", "caption": "x"}',
        '{"file": "c/", "caption": "y"}',
        '{"file": 3, "caption": "y"}',
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        find_clips(folder, 9, 8)
    message = str(caught.value)
    assert message.count("leaves the folder") == 3
    assert message.count('expected {"file"') == 2
    for part in ("(9 faults)", "b.gif: its caption", "there is no video", "line 9: c/ has a caption", "must be text"):
        assert part in message


# --- runs ---


@pytest.fixture(scope="module")
def started(tmp_path_factory, model, clips, one_compilation):
    """A whole run of each method, and the same stopped after two of its four steps and taken up again."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {}
    for method in ("lora", "full"):
        for name, stop_after in (("whole", None), ("stopped", lambda done: done == 2)):
            out = folder / f"{method} {name}"
            path = folder / "config.toml"
            path.write_text(CONFIG.format(model=model, clips=clips, out=out, method=method))
            config = read_config(path)
            result = finetune(check(config), stop_after=stop_after, progress=False)
            if stop_after is not None:
                assert result is None
                assert not (out / "loss.png").exists()
                result = finetune(check(config), progress=False)
            runs[method, name] = result
    return runs


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_stopped_run_ends_as_if_it_had_not_been(started, method):
    whole, stopped = started[method, "whole"], started[method, "stopped"]
    file = whole.name if method == "lora" else "checkpoint/transformer/model.safetensors"
    ours, theirs = (load_file(path.parent / file) for path in (whole, stopped))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    ours, theirs = (read_metrics(path.parent / "training" / "metrics.jsonl") for path in (whole, stopped))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [2, 4]
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]


def test_lora_is_trained_and_changes_what_is_generated(started, model, paths, tmp_path):
    file = started["lora", "whole"]
    assert file.name == FILE_NAME
    config = checkpoint.read_manifest(model).configs["transformer"]
    assert describe_lora(COGVIDEOX, file, 1.0, config)["file"] == str(file)
    tensors = load_file(file)
    assert {name.split(".", 3)[3].rsplit(".", 2)[0] for name in tensors} == {
        "attn1.to_q",
        "attn1.to_out.0",
        "ff.net.0.proj",
    }
    assert min(np.abs(value).max() for name, value in tensors.items() if "lora_B" in name) > 1e-3  # they start at zero
    size = ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 2, "--dtype", "float32"]
    common = ["generate", PROMPT, "--model", model, *size]
    plain, tuned, none = (
        np.load(paths(*common, "--out", tmp_path / f"{name}.npz", *more)[0])["latents"]
        for name, more in (("plain", []), ("tuned", ["--lora", file]), ("none", ["--lora", f"{file}:0"]))
    )
    np.testing.assert_allclose(none, plain, atol=1e-4 * plain.std())
    assert np.abs(tuned - plain).max() > 0.01 * plain.std()


def test_full_writes_a_whole_checkpoint(started, model, paths, tmp_path):
    tuned = started["full", "whole"]
    checkpoint.verify(tuned)
    before, after = checkpoint.read_manifest(model), checkpoint.read_manifest(tuned)
    assert after.weights["transformer"]["source"]["steps"] == 4
    assert {name: after.weights[name] for name in ("vae", "text_encoder")} == {
        name: before.weights[name] for name in ("vae", "text_encoder")
    }
    assert dataclasses.replace(after, weights={}) == dataclasses.replace(before, weights={})
    old, new = (parameters(load_transformer(path)) for path in (model, tuned))
    assert all(np.abs(new[name] - old[name]).max() > 1e-4 for name in old)
    pipe = CogVideoXPipeline(tuned, "float32", None)
    assert pipe.encode_prompts([PROMPT], progress=False)[0].shape == (1, 10, 40)
    (out,) = paths("generate", PROMPT, "--model", tuned, "--steps", 1, "--out", tmp_path / "x.npz", "--num-frames", 9)
    assert np.isfinite(np.load(out)["latents"]).all()


def test_command_draws_samples_and_plots(write, run, started, tmp_path):
    sample = '[sample]\nprompts = ["{prompt}", "a blue square"]\nevery = 2\nframes = 3\nnum_inference_steps = 1\n'
    path = write(CONFIG + sample.replace("{prompt}", PROMPT))
    code, out, err = run("train", "--config", path)
    assert code == 0, err
    assert out.strip() == str(tmp_path / "run" / FILE_NAME)
    sheets = sorted((tmp_path / "run" / "samples").iterdir())
    assert [sheet.name for sheet in sheets] == ["000002.png", "000004.png"]
    for sheet in sheets:
        with Image.open(sheet) as image:
            assert image.size == (3 * 48 + 2 * 2, 2 * 32 + 2)
    assert sheets[0].read_bytes() != sheets[1].read_bytes()
    with Image.open(tmp_path / "run" / "loss.png") as image:
        assert image.size[0] > 600
    # the run is over: the same command only says so, and other prompts are no other run
    before = tree(tmp_path / "run" / "training")
    other = write(CONFIG + sample.replace("{prompt}", "a red square"))
    assert run("train", "--config", other)[0] == 0
    assert tree(tmp_path / "run" / "training").keys() == before.keys()
    code, _, err = run("train", "--config", path, "--steps", 5)
    assert code == 2
    assert "steps: there 4, now 5" in err


def test_a_stopped_command_says_so(write, run, monkeypatch):
    monkeypatch.setattr(finetuning, "train", lambda *_, **__: finetuning.State(jnp.int32(1), {}, None, None))
    code, out, err = run("train", "--config", write())
    assert (code, out) == (130, "")
    assert "the same command goes on" in err


def test_check_says_what_would_be_done_and_touches_nothing(write, run, tmp_path, monkeypatch):
    def begun(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(CogVideoXPipeline, "component", begun)
    monkeypatch.setattr("cogvideox_flax.checkpoint.load.load_component", begun)
    path = write()
    before = tree(tmp_path)
    code, out, err = run("train", "--config", path, "--check", "--steps", 30)
    assert code == 0, err
    assert tree(tmp_path) == before
    # 3 latent frames of 4x6, patches of 2x2; adapters of rank 2 on 64 -> 64 twice and 64 -> 256, two layers
    for part in (
        "3 in ",
        "18 of video and 10 of text",
        f"{2 * 2 * (2 * 128 + 320):,} of ",
        "30 of 2 clips",
        "20.0 times",
    ):
        assert part in out


# --- refusals ---


def test_changed_clips_weights_or_settings_are_another_run(started, write, clips, tmp_path):
    out = started["lora", "whole"].parent
    other = shutil.copytree(clips, tmp_path / "other")
    assert finetune(check(read_config(write(out=out, clips=other)))) is not None  # the same clips in another place
    (other / "c.txt").write_text("a black circle")
    with pytest.raises(InputError, match="holds a run of something else:\n  clips: there"):
        finetune(check(read_config(write(out=out, clips=other))))
    with pytest.raises(InputError, match=r"lora: there .*'rank': 2.*, now .*'rank': 4"):
        finetune(check(read_config(write(out=out), {"lora.rank": 4})))
    with pytest.raises(InputError, match="method: there lora, now full"):
        finetune(check(read_config(write(out=out, method="full"))))
    (out / finetuning.RECORD_FILE).unlink()  # what was prepared knows by itself
    with pytest.raises(InputError, match=r"made from something else \(differing: clips\)"):
        finetune(check(read_config(write(out=out, clips=other))))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("scheduler", "snr_shift_scale", 3.0), ("transformer", "temporal_interpolation_scale", 2.0)],
)
def test_a_run_does_not_go_on_with_another_model(write, model, tmp_path, part, field, value):
    """Stopped after two steps, one number of the model's config.json changed, and taken up again."""
    own = shutil.copytree(model, tmp_path / "model")
    assert finetune(check(read_config(write(model=own))), stop_after=lambda done: done == 2, progress=False) is None
    raw = json.loads((own / "config.json").read_text())
    raw[part][field] = value
    (own / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=f"holds a run of something else:\n  {part}: there"):
        finetune(check(read_config(write(model=own))), progress=False)


def test_damaged_files_of_a_stopped_run(write, tmp_path, caplog):
    """Each costs what it holds at most, and says so."""
    config, out = read_config(write()), tmp_path / "run"
    caplog.set_level("INFO")
    assert finetune(check(config), stop_after=lambda done: done == 3, progress=False) is None
    whole = finetune(check(read_config(write(out=tmp_path / "whole"))), progress=False)
    for path in (out / finetuning.RECORD_FILE, out / "training" / "settings.json"):
        text = path.read_text()
        for damaged in (text[: len(text) // 2], text.replace('": 0.3', '": 0.4').replace('": 0.9', '": 0.8')):
            path.write_text(damaged)
            with pytest.raises(InputError, match=rf"{path.name} is damaged .*delete that file to go on"):
                finetune(check(config), progress=False)
        path.unlink()
    for path in (*sorted((out / "prepared").rglob("*.safetensors")), *sorted((out / "prepared").rglob("store.json"))):
        data = bytearray(path.read_bytes())
        data[-20] ^= 2
        path.write_bytes(data)
    caplog.clear()
    result = finetune(check(config), progress=False)
    assert caplog.text.count("its examples are prepared again") == 2  # latents and texts
    assert caplog.text.count("store.json is damaged") == 2 and "going on from step 3" in caplog.text
    ours, theirs = load_file(result), load_file(whole)  # the order of a file's metadata is random
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_hostile_clips_are_refused_in_a_line_each(write, run, tmp_path):
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / "a.mp4").write_text(f"ffconcat version 1.0\nfile '{tmp_path}/b.mp4'\n")
    for name, side, fps in (("large", 20000, "8"), ("rate", 8, "abc")):
        (folder / name).mkdir()
        texts = PngInfo()
        texts.add_text("fps", fps)
        Image.new("1", (side, side)).save(folder / name / "0.png", pnginfo=texts)
    for name in ("a", "large", "rate"):
        (folder / f"{name}.txt").write_text("something")
    code, out, err = run("train", "--config", write(clips=folder), "--check")
    assert (code, out) == (2, "")
    first, *faults = err.splitlines()
    assert first.startswith("error: ")
    assert "(3 faults)" in first
    assert len(faults) == 3
    for fault, part in zip(faults, ("contents are none of", "a frame of 20000x20000", "states 'abc'"), strict=True):
        assert part in fault


def test_image_to_video_models_are_refused(write, tmp_path, home):
    layout = save_layout(tmp_path / "i2v", "cogvideox1.5-5b-i2v")
    with pytest.raises(InputError, match="image-to-video"):
        check(read_config(write(model=layout)))


def test_all_faults_of_a_configuration_in_one_message(write):
    text = 'clips = "x"\nbatch = "2"\nlearning_rate = 1.0\nremat = 1\n[loop]\nstepz = 3\ndtype = 16\nseed = 1\n'
    text += "[lora]\ntargets = [1]\nrank = true\n[optimizer]\nbeta = 0.9\n"
    with pytest.raises(InputError) as caught:
        read_config(write(text))
    message = str(caught.value)
    for part in (
        "(11 faults)",
        "batch: got '2', expected a whole number",
        "learning_rate: unknown key; known are clips, out, model",
        "remat: got 1, expected true or false",
        "loop.stepz: unknown key; known are steps, accumulate",
        "loop.steps: missing",
        "loop.dtype: got 16, expected a text",
        "loop.seed: unknown key; it stands at the top",
        "lora.targets: got [1], expected a list of texts",
        "lora.rank: got True",
        "optimizer.beta: unknown key; known are kind, learning_rate",
        "out: missing",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dora"}, "method: got 'dora', expected lora or full"),
        ({"batch": 3}, "batch: got 3, expected a multiple of loop.accumulate, 2"),
        ({"caption_dropout": 1.5}, "caption_dropout"),
        ({"lora.targets": ("q", "w")}, "expected some of q, k, v"),
        ({"loop.steps": 0}, "steps: got 0"),
        ({"optimizer.learning_rate": -1.0}, "learning_rate"),
        ({"num_frames": 10}, "Nearest: 9 and 17"),
        ({"mesh": "2,1,1"}, "clips of a micro-batch"),
        ({"mesh": "1,1,3"}, "does not divide over mesh axis tp"),
        ({"num_frames": 17}, "(?s)a.mp4: too short.*b.gif: too short.*c: too short"),
        ({"sample.prompts": ("a",), "sample.num_inference_steps": 0}, "num_inference_steps"),
        ({"clips": "/nowhere"}, "there is no folder of clips"),
        ({"clips": "~nosuchuser/clips"}, "clips: ~nosuchuser/clips: there is no home directory of that user"),
        ({"seed": -1}, "seed: got -1, expected 0 to 4294967295"),
        ({"sample.prompts": ("a",), "sample.seed": -1}, "seed is -1"),
        ({"lora.alpha": 10**400}, "lora.alpha"),
        ({"optimizer.learning_rate": float("inf")}, "learning_rate: got inf"),
    ],
)
def test_settings_that_cannot_be_served(write, changes, message):
    with pytest.raises(InputError, match=message):
        check(read_config(write(), changes))


def test_a_missing_extra_says_how_to_get_it(write, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    code, _, err = run("train", "--config", write())
    assert code == 2
    assert 'training needs optax; install it with: pip install "cogvideox-flax[train]"' in err


# --- numbers ---


def test_latents_are_scaled_samples_with_the_first_frame_repeated():
    mean = jax.random.normal(jax.random.key(0), (2, 3, 4, 6, 16)).astype(jnp.float16)
    exact = sample_latents(mean, jnp.zeros_like(mean), jax.random.key(1), 0.7, 1)
    assert exact.shape == (2, 4, 4, 6, 16)
    np.testing.assert_allclose(exact[:, 1:], 0.7 * mean.astype(jnp.float32), rtol=1e-6)
    noisy = sample_latents(mean, jnp.full_like(mean, 2), jax.random.key(1), 0.7, 1)
    assert (noisy[:, 0] == noisy[:, 1]).all()  # one sample, twice
    assert abs(float((noisy - exact)[:, 1:].std()) / (0.7 * 2) - 1) < 0.05
    assert sample_latents(mean, mean, jax.random.key(1), 0.7, 0).shape == mean.shape


def test_releases_that_patch_time_train_on_an_extra_frame(write, tmp_path, home, monkeypatch):
    layout = save_layout(tmp_path / "1.5", "cogvideox1.5-5b")
    plan = check(read_config(write(model=layout)))
    assert (plan.size.latent_frames, plan.size.extra_latents, plan.fps) == (4, 1, 16)
    assert plan.tokens == 2 * 2 * 3
    seen = {}

    def objective(denoiser, latents, key, config):
        seen["latents"] = latents
        return denoiser(latents, jnp.zeros(2, jnp.int32)).mean(), {}

    monkeypatch.setattr(finetuning, "v_prediction", objective)
    transformer = plan.manifest.abstract("transformer")
    latents = jax.ShapeDtypeStruct((2, 3, 4, 6, 16), jnp.float16)
    text_shape = jax.ShapeDtypeStruct((2, 10, 40), jnp.float32)
    batch = {"mean": latents, "std": latents, "text": text_shape}
    frozen = {"empty": jax.ShapeDtypeStruct((10, 40), jnp.float32)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert (
        jax.eval_shape(partial(finetuning._loss, plan=plan), {"transformer": transformer}, frozen, batch, key)[0].shape
        == ()
    )
    assert seen["latents"].shape == (2, 4, 4, 6, 16)


def test_micro_batches_add_up(tmp_path):
    """Two micro-batches of one are a batch of two, where the loss draws nothing."""

    def loss(params, frozen, batch, key):
        error = batch["x"] @ params["transformer"]["w"] - batch["y"]
        return jnp.square(error).mean(), {}

    def batches(step):
        random = np.random.default_rng(step)
        return {"x": random.normal(size=(4, 3)).astype(np.float32), "y": random.normal(size=(4,)).astype(np.float32)}

    def run(accumulate):
        config = LoopConfig(
            steps=3, accumulate=accumulate, optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=0)
        )
        start = {"transformer": {"w": jnp.arange(3.0)}}
        return train(start, None, loss, batches, config, tmp_path / str(accumulate)).params["transformer"]["w"]

    whole, halves, single = (np.asarray(run(n)) for n in (1, 2, 4))
    assert np.abs(whole - np.arange(3)).min() > 0.02
    np.testing.assert_allclose(halves, whole, atol=1e-6)
    np.testing.assert_allclose(single, whole, atol=1e-6)


def test_a_frozen_base_is_neither_copied_nor_widened(tmp_path):
    """The step of a LoRA run on a bfloat16 base of which nothing but single layers may appear a second time."""
    config = TransformerConfig(layers=16, heads=8, rotary=True, text_width=64, text_length=8)
    base = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), COGVIDEOX.components["transformer"].abstract(config)
    )
    model = jax.eval_shape(lambda base: add_lora(COGVIDEOX, base, 2, rngs=nnx.Rngs(0)), base)
    settings = LoopConfig(steps=2, dtype="bfloat16")

    def loss(params, frozen, batch, key):
        x, context = batch
        v = with_parameters(frozen, params["transformer"])(x, context, jnp.zeros(1, jnp.int32), remat=True)
        return jnp.square(v).mean(), {}

    state = jax.eval_shape(lambda p: loop._place({"transformer": p}, settings, None), lora_parameters(model))
    batch = tuple(jax.ShapeDtypeStruct((1, 1, *shape), jnp.float32) for shape in ((1, 4, 4, 16), (8, 64)))
    step = jax.jit(
        partial(loop._step, loss=loss, config=settings), donate_argnums=0, compiler_options=compiler_options("bfloat16")
    )
    memory = step.lower(state, model, batch).compile().memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(base))
    assert memory.temp_size_in_bytes < 0.5 * held
