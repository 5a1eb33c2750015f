"""What the shell commands cannot serve: one clear message, exit code 2, nothing heavy begun, nothing lost."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cogvideox_flax.checkpoint import read_manifest
from cogvideox_flax.cli.prepare import read_prompts
from cogvideox_flax.generate import store
from cogvideox_flax.io import tensor_file
from cogvideox_flax.io.atomic import file_lock
from cogvideox_flax.io.paths import expand_user
from tests.support.commands import PROMPT, QUICK, generate, python
from tests.support.reference import make_transformer, save_layout

pytest_plugins = ["tests.support.commands"]


def option(*argv, message):
    return pytest.param(argv, message, id=" ".join(argv)[:60])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        option("--num-frames", "10", message="num_frames is 10; it must be 8 n + 1. Nearest: 9 and 17"),
        option("--num-frames", "0", message="Smallest: 1 and 9"),
        option("--height", "60", message="height is 60; it must be a multiple of 16. Nearest: 48 and 64"),
        option("--width", "1000", message="Nearest: 992 and 1008"),
        option("--steps", "0", message="num_inference_steps is 0; expected 1 to 1000"),
        option("--steps", "1001", message="expected 1 to 1000"),
        option("--guidance-scale", "nan", message="guidance_scale is nan; expected a number"),
        option("--lora", "x.safetensors:1e300", message="must be a finite number (1 is as trained); got 1e+300"),
        option("--profile-steps", "9" * 5000, message="expected a step or two, such as 3 or 3-5"),
        option("--seed", "-1", message="seed is -1; expected a whole number from 0 to 4294967295"),
        option("--seed", "9" * 30, message="seed is 999"),
        option("--fps", "0", message="fps is 0; expected a whole number from 1 to 1000"),
        option("--fps", "7.5", message="--fps: expected a whole number from 1 to 1000 frames per second; got '7.5'"),
        option("--mesh", "2,1", message="mesh must be DP,SP,TP such as 2,1,4, or DP,SP,TP,fsdp; got '2,1'"),
        option("--mesh", "", message="mesh must be DP,SP,TP"),
        option("--mesh", "a,b,c", message="mesh must be DP,SP,TP"),
        option("--mesh", "²,1,1", message="mesh must be DP,SP,TP"),
        option("--mesh", "9" * 5000 + ",1,1", message="mesh must be DP,SP,TP"),
        option("--mesh", "0,1,1", message="mesh dp=0"),
        option("--mesh", "3,3,1", message="needs 9 devices; there are 8"),
        option("--mesh", "4,1,1", message="2 does not divide over mesh axis dp of size 4"),
        option("--mesh", "1,1,8", message="does not divide over mesh axis tp of size 8"),
        option("--mesh", "2,1,1", "--guidance-scale", "1", message="1 does not divide over mesh axis dp of size 2"),
        option("--dtype", "float8", message="invalid choice: 'float8'"),
        option("--scheduler", "heun", message="unknown scheduler 'heun'; known are ddim, dpm, euler"),
        option("--revision", "main", message="a revision belongs to a hub id"),
        option("--variant", "fp16", message="has no variant fp16; it holds the plain one"),
        option("--tiling", message="tiles would not add up to the image"),
        option("--prompt-file", "nowhere.txt", message="prompts were given beside --prompt-file"),
        option("--out", "video.avi", message="known are .mp4, .webm, .gif"),
        option("--out", "frame.png", message="frame.png names one image"),
        option("--out", "x" * 300 + ".mp4", message="File name too long"),
        option("--dir", "x" * 300, message="File name too long"),
    ],
)
def test_bad_options_are_refused_before_anything_is_converted(refused, layout, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*generate(layout, "v.mp4"), *argv)


def test_all_faults_of_a_size_at_once(refused, layout, tmp_path):
    message = refused(*generate(layout, tmp_path / "v.mp4", "--num-frames", 4, "--height", 50, "--width", 70))
    assert all(name in message for name in ("num_frames is 4", "height is 50", "width is 70"))


def test_float16_of_a_bfloat16_model(refused, layout_5b, tmp_path):
    assert "float16 gives NaN" in refused(*generate(layout_5b, tmp_path / "v.mp4", "--dtype", "float16"))


@pytest.mark.parametrize("command", ["generate", "encode"])
def test_float16_on_a_tpu(refused, layout, tmp_path, monkeypatch, command):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    argv = generate(layout, tmp_path / "v.mp4", "--dtype", "float16")
    if command == "encode":
        argv = ["encode", PROMPT, "--model", layout, "--dir", tmp_path / "run", "--dtype", "float16"]
    err = refused(*argv)
    assert err == (
        "error: float16 is not served on TPUs, whose kernels compute in bfloat16 or float32; use one of these\n"
    )


def test_prompts_that_are_none(refused, layout, tmp_path):
    file = tmp_path / "prompts.txt"
    argv = ["generate", "--model", layout, "--out", tmp_path / "v.mp4", *QUICK]
    assert "no prompt was given" in refused(*argv)
    for data, message in ((b"", "holds no prompt"), (b" \n\n", "holds no prompt"), (b"\xff\xfe\x00", "UTF-8")):
        file.write_bytes(data)
        assert message in refused(*argv, "--prompt-file", file)
    assert "cannot read prompts" in refused(*argv, "--prompt-file", tmp_path)
    message = refused(*generate(layout, tmp_path / "v.mp4", prompts=["a\udcffb"]))
    assert "not valid Unicode at character 1" in message


def test_places_that_cannot_be_written(refused, layout, staged, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "taken.mp4").mkdir()
    for argv in (["--out", file / "v.mp4"], ["--out", file / "v.npz"], ["--out", tmp_path / "v.mp4", "--dir", file]):
        assert "Not a directory" in refused(*generate(layout, "v.mp4", *argv))
    assert "Not a directory" in refused("encode", PROMPT, "--model", layout, "--dir", file)
    for name in ("taken.mp4", "taken.npz"):
        (tmp_path / name).mkdir(exist_ok=True)
        assert "is a directory" in refused(*generate(layout, tmp_path / name))
    assert "holds other files" in refused(*generate(layout, tmp_path))
    # with two prompts it is the numbered names that count
    (tmp_path / "two-1.mp4").mkdir()
    assert "two-1.mp4 is a directory" in refused(
        *generate(layout, tmp_path / "two.mp4", prompts=["a circle", "b circle"])
    )
    assert "Not a directory" in refused("decode", "--dir", staged, "--out", file / "v.mp4")
    assert file.read_text() == "mine"


@pytest.fixture
def special(tmp_path):
    """A named pipe, a socket and a device."""
    for name in ("pipe", "pipe.png", "pipe.mp4", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    return {"pipe": "a named pipe", "socket": "a socket", "/dev/zero": "a device"}


LONG = "y" * 5000


def test_outputs_that_are_no_names(refused, layout, native, staged, tmp_path, monkeypatch, special):
    monkeypatch.chdir(tmp_path)
    wrong = {".": "has no name of its own", "/": "has no name of its own", "..": "has no name of its own"}
    wrong |= {"": "a path is empty", LONG: "File name too long", f"{LONG}.npz": "File name too long"}
    wrong |= {"pipe.mp4": "a named pipe", **special}
    for out, message in wrong.items():
        assert message in refused(*generate(layout, out)), out
        assert message in refused(*generate(layout, out, prompts=["a circle", "b circle"])), out
        assert message in refused("decode", "--dir", staged, "--out", out), out
        assert message in refused("upscale", "clip", "--model", native, "--out", out), out


def test_directories_that_are_none(refused, layout, native, tmp_path, monkeypatch, special):
    monkeypatch.chdir(tmp_path)
    wrong = {"": "a path is empty", LONG: "File name too long", "pipe/x": "Not a directory", **special}
    for folder, message in wrong.items():
        assert message in refused(*generate(layout, "v.mp4", "--dir", folder)), folder
        assert message in refused("encode", PROMPT, "--model", layout, "--dir", folder), folder
        assert message in refused("denoise", "--dir", folder), folder
        assert message in refused("decode", "--dir", folder), folder
        assert message in refused("quantize", native, folder), folder
        assert message in refused("convert", layout, folder), folder


def test_inputs_that_are_no_files(refused, layout, native, tmp_path, monkeypatch, special):
    """Nobody writes to the pipes: to read one would never end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, message in {"": "a path is empty", **special}.items():
        for option_ in ("--lora", "--image", "--video", "--prompt-file", "--model", "--profile"):
            model = "embedded-image-to-video" if option_ == "--image" else layout
            assert message in refused(*generate(model, "v.mp4", option_, name)), (option_, name)
        assert message in refused("train", "--config", name)
        assert message in refused("upscale", name, "--model", native, "--out", "v.mp4")
        assert message in refused("info", name)
        assert message in refused("plan", "--model", name)
        assert message in refused("quantize", name, "small")
        assert message in refused("convert", name, "native")
    for option_, model in (("--lora", layout), ("--image", "embedded-image-to-video"), ("--video", layout)):
        assert "File name too long" in refused(*generate(model, "v.mp4", option_, LONG)), option_
    assert "File name too long" in refused("train", "--config", LONG)


def test_named_pipes_in_folders(refused, layout, native, tmp_path):
    frames, model = tmp_path / "frames", shutil.copytree(native, tmp_path / "model")
    frames.mkdir()
    os.mkfifo(frames / "0.png")
    assert "0.png: it is a named pipe, not a file" in refused(*generate(layout, "v.mp4", "--video", frames))
    for name in ("transformer/model.safetensors", "config.json"):
        (model / name).unlink()
        os.mkfifo(model / name)
        refused(*generate(model, tmp_path / "v.mp4"))
    for argv in (["info", frames], generate(layout, "v.mp4", "--like", frames)):
        assert "0.png: it is a named pipe" in refused(*argv)
    (tmp_path / "prompts.txt").write_text("a")
    os.mkfifo(tmp_path / "index.html")
    queue = ["generate", "--prompt-file", tmp_path / "prompts.txt", "--model", native, "--out", tmp_path / "v.mp4"]
    assert "index.html: it is a named pipe" in refused(*queue, *QUICK)


def test_named_pipes_in_a_run_directory(refused, paths, native, copied):
    """What another command must have left is refused; what a run keeps for itself is written again."""
    for name in (store.LATENTS_FILE, store.EMBEDDINGS_FILE, store.CONFIG_FILE):
        (copied / name).unlink()
        os.mkfifo(copied / name)
        for command in ("denoise", "decode"):
            if (command, name) != ("denoise", store.LATENTS_FILE):
                assert "a named pipe" in refused(command, "--dir", copied), (command, name)
    (copied / store.CONFIG_FILE).unlink()
    os.mkfifo(copied / store.STATE_FILE)
    paths(*generate(native, copied / "x.npz", "--dir", copied))
    assert all((copied / name).is_file() for name in (store.EMBEDDINGS_FILE, store.LATENTS_FILE))


def test_a_pipe_of_the_shell_may_hold_prompts():
    reading, writing = os.pipe()
    os.write(writing, b"a red circle\n")
    os.close(writing)
    path = expand_user(f"/dev/fd/{reading}")
    assert read_prompts(argparse.Namespace(prompt=[], prompt_file=path)) == ["a red circle"]
    os.close(reading)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directories(refused, layout, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    assert "Permission denied" in refused(*generate(layout, folder / "v.mp4"))


def test_a_cache_that_cannot_be_written(run, layout, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COGVIDEOX_HOME", str(tmp_path / "file" / "home"))
    code, _, err = run(*generate(layout, tmp_path / "v.mp4"))
    assert code == 2
    assert "set COGVIDEOX_HOME to another directory" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk(refused, layout, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    assert "v.mp4.stages needs about 64 MiB, and its disk has 1 MiB free" in refused(
        *generate(layout, tmp_path / "v.mp4")
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=70 * 2**20))
    long = ["--num-frames", 161, "--height", 512, "--width", 512]
    assert "needs about 185 MiB, and its disk has 70 MiB free" in refused(*generate(layout, tmp_path / "v.mp4", *long))


def test_a_disk_too_small_for_the_conversion(refused, layout, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store, "check_folder", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=68 * 2**20))
    # each component would fit, all three do not
    message = refused(*generate(layout, tmp_path / "v.mp4"), converts=True)
    assert "needs about 72 MiB, and its disk has 68 MiB free" in message
    assert not list((tmp_path / "refused home").glob("*/.conversion"))


def test_what_is_not_a_model(refused, layout, native, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    for command in (["info"], [*generate("", tmp_path / "v.mp4"), "--model"]):
        assert "empty is not a model: expected a native checkpoint" in refused(*command, tmp_path / "empty")
        assert "spiece.model is not a model" in refused(*command, layout / "tokenizer" / "spiece.model")
        assert f"Did you mean {layout}?" in refused(*command, layout / "transformer")
        assert f"Did you mean {native}?" in refused(*command, native / "vae" / "model.safetensors")
        assert "does not exist; expected a directory, or a hub id" in refused(*command, tmp_path / "nowhere")
        assert "does not exist" in refused(*command, "nowhere")
        assert "does not exist" in refused(*command, "./a/b")
        assert "does not exist" in refused(*command, "A panda, dressed in a small, red jacket. " * 20)
        assert "does not exist" in refused(*command, "~/nowhere")


def test_configs_that_are_no_configs(refused, layout, native, tmp_path):
    for text in ("7", "null", "[]", '"format_version"', "[" * 100_000, "{"):
        folder = shutil.copytree(native, tmp_path / "native")
        (folder / "config.json").write_text(text)
        assert "is not a model" in refused("info", folder)
        shutil.rmtree(folder)
    for name, text in (
        ("transformer/config.json", "[" * 100_000),
        ("transformer/config.json", '{"num_layers": "two"}'),
        ("vae/config.json", '{"block_out_channels": 3}'),
        ("scheduler/scheduler_config.json", '{"beta_start": []}'),
        ("scheduler/scheduler_config.json", "[]"),
    ):
        folder = shutil.copytree(layout, tmp_path / "hf")
        (folder / name).write_text(text)
        assert f"{folder / name}" in refused(*generate(folder, tmp_path / "v.mp4"))
        shutil.rmtree(folder)


def weights(folder: Path, component: str = "transformer") -> Path:
    return next((folder / component).glob("*.safetensors"))


def lose_a_tensor(folder):
    tensors = load_file(weights(folder))
    del tensors["transformer_blocks.1.attn1.norm_q.weight"]
    save_file(tensors, weights(folder))


def rename_a_tensor(folder):
    tensors = load_file(weights(folder))
    tensors["transformer_blocks.0.ff.net.9.bias"] = tensors.pop("transformer_blocks.0.ff.net.2.bias")
    save_file(tensors, weights(folder))


def truncate(folder):
    weights(folder).write_bytes(weights(folder).read_bytes()[:-1000])


def spoil_the_header(folder):
    weights(folder).write_bytes(b"\x20" + b"\x00" * 7 + b"\xff" * 64)


def point_outside(folder):
    index = {"weight_map": {"proj_out.bias": "../vae/diffusion_pytorch_model.safetensors"}}
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def pickle_only(folder):
    weights(folder).rename(folder / "transformer" / "diffusion_pytorch_model.bin")


def rename_a_pickle(folder):
    weights(folder).write_bytes(b"PK\x03\x04" + b"pickle" * 50)


def swap_the_config(folder):
    make_transformer("cogvideox1.5-5b").save_config(folder / "transformer")


def mix_parts(folder):
    make_transformer("cogvideox-2b", text_embed_dim=48).save_pretrained(folder / "transformer")


def lose_a_component(folder):
    shutil.rmtree(folder / "vae")


def lose_weights(folder):
    weights(folder, "vae").unlink()


def quantized_only(folder):
    weights(folder).rename(folder / "transformer" / "model-Q4_K.gguf")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 5123456789\n"


def point_to_weights(folder):
    weights(folder).write_bytes(POINTER)


def point_to_a_config(folder):
    (folder / "vae" / "config.json").write_bytes(POINTER)


def point_to_the_tokenizer(folder):
    (folder / "tokenizer" / "spiece.model").write_bytes(POINTER)


def keep_the_page(folder):
    weights(folder).write_text('\n<!DOCTYPE html>\n<html class=""><head><title>a model at main</title></head></html>')


def lose_the_tokenizer(folder):
    (folder / "tokenizer" / "spiece.model").unlink()


def truncate_the_tokenizer(folder):
    file = folder / "tokenizer" / "spiece.model"
    file.write_bytes(file.read_bytes()[:500])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_tensor, "missing  blocks.attn.norm_q.scale layer 1"),
        (rename_a_tensor, "unused   transformer_blocks.0.ff.net.9.bias"),
        (truncate, "is cut short"),
        (spoil_the_header, "not a valid safetensors file"),
        (point_outside, "names files outside its directory"),
        (pickle_only, "safe_serialization=True"),
        (rename_a_pickle, "never read; use the safetensors files"),
        (swap_the_config, "does not match its config"),
        (mix_parts, "the text encoder gives 40 channels, the transformer takes 48"),
        (lose_a_component, "has no vae config"),
        (lose_weights, "vae/ holds no safetensors weights (config.json)"),
        (quantized_only, "model-Q4_K.gguf is not a valid GGUF file"),
        (
            point_to_weights,
            "is not a safetensors file: it is a git-lfs pointer, not the file itself; run `git lfs pull`",
        ),
        (point_to_a_config, "vae/config.json is not valid JSON: it is a git-lfs pointer"),
        (point_to_the_tokenizer, "tokenizer/spiece.model: it is a git-lfs pointer"),
        (keep_the_page, "is not a safetensors file: it is a web page, not the file itself; download it again"),
        (lose_the_tokenizer, "copy it from any released checkpoint"),
        (truncate_the_tokenizer, "is not a whole SentencePiece model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_checkpoints_that_cannot_be_converted(refused, layout, tmp_path, spoil, message):
    folder = shutil.copytree(layout, tmp_path / "spoilt")
    spoil(folder)
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cogvideox_flax.conversion.convert._Job.convert", lambda *_: written.append(1))
        assert message in refused(*generate(folder, tmp_path / "v.mp4"), converts=True)
    assert not written


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_a_tensor, "missing  blocks.attn.norm_q.scale layer 1"),
        (truncate, "is cut short"),
        (point_outside, "names files outside its directory"),
        (pickle_only, "safe_serialization=True"),
        (swap_the_config, "does not match its config"),
        (
            lose_a_component,
            "is not a whole model: there is no vae/; to convert what is there, name it with --component",
        ),
        (lose_weights, "vae/ holds no safetensors weights (config.json)"),
        (quantized_only, "model-Q4_K.gguf is not a valid GGUF file"),
        (point_to_weights, "it is a git-lfs pointer"),
        (point_to_a_config, "it is a git-lfs pointer"),
        (point_to_the_tokenizer, "it is a git-lfs pointer"),
        (keep_the_page, "it is a web page"),
        (lose_the_tokenizer, "copy it from any released checkpoint"),
        (truncate_the_tokenizer, "is not a whole SentencePiece model"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_conversion_refuses_them_too(refused, layout, tmp_path, spoil, message):
    folder = shutil.copytree(layout, tmp_path / "spoilt")
    spoil(folder)
    assert message in refused("convert", folder, tmp_path / "dst")


@pytest.mark.parametrize("command", ["generate", "quantize"])
@pytest.mark.parametrize("name", ["config.json", "transformer/model.safetensors", "tokenizer/spiece.model"])
def test_pointers_in_a_native_checkpoint(refused, native, tmp_path, name, command):
    """Of a repository that was cloned without git-lfs."""
    folder = shutil.copytree(native, tmp_path / "native")
    (folder / name).write_bytes(POINTER)
    quantize = ["quantize", folder, tmp_path / "small"]
    message = refused(*(quantize if command == "quantize" else generate(folder, tmp_path / "v.mp4")))
    assert str(folder / name) in message
    assert "it is a git-lfs pointer, not the file itself; run `git lfs pull` in its repository" in message


def test_adapters_that_are_pointers_or_pages(refused, native, tmp_path):
    file = tmp_path / "style.safetensors"
    for text, what in ((POINTER, "a git-lfs pointer"), (b"<html><body>not found</body></html>", "a web page")):
        file.write_bytes(text)
        for command in (generate(native, tmp_path / "v.mp4", "--lora", file), ["info", file]):
            assert f"{file} is not a safetensors file: it is {what}, not the file itself" in refused(*command)


def test_parts_that_are_asked_for_are_converted(run, refused, layout, tmp_path, caplog):
    folder = shutil.copytree(layout, tmp_path / "parts")
    for spoil in (lose_a_component, quantized_only, lose_the_tokenizer):
        spoil(folder)
    assert "is not a whole model" in refused("convert", folder, tmp_path / "dst")
    code, out, _ = run("convert", folder, tmp_path / "dst", "--component", "text_encoder")
    assert (code, out) == (0, f"{tmp_path / 'dst'}\n")
    assert [record.message for record in caplog.records if "has no tokenizer" in record.message]
    assert list(read_manifest(tmp_path / "dst").weights) == ["text_encoder"]
    assert "is not a valid GGUF file" in refused("convert", folder, tmp_path / "other", "--component", "transformer")
    point_to_the_tokenizer(folder)
    assert "it is a git-lfs pointer" in refused("convert", folder, tmp_path / "other", "--component", "text_encoder")
    # what is added to a native checkpoint need not be a model of its own
    code, _, err = run("convert", layout, tmp_path / "dst")
    assert code == 0, err
    assert set(read_manifest(tmp_path / "dst").weights) == {"text_encoder", "transformer", "vae"}


def test_conversion_command(run, refused, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    assert "belongs to a hub id" in refused("convert", layout, tmp_path / "dst", "--revision", "main")
    assert "does not exist; expected a directory" in refused("convert", tmp_path / "no", tmp_path / "dst")
    assert "is a file" in refused("convert", layout, tmp_path / "file")
    assert "cannot write" in refused("convert", layout, tmp_path / "file" / "dst")
    assert "not empty" in refused("convert", layout, layout)
    assert "required: DST" in refused("convert", layout)
    code, out, _ = run("convert", layout, "~/dst", "--component", "vae")
    assert (code, out) == (0, f"{tmp_path / 'dst'}\n")
    assert "native checkpoint already" in refused("convert", tmp_path / "dst", tmp_path / "again")

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("cogvideox_flax.conversion.convert.write_tensors", interrupt)
    code, out, err = run("convert", layout, tmp_path / "killed")
    assert (code, out) == (130, "")
    assert "kept for the next attempt" in err


@pytest.fixture
def damaged(native, tmp_path):
    return shutil.copytree(native, tmp_path / "damaged")


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_native_checkpoints_of_another_format(refused, damaged, tmp_path):
    change_config(damaged, format_version=99)
    for command in (["info", damaged], generate(damaged, tmp_path / "v.mp4")):
        assert "has format_version 99, this version reads 1. Convert the checkpoint again" in refused(*command)


def test_native_checkpoints_with_a_part_missing(refused, damaged, native, tmp_path):
    config = json.loads((native / "config.json").read_text())
    del config["weights"]["text_encoder"]
    (damaged / "config.json").write_text(json.dumps(config))
    assert "has no text_encoder (it holds transformer, vae)" in refused(*generate(damaged, tmp_path / "v.mp4"))
    del config["vae"]
    (damaged / "config.json").write_text(json.dumps(config))
    assert "has no vae config" in refused(*generate(damaged, tmp_path / "v.mp4"))
    change_config(damaged, **json.loads((native / "config.json").read_text()))
    shutil.rmtree(damaged / "vae")
    assert "No such file" in refused(*generate(damaged, tmp_path / "v.mp4"))


def test_tampered_native_checkpoints(refused, damaged, native, tmp_path):
    file = damaged / "transformer" / "model.safetensors"
    data = file.read_bytes()
    for spoilt in (data[:-1], data[:100], b"", b"\xff" * 100):
        file.write_bytes(spoilt)
        assert str(file) in refused(*generate(damaged, tmp_path / "v.mp4"))
    shutil.copy(native / "vae" / "model.safetensors", file)
    assert "does not match its config.json" in refused(*generate(damaged, tmp_path / "v.mp4"))
    file.unlink()
    file.mkdir()
    assert "Is a directory" in refused(*generate(damaged, tmp_path / "v.mp4"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": 7}, "is damaged (TypeError: weights is not an object); convert the checkpoint again"),
        ({"weights": {"vae": {}}}, "is damaged (KeyError: 'sha256'); convert the checkpoint again"),
        ({"vae": {}}, "does not match its config.json"),
        ({"vae": None}, "is damaged (TypeError"),
        ({"transformer": {"layers": -1}}, "layers: got -1, expected a whole number from 1 to 1000"),
        ({"scheduler": {"kind": 3}}, "kind: got 3, expected a text"),
    ],
    ids=str,
)
def test_native_configs_that_lie(refused, damaged, tmp_path, changes, message):
    change_config(damaged, **changes)
    assert message in refused(*generate(damaged, tmp_path / "v.mp4"))


def test_nan_in_the_weights(run, tmp_path, request):
    model = make_transformer("cogvideox-2b")
    with torch.no_grad():
        model.proj_out.bias[3] = torch.nan
    layout = save_layout(tmp_path / "nan", "cogvideox-2b", transformer=model)
    work = request.getfixturevalue("work")
    for expected in (["encode", "denoise"], ["denoise"]):
        work.clear()
        code, out, err = run(*generate(layout, tmp_path / "v.mp4"))
        assert (code, out) == (2, "")
        assert "NaN or infinity after step 1 of 2 (timestep 999)" in err
        assert "--dtype" not in err  # it was float32 already
        assert work == expected
        assert [p.name for p in (tmp_path / "v.mp4.stages").glob("stage*")] == ["stage1_embeddings.safetensors"]
    code, _, err = run(*generate(layout, tmp_path / "v.mp4", "--dtype", "bfloat16"))
    assert code == 2
    assert "Try --dtype float32" in err


def test_nan_in_the_text_encoder(run, layout, tmp_path):
    folder = shutil.copytree(layout, tmp_path / "nan")
    tensors = load_file(weights(folder, "text_encoder"))
    tensors["encoder.final_layer_norm.weight"][3] = np.nan
    save_file(tensors, weights(folder, "text_encoder"))
    code, _, err = run(*generate(folder, tmp_path / "v.mp4"))
    assert code == 2
    assert "the text encoder gives NaN" in err
    assert not (tmp_path / "v.mp4.stages").exists()


# --- damaged stage files ---


def test_stages_that_are_not_there(refused, copied, tmp_path):
    (copied / store.LATENTS_FILE).unlink()
    assert "stage2_latents.safetensors is missing; run `cogvideox denoise` first" in refused("decode", "--dir", copied)
    (copied / store.EMBEDDINGS_FILE).unlink()
    message = refused("denoise", "--dir", copied)
    assert "stage1_embeddings.safetensors is missing; run `cogvideox encode` first" in message
    (copied / store.CONFIG_FILE).unlink()
    for command in ("denoise", "decode"):
        assert "run `cogvideox encode` first" in refused(command, "--dir", copied)
        assert "run `cogvideox encode` first" in refused(command, "--dir", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "no usable"),
        ('{"prompt": 5, "negative_prompt": "", "model_id": "x"}', "no usable prompt"),
        ('{"prompt": [5], "negative_prompt": [""], "model_id": "x"}', "no usable prompt"),
        ('{"prompt": [], "negative_prompt": [], "model_id": "x"}', "empty"),
        ('{"prompt": ["a", "b"], "negative_prompt": "", "model_id": "x"}', "2 prompts but 1 negative"),
        ('{"prompt": "a", "negative_prompt": "", "model_id": "x", "seed": "7"}', "no usable seed"),
        ('{"prompt": "a", "negative_prompt": "", "model_id": "x", "fps": 0}', "fps is 0; expected"),
    ],
)
def test_damaged_settings(refused, copied, text, message):
    (copied / store.CONFIG_FILE).write_bytes(text.encode("latin-1"))
    for command in ("denoise", "decode"):
        assert message in refused(command, "--dir", copied)


@pytest.mark.parametrize("spoil", ["cut", "header", "pickle", "directory", "names", "shape", "nan"])
@pytest.mark.parametrize(
    ("file", "command", "maker"),
    [(store.EMBEDDINGS_FILE, "denoise", "encode"), (store.LATENTS_FILE, "decode", "denoise")],
)
def test_damaged_stage_files(refused, copied, file, command, maker, spoil):
    path = copied / file
    data = path.read_bytes()
    tensors = load_file(path)
    if spoil == "cut":
        path.write_bytes(data[:-10])
    elif spoil == "header":
        path.write_bytes(b"\xff" * 100)
    elif spoil == "pickle":
        path.write_bytes(b"PK" + bytes(100))
    elif spoil == "directory":
        path.unlink()
        path.mkdir()
    elif spoil == "names":
        save_file({f"{name}s": value for name, value in tensors.items()}, path)
    elif spoil == "shape":
        save_file({name: value[:, 1:] for name, value in tensors.items()}, path)
    else:
        for value in tensors.values():
            value.flat[7] = np.nan
        save_file(tensors, path)
    message = refused(command, "--dir", copied)
    assert str(path) in message
    assert f"run `cogvideox {maker}` again" in message


def test_a_damaged_stage_is_made_again_by_generate(paths, native, copied, work, caplog):
    (copied / store.EMBEDDINGS_FILE).write_bytes((copied / store.EMBEDDINGS_FILE).read_bytes()[:-10])
    paths(*generate(native, copied / "x.npz", "--dir", copied))
    assert work == ["encode"]  # its latents were made from the very same embeddings
    assert "making stage1_embeddings.safetensors again" in caplog.text


def test_stages_of_another_run_are_not_mixed(run, refused, native, copied):
    config = copied / store.CONFIG_FILE
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"prompt": "something else"}))
    assert "'something else'" in refused("denoise", "--dir", copied)
    assert "'something else'" in refused("decode", "--dir", copied)
    config.write_text(json.dumps(json.loads(before) | {"seed": 5}))
    message = refused("decode", "--dir", copied)
    assert "made with other settings than this run's (seed '0' is now '5'); run `cogvideox denoise` again" in message
    # a new stage 1 in an old directory: the old latents are not passed off as its own
    assert run("encode", "another prompt", "--model", native, "--dtype", "float32", "--dir", copied)[0] == 0
    assert "run `cogvideox denoise` again" in refused("decode", "--dir", copied)


def test_two_runs_do_not_share_a_directory(refused, native, copied):
    with file_lock(copied / store.LOCK_FILE, busy=""):
        assert "another run is at work" in refused(*generate(native, copied / "x.npz", "--dir", copied))


def test_the_model_of_a_run_is_gone(refused, copied, tmp_path):
    config = copied / store.CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_id": str(tmp_path / "gone")}))
    for command in ("denoise", "decode"):
        assert "gone does not exist" in refused(command, "--dir", copied)


def test_a_disk_that_fills_up_keeps_what_is_done(run, native, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "save_file", full)
        code, _, err = run(*generate(native, tmp_path / "x.npz"))
        assert code == 2
        assert "No space left on device" in err
        assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        code, _, err = run(*generate(native, tmp_path / "x.npz"))
    assert code == 2
    assert "No space left on device" in err
    kept = {p.name for p in (tmp_path / "x.npz.stages").iterdir()} - {".lock"}
    assert kept == {store.CONFIG_FILE, store.EMBEDDINGS_FILE, store.LATENTS_FILE}
    assert not (tmp_path / "x.npz").exists()


# --- one line where a traceback was ---


def test_a_home_of_nobody(run, tmp_path, layout):
    for argv in (
        generate(layout, "~nosuchuser/x.mp4"),
        ["info", "~nosuchuser/x"],
        generate("~nosuchuser/x", tmp_path / "x.mp4"),
        ["quantize", "~nosuchuser/x", tmp_path / "y"],
        generate(layout, tmp_path / "x.mp4", "--lora", "~nosuchuser/x"),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, "") and "there is no home directory of that user" in err
    code, _, err = run("convert", "~nosuchuser/x", tmp_path / "y")
    assert code == 2 and "there is no home directory of that user" in err


def test_quantizing_onto_a_full_disk(run, native, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
        code, _, err = run("quantize", native, tmp_path / "small")
        assert code == 2 and "needs about" in err and "free some space" in err

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        code, _, err = run("quantize", native, tmp_path / "small")
        assert code == 2 and "No space left on device; free some space" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["generate", "info"])
@pytest.mark.parametrize("value", ['"abc"', "NaN", "1" * 400, "true", "[1]"])
def test_a_guidance_scale_that_is_no_number(run, damaged, tmp_path, value, command):
    path = damaged / "config.json"
    path.write_text(path.read_text().replace('"weights": {', f'"guidance_scale": {value}, "weights": {{', 1))
    argv = ["info", damaged] if command == "info" else generate(damaged, tmp_path / "x.mp4")
    code, _, err = run(*argv)
    assert code == 2 and "guidance_scale is" in err and "expected a finite number" in err


def test_a_model_of_millions_of_layers(refused, layout, damaged, tmp_path):
    folder = shutil.copytree(layout, tmp_path / "hf")
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3_000_000}))
    for argv in (["info", folder], generate(folder, tmp_path / "x.mp4")):
        assert "layers: got 3000000, expected a whole number from 1 to 1000" in refused(*argv)
    config = json.loads((damaged / "config.json").read_text())["transformer"]
    change_config(damaged, transformer=config | {"layers": 3_000_000})
    assert "layers: got 3000000" in refused("info", damaged)


@pytest.mark.parametrize(
    "header",
    [
        '{"x": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, -4]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        '{"x": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        '{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": {}}',
        '{"__metadata__": {"a": 1}}',
        '{"__metadata__": 7}',
        "NaN",
    ],
)
def test_headers_that_are_none(refused, copied, tmp_path, native, header):
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    for path, argv in (
        (copied / store.LATENTS_FILE, ("decode", "--dir", copied)),
        (tmp_path / "lora.safetensors", generate(native, tmp_path / "x.mp4", "--lora", tmp_path / "lora.safetensors")),
    ):
        path.write_bytes(data)
        assert "is not a valid safetensors file" in refused(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"seed": true', "no usable seed"),
        ('"fps": true', "no usable fps"),
        (f'"guidance_scale": {"1" * 400}', "no usable guidance_scale"),
        ('"guidance_scale": Infinity', "no usable guidance_scale"),
        (f'"lora": [{{"file": "x", "scale": {"1" * 400}}}]', "no usable lora"),
        ('"height": 1e9', "no usable height"),
    ],
)
def test_settings_beyond_all_numbers(refused, copied, text, message):
    path = copied / store.CONFIG_FILE
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k in ("prompt", "negative_prompt", "model_id")}
    path.write_text(json.dumps(kept)[:-1] + f", {text}}}")
    for command in ("denoise", "decode"):
        assert message in refused(command, "--dir", copied)


def test_sizes_beyond_all_machines(refused, layout, tmp_path):
    message = refused(*generate(layout, tmp_path / "x.mp4", "--height", 16 * 10**12, "--num-frames", 8 * 10**9 + 1))
    assert "height is 16000000000000; the most is 16384" in message and "num_frames is 8000000001" in message


def test_a_profile_that_cannot_be_written(refused, layout, tmp_path):
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(*generate(layout, tmp_path / "x.mp4", "--profile", tmp_path / "file" / "trace"))


@pytest.mark.parametrize(
    ("number", "advice"), [(5, "check the disk"), (13, "allow access to it"), (28, "free some space")]
)
def test_a_disk_that_fails_anywhere_is_a_message(run, layout, tmp_path, monkeypatch, number, advice):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number), "/a/file")

    monkeypatch.setattr("cogvideox_flax.hub.peek", fail)
    code, _, err = run(*generate(layout, tmp_path / "x.mp4"))
    assert code == 2 and f"error: /a/file: {os.strerror(number)}; {advice} or choose another place" in err


# --- starts ---


def plain_environment() -> dict[str, str]:
    """Of a user who has set nothing for JAX."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TPU_", "JAX_", "XLA_"))}


def test_a_start_is_quiet(tmp_path):
    """libtpu is installed here and there is no TPU, of which it would complain."""
    argv = ["encode", "a red circle moves up", "--dir", tmp_path / "run", "--quiet"]
    done = python("-m", "cogvideox_flax", *argv, env=plain_environment(), inherit=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_libtpu_plan_names_the_extra():
    code = "import sys; sys.modules['libtpu'] = None; from cogvideox_flax.cli import main; sys.exit(main(sys.argv[1:]))"
    plan = ["plan", "--release", "cogvideox-2b", "--topology", "v6e:1x1"]
    done = python("-c", code, *plan, env=plain_environment(), inherit=False)
    assert done.returncode == 2
    way = 'pip install ".[tpu]" in a checkout of cogvideox-flax'
    assert done.stderr == f"error: a plan needs libtpu, the compiler for TPUs: {way}\n"


PLATFORMS = """
import jax, sys
from cogvideox_flax import Pipeline
from cogvideox_flax import hub
from cogvideox_flax.checkpoint import load_vae
from cogvideox_flax.cli import main
from cogvideox_flax.errors import InputError

how = ["--steps", "1", "--out", "x.mp4"]
commands = [["doctor"], ["generate", "a", *how], ["generate", "a", *how, "--mesh", "1,1,1"]]
commands += [["encode", "a", "--dir", "d"], ["quantize", str(hub.EMBEDDED), "small"]]
commands += [["plan", "--release", "cogvideox-2b", "--topology", "v6e:1x1"]]
for platforms in sys.argv[1:]:
    jax.config.update("jax_platforms", platforms)
    for command in commands:
        assert main(command) == 2, command
    for load in (Pipeline.from_pretrained, lambda: load_vae(hub.EMBEDDED)):
        try:
            load()
        except InputError as e:
            print(f"error: {e}", file=sys.stderr)
"""


def test_platforms_that_are_not_there(tmp_path):
    """No command, and nothing in Python, goes on with another device than was asked for."""
    asked = ["cuda", "gpu", "rocm", "tpu", "nonsense", ",", "cuda,rocm"]
    done = python("-c", PLATFORMS, *asked, env=plain_environment(), inherit=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 8 * len(asked)
    for i, line in enumerate(lines):
        assert line.startswith(f"error: JAX_PLATFORMS is {asked[i // 8]!r}, and JAX finds no such device (")
        assert "this machine has a CPU" in line and "Leave JAX_PLATFORMS out" in line
    assert list(tmp_path.iterdir()) == []
