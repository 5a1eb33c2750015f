"""The three stages on disk: one run in parts, the reference system's files, runs that are killed and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.generate import journey, store
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_metadata, read_video
from tests.support import processes
from tests.support.commands import PROMPT, ROOT, SIZE, generate
from tests.support.reference import make_transformer, save_layout

pytest_plugins = ["tests.support.commands"]


def test_three_stages_are_one_run(paths, native, staged, tmp_path):
    (npz,) = paths(*generate(native, tmp_path / "x.npz"))
    latents = load_file(staged / store.LATENTS_FILE)["latents"]
    assert (latents.transpose(0, 2, 3, 4, 1) == np.load(npz)["latents"]).all()
    (video,) = paths(*generate(native, tmp_path / "v.mp4"))
    assert (read_video(video)[0] == read_video(staged / store.VIDEO_FILE)[0]).all()
    assert read_metadata(video) == read_metadata(staged / store.VIDEO_FILE)


def test_stage_files_are_the_reference_systems(staged, native):
    names = {"generation_config.json", "stage1_embeddings.safetensors", "stage2_latents.safetensors"}
    assert {p.name for p in staged.iterdir()} == names | {"output_video.mp4"}
    config = json.loads((staged / "generation_config.json").read_text())
    assert config["prompt"] == PROMPT
    assert config["model_id"] == str(native)
    assert [config[k] for k in ("frames", "height", "width", "num_inference_steps", "fps")] == [9, 32, 48, 2, 8]
    with TensorFile(staged / "stage1_embeddings.safetensors") as file:
        assert {name: (info.shape, info.dtype) for name, info in file.tensors.items()} == {
            "prompt_embeds": ((1, 10, 40), np.float32),
            "negative_prompt_embeds": ((1, 10, 40), np.float32),
        }
        assert [file.metadata[k] for k in ("prompt", "negative_prompt", "model_id")] == [PROMPT, "", str(native)]
        dtypes = json.loads(file.metadata["dtype_info"])
        assert dtypes == {"prompt_embeds": "float32", "negative_prompt_embeds": "float32"}
    with TensorFile(staged / "stage2_latents.safetensors") as file:
        assert {name: info.shape for name, info in file.tensors.items()} == {"latents": (1, 16, 3, 4, 6)}
        names = ("num_frames", "num_inference_steps", "guidance_scale", "seed", "height", "width")
        assert [file.metadata[k] for k in names] == ["9", "2", "6.0", "0", "32", "48"]


def test_bfloat16_embeddings_are_stored_as_float32_and_say_so(paths, native, tmp_path):
    paths("encode", PROMPT, "--model", native, "--dtype", "bfloat16", "--dir", tmp_path / "run")
    with TensorFile(tmp_path / "run" / "stage1_embeddings.safetensors") as file:
        assert file.tensors["prompt_embeds"].dtype == np.float32
        assert json.loads(file.metadata["dtype_info"])["prompt_embeds"] == "bfloat16"


def test_the_extra_frame_of_1_5_is_dropped(paths, tmp_path):
    layout = save_layout(tmp_path / "1.5", "cogvideox1.5-5b")
    run = tmp_path / "run"
    paths("encode", PROMPT, "--model", layout, "--dir", run, "--dtype", "float32")
    paths("denoise", "--dir", run, *SIZE, "--steps", 2)
    pipe = CogVideoXPipeline.from_pretrained(layout, dtype="float32")
    assert pipe.resolve(GenerationRequest(PROMPT, num_frames=9, height=32, width=48)).size.latent_frames == 4
    assert load_file(run / "stage2_latents.safetensors")["latents"].shape == (1, 16, 3, 4, 6)
    assert json.loads((run / "generation_config.json").read_text())["fps"] == 16


def test_a_run_of_the_reference_system_is_taken_over(paths, native, staged, tmp_path, cheap_decoder):
    """Their files hold no more than this; their run need not keep to 8 n + 1 frames."""
    run = tmp_path / "theirs"
    run.mkdir()
    config = {"prompt": "a panda", "negative_prompt": "", "model_id": str(native)}
    (run / "generation_config.json").write_text(json.dumps(config))
    ours = load_file(staged / "stage1_embeddings.safetensors")
    save_file(ours, run / "stage1_embeddings.safetensors", config | {"dtype_info": "{}"})
    paths("denoise", "--dir", run, *SIZE, "--steps", 2, "--dtype", "float32")
    latents = load_file(run / "stage2_latents.safetensors")["latents"]
    assert (latents == load_file(staged / "stage2_latents.safetensors")["latents"]).all()

    more = {"num_inference_steps": 50, "guidance_scale": 6.0, "seed": 42, "height": 32, "width": 48}
    their_config = config | more | {"frames": 5, "fps": 16, "window_size": None, "bqsize": 3328}
    (run / "generation_config.json").write_text(json.dumps(their_config))
    metadata = {name: str(value) for name, value in (more | {"num_frames": 5}).items()}
    save_file({"latents": latents[:, :, :2]}, run / "stage2_latents.safetensors", metadata)
    (video,) = paths("decode", "--dir", run, "--dtype", "float32")
    assert video == run / "output_video.mp4"
    frames, fps = read_video(video)
    assert frames.shape == (8, 32, 48, 3)
    assert fps == 16
    found = read_metadata(video)
    assert found["seed"] == 42
    assert "scheduler" not in found["settings"]  # what they did not say, we do not make up


def test_decode_elsewhere_and_at_another_rate(paths, staged, tmp_path):
    (gif,) = paths("decode", "--dir", staged, "--out", tmp_path / "v.gif", "--fps", 5)
    assert read_video(gif)[1] == pytest.approx(5)


def test_denoise_keeps_the_directorys_settings(paths, copied, work):
    paths("denoise", "--dir", copied, "--seed", 3)
    config = json.loads((copied / "generation_config.json").read_text())
    assert (config["seed"], config["num_inference_steps"], config["frames"], config["dtype"]) == (3, 2, 9, "float32")
    paths("denoise", "--dir", copied)
    assert work == ["denoise"]  # the second found its work done, seed 3 and all


# --- a killed run goes on ---


@pytest.mark.parametrize(
    ("stage", "left"),
    [
        ("encode", ["encode", "denoise", "decode"]),
        ("denoise", ["denoise", "decode"]),
        ("decode", ["decode"]),
    ],
)
def test_interrupted_runs_go_on(run, paths, native, tmp_path, monkeypatch, caplog, work, stage, left):
    def interrupt(*args, **kwargs):
        yield from ()
        raise KeyboardInterrupt

    command = generate(native, tmp_path / "v.mp4")
    with monkeypatch.context() as patch:
        patch.setattr(journey, stage, interrupt)
        code, out, err = run(*command)
    assert code == 130
    assert out == ""
    assert "the same command goes on" in err
    folder = tmp_path / "v.mp4.stages"
    if stage == "encode":
        assert not folder.exists()
    else:
        latents = " and stage2_latents.safetensors" if stage == "decode" else ""
        assert f"stage1_embeddings.safetensors{latents} in {folder}: kept" in caplog.text
    work.clear()
    assert paths(*command) == [tmp_path / "v.mp4"]
    assert work == left
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "made_again"),
    [
        ([], []),
        (["--seed", 1], ["denoise"]),
        (["--steps", 3], ["denoise"]),
        (["--guidance-scale", 2], ["denoise"]),
        (["--dynamic-cfg", "timestep"], ["denoise"]),
        (["--scheduler", "dpm"], ["denoise"]),
        (["--height", 80], ["denoise"]),
        (["--negative-prompt", "red"], ["encode", "denoise"]),
        (["--dtype", "bfloat16"], ["encode", "denoise"]),
        (["--fps", 4], []),
    ],
    ids=lambda value: " ".join(map(str, value)) or "nothing",
)
def test_only_matching_stages_are_taken_over(paths, native, copied, work, change, made_again):
    paths(*generate(native, copied / "x.npz", "--dir", copied, *change))
    assert work == made_again


def test_another_prompt_takes_nothing_over(paths, native, copied, work):
    paths(*generate(native, copied / "x.npz", "--dir", copied, prompts=["another prompt"]))
    assert work == ["encode", "denoise"]


def test_another_checkpoint_makes_the_stages_again(paths, layout, native, copied, tmp_path, work):
    convert(layout, tmp_path / "other")
    paths(*generate(tmp_path / "other", copied / "x.npz", "--dir", copied))
    assert work == []  # the same weights in another place
    model = make_transformer("cogvideox-2b", seed=5)
    convert(save_layout(tmp_path / "hf", "cogvideox-2b", transformer=model), tmp_path / "third")
    paths(*generate(tmp_path / "third", copied / "x.npz", "--dir", copied))
    assert work == ["denoise"]  # its text encoder is the same


def test_replaced_embeddings_are_noticed(paths, copied, work):
    file = copied / store.EMBEDDINGS_FILE
    with TensorFile(file) as old:
        metadata = old.metadata
    del metadata["checksum"]  # which only this library writes
    save_file({name: 2 * value for name, value in load_file(file).items()}, file, metadata)
    paths("denoise", "--dir", copied)
    assert work == ["denoise"]


def wait_for(process, file: Path, text: str) -> None:
    """Until the process has written a text to its file."""
    deadline = time.monotonic() + 120
    while text not in file.read_text():
        assert process.poll() is None, f"the process ended without {text!r}: {file.read_text()}"
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("moment", "number", "code", "left"),
    [
        pytest.param("denoising:", signal.SIGINT, 130, ["denoise"], marks=pytest.mark.further),
        ("compiling the denoising step", signal.SIGKILL, -signal.SIGKILL, ["denoise"]),
    ],
    ids=["ctrl-c", "kill"],
)
def test_a_real_kill(paths, native, tmp_path, work, moment, number, code, left):
    command = generate(native, tmp_path / "x.npz", "--steps", 1000)  # enough to be met at work on a busy machine
    with (tmp_path / "stderr").open("w") as stderr:
        how = {"stdout": subprocess.PIPE, "stderr": stderr, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
        with processes.running([sys.executable, "-m", "cogvideox_flax", *command], **how) as process:
            wait_for(process, Path(stderr.name), moment)
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)
    err = Path(stderr.name).read_text()
    Path(stderr.name).unlink()
    assert process.returncode == code
    assert out == b""
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert "the same command goes on" in err
        assert str(tmp_path / "x.npz.stages") in err
    assert not (tmp_path / "x.npz").exists()
    assert paths(*command) == [tmp_path / "x.npz"]
    assert work == left
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]


def test_other_peoples_files_survive(paths, native, tmp_path):
    folder = tmp_path / "v.npz.stages"
    folder.mkdir()
    (folder / "thesis.tex").write_text("42")
    paths(*generate(native, tmp_path / "v.npz"))
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]
