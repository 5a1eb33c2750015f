"""The shell commands as people use them: results and messages."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from cogvideox_flax import hub
from cogvideox_flax.checkpoint import read_manifest
from cogvideox_flax.cli import main
from cogvideox_flax.cli.arguments import make_parser
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.io.video import read_metadata, read_video
from tests.support import processes
from tests.support.commands import PROMPT, QUICK, ROOT, generate, python
from tests.support.reference import make_transformer

pytest_plugins = ["tests.support.commands"]


# --- results ---


def test_generate_from_the_released_layout_converts_once(paths, layout, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("COGVIDEOX_HOME", str(tmp_path / "home"))
    caplog.set_level(logging.INFO, "cogvideox_flax")
    out = tmp_path / "a new dir" / "vidéo.mp4"
    assert paths(*generate(layout, out)) == [out]
    assert "converting" in caplog.text
    caplog.clear()
    # other names of the same directory: with a slash at the end, relative, and through ~
    monkeypatch.chdir(layout.parent)
    monkeypatch.setenv("HOME", str(layout.parent))
    for model in (f"{layout}/", layout.name, f"~/{layout.name}"):
        paths("encode", PROMPT, "--model", model, "--dir", tmp_path / "run", "--dtype", "float32")
    assert "converting" not in caplog.text
    assert len(list((tmp_path / "home").glob("*/config.json"))) == 1
    assert sorted(p.name for p in out.parent.iterdir()) == ["vidéo.mp4"]
    frames, fps = read_video(out)
    assert frames.shape == (9, 32, 48, 3)
    assert fps == 8
    assert frames.std() > 10


def test_a_changed_source_is_converted_again_and_other_files_do_not_count(paths, layout, tmp_path, home):
    source = shutil.copytree(layout, tmp_path / "source")
    count = len(list(home.glob("*/config.json")))

    def converted():
        paths("encode", PROMPT, "--model", source, "--dir", tmp_path / "run", "--dtype", "float32")
        return len(list(home.glob("*/config.json"))) - count

    assert converted() == 1
    (source / "README.md").write_text("notes")
    (source / "transformer" / "notes.txt").write_text("notes")
    assert converted() == 1
    weights = source / "vae" / "diffusion_pytorch_model.safetensors"
    os.utime(weights)
    assert converted() == 1
    before = weights.stat()
    with weights.open("r+b") as file:  # as large, and as old, as it was
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\1")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert converted() == 2


def test_a_damaged_converted_copy_is_made_again(paths, layout, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("COGVIDEOX_HOME", str(tmp_path / "home"))
    first = paths(*generate(layout, tmp_path / "a.npz"))[0]
    (weights,) = (tmp_path / "home").glob("*/vae/model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    second = paths(*generate(layout, tmp_path / "b.npz"))[0]
    assert "is damaged and will be made again" in caplog.text
    assert weights.read_bytes() == data
    assert (np.load(first)["latents"] == np.load(second)["latents"]).all()


def test_mp4_holds_what_made_it(paths, native, tmp_path):
    more = ["--negative-prompt", "blue", "--seed", 7, "--scheduler", "dpm", "--guidance-scale", 3, "--fps", 24]
    (out,) = paths(*generate(native, tmp_path / "v.mp4", *more))
    assert read_video(out)[1] == 24
    metadata = read_metadata(out)
    assert (metadata["prompt"], metadata["negative_prompt"], metadata["seed"]) == (PROMPT, "blue", 7)
    assert metadata["settings"] == {
        "num_frames": 9,
        "height": 32,
        "width": 48,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "use_dynamic_cfg": False,
        "scheduler": "dpm",
        "fps": 24,
        "dtype": "float32",
    }


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ""])
def test_a_long_prompt_is_stored_whole(paths, native, tmp_path, suffix):
    prompt = "猫" * 23_000  # 138 kB as JSON, which writes it in ASCII; Linux allows an argument 131 kB
    (out,) = paths(*generate(native, tmp_path / f"v{suffix}", prompts=[prompt]))
    assert read_metadata(out)["prompt"] == prompt


def test_a_checkpoint_may_recommend_its_guidance(paths, native, tmp_path):
    own = shutil.copytree(native, tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"guidance_scale": 2.5}))
    used = [read_metadata(paths(*generate(m, tmp_path / "v.mp4"))[0])["settings"] for m in (native, own)]
    assert [settings["guidance_scale"] for settings in used] == [6.0, 2.5]
    settings = {"num_frames": 9, "height": 32, "width": 48, "num_inference_steps": 1, "output_type": "latent"}
    video = CogVideoXPipeline.from_pretrained(own, dtype="float32")(PROMPT, **settings, progress=False)
    assert video.metadata["settings"]["guidance_scale"] == 2.5
    assert read_manifest(own).to_json()["guidance_scale"] == 2.5


def test_every_format_holds_the_same_frames(paths, native, tmp_path):
    (gif,) = paths(*generate(native, tmp_path / "v.gif"))
    (pattern,) = paths(*generate(native, tmp_path / "frames" / "f%03d.png"))
    (folder,) = paths(*generate(native, tmp_path / "pngs"))
    frames, fps = read_video(folder)
    assert frames.shape == (9, 32, 48, 3)
    assert fps == 8
    assert sorted(p.name for p in pattern.parent.iterdir()) == [f"f{i:03d}.png" for i in range(9)]
    assert (read_video(pattern)[0] == frames).all()
    assert read_video(gif)[0].shape == frames.shape
    assert read_metadata(gif) == read_metadata(folder) == read_metadata(pattern)


def test_npz_holds_latents_that_decode_to_the_video(paths, native, tmp_path):
    (npz,) = paths(*generate(native, tmp_path / "new" / "x.npz"))
    data = np.load(npz)
    assert data["latents"].shape == (1, 3, 4, 6, 16)
    assert data["latents"].dtype == np.float32
    assert json.loads(str(data["metadata"]))["prompt"] == PROMPT
    pipe = CogVideoXPipeline.from_pretrained(native, dtype="float32")
    (folder,) = paths(*generate(native, tmp_path / "pngs"))
    assert (read_video(folder)[0] == np.asarray(pipe.decode(data["latents"], progress=False))[0]).all()


def test_several_prompts(paths, native, tmp_path, cheap_decoder):
    videos = paths(*generate(native, tmp_path / "v.mp4", prompts=[PROMPT, "a blue square", "ein größer Kreis"]))
    assert [p.name for p in videos] == ["v-0.mp4", "v-1.mp4", "v-2.mp4"]
    assert [read_metadata(p)["prompt"] for p in videos] == [PROMPT, "a blue square", "ein größer Kreis"]
    frames = [read_video(p)[0] for p in videos]
    assert all(f.shape == (9, 32, 48, 3) for f in frames)
    assert (frames[0] != frames[1]).any()


def test_options_matter_and_the_empty_prompt_is_one(paths, native, tmp_path):
    def latents(*more, prompt=PROMPT):
        return np.load(paths(*generate(native, tmp_path / "x.npz", *more, prompts=[prompt]))[0])["latents"]

    base = latents()
    assert (latents() == base).all()
    for change in (["--seed", 1], ["--steps", 3], ["--guidance-scale", 2], ["--dynamic-cfg", "index"]):
        assert (latents(*change) != base).any(), change
    for change in (["--negative-prompt", "red"], ["--scheduler", "dpm"]):
        assert (latents(*change) != base).any(), change
    assert (latents(prompt="") != base).any()
    np.testing.assert_allclose(latents("--compiled-loop"), base, atol=1e-5 * base.std())


def test_mesh(paths, native, tmp_path, caplog):
    alone = np.load(paths(*generate(native, tmp_path / "a.npz"))[0])["latents"]
    for mesh in ("2,1,1", "auto"):
        with caplog.at_level("INFO", logger="cogvideox_flax"):
            spread = np.load(paths(*generate(native, tmp_path / f"{mesh}.npz", "--mesh", mesh))[0])["latents"]
        np.testing.assert_allclose(spread, alone, atol=1e-4 * alone.std())
    assert "as the planner says" in caplog.text


# --- messages ---


def test_processes_and_exit_codes(native, layout, tmp_path):
    done = python("-m", "cogvideox_flax", *generate(native, "x.npz"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "x.npz\n")
    assert "denoising: 0 of 2 steps\n" in done.stderr
    assert "denoising: 2 of 2 steps in " in done.stderr
    assert "\r" not in done.stderr, "no bar where nobody watches it"
    done = python("-m", "cogvideox_flax", "info", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    monkeypatch.setattr(hub, "peek", 1)
    with pytest.raises(TypeError):
        main(["info"])


def test_the_module_and_the_command_convert_alike(run, layout, tmp_path):
    argv = [layout, "--component", "text_encoder", "vae", "--dtype", "bfloat16"]
    done = python("-m", "conversion", *argv[:1], "native", *argv[1:], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "native\n")
    assert "converting vae: 100%" in done.stderr
    code, out, err = run("convert", *argv[:1], tmp_path / "same", *argv[1:])
    assert (code, out) == (0, f"{tmp_path / 'same'}\n")
    assert "converting vae: 100%" in err
    one, other = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "native", tmp_path / "same")
    )
    assert one == other and len(one) > 3


def test_a_transformer_in_place_of_the_models(paths, run, layout, native, tmp_path):
    """In the shell, in Python and in stages: the video is that of a model which has it, and its recipe names it."""
    src = tmp_path / "checkpoint-500" / "transformer"
    make_transformer("cogvideox-2b", seed=1).save_pretrained(src)
    tuned = shutil.copytree(native, tmp_path / "tuned")
    convert(src, tuned)
    expected = CogVideoXPipeline.from_pretrained(tuned, "float32").fingerprints()

    def made(*where):
        paths("generate", PROMPT, *where, *QUICK, "--out", out := tmp_path / "latents.npz")
        with np.load(out) as file:
            return file["latents"], json.loads(str(file["metadata"]))["checkpoint"]

    latents, parts = made("--model", tuned)
    assert parts == {name: value[:12] for name, value in expected.items()}
    assert not np.array_equal(made("--model", native)[0], latents)
    (file,) = src.glob("*.safetensors")
    for model, transformer in ((native, src), (layout, src.parent), (native, file), (native, tuned)):
        found, stated = made("--model", model, "--transformer", transformer)
        np.testing.assert_array_equal(found, latents)
        assert stated == parts
    pipe = CogVideoXPipeline.from_pretrained(native, "float32", transformer=src)
    assert pipe.fingerprints() == expected
    paths("encode", PROMPT, "--model", native, "--transformer", src, "--dir", tmp_path / "run", "--dtype", "float32")
    (path,) = paths("denoise", "--dir", tmp_path / "run", *QUICK[:-2])
    np.testing.assert_array_equal(load_file(path)["latents"].transpose(0, 2, 3, 4, 1), latents)

    make_transformer("cogvideox-5b").save_pretrained(other := tmp_path / "other")
    for wrong, message in (
        (other, f"error: this is no part of the checkpoint in {native}: its transformer has rotary True, not False."),
        (layout / "vae", f"error: {layout / 'vae'} holds vae alone; expected the transformer of"),
    ):
        code, _, err = run("generate", PROMPT, "--model", native, "--transformer", wrong, *QUICK, "--out", "x.npz")
        assert (code, err[: len(message)]) == (2, message)
    code, _, err = run("generate", PROMPT, "--model", src, *QUICK, "--out", "x.npz")
    assert (code, "one component alone goes with a model that has the rest: see --transformer" in err) == (2, True)
    with pytest.raises(InputError, match=r"A module is set afterwards: pipe\.transformer = module"):
        CogVideoXPipeline.from_pretrained(native, transformer=pipe.transformer)


def test_a_variant_of_the_weight_files(paths, run, layout, native, tmp_path):
    """Wherever a model is opened, of the model and of --transformer; stages go on with it."""
    both = shutil.copytree(layout, tmp_path / "both")
    make_transformer("cogvideox-2b", seed=1).save_pretrained(both / "transformer", variant="fp16")
    for name, stem in (("text_encoder", "model"), ("vae", "diffusion_pytorch_model")):
        shutil.copy(both / name / f"{stem}.safetensors", both / name / f"{stem}.fp16.safetensors")
    plain, other = (
        CogVideoXPipeline.from_pretrained(both, "float32", variant=variant).fingerprints() for variant in (None, "fp16")
    )
    assert [name for name in plain if plain[name] != other[name]] == ["transformer"]
    pipe = CogVideoXPipeline.from_pretrained(native, "float32", transformer=both / "transformer", variant="fp16")
    assert pipe.fingerprints()["transformer"] == other["transformer"]
    assert CogVideoXPipeline.from_pretrained(both, "float32").fingerprints() == plain

    run_dir = ["--dir", tmp_path / "run"]
    paths("encode", PROMPT, "--model", both, "--variant", "fp16", *run_dir, "--dtype", "float32")
    paths("denoise", *run_dir, *QUICK[:-2])
    found = json.loads((tmp_path / "run" / "generation_config.json").read_text())
    assert (found["variant"], found["fingerprints"]["transformer"]) == ("fp16", other["transformer"])
    code, _, err = run("generate", PROMPT, "--model", native, "--variant", "fp16", *QUICK, "--out", tmp_path / "x.gif")
    assert (code, "is a native checkpoint, which has one" in err) == (2, True)
    code, _, err = run("generate", PROMPT, "--model", both, "--variant", "fp8", *QUICK, "--out", tmp_path / "x.gif")
    assert (code, "has no variant fp8; it holds fp16, the plain one" in err) == (2, True)
    options = {name: set(parser._option_string_actions) for name, parser in make_parser().commands.items()}
    reads_weights = {name for name, own in options.items() if "--revision" in own} - {"info", "plan"}
    assert reads_weights == {name for name, own in options.items() if "--variant" in own} and len(reads_weights) > 8


def test_quiet_also_while_converting(layout, tmp_path):
    env = {"COGVIDEOX_HOME": str(tmp_path / "home")}
    encode = ["encode", PROMPT, "--model", layout, "--dir", "run", "--dtype", "float32", "--quiet"]
    done = python("-m", "cogvideox_flax", *encode, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "run/stage1_embeddings.safetensors\n")
    assert done.stderr == ""
    assert list((tmp_path / "home").glob("*/config.json"))


def test_a_second_start_compiles_nothing(tmp_path):
    env = {"COGVIDEOX_HOME": str(tmp_path / "home"), "JAX_COMPILATION_CACHE_DIR": ""}

    def programs():
        return {path.name for path in (tmp_path / "home").glob("programs/*")}

    for folder in ("first", "second"):
        before = programs()
        done = python("-m", "cogvideox_flax", "encode", PROMPT, "--dir", folder, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
    assert "compil" not in done.stderr and programs() == before, done.stderr
    assert len(before) == 1
    mine = env | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "mine")}
    done = python("-m", "cogvideox_flax", "encode", PROMPT, "--dir", "third", cwd=tmp_path, env=mine)
    assert done.returncode == 0 and programs() == before  # the user's choice stands


def test_help_and_version_answer_at_once(run):
    for argv in (["--help"], ["generate", "--help"], ["--version"]):
        code, out, _ = run(*argv)
        assert code == 0
        assert out
    heavy = "import sys; from cogvideox_flax.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    assert python("-c", heavy + "assert 'jax' not in sys.modules").returncode == 0


def test_info(run, native, layout):
    code, out, _ = run("info", native)
    assert code == 0
    assert f"from {layout}" in out
    assert "float32" in out
    code, out, _ = run("info", layout)
    assert code == 0
    assert "not converted yet" in out


def test_info_json(run, native, layout, layout_5b):
    code, out, _ = run("info", native, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["where"] == str(native)
    assert set(facts["components"]) == {"text_encoder", "transformer", "vae"}
    assert facts["components"]["vae"]["source"]["path"] == str(layout)
    count = sum(value.size for value in load_file(native / "vae" / "model.safetensors").values())
    assert facts["components"]["vae"]["parameters"] == count
    code, out, _ = run("info", layout_5b, "--json")
    facts = json.loads(out)
    assert facts["transformer"]["rotary"] is True
    assert facts["weights"] == {}


def test_info_of_a_released_model(run, tmp_path):
    folder = ROOT.parent / "shared" / "spec" / "configs" / "CogVideoX1.5-5B"
    if not folder.is_dir():
        pytest.skip(f"no released configs in {folder}")
    code, out, _ = run("info", folder)
    assert code == 0
    assert "cogvideox1.5-5b" in out
    assert "81 frames of 768x1360 at 16 fps" in out


# --- Ctrl-C ---


COMMANDS = {
    "module": ["-m", "cogvideox_flax", "generate", "x", "--out", "x.npz", "--quiet"],
    "script": ["bin/cogvideox", "generate", "x", "--out", "x.npz", "--quiet"],
    "conversion": ["-m", "conversion", "nowhere", "native"],
}


def interrupted(argv, module, delay, cwd):
    """Starts a process, sends Ctrl-C a while after it has imported a module, and returns its exit code and stderr."""
    (cwd / "bin").mkdir()
    script = cwd / "bin" / "cogvideox"  # as an installer writes it
    script.write_text("import sys\nfrom cogvideox_flax.cli import main\nsys.exit(main())\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-X", "importtime", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.running(command, cwd=cwd, env=env, **pipes, text=True) as one:
        ends = threading.Timer(60, one.kill)
        ends.start()
        assert one.stderr is not None
        said = []
        for line in one.stderr:
            said.append(line)
            if line.startswith("import time:") and line.split("|")[-1].strip() == module:
                time.sleep(delay)
                one.send_signal(signal.SIGINT)
                break
        said += one.stderr.readlines()
        code = one.wait(60)
        ends.cancel()
    return code, "".join(line for line in said if not line.startswith("import time:"))


@pytest.mark.parametrize("delay", [0, 0.05, 0.3])
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_at_the_start(tmp_path, command, delay):
    """From the first of our modules on."""
    code, said = interrupted(COMMANDS[command], "cogvideox_flax.io.interrupts", delay, tmp_path)
    assert (code, said) == (130, "stopped; nothing was begun\n")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    "module", ["numpy.exceptions", "jaxtyping", "cogvideox_flax.cli.arguments", "ml_dtypes", "jax._src.config", "jax"]
)
def test_ctrl_c_while_jax_is_imported(tmp_path, module):
    code, said = interrupted(COMMANDS["module"], module, 0, tmp_path)
    assert (code, said) == (130, "stopped; nothing was begun\n")


def test_a_program_that_imports_the_library_keeps_its_handler(tmp_path):
    code = "import signal, cogvideox_flax; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text(code)
    (tmp_path / "theirs" / "__main__.py").write_text("")
    for command in (["-c", code], ["-m", "theirs"]):
        done = python(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_an_import_that_an_interrupt_broke_is_no_failure(run, monkeypatch):
    def broken(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("numpy._core.multiarray failed to import") from None

    monkeypatch.setattr("cogvideox_flax.hub.peek", broken)
    code, _, err = run("info")
    assert code == 130 and err.strip() == "stopped; the same command goes on from what was finished"
