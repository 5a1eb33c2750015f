"""What the shell says to people: the help, mistakes, and what was probably meant."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.cli.arguments import make_parser
from cogvideox_flax.cli.doctor import _fits, _unused
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.io.video import read_metadata, read_video, save_video
from cogvideox_flax.lora import add_lora, save_lora
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.plan import GPUS
from cogvideox_flax.plan.gpu import usable_memory
from tests.support.commands import PROMPT, QUICK, ROOT

pytest_plugins = ["tests.support.commands"]


def test_no_command_shows_what_one_can_do(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 30
    for name in ("generate", "info", "plan", "train", "upscale", "encode", "quantize", "convert", "doctor"):
        assert name in out


@pytest.mark.parametrize(
    "command", ["generate", "encode", "denoise", "decode", "upscale", "train", "plan", "convert", "info"]
)
def test_the_short_help_and_the_long_one(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, short, _ = run(command, "--help")
    assert code == 0
    assert len(short.splitlines()) <= 60
    code, long, _ = run(command, "--help-all")
    assert code == 0
    words = set(short.split())
    assert words - set(long.split()) <= {"more", "options:", "--help-all", *filter(str.isdecimal, words), "cogvideox"}
    assert ("more options: cogvideox" in short) == (len(long.splitlines()) > len(short.splitlines()))


def test_rare_options_are_in_the_long_help_alone(run):
    short, long = (run("generate", flag)[1] for flag in ("--help", "--help-all"))
    for flag in ("--coordinator", "--no-jit", "--step-cache", "--window", "--fps"):
        assert flag in long
        assert flag not in short
    for flag in ("--steps", "--seed", "--image", "--like", "--out", "--lora"):
        assert flag in short


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate", "x"], "there is no command 'genrate'; did you mean generate?"),
        (["fly"], "there is no command 'fly'; known are generate"),
        (["a panda"], 'did you mean cogvideox generate "a panda"?'),
        (["generate", "x", "--sede", "3"], "there is no option --sede; did you mean --seed?"),
        (["generate", "x", "--stepz=3"], "there is no option --stepz; did you mean --steps?"),
        (["generate", "x", "--seed", "three"], "--seed: expected a whole number from 0 to 4294967295; got 'three'"),
        (["generate", "x", "--dtype", "float8"], "--dtype: invalid choice: 'float8'"),
        (["generate", "x", "--fit", "zoom"], "--fit: expected one of crop, stretch; got 'zoom'"),
        (["generate", "x", "--steps", "3", "y"], "'y' is not expected after options"),
        (["denoise"], "required: --dir"),
        (["--foo"], "required: COMMAND"),
        (["generate", "a", "red", "circle"], 'write it in quotes: "a red circle"'),
        (["encode", "a", "panda", "--dir", "x"], 'write it in quotes: "a panda"'),
    ],
)
def test_a_mistake_is_one_line(run, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_prompts_may_be_options():
    read = make_parser().read
    for argv in (["a", "b c"], ["--prompt", "a", "--prompt", "b c"], ["a", "--prompt", "b c"]):
        assert read(["generate", *argv, "-o", "x.mp4"]).prompt == ["a", "b c"]
    assert read(["generate"]).prompt == []
    assert read(["encode", "--prompt=-a", "--dir", "x"]).prompt == ["-a"]


def test_names_by_template(run, native, tmp_path, cheap_decoder):
    def names(out, *argv):
        code, printed, err = run("generate", *argv, "--model", native, "-o", tmp_path / out, *QUICK)
        return code, [line.rpartition("/")[2] for line in printed.splitlines()], err

    word = "ß/" * 300
    assert names("{prompt}-{seed}.gif", word, "--seed", 7)[:2] == (0, ["-".join("ß" * 20) + "-7.gif"])
    two = ["a red circle", "a blue square", "--num-videos", 2]
    expected = [
        f"{n:04} {words} {seed}.gif"
        for n, (seed, words) in enumerate(
            [(0, "a-red-circle"), (0, "a-blue-square"), (1, "a-red-circle"), (1, "a-blue-square")], 1
        )
    ]
    assert names("{n} {prompt} {seed}.gif", *two)[:2] == (0, expected)
    for name, path in zip(expected, sorted(tmp_path.glob("0*.gif")), strict=True):
        assert path.name == name and str(read_metadata(path)["seed"]) == path.stem[-1]
    assert names("{seed}-{prompt}.npz", *two)[:2] == (0, ["0-a-red-circle.npz", "1-a-red-circle.npz"])
    code, _, err = names("{prompt}.gif", *two)
    assert code == 2 and "gives two videos the name" in err
    decode = ["decode", tmp_path / "1-a-red-circle.npz", "--model", native, "-o"]
    expected = [
        str(tmp_path / f"1-1 {words}-{n:04}.gif") for n, words in enumerate(("a-red-circle", "a-blue-square"), 1)
    ]
    assert run(*decode, tmp_path / "{seed}-1 {prompt}-{n}.gif")[:2] == (0, "\n".join([*expected, ""]))
    assert "gives two videos the name" in run(*decode, tmp_path / "{seed}.gif")[2]
    code, _, err = run("upscale", expected[0], "--model", native, "-o", tmp_path / "{n}.mp4")
    assert code == 2 and "a clip has no prompt, seed or number to put into its name" in err
    assert not list(tmp_path.glob("*.stages"))


def test_the_quality_of_an_mp4(run, native, tmp_path, cheap_decoder, caplog):
    """x264 writes into a file how it was made."""

    def crf_of(name, *argv):
        assert run(*argv, "-o", tmp_path / name)[0] == 0
        data = (tmp_path / name).read_bytes()
        return data[data.index(b" crf=") + 5 :].split(b" ")[0], read_metadata(tmp_path / name)["settings"].get("crf")

    generate = ["generate", PROMPT, "--model", native, *QUICK]
    assert crf_of("default.mp4", *generate) == (b"17.0", None)
    assert crf_of("a.mp4", *generate, "--crf", 30) == (b"30.0", 30)
    assert crf_of("like.mp4", "generate", "--model", native, "--like", tmp_path / "a.mp4") == (b"30.0", 30)
    assert run(*generate, "--crf", 30, "-o", tmp_path / "a.npz")[0] == 0
    decode = ["decode", "--model", native, tmp_path / "a.npz"]
    assert crf_of("decoded.mp4", *decode) == (b"30.0", 30)
    assert crf_of("better.mp4", *decode, "--crf", 5) == (b"5.0", 5)
    assert "crf" not in caplog.text
    assert run(*generate, "--crf", 30, "-o", tmp_path / "a.gif")[0] == 0
    assert "a.gif is written without crf 30, which is of .mp4" in caplog.text
    assert run(*generate, "--crf", 52)[0] == 2


def test_a_video_holds_no_recipe_on_request(run, native, tmp_path, cheap_decoder):
    argv = [PROMPT, "--model", native, *QUICK]
    assert run("generate", *argv, "--out", tmp_path / "a.npz")[0] == 0
    for words in (["generate", *argv], ["decode", tmp_path / "a.npz", "--model", native]):
        for name in ("v.mp4", "v.webp", "v.gif", "v"):
            assert run(*words, "--out", tmp_path / name, "--no-metadata", "--overwrite")[0] == 0
            assert read_metadata(tmp_path / name) == {}
            for path in (tmp_path / name).iterdir() if name == "v" else [tmp_path / name]:
                assert b"circle" not in path.read_bytes()
    (tmp_path / "prompts.txt").write_text("a")
    for other in (["--prompt-file", tmp_path / "prompts.txt"], [*argv, "--out", tmp_path / "b.npz"]):
        code, _, err = run("generate", *other, "--no-metadata")
        assert code == 2 and "leave out --no-metadata" in err


def test_like_finds_adapters_by_their_hash(run, paths, native, tmp_path, cheap_decoder, monkeypatch, caplog):
    """A video names its adapters, not where they were; in a folder of diffusers', by the name of the folder."""
    caplog.set_level("INFO")
    pipe = Pipeline.from_pretrained(native, dtype="float32")
    home, hub, here, bare = (tmp_path / name for name in ("home/me", "hub", "here", "bare"))
    for path in (home, here, bare, snapshot := hub / "models--someone--stripes" / "snapshots" / "abc"):
        path.mkdir(parents=True)
    for seed, name in enumerate(("red.safetensors", "kites", "stripes.safetensors")):
        adapted = add_lora(pipe.manifest.model, pipe.transformer, 2, rngs=nnx.Rngs(seed))
        adapted.blocks.attn.q.b = nnx.Param(jax.random.normal(jax.random.key(seed), adapted.blocks.attn.q.b.shape))
        save_lora(pipe.manifest.model, home / name, adapted)
    loras = ["--lora", f"{home}/red.safetensors:0.5", "--lora", home / "kites"]
    loras += ["--lora", f"{home}/stripes.safetensors:0.25:alpha=4"]
    (first,) = paths("generate", PROMPT, "--model", native, *QUICK, *loras, "--out", here / "first.mp4")
    names = [record["file"] for record in read_metadata(first)["settings"]["lora"]]
    assert names == ["red.safetensors", "kites", "stripes.safetensors"]
    assert b"home/me" not in first.read_bytes()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.chdir(bare)
    like = ["generate", "--like", first, "--model", native, "--out", here / "again.mp4"]
    code, _, err = run(*like)
    assert code == 2
    assert "give them again: --lora red.safetensors --lora kites --lora stripes.safetensors" in err
    (home / "red.safetensors").rename(here / "renamed.safetensors")  # beside the video
    (home / "kites").rename(bare / "kites")  # in the current folder
    (home / "stripes.safetensors").rename(snapshot / "stripes.safetensors")
    (bare / "red.safetensors").write_bytes(b"another of its name")
    (again,) = paths(*like)
    assert (read_video(again)[0] == read_video(first)[0]).all()
    names = [record["file"] for record in read_metadata(again)["settings"]["lora"]]
    assert names == ["renamed.safetensors", "kites", "someone/stripes/stripes.safetensors"]
    assert f"{here}/renamed.safetensors, kites/pytorch_lora_weights.safetensors, {snapshot}/stri" in caplog.text
    (once_more,) = paths("generate", "--like", again, "--model", native, "--out", tmp_path / "once_more.mp4")
    assert read_metadata(once_more) == read_metadata(again)


def test_progress_for_machines_and_a_log(native, tmp_path):
    """Of a process: what the tests themselves do with messages is not in the way."""
    argv = [sys.executable, "-m", "cogvideox_flax", "generate", "--prompt-file", "-", "--model", native, "-o", "v.gif"]
    argv += [*QUICK, "--progress", "json", "--log", "run.log", "--batch", 2]

    def events(lines, *more):
        how = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
        done = subprocess.run([*map(str, [*argv, *more])], input=lines, timeout=200, **how)
        return done, [json.loads(line) for line in done.stderr.splitlines()]

    done, found = events("a\n# b\nc\n")
    assert done.returncode == 0, done.stderr
    assert [line.rpartition("/")[2] for line in done.stdout.splitlines()] == [
        "v-0001-a-seed0.gif",
        "v-0003-c-seed0.gif",
    ]
    steps = [event for event in found if event["event"] == "progress"]
    assert steps == [
        {"event": "progress", "what": "denoising", "done": i, "total": 2, "unit": "step"} for i in range(3)
    ]
    (video,) = (event for event in found if event["event"] == "video")
    assert (video["number"], video["total"], video["lines"]) == (1, 2, [1, 3])
    compiling, compiled = ([e["program"] for e in found if e["event"] == name] for name in ("compiling", "compiled"))
    assert compiling == compiled
    assert [event["seconds"] > 0 for event in found if event["event"] == "made"] == [True]
    text = (tmp_path / "run.log").read_text()
    for event in found:
        assert event["event"] == "progress" or event["message"] in text
    done, found = events('{"prompt": 3}\n', "--quiet")
    assert done.returncode == 2
    assert found[-1]["event"] == "error" and found[-1]["code"] == 2
    assert (tmp_path / "run.log").read_text().startswith(text) and "prompt is 3" in found[-1]["message"]
    assert re.search(r"^[0-9-]+ [0-9:,]+ ERROR: .*were not made", (tmp_path / "run.log").read_text(), re.MULTILINE)
    done, found = events("a", "--log", "nowhere/x/run.log")
    assert "cannot write nowhere/x/run.log" in found[-1]["message"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("qua", {"quantize"}),
        ("generate --se", {"--seed"}),
        ("generate --num-", {"--num-frames", "--num-videos", "--num-inference-steps", "--num-processes"}),
        ("generate --dtype ", {"bfloat16", "float32", "float16"}),
        ("generate x --guidance apg --fit st", {"stretch"}),
        ("plan --stages d", {"decode", "denoise"}),
        ("completion f", {"fish"}),
        ("generate --image ", set()),  # files, by the shell
    ],
)
def test_what_bash_completes(run, line, expected):
    code, script, err = run("completion", "bash")
    assert (code, err) == (0, "")
    words = ["cogvideox", *line.split(" ")]
    ask = f"{script}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _cogvideox\n"
    ask += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)
    assert (set(filter(None, done.stdout.split("\n"))), done.stderr) == (expected, "")


def test_completion_of_other_shells(run):
    assert run("completion", "zsh")[1].endswith(run("completion", "bash")[1])
    lines = run("completion", "fish")[1].splitlines()
    assert all(shlex.split(line)[:3] == ["complete", "-c", "cogvideox"] for line in lines)
    (dtype,) = (line for line in lines if "from generate'" in line and "-l dtype" in line)
    assert shlex.split(dtype)[5:9] == ["-l", "dtype", "-xa", "bfloat16 float32 float16"]


def test_a_drawn_seed_is_logged_and_recorded(run, native, tmp_path, cheap_decoder, caplog):
    seeds = []
    for name in ("a.mp4", "b.mp4"):
        argv = ["generate", PROMPT, "--model", native, "-o", tmp_path / name, *QUICK, "--seed", "random"]
        assert run(*argv)[0] == 0
        seeds.append(read_metadata(tmp_path / name)["seed"])
        assert f"--seed {seeds[-1]} was drawn" in caplog.text
    assert seeds[0] != seeds[1]
    (tmp_path / "prompts.txt").write_text("a")
    code, _, err = run("generate", "--prompt-file", tmp_path / "prompts.txt", "--seed", "random")
    assert code == 2 and "--seed random beside --prompt-file" in err
    assert run("upscale", tmp_path / "a.mp4", "--out", "x.mp4", "--seed", "random")[0] == 2


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_an_image_is_no_video(run, native, tmp_path, suffix):
    Image.fromarray(np.zeros((32, 48, 3), np.uint8)).save(tmp_path / f"beach{suffix}")
    image = tmp_path / f"beach{suffix}"
    argv = ["generate", PROMPT, "--model", native, "--video", image, "--out", tmp_path / "v.mp4", *QUICK]
    code, _, err = run(*argv)
    assert code == 2
    assert "is one image, and a clip was expected; a first frame is given as --image" in err


def test_what_a_run_costs(run):
    plan = ["plan", "--topology", "v6e:1x1", "--mesh", "1,1,1", "--stages", "encode"]
    code, out, err = run(*plan, "--price", "2.7")
    assert code == 0
    assert "compiling for v6e:1x1: encode;" in err
    assert out.splitlines()[-1].startswith("a video takes 0.")
    assert out.splitlines()[-1].endswith(" at $2.7 for an hour of each")
    for price in ("-1", "nan"):
        code, _, err = run(*plan, "--price", price)
        assert code == 2
        assert "expected the dollars of a chip's hour" in err


def test_the_page_of_releases():
    rows = []
    for name, release in RELEASES.items():
        manifest = Manifest.of_release(release)
        components = manifest.model.components.items()
        parts = {
            part: each.num_parameters(manifest.configs[part]) for part, each in components if part in manifest.configs
        }
        largest = max(parts, key=parts.__getitem__)
        gib = [f"{2 * count / 2**30:.1f}" for count in (sum(parts.values()), parts[largest])]
        size = f"{release.num_frames} x {release.height} x {release.width}, {release.fps} fps"
        hub_id = f"[{release.hub_id}](https://huggingface.co/{release.hub_id})"
        rows.append(f"| `{name}` | {hub_id} | {size} | {release.max_frames} | {gib[0]} | {largest} {gib[1]} |")
    page = (ROOT / "docs" / "releases.md").read_text()
    assert "\n".join(rows) in page, "\n".join(rows)


def test_memory_and_time_of_the_releases():
    """Each release that is not distilled has a row; what is marked is what JAX does not take of a GPU of 24 GB."""
    page = (ROOT / "docs" / "releases.md").read_text().partition("## Memory and time")[2]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall("`(.*?)`", row[0])]
    assert sorted(named) == sorted(name for name in RELEASES if "distilled" not in name)
    for row in rows:
        release = RELEASES[re.findall("`(.*?)`", row[0])[0]]
        manifest = Manifest.of_release(release)
        encode, step, decode = map(float, row[1].split(","))
        transformer = manifest.model.components["transformer"].num_parameters(manifest.configs["transformer"])
        assert 2 * transformer / 2**30 < step and encode > 8
        assert ("*" in row[3]) == (max(step, decode) * 2**30 > usable_memory(GPUS["rtx4090"]) and row[3] != " ")


def test_the_doctor(run, home, tmp_path):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for word in ("jax ", "av ", "8 x cpu", "cores", str(home), "cogvideox-2b", "next"):
        assert word in out
    assert all(len(line) <= 120 for line in out.splitlines())
    found = json.loads(run("doctor", "--json")[1])
    assert found["devices"]["count"] == 8
    assert found["host"]["bytes"] > 2**28
    assert found["caches"]["compiled programs"]["folder"] == str(home / "programs")
    assert set(found["fits"]) == set(RELEASES)
    assert set(found["fits"].values()) <= {"whole", "in stages", "no"}
    words = shlex.split(found["next"])
    assert words[:2] == ["cogvideox", "generate"]


@pytest.mark.parametrize(("device", "extra"), [("nvidia0", "cuda"), ("accel0", "tpu"), ("vfio/0", "tpu")])
def test_the_doctor_says_how_jax_finds_a_device(monkeypatch, device, extra):
    monkeypatch.setattr("os.path.exists", lambda path: path == f"/dev/{device}")
    line = _unused("cpu")
    assert line.endswith(f'which JAX does not use: pip install ".[{extra}]" in a checkout of cogvideox-flax')
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra in extras
    assert _unused("gpu") is None


def test_what_fits():
    gib = 2**30
    assert set(_fits(4 * gib).values()) == {"no"}
    assert set(_fits(400 * gib).values()) == {"whole"}
    # T5-XXL 8.9 GiB, the transformers 3.2 and 10.4 GiB
    assert _fits(12 * gib)["cogvideox-2b"] == "in stages"
    assert _fits(12 * gib)["cogvideox-5b"] == "no"
    assert _fits(16 * gib)["cogvideox-2b"] == "whole"
    assert _fits(16 * gib)["cogvideox-5b"] == "in stages"


# --- what is there already


def test_a_file_of_somebody_else_is_not_replaced(run, paths, native, tmp_path, cheap_decoder, caplog):
    argv = ["generate", PROMPT, "--model", native, *QUICK]
    for name in ("mine.mp4", "mine.npz", "mine.webp"):
        (file := tmp_path / name).write_bytes(b"mine")
        code, _, err = run(*argv, "--out", file)
        assert code == 2
        assert f"{file} is there and was not made by this program" in err
        assert file.read_bytes() == b"mine"
    assert paths(*argv, "--out", tmp_path / "mine.mp4", "--overwrite") == [tmp_path / "mine.mp4"]
    caplog.clear()
    paths(*argv, "--out", tmp_path / "mine.mp4")
    assert f"{tmp_path / 'mine.mp4'} was replaced" in caplog.text
    frames = tmp_path / "frames"
    frames.mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(frames / "0001.png")
    assert "was not made by this program" in run(*argv, "--out", frames)[2]
    paths(*argv, "--out", frames, "--overwrite")
    paths(*argv, "--out", frames)


# --- latents, and recipes


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif", ".webp", ""])
def test_a_format_holds_its_recipe(paths, run, native, tmp_path, cheap_decoder, suffix):
    (out,) = paths("generate", PROMPT, "--model", native, "--out", tmp_path / f"v{suffix}", "--seed", 7, *QUICK)
    code, shown, _ = run("info", out)
    assert code == 0
    assert ["seed", "7"] in [line.split() for line in shown.splitlines()]
    assert json.loads(run("info", out, "--json")[1])["prompt"] == PROMPT


def test_latents_are_decoded_by_a_command(paths, run, native, tmp_path):
    argv = [PROMPT, "--model", native, *QUICK]
    (latents,) = paths("generate", *argv, "--out", tmp_path / "x.npz")
    (frames,) = paths("generate", *argv, "--out", tmp_path / "direct")
    (decoded,) = paths("decode", latents, "--model", native, "--dtype", "float32", "--out", tmp_path / "decoded")
    assert (read_video(decoded)[0] == read_video(frames)[0]).all()
    assert read_metadata(decoded) == read_metadata(frames)
    assert paths("decode", latents, "--model", native) == [tmp_path / "x.mp4"]


def test_latents_that_cannot_be_decoded(run, paths, native, layout_5b, tmp_path):
    (latents,) = paths("generate", PROMPT, "--model", native, "--out", tmp_path / "x.npz", *QUICK)
    whole = dict(np.load(latents))
    assert "name that checkpoint with --model" in run("decode", latents)[2]
    for change, message in (
        ({"latents": np.full_like(whole["latents"], np.nan)}, "hold NaN"),
        ({"latents": whole["latents"][0]}, "expected [1, T, h, w, 16]"),
        ({"latents": whole["latents"][..., :3]}, "expected [1, T, h, w, 16]"),
        ({"metadata": "{}"}, "was not made by"),
        ({"metadata": json.dumps(json.loads(str(whole["metadata"])) | {"prompt": 3})}, "states prompt 3"),
    ):
        np.savez(tmp_path / "bad.npz", **(whole | change))
        code, _, err = run("decode", tmp_path / "bad.npz", "--model", native)
        assert code == 2
        assert message in err
    for argv in ([], [latents, "--dir", tmp_path]):
        assert "one of the two" in run("decode", *argv)[2]


def test_like(paths, run, native, tmp_path, cheap_decoder):
    size = ["--num-frames", 9, "--height", 32, "--width", 48, "--dtype", "float32"]
    made = ["--steps", 3, "--seed", 5, "--guidance-scale", 2.5, "--scheduler", "dpm", "--negative-prompt", "blur"]
    (first,) = paths("generate", PROMPT, "--model", native, *size, *made, "--out", tmp_path / "first.mp4")
    (again,) = paths("generate", "--like", first, "--model", native, "--out", tmp_path / "again.mp4")
    assert read_metadata(again) == read_metadata(first)
    assert (read_video(again)[0] == read_video(first)[0]).all()
    argv = ["--like", first, "--seed", 6, "--model", native, "--out", tmp_path / "other.npz"]
    (other,) = paths("generate", "another prompt", *argv)
    recipe = json.loads(str(np.load(other)["metadata"]))
    assert recipe["prompt"] == "another prompt"
    assert recipe | {"prompt": PROMPT, "seed": 5} == read_metadata(first)
    assert paths("generate", "--like", other, "--model", native, "--out", tmp_path / "third.mp4"), "an npz will do"


def test_like_what_cannot_be_made_again(run, paths, native, tmp_path, cheap_decoder, caplog):
    out = tmp_path / "v.mp4"
    save_video(tmp_path / "foreign.mp4", np.zeros((2, 16, 16, 3), np.uint8), 8, {"prompt": "x"})
    for more in (["--out", out], []):
        assert "does not say how it was made" in run("generate", "--like", tmp_path / "foreign.mp4", *more)[2]
    (first,) = paths("generate", PROMPT, "--model", native, *QUICK, "--out", tmp_path / "first.mp4")
    assert "name that checkpoint with --model" in run("generate", "--like", first, "--out", out)[2]
    clip = tmp_path / "clip.mp4"
    save_video(clip, np.random.default_rng(0).integers(0, 255, (9, 32, 48, 3), np.uint8), 8)
    argv = [PROMPT, "--model", native, *QUICK, "--video", clip]
    (made,) = paths("generate", *argv, "--out", tmp_path / "made" / "v.mp4")
    like = ["generate", "--like", made, "--model", native, "--out", out]
    code, _, err = run(*like)
    assert code == 2
    assert "give them again: --video clip.mp4" in err and str(tmp_path).encode() not in made.read_bytes()
    (made.parent / "clip.mp4").write_bytes(b"another of its name")
    assert run(*like)[0] == 2
    shutil.copy(clip, made.parent)
    (again,) = paths(*like)
    assert read_metadata(again) == read_metadata(made)
    paths("generate", "--like", made, "--model", native, "--video", clip, "--out", out)
    assert "is not the one" not in caplog.text
    save_video(clip, np.zeros((9, 32, 48, 3), np.uint8), 8)
    paths("generate", "--like", made, "--model", native, "--video", clip, "--out", out)
    assert f"--video is not the one that {made} was made of" in caplog.text
    two = paths("generate", "a circle", "a square", "--model", native, *QUICK, "--out", tmp_path / "two.mp4")
    caplog.clear()
    paths("generate", "--like", two[1], "--model", native, "--out", out)
    assert "had other noise than a run of it alone" in caplog.text


def test_a_reader_that_goes_away(tmp_path, native):
    command = f"{sys.executable} -m cogvideox_flax info {native} | head -0; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() in ("0", "141")
    assert "Traceback" not in done.stderr


# --- nothing is lost


def test_the_next_prompt_keeps_the_last_video(paths, run, native, tmp_path, cheap_decoder, monkeypatch, caplog):
    """Without --out, each video has a name of its own."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    argv = ["--model", native, *QUICK]
    (first,) = paths("generate", "a", *argv)
    data = first.read_bytes()
    (second,) = paths("generate", "b", *argv)
    (third,) = paths("generate", "a", *argv)
    assert [str(path) for path in (first, second, third)] == ["video.mp4", "video-2.mp4", "video-3.mp4"]
    assert first.read_bytes() == data and "replaced" not in caplog.text
    several = paths("generate", "c c", "d d", *argv)
    assert [str(path) for path in several] == ["video-0.mp4", "video-1.mp4"]
    assert [str(path) for path in paths("generate", "e e", "f f", *argv)] == ["video-2-0.mp4", "video-2-1.mp4"]


def test_a_run_in_the_middle_keeps_its_name(paths, run, native, tmp_path, cheap_decoder, monkeypatch, work):
    """The same command goes on; another one takes another name."""
    from cogvideox_flax.generate.result import GenerationResult

    monkeypatch.chdir(tmp_path)
    argv, how = ["--model", native, *QUICK], ("--seed", 2, "--negative-prompt", "c", "--guidance-interval", "0,0.6")
    with monkeypatch.context() as patch:
        patch.setattr(GenerationResult, "save_items", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run("generate", "a", *how, *argv)[0] == 130
    assert (tmp_path / "video.mp4.stages").is_dir()
    assert [str(path) for path in paths("generate", "b", *argv)] == ["video-2.mp4"]
    assert [str(path) for path in paths("generate", "a", "--seed", 3, *argv)] == ["video-3.mp4"]
    work.clear()
    assert [str(path) for path in paths("generate", "a", *how, *argv)] == ["video.mp4"]
    assert work == ["decode"] and not list(tmp_path.glob("*.stages"))
    like = ["--like", "video.mp4", "--model", native]
    with monkeypatch.context() as patch:
        patch.setattr(GenerationResult, "save_items", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run("generate", *like, "--seed", 5)[0] == 130
    work.clear()
    assert [str(path) for path in paths("generate", *like, "--seed", 5)] == ["video-4.mp4"]
    assert work == ["decode"]


def test_replaced_is_said_when_it_happens(paths, run, native, tmp_path, cheap_decoder, caplog):
    caplog.set_level("INFO")
    out = tmp_path / "v.mp4"
    paths("generate", "a", "--model", native, *QUICK, "--out", out)
    assert run("generate", "a", "--model", native, *QUICK, "--steps", 0, "--out", out)[0] == 2
    assert "replaced" not in caplog.text
    paths("generate", "b", "--model", native, *QUICK, "--out", out)
    assert f"{out} was replaced" in caplog.text


def test_a_preview_replaces_previews_alone(paths, run, tmp_path, cheap_decoder):
    argv = ["generate", "a red circle moves up", "--steps", 1, "--out", tmp_path / "v.webp"]
    for name in ("p.png", "p.webp"):
        path = tmp_path / name
        paths(*argv, "--preview", path)
        ours = path.read_bytes()
        paths(*argv, "--seed", 1, "--preview", path)
        assert path.read_bytes() != ours
        Image.new("RGB", (9, 9)).save(path)
        theirs = path.read_bytes()
        code, _, err = run(*argv, "--preview", path)
        assert code == 2 and f"{path} is there and is no preview of this program" in err
        assert path.read_bytes() == theirs
        paths(*argv, "--preview", path, "--overwrite")
        assert path.read_bytes() != theirs
    (tmp_path / "p.png").write_bytes(b"notes")
    assert run(*argv, "--preview", tmp_path / "p.png")[0] == 2
    code, _, err = run(*argv, "--preview", tmp_path / "v.webp")
    assert code == 2 and "is to hold the video" in err


def test_videos_that_are_there_are_the_runs_own(paths, run, native, tmp_path, cheap_decoder, monkeypatch, work):
    """A run that was stopped between its videos goes on under its name."""
    from cogvideox_flax.generate.result import GenerationResult

    monkeypatch.chdir(tmp_path)
    argv = ["generate", "a", "--model", native, *QUICK, "--num-videos", 2]
    save, saved = GenerationResult.save_items, []

    def stopped(self, names):
        if saved:
            raise KeyboardInterrupt
        saved.append(save(self, names))

    with monkeypatch.context() as patch:
        patch.setattr(GenerationResult, "save_items", stopped)
        assert run(*argv)[0] == 130
    assert (tmp_path / "video-0.mp4").exists() and not (tmp_path / "video-1.mp4").exists()
    work.clear()
    assert [str(path) for path in paths(*argv)] == ["video-0.mp4", "video-1.mp4"]
    assert "denoise" not in work and not list(tmp_path.glob("*.stages"))


def test_a_name_is_taken_when_it_is_chosen(run, native, tmp_path, monkeypatch):
    """Another command that is still loading its model has it; a command that is refused leaves nothing."""
    from cogvideox_flax.cli import prepare

    monkeypatch.chdir(tmp_path)
    args = make_parser().read(["generate", "a", "--seed", "1"])
    other = make_parser().read(["generate", "b"])
    with prepare.output_of(args) as first, prepare.output_of(other) as second, prepare.output_of(args) as again:
        assert [str(path) for path in (first, second, again)] == ["video.mp4", "video-2.mp4", "video.mp4"]
    assert run("generate", "a", "--model", native, *QUICK, "--steps", 0)[0] == 2
    assert list(tmp_path.iterdir()) == []
