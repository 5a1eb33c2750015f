"""Fine-tuning: from a folder of clips to weights that generate uses, stopped and resumed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import load_file, save_file

from cogvideox_flax import checkpoint, hub
from cogvideox_flax.checkpoint import Manifest, load_transformer, parameters
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_video, save_video
from cogvideox_flax.lora import EMBEDDED_ADAPTERS, FILE_NAME, describe_lora, lora_parameters, save_lora
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.registry import get_release
from cogvideox_flax.schedulers import TimestepLaw
from cogvideox_flax.training import finetune as finetuning
from cogvideox_flax.training import job as job_module
from cogvideox_flax.training import prepare, snapshots
from cogvideox_flax.training.config import config_json, config_of_json, read_config
from cogvideox_flax.training.finetune import finetune
from cogvideox_flax.training.forecast import abstract_arguments
from cogvideox_flax.training.job import RECORD_FILE, FinetuneJob, check
from cogvideox_flax.training.loop import Trainer
from cogvideox_flax.training.metrics import read_metrics
from cogvideox_flax.training.step import TrainState
from tests.support import hunyuan_layout
from tests.support.commands import tree
from tests.support.media import CAPTION, make_clips
from tests.support.reference import save_layout
from tests.support.training import settings

pytest_plugins = ["tests.support.commands"]

SIZE = (9, 32, 48)
CONFIG = settings(
    top="caption_dropout = 0.3\nseed = 7",
    lora='targets = ["q", "out", "up"]',
    loop="accumulate = 2\nema_decay = 0.9\nlog_every = 2",
)


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


# --- runs ---


@pytest.fixture(scope="module")
def train(tmp_path_factory, model, clips):
    """Returns a run of a method, whole, or stopped after two of its four steps and taken up again."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def train(method, how):
        out = folder / f"{method} {how}"
        path = folder / "config.toml"
        path.write_text(CONFIG.format(model=model, clips=clips, out=out, method=method))
        config = read_config(path)
        if how == "stopped":
            assert finetune(check(config), stop_after=lambda done: done == 2, progress=False) is None
            assert not (out / "loss.png").exists()
        return finetune(check(config), progress=False)

    return train


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.further)])
def test_a_resumed_run_gives_the_same_weights(train, method):
    whole, stopped = train(method, "whole"), train(method, "stopped")
    file = whole.name if method == "lora" else "checkpoint/transformer/model.safetensors"
    ours, theirs = (load_file(path.parent / file) for path in (whole, stopped))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    ours, theirs = (read_metrics(path.parent / "training" / "metrics.jsonl") for path in (whole, stopped))
    fixed = [[line["fixed_noise_loss"] for line in each if "fixed_noise_loss" in line] for each in (ours, theirs)]
    assert fixed[0] == fixed[1] and len(fixed[0]) == 2  # before the first step and after the last
    ours, theirs = ([line for line in each if "loss" in line] for each in (ours, theirs))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [2, 4]
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]


def test_lora_is_trained_and_changes_what_is_generated(train, model, paths, tmp_path):
    file = train("lora", "whole")
    assert file.name == FILE_NAME
    config = checkpoint.read_manifest(model).configs["transformer"]
    assert describe_lora(CogVideoX, file, 1.0, config)["file"] == str(file)
    tensors = load_file(file)
    assert {name.split(".", 3)[3].rsplit(".", 2)[0] for name in tensors} == {
        "attn1.to_q",
        "attn1.to_out.0",
        "ff.net.0.proj",
    }
    assert min(np.abs(value).max() for name, value in tensors.items() if "lora_B" in name) > 1e-3  # they start at zero
    size = ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 2, "--dtype", "float32"]
    common = ["generate", CAPTION, "--model", model, *size]
    plain, tuned, none = (
        np.load(paths(*common, "--out", tmp_path / f"{name}.npz", *more)[0])["latents"]
        for name, more in (("plain", []), ("tuned", ["--lora", file]), ("none", ["--lora", f"{file}:0"]))
    )
    np.testing.assert_allclose(none, plain, atol=1e-4 * plain.std())
    assert np.abs(tuned - plain).max() > 0.01 * plain.std()


def test_full_writes_a_whole_checkpoint(train, model, paths, tmp_path):
    tuned = train("full", "whole")
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
    assert pipe.encode(GenerationRequest(CAPTION), progress=False).text["prompt_embeds"].shape == (1, 10, 40)
    (out,) = paths("generate", CAPTION, "--model", tuned, "--steps", 1, "--out", tmp_path / "x.npz", "--num-frames", 9)
    assert np.isfinite(np.load(out)["latents"]).all()


def test_training_goes_on_from_an_adapter(train, write, run, tmp_path):
    """It begins as the adapter is: with its matrices, rank, alpha and targets; and ends there at a rate of nothing."""
    first = train("lora", "whole")
    text = CONFIG[: CONFIG.index("[lora]")] + CONFIG[CONFIG.index("[loop]") :].replace("3e-2", "1e-12")
    path = write(text)
    job = check(read_config(path, {"lora.init": str(first)}))
    adapted = job.add_lora(load_transformer(job.config.model), None)
    begun = save_lora(CogVideoX, tmp_path / "begun", adapted)
    with TensorFile(begun) as one, TensorFile(first) as two:
        assert one.metadata == two.metadata  # the checksum of all tensors is there
        assert one.metadata["checksum"]
    code, out, err = run("train", "--config", path, "--init-lora", first)
    assert code == 0, err
    before, after = load_file(first), load_file(out.strip())
    assert before.keys() == after.keys()
    worst = max(np.abs(after[name] - value).max() / np.abs(value).max() for name, value in before.items())
    assert worst < 2**-22  # float32's rounding in the moving average
    # another adapter under this name is another run
    shutil.copytree(first.parent, tmp_path / "other")
    adapter = tmp_path / "other" / FILE_NAME
    tensors = load_file(adapter)
    save_file({name: -value for name, value in tensors.items()}, adapter)
    code, _, err = run("train", "--config", path, "--init-lora", adapter)
    assert code == 2 and "lora: there" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.rank": 4}, "lora.rank: got 4, expected 2, as .* has for q"),
        ({"lora.alpha": 3.0}, "lora.alpha: got 3.0, expected 2, as .* has for q"),
        ({"lora.targets": ["q"]}, r"lora.targets: got \('q',\), expected q, out, up, as .* has"),
        ({"method": "full"}, 'lora.init: got .* expected none, with method "full"'),
    ],
)
def test_settings_that_are_not_the_adapters(train, write, changes, message):
    with pytest.raises(InputError, match=message):
        check(read_config(write(), {"lora.init": str(train("lora", "whole")), **changes}))


def test_adapters_from_which_training_cannot_go_on(train, write, tmp_path):
    tensors = load_file(train("lora", "whole"))
    width = 64
    one_layer = {name: x for name, x in tensors.items() if "blocks.0." in name}
    other = {
        f"transformer.proj_out.lora_{half}.weight": np.ones(shape, np.float32)
        for half, shape in (("A", (2, width)), ("B", (64, 2)))
    }
    for name, kept, message in (
        ("layer", one_layer, "adapts q in 1 layers of 2"),
        ("other", tensors | other, "adapts proj_out, which is not trained"),
    ):
        save_file(kept, tmp_path / f"{name}.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check(read_config(write(), {"lora.init": str(tmp_path / f"{name}.safetensors")}))


def test_training_folders_are_known(train, run, model, tmp_path):
    """A folder of adapters stands for its adapter, one of a full fine-tune for its checkpoint."""
    adapters = tmp_path / "adapters"
    shutil.copytree(train("lora", "whole").parent, adapters)
    assert (adapters / "loss.png").exists()
    shutil.copyfile(EMBEDDED_ADAPTERS["embedded-four-steps"] / FILE_NAME, adapters / FILE_NAME)  # one of a known model
    code, out, err = run("info", adapters)
    assert code == 0, err
    assert "rank 32" in out and "fits     embedded" in out
    assert "is a training run without a checkpoint" in run("generate", CAPTION, "--model", adapters)[2]
    full = tmp_path / "full"
    shutil.copytree(model, full / "checkpoint")
    (full / RECORD_FILE).write_text("{}")
    shutil.copyfile(adapters / "loss.png", full / "loss.png")
    code, out, err = run("info", full)
    assert code == 0, err
    assert "transformer" in out and "parameters" in out
    assert hub.find(full) == full / "checkpoint"
    assert run("export", full, tmp_path / "out", "--component", "vae")[0] == 0
    args = ("--steps", 1, "--num-frames", 9, "--out", tmp_path / "x.npz")
    assert run("generate", CAPTION, "--model", full, *args)[0] == 0


def test_command_saves_samples_and_plots(write, run, tmp_path):
    sample = '[sample]\nprompts = ["{prompt}", "a blue square"]\nevery = 2\nframes = 3\nnum_inference_steps = 1\n'
    path = write(CONFIG + sample.replace("{prompt}", CAPTION))
    code, out, err = run("train", "--config", path)
    assert code == 0, err
    assert out.strip() == str(tmp_path / "run" / FILE_NAME)
    sheets = sorted((tmp_path / "run" / "samples").iterdir())
    assert [sheet.name for sheet in sheets] == ["000000.png", "000002.png", "000004.png"]
    for sheet in sheets:
        with Image.open(sheet) as image:
            assert image.size == (3 * 48 + 2 * 2, 2 * 32 + 2)
    assert len({sheet.read_bytes() for sheet in sheets}) == 3
    with Image.open(tmp_path / "run" / "loss.png") as image:
        assert image.size[0] > 600
    # the run is over: the same command only says so, and other prompts are no other run
    before = tree(tmp_path / "run" / "training")
    other = write(CONFIG + sample.replace("{prompt}", "a red square"))
    assert run("train", "--config", other)[0] == 0
    assert tree(tmp_path / "run" / "training").keys() == before.keys()
    code, _, err = run("train", "--config", path, "--steps", 3)
    assert code == 2
    assert "steps: there 4, now 3" in err
    before = (tmp_path / "run" / FILE_NAME).read_bytes()
    assert run("train", "--config", path, "--steps", 5)[0] == 0, "it goes on"
    assert (tmp_path / "run" / FILE_NAME).read_bytes() != before


@pytest.mark.further
def test_words_that_are_learned_are_no_news(write, clips, tmp_path, caplog):
    """Of captions and sample prompts, to a small model that knows a few words."""
    own = shutil.copytree(clips, tmp_path / "own")
    for path in own.glob("*.txt"):
        path.write_text(f"a panda and a {path.stem}")
    path = write(CONFIG + '[sample]\nprompts = ["a panda", "bamboo"]\n', model=hub.EMBEDDED, clips=own)
    assert finetune(check(read_config(path)), stop_after=lambda done: done == 1, progress=False) is None
    assert (tmp_path / "run" / "samples" / "000000.png").exists()
    assert not [message for message in caplog.messages if "panda" in message or "the model shows" in message]


def test_the_law_of_the_timesteps(write, tmp_path, home):
    """It is the release's, but for what the settings say."""
    assert check(read_config(write())).timesteps == TimestepLaw()
    model = hunyuan_layout.save_layout(tmp_path / "hf")
    job = check(read_config(write(model=model), {"timesteps.std": 2.0}))
    assert job.timesteps == TimestepLaw(law="logit_normal", std=2.0, shift=3.0, margin=1e-5)
    with pytest.raises(InputError, match=r"min_snr: got 5.0, expected none: this model's noise schedule is a flow"):
        check(dataclasses.replace(job.config, min_snr=5.0))


@pytest.mark.parametrize("release", ["cogvideox-2b", "cogvideox1.5-5b-i2v"])
def test_the_dtype_is_that_of_a_run(write, release):
    text = CONFIG.replace('dtype = "float32"', "")
    config = read_config(write(text))
    assert check(config).config.loop.dtype == "float32", "of a small model"
    assert (
        FinetuneJob(config=config, manifest=Manifest.of_release(get_release(release))).config.loop.dtype == "bfloat16"
    )
    assert check(read_config(write(text), {"loop.dtype": "bfloat16"})).config.loop.dtype == "bfloat16"


RECIPE = {
    "timesteps.law": "logit_normal",
    "min_snr": 5.0,
    "id_token": "kite7",
    "optimizer.schedule": "linear",
}
"""Another law of the timesteps, min-SNR, a word before each caption, another schedule."""


def test_each_setting_of_a_recipe_is_part_of_the_run(write):
    job = check(read_config(write(), RECIPE))
    assert {clip.caption for clip in job.clips} >= {"kite7 a large blue square", "kite7 a white circle"}
    assert finetune(job, stop_after=lambda done: done == 1, progress=False) is None
    for name, place in zip(RECIPE, ("timesteps", "min_snr", "clips", "optimizer"), strict=True):
        others = {key: value for key, value in RECIPE.items() if key != name}
        with pytest.raises(InputError, match=f"{place}: there"):
            finetune(check(read_config(write(), others)), progress=False)


@pytest.mark.further
def test_a_run_with_other_recipes_resumes_exactly(write, tmp_path):
    config = read_config(write(), RECIPE)
    assert finetune(check(config), stop_after=lambda done: done == 2, progress=False) is None
    cut = finetune(check(config), progress=False)
    whole = finetune(check(dataclasses.replace(config, out=tmp_path / "whole")), progress=False)
    ours, theirs = load_file(cut), load_file(whole)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.further
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_adapters_beside_weights_of_8_bits(train, write, model, tmp_path, kind):
    """They resume exactly, learn as beside the weights themselves, and a checkpoint of this kind gives the same."""
    config = read_config(write(), {"lora.quantize": kind})
    assert finetune(check(config), stop_after=lambda done: done == 2, progress=False) is None
    with pytest.raises(InputError, match="lora: there"):
        finetune(check(read_config(write())), progress=False)
    cut = finetune(check(config), progress=False)
    quantize_checkpoint(model, tmp_path / kind, ["transformer"], kind)
    stored = dataclasses.replace(read_config(write(), {"model": str(tmp_path / kind)}), out=tmp_path / "stored")
    whole = finetune(check(dataclasses.replace(config, out=tmp_path / "whole")), progress=False)
    results = [load_file(path) for path in (cut, whole, finetune(check(stored), progress=False))]
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert all(np.array_equal(results[0][name], other[name]) for name in other)
    ours, theirs = (read_metrics(path.parent / "training" / "metrics.jsonl") for path in (cut, train("lora", "whole")))
    ours, theirs = (np.array([line["loss"] for line in lines if "loss" in line]) for lines in (ours, theirs))
    assert 0 < np.abs(ours / theirs - 1).max() < 0.02


def test_memory_of_weights_of_8_bits(write, model, tmp_path):
    """Where they are quantized when they are loaded, and where the checkpoint has them so."""
    path = write()
    plain, small = (check(read_config(path, settings)) for settings in ({}, {"lora.quantize": "int8"}))
    weights = parameters(plain.manifest.abstract("transformer"))
    maps = [weights[f"{name}.kernel"] for name in CogVideoX.components["transformer"].linear_maps]
    saved = sum(3 * kernel.size - 4 * kernel.shape[0] * kernel.shape[2] for kernel in maps)
    assert plain.memory()["frozen weights"] - small.memory()["frozen weights"] == saved
    assert plain.trainable == small.trainable and plain.parameters == small.parameters
    held = abstract_arguments(small)[1]["transformer"]
    adapters = sum(x.size * x.dtype.itemsize for x in lora_parameters(held).values())
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
    assert total - adapters == small.memory()["frozen weights"]
    quantize_checkpoint(model, tmp_path / "int8", ["transformer"], "int8")
    stored = {"model": str(tmp_path / "int8")}
    assert check(read_config(path, stored)).memory() == small.memory()
    with pytest.raises(InputError, match=r"lora\.quantize: got 'float8', expected int8, as this checkpoint is"):
        check(read_config(path, stored | {"lora.quantize": "float8"}))
    with pytest.raises(InputError, match=r'is quantized and cannot be trained; .* method = "lora"'):
        check(read_config(path, stored | {"method": "full"}))


@pytest.fixture
def in_buckets(write, clips, tmp_path):
    """The path of a configuration with a bucket of clips and one of images."""
    folder = shutil.copytree(clips, tmp_path / "clips")
    for name in ("d.png", "0001.jpg", "0002.jpg"):  # each an image of its own
        Image.fromarray(np.random.default_rng(len(name)).integers(0, 256, (50, 70, 3), np.uint8)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text("a red circle")
    text = CONFIG.replace("[lora]", "buckets = [[9, 32, 48], [1, 48, 64]]\n\n[lora]", 1)
    return write(text.replace("steps = 4", "steps = 6").replace("log_every = 2", "log_every = 1"), clips=folder)


def test_buckets_of_clips_and_images(in_buckets, write, clips, tmp_path):
    """Each bucket has its own shapes, and its turns."""
    job = check(read_config(in_buckets))
    names = [[job.clips[i].name for i in members] for members in job.members]
    assert names == [["a.mp4", "b.gif", "c"], ["0001.jpg", "0002.jpg", "d.png"]]
    assert "1x48x64 at 8 fps, 22 tokens per clip: 3 clips" in job.describe("")
    file = finetune(job, progress=False)
    losses = [x["loss"] for x in read_metrics(file.parent / "training" / "metrics.jsonl") if "loss" in x]
    assert len(losses) == 6 and np.isfinite(losses).all()
    for name, shape in {"vae-9x32x48": (3, 3, 4, 6, 16), "vae-1x48x64": (3, 1, 6, 8, 16)}.items():
        assert load_file(tmp_path / "run" / "prepared" / name / "00000.safetensors")["mean"].shape == shape
    with pytest.raises(InputError, match=r"buckets: there \[.*, now None"):
        finetune(check(read_config(write(clips=clips))), progress=False)


@pytest.mark.further
def test_a_resumed_run_in_buckets_gives_the_same_weights(in_buckets, tmp_path):
    job = check(read_config(in_buckets))
    assert finetune(job, stop_after=lambda done: done == 3, progress=False) is None
    cut = finetune(job, progress=False)
    whole = finetune(check(dataclasses.replace(job.config, out=tmp_path / "whole")), progress=False)
    ours, theirs = load_file(cut), load_file(whole)
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    lines = [read_metrics(file.parent / "training" / "metrics.jsonl") for file in (cut, whole)]
    assert [x["loss"] for x in lines[0] if "loss" in x] == [x["loss"] for x in lines[1] if "loss" in x]


def test_clips_that_are_held_out(write, tmp_path, clips, caplog):
    config = read_config(write(CONFIG + "[validation]\nclips = 2\nevery = 3\n"))
    job = check(config)
    assert len(job.held_out) == 2
    assert sorted(job.held_out + job.trained_on) == list(range(len(job.clips)))
    finetune(job, progress=False)
    lines = read_metrics(tmp_path / "run" / "training" / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 3, 4]
    with pytest.raises(InputError, match="held out: there 2, now None"):
        finetune(check(read_config(write())), progress=False)


def test_a_full_disk_ends_the_command_in_a_message(write, run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "free_bytes", lambda _: 0)
        code, out, err = run("train", "--config", write())
    states = tmp_path / "run" / "training" / "states"
    (last,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and not out and f"error: writing a training state to {states} failed: No space left" in last
    assert "MiB, and its disk has 0 MiB free. The same command resumes" in last


def test_a_stopped_command_says_so(write, run, monkeypatch):
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: TrainState(jnp.int32(1), {}, None, None))
    code, out, err = run("train", "--config", write())
    assert (code, out) == (130, "")
    assert "the same command goes on" in err


def test_check_says_what_would_be_done_and_touches_nothing(write, run, tmp_path, monkeypatch):
    def begun(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(OpenModel, "component", begun)
    monkeypatch.setattr("cogvideox_flax.checkpoint.load.load_component", begun)
    path = write()
    before = tree(tmp_path)
    code, out, err = run("train", "--config", path, "--check", "--steps", 30)
    assert code == 0, err
    assert tree(tmp_path) == before
    # 3 latent frames of 4x6, patches of 2x2; adapters of rank 2 on 64 -> 64 twice and 64 -> 256, two layers
    for part in (
        "3 in ",
        "28 per clip, text included",
        f"{2 * 2 * (2 * 128 + 320):,} of ",
        "30 of 2 clips",
        "20.0 times",
    ):
        assert part in out


def test_full_needs_disk_for_components_that_cannot_be_linked(write, model, monkeypatch):
    def disk():
        return check(read_config(write(method="full"))).disk()

    linked = disk()
    monkeypatch.setattr(job_module, "_file_system", lambda path: path.is_relative_to(model))
    files = [load_file(checkpoint.weights_file(model, name)) for name in ("text_encoder", "vae")]
    assert disk() - linked == sum(value.nbytes for tensors in files for value in tensors.values())


# --- refusals ---


def test_changed_clips_weights_or_settings_are_another_run(train, write, clips, tmp_path):
    out = train("lora", "whole").parent
    other = shutil.copytree(clips, tmp_path / "other")
    assert finetune(check(read_config(write(out=out, clips=other)))) is not None  # the same clips in another place
    (other / "c.txt").write_text("a black circle")
    with pytest.raises(InputError, match="holds a run of something else:\n  clips: there"):
        finetune(check(read_config(write(out=out, clips=other))))
    with pytest.raises(InputError, match=r"lora: there .*'rank': 2.*, now .*'rank': 4"):
        finetune(check(read_config(write(out=out), {"lora.rank": 4})))
    with pytest.raises(InputError, match="method: there lora, now full"):
        finetune(check(read_config(write(out=out, method="full"))))
    (out / RECORD_FILE).unlink()  # what was prepared knows by itself
    with pytest.raises(InputError, match=r"made from something else \(differing: clips\)"):
        finetune(check(read_config(write(out=out, clips=other))))


def test_clips_that_change_while_they_are_prepared(write, clips, tmp_path, monkeypatch):
    """They do not become the examples of the clips that were hashed."""
    own, real = shutil.copytree(clips, tmp_path / "own"), prepare.load_clip

    def load(path, *args):
        if path.name == "b.gif":
            save_video(path, 255 - read_video(path)[0], 8)
        return real(path, *args)

    monkeypatch.setattr(prepare, "load_clip", load)
    with pytest.raises(InputError, match=r"own/b\.gif changed while this run was under way; start it again"):
        finetune(check(read_config(write(clips=own))), progress=False)
    assert not list((tmp_path / "run" / "prepared" / "vae").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("scheduler", "snr_shift_scale", 3.0),
        pytest.param("transformer", "temporal_interpolation_scale", 2.0, marks=pytest.mark.further),
    ],
)
def test_a_run_does_not_resume_with_another_model(write, model, tmp_path, part, field, value):
    """Stopped after two steps, one number of the model's config.json changed, and taken up again."""
    own = shutil.copytree(model, tmp_path / "model")
    assert finetune(check(read_config(write(model=own))), stop_after=lambda done: done == 2, progress=False) is None
    raw = json.loads((own / "config.json").read_text())
    raw[part][field] = value
    (own / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=f"holds a run of something else:\n  {part}: there"):
        finetune(check(read_config(write(model=own))), progress=False)


@pytest.mark.further
def test_damaged_files_of_a_stopped_run(write, tmp_path, caplog):
    """Each costs what it holds at most, and says so."""
    config, out = read_config(write()), tmp_path / "run"
    caplog.set_level("INFO", "cogvideox_flax")
    assert finetune(check(config), stop_after=lambda done: done == 3, progress=False) is None
    whole = finetune(check(read_config(write(out=tmp_path / "whole"))), progress=False)
    for path in (out / RECORD_FILE, out / "training" / "settings.json"):
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
    assert caplog.text.count("store.json is damaged") == 2 and "resuming from step 3" in caplog.text
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
        "remat: got 1, expected true or false or none or full or attention or offload or auto",
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
        ({"buckets": [[9, 32, 48], [10, 32, 48]]}, "num_frames is 10; it must be 8 n \\+ 1"),
        ({"optimizer.schedule": "step"}, "schedule: got 'step', expected cosine or linear or constant_with_warmup"),
        ({"min_snr": 0.0}, "min_snr: got 0.0, expected a finite number above 0"),
        ({"timesteps.law": "lognorm"}, "timesteps.law: got 'lognorm', expected uniform or logit_normal or mode"),
        ({"timesteps.std": 0.0}, "timesteps.std: got 0.0, expected a finite number above 0"),
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
        ({"lora.quantize": "int4"}, "lora.quantize: got 'int4', expected int8 or float8"),
        ({"lora.quantize": "int8", "method": "full"}, "lora.quantize: got 'int8', expected none"),
        ({"optimizer.learning_rate": float("inf")}, "learning_rate: got inf"),
        ({"optimizer.learning_rate": 1e300}, "learning_rate: got 1e\\+300, expected a finite number above 0"),
        ({"optimizer.weight_decay": 1e300}, "weight_decay: got 1e\\+300"),
        ({"optimizer.eps": float("nan")}, "eps: got nan"),
        ({"optimizer.warmup_steps": 10**30}, "warmup_steps: got 1000.*, expected 0 to 2147483647"),
        ({"lora.alpha": float("inf")}, "lora.alpha: got inf, expected a finite number above 0"),
        ({"lora.rank": 10**30}, "lora.rank: got 1000.*, expected 1 to 65536"),
        ({"batch": 10**30}, "batch: got 1000.*, expected 1 to 2147483647"),
        ({"loop.keep": 10**400}, "keep: got 1000.*, expected 1 to 2147483647"),
        ({"sample.prompts": ("a",), "sample.guidance_scale": 1e300}, "guidance_scale is 1e\\+300"),
    ],
)
def test_settings_that_cannot_be_served(write, changes, message):
    with pytest.raises(InputError, match=message):
        check(read_config(write(), changes))


def test_settings_reach_another_host_unchanged(write):
    config = read_config(write(), {"lora.targets": ("q", "v"), "sample.prompts": ("a",), "loop.save_minutes": 1e-9})
    assert config_of_json(json.loads(json.dumps(config_json(config)))) == config


@pytest.mark.parametrize("text", [f"batch = {'9' * 5000}", f"batch = {'[' * 100_000}", "batch ="])
def test_what_is_not_toml(write, text):
    with pytest.raises(InputError, match=r"config.toml is not TOML"):
        read_config(write(text))


@pytest.mark.further
def test_without_matplotlib_there_is_no_plot(write, run, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("train", "--config", write(), "--steps", 2)
    assert code == 0, err
    assert out.strip() == str(tmp_path / "run" / FILE_NAME) and not (tmp_path / "run" / "loss.png").exists()
    assert "no plot of the loss, since matplotlib is not installed" in caplog.text


def test_a_missing_extra_says_how_to_get_it(write, run, monkeypatch):
    monkeypatch.delitem(sys.modules, "cogvideox_flax.cli.train", raising=False)  # as in a new process
    monkeypatch.setitem(sys.modules, "optax", None)
    code, _, err = run("train", "--config", write())
    assert code == 2
    assert 'training needs optax: pip install ".[train]" in a checkout of cogvideox-flax' in err


# --- numbers ---


def test_releases_that_patch_time_train_on_an_extra_frame(write, tmp_path, home, monkeypatch):
    layout = save_layout(tmp_path / "1.5", "cogvideox1.5-5b")
    job = check(read_config(write(model=layout)))
    assert (job.size.latent_frames, job.size.extra_latents, job.fps) == (4, 1, 16)
    assert job.tokens == 10 + 2 * 2 * 3
    seen = {}

    def objective(denoiser, latents, *_, **__):
        seen["latents"] = latents
        return denoiser(latents, jnp.zeros(2, jnp.int32)).mean(), {}

    monkeypatch.setattr(finetuning, "velocity_loss", objective)
    transformer = job.manifest.abstract("transformer")
    latents = jax.ShapeDtypeStruct((2, 3, 4, 6, 16), jnp.float16)
    text_shape = jax.ShapeDtypeStruct((2, 10, 40), jnp.float32)
    batch = {"mean": latents, "std": latents, "text": {"prompt_embeds": text_shape}}
    frozen = {"empty": {"prompt_embeds": jax.ShapeDtypeStruct((10, 40), jnp.float32)}}
    key = jax.eval_shape(lambda: jax.random.key(0))
    loss, _ = jax.eval_shape(partial(finetuning._loss, job=job), {"transformer": transformer}, frozen, batch, key)
    assert loss.shape == ()
    assert seen["latents"].shape == (2, 4, 4, 6, 16)
