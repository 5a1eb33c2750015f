"""A file of prompts: one video after the other, each kept when it is done."""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import shlex
import sys

import numpy as np
import pytest

from cogvideox_flax.cli.prepare import read_prompts
from cogvideox_flax.generate import journey
from cogvideox_flax.generate.page import PAGE, PageRow, write_page
from cogvideox_flax.generate.queue import fields_of, find_made
from cogvideox_flax.io.video import read_metadata, read_video, save_video
from cogvideox_flax.runtime import compile as compile_module
from tests.support.commands import PROMPT, QUICK

pytest_plugins = ["tests.support.commands"]

PROMPTS = ["a red circle moves", "a blue square, very <script>alert(1)</script> & big", "ein größer Kreis"]


def write(folder, *lines):
    file = folder / "prompts.txt"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


@pytest.fixture
def queue(run, native, tmp_path):
    """Runs `generate` with a file of these lines; returns exit code, names of the videos, and stderr."""

    def queue(*lines, argv=(), out="v.mp4"):
        file = write(tmp_path, *lines)
        argv = ["generate", "--prompt-file", file, "--model", native, "--out", tmp_path / "out" / out, *QUICK, *argv]
        code, printed, err = run(*argv)
        return code, [line.rpartition("/")[2] for line in printed.splitlines()], err

    return queue


def test_names_lines_and_metadata(queue, tmp_path, cheap_decoder):
    long = "word " * 30
    code, names, _ = queue(
        "\ufeffa blue Square", "", "  ", {"prompt": "ein größer/Kreis", "seed": 7}, "", long, '{"prompt": ""}'
    )
    assert code == 0
    assert names == [
        "v-0001-a-blue-square-seed0.mp4",
        "v-0004-ein-größer-kreis-seed7.mp4",
        "v-0006-word-word-word-word-word-word-word-word-seed0.mp4",
        "v-0007-seed0.mp4",
    ]
    found = [read_metadata(tmp_path / "out" / name) for name in names]
    assert [each["prompt"] for each in found] == ["a blue Square", "ein größer/Kreis", long, ""]
    assert [each["seed"] for each in found] == [0, 7, 0, 0]
    assert all(each["seconds"] > 0 for each in found)
    assert not (tmp_path / "out" / "v.mp4.stages").exists()


def test_names_by_template(queue, tmp_path, cheap_decoder):
    lines = ["a/../../red circle", {"prompt": "", "num_videos": 2}, "a red circle"]
    code, names, _ = queue(*lines, out="[{prompt}]_{seed}.webm")
    assert code == 0
    assert names == ["[a-red-circle]_0.webm", "[no-prompt]_0.webm", "[no-prompt]_1.webm", "[a-red-circle]_0-2.webm"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*names, "index.html"}
    code, more, _ = queue("new", *reversed(lines), out="[{prompt}]_{seed}.webm")
    assert (code, more) == (0, ["[new]_0.webm"])
    assert queue("a", out="{n}")[1] == ["0001.mp4"]
    code, _, err = queue("a", out="{prompt}/{n}.mp4")
    assert code == 2 and "may stand in the name of the file, not in folders" in err


def test_a_folder_of_videos(queue, tmp_path, cheap_decoder):
    code, names, _ = queue("a red circle", "a blue square", out="clips")
    assert code == 0
    assert names == ["0001-a-red-circle-seed0.mp4", "0002-a-blue-square-seed0.mp4"]
    assert {path.name for path in (tmp_path / "out" / "clips").iterdir()} == {*names, "index.html"}


def test_what_a_line_may_say():
    assert fields_of("a {red} circle") == {"prompt": "a {red} circle"}
    line = {
        "prompt": "a",
        "steps": 3,
        "num-frames": 17,
        "lora": "a.safetensors:0.5",
        "image": ["a.png"],
        "dynamic_cfg": True,
    }
    assert fields_of(json.dumps(line)) == {
        "prompt": "a", "num_inference_steps": 3, "num_frames": 17, "lora": "a.safetensors:0.5", "image": ["a.png"],
        "use_dynamic_cfg": True,
    }  # fmt: skip


def test_options_are_for_all_lines_and_a_lines_own_come_first(queue, tmp_path, cheap_decoder):
    _, names, _ = queue("a", {"prompt": "b", "seed": 3, "num_videos": 2, "steps": 1}, argv=["--seed", 9])
    assert names == ["v-0001-a-seed9.mp4", "v-0002-b-seed3.mp4", "v-0002-b-seed4.mp4"]
    steps = [read_metadata(tmp_path / "out" / name)["settings"]["num_inference_steps"] for name in names]
    assert steps == [2, 1, 1]


def test_bad_lines_are_named_and_the_rest_is_done(queue, tmp_path, cheap_decoder, caplog):
    lines = [
        "a", '{"prompt": "b"', {"prompt": "c", "sed": 3}, {"prompt": "d", "num_frames": "many"}, {"seed": 3},
        {"prompt": "f", "height": 50}, '{"prompt": "g", "guidance_scale": NaN}', {"prompt": 3}, "i", "b\ud800"[:1],
    ]  # fmt: skip
    code, names, err = queue(*lines)
    assert code == 2
    assert names == ["v-0001-a-seed0.mp4", "v-0009-i-seed0.mp4", "v-0010-b-seed0.mp4"]
    said = err.partition("error: ")[2]
    assert "of 10 prompts" in said
    for number, message in {
        2: "it is not JSON",
        3: "there is no option 'sed'; did you mean seed?",
        4: "num_frames is 'many'; expected a whole number",
        5: 'it has no "prompt"',
        6: "height is 50",
        7: "guidance_scale is nan",
        8: "prompt is 3; expected a text in quotes",
    }.items():
        assert re.search(rf"line {number}: .*{re.escape(message)}", said), said
        assert f"line {number} is left out: " in caplog.text, "said before the work too"
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    assert "3 of 10 videos" in page
    assert "did you mean seed?" in page


def test_nothing_but_bad_lines_loads_nothing(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(journey, "encode", None)
    code, names, err = queue('{"prompt": 1}', "{}")
    assert (code, names) == (2, [])
    assert "line 1: prompt is 1" in err
    assert not (tmp_path / "out").exists()


def test_a_killed_queue_goes_on(queue, tmp_path, work, cheap_decoder, monkeypatch, caplog):
    encode, done = journey.encode, []

    def killed(*args, **how):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return (yield from encode(*args, **how))

    monkeypatch.setattr(journey, "encode", killed)
    lines = ["a", "b", "c", "d"]
    code, names, err = queue(*lines)
    assert code == 130
    assert "the same command goes on" in err
    assert names == ["v-0001-a-seed0.mp4", "v-0002-b-seed0.mp4"]
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    monkeypatch.setattr(journey, "encode", encode)
    work.clear()
    code, more, err = queue(*lines)
    assert code == 0
    assert more == ["v-0003-c-seed0.mp4", "v-0004-d-seed0.mp4"]
    assert "2 of 4 videos are there already" in caplog.text
    assert work.count("denoise") == 2
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names} == times
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    assert page.count("<video") == 4
    # other settings, or a damaged file: made anew
    (tmp_path / "out" / names[0]).write_bytes(b"damaged")
    assert queue(*lines)[1] == ["v-0001-a-seed0-2.mp4"]
    assert len(queue(*lines, argv=["--guidance-scale", 3])[1]) == 4


@pytest.mark.parametrize("out", ["", "{prompt}-{seed}.mp4"])
def test_the_file_of_a_process_that_was_killed_before_it_named_it_is_no_video(tmp_path, out):
    recipe = {"version": "cogvideox-flax 1", "prompt": "a", "seed": 0}
    save_video(tmp_path / "found-0.mp4", np.zeros((1, 16, 16, 3), np.uint8), 8, recipe)
    wanted = [(tmp_path / "a-0.mp4", recipe)]
    ((path, _),) = find_made(tmp_path / out, wanted)
    assert path == tmp_path / "found-0.mp4"
    path.rename(tmp_path / ".cogvideox-0123456789abcdef-0.partial.mp4")
    assert find_made(tmp_path / out, wanted) == [None]


def test_a_kill_in_the_middle_of_a_video(queue, tmp_path, work, cheap_decoder, monkeypatch):
    """What was finished of it is taken over."""
    from cogvideox_flax.generate.result import GenerationResult

    save = GenerationResult.save_items
    monkeypatch.setattr(GenerationResult, "save_items", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert queue("a")[0] == 130
    monkeypatch.setattr(GenerationResult, "save_items", save)
    work.clear()
    assert queue("a")[1] == ["v-0001-a-seed0.mp4"]
    assert work == [], "decoding aside, which is replaced here"


def test_a_line_that_fails_while_it_is_made(queue, cheap_decoder, monkeypatch):
    from cogvideox_flax.errors import InputError

    encode = journey.encode

    def failing(model, run, **how):
        if run.request.prompt == ["b"]:
            raise InputError("a sad story")
        return (yield from encode(model, run, **how))

    monkeypatch.setattr(journey, "encode", failing)
    code, names, err = queue("a", "b", "c")
    assert (code, names) == (2, ["v-0001-a-seed0.mp4", "v-0003-c-seed0.mp4"])
    assert err.endswith("line 2: a sad story\n")


def test_a_shape_is_compiled_once(queue, cheap_decoder, monkeypatch):
    compiled = []
    prepare = compile_module.CompiledProgram._compile

    def counted(self, *args, **kwargs):
        compiled.append(self.program.name)
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(compile_module, "_PROGRAMS", {})  # as in a new process
    monkeypatch.setattr(compile_module.CompiledProgram, "_compile", counted)
    assert queue("a", "b", {"prompt": "c", "seed": 5}, "d")[0] == 0
    assert compiled.count("denoising step") == 1
    assert compiled.count("text encoder") == 1


@pytest.mark.parametrize("scheduler", ["ddim", "dpm"])
def test_a_batch_is_the_same_as_one_at_a_time(queue, tmp_path, scheduler):
    lines = ["a red circle", "a blue square", {"prompt": "a green circle", "seed": 4}, "a triangle"]
    argv = ["--scheduler", scheduler]
    one = {name: np.load(tmp_path / "out" / name) for name in queue(*lines, argv=argv, out="x.npz")[1]}
    code, names, err = queue(*lines, argv=[*argv, "--batch", 2, "--memory"], out="y.npz")
    assert code == 0, err
    assert sorted(name.replace("y-", "x-") for name in names) == sorted(one)
    assert names[:2] == ["y-0001-a-red-circle-seed0.npz", "y-0002-a-blue-square-seed0.npz"]
    for name, alone in one.items():
        batched = np.load(tmp_path / "out" / name.replace("x-", "y-"))
        np.testing.assert_allclose(batched["latents"], alone["latents"], atol=1e-4)
        a, b = (json.loads(str(each["metadata"])) for each in (alone, batched))
        assert a | {"seconds": 0} == b | {"seconds": 0}
    noise = [each["latents"] for each in one.values()]
    assert np.abs(noise[0] - noise[1]).max() > 1e-3, "the prompt matters"


def test_the_page(queue, tmp_path, cheap_decoder):
    _, names, _ = queue(*PROMPTS)
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; big" in page
    assert "ein größer Kreis" in page
    assert re.search(r"[0-9.]+ s; seed 0<br>", page)
    assert page.count("num_inference_steps 2") == 1, "the settings of all, once"
    assert '<meta name="viewport" content="width=device-width' in page and page.count(" autoplay loop muted") == 3
    assert not re.search(r'(src|href)="(?!v-000)', page), "it loads nothing from elsewhere"
    assert [name for name in names if f'src="{name}"' in page] == names[:2]
    assert 'src="v-0003-ein-gr%C3%B6%C3%9Fer-kreis-seed0.mp4"' in page
    assert "3 of 3 videos" in page


def test_a_page_says_in_what_videos_differ_and_how_each_is_made_again(tmp_path):
    settings = [{"num_inference_steps": 2, "scheduler": name, "height": 48} for name in ("ddim", "dpm")]
    rows = [
        PageRow(i, "a", tmp_path / f"a {i}.mp4", {"seed": i, "settings": facts}) for i, facts in enumerate(settings)
    ]
    write_page(tmp_path, "v", [*rows, PageRow(3, "b")], "weights/my model")
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "<small>num_inference_steps 2, height 48</small>" in page
    assert "<small>seed 0, scheduler ddim<br>" in page and "<small>seed 1, scheduler dpm<br>" in page
    for row in rows:
        (command,) = re.findall(rf"<code>(.*{row.path.name}.*)</code>", page)
        expected = ["cogvideox", "generate", "--like", str(row.path), "--model", "weights/my model"]
        assert shlex.split(html.unescape(command)) == expected


def test_a_page_of_somebody_else_stays(queue, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PAGE).write_text("my home page")
    monkeypatch.setattr(journey, "encode", None)
    code, _, err = queue("a")
    assert code == 2
    assert "is not one that this program wrote" in err
    assert (tmp_path / "out" / PAGE).read_text() == "my home page"


def test_other_formats(queue, tmp_path, cheap_decoder):
    _, (name, _), _ = queue("a", "b", out="g.gif")
    assert name == "g-0001-a-seed0.gif"
    assert read_video(tmp_path / "out" / name)[0].shape == (9, 32, 48, 3)
    assert queue("a", "b", out="g.gif")[1] == [], "they are there"


def test_comments_and_separators_of_a_prompt_file(queue, cheap_decoder, tmp_path):
    lines = ["# red things", "a\u2028red circle", "  # blue things", '{"prompt": "# of circles: 2"}']
    _, names, _ = queue(*lines)
    assert names == ["v-0002-a-red-circle-seed0.mp4", "v-0004-of-circles-2-seed0.mp4"]
    prompts = [read_metadata(tmp_path / "out" / name)["prompt"] for name in names]
    assert prompts == ["a\u2028red circle", "# of circles: 2"]
    assert read_prompts(argparse.Namespace(prompt=[], prompt_file=write(tmp_path, *lines[:3]))) == lines[1:2]


def test_prompts_from_standard_input(run, native, tmp_path, cheap_decoder, monkeypatch):
    argv = ["generate", "--prompt-file", "-", "--model", native, "-o", tmp_path / "v.mp4", *QUICK]
    for data, expected in ((b"\xef\xbb\xbfa\r\n\r\nb\r\n", (0, 2)), (b"# nothing\n", (2, 0))):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code, out, err = run(*argv)
        assert (code, out.count("\n")) == expected, err
    assert "standard input holds no prompt" in err


def test_wrong_ways(run, native, tmp_path):
    file = write(tmp_path, "a")
    argv = ["--model", native, "--out", tmp_path / "v.mp4", *QUICK]
    code, _, err = run("generate", PROMPT, "--prompt-file", file, *argv)
    assert code == 2
    assert "prompts were given beside --prompt-file" in err
    code, _, err = run("generate", PROMPT, "--batch", 2, *argv)
    assert code == 2
    assert "--batch is of a --prompt-file" in err


def test_a_lines_own_paths_are_its_own_fault(queue, tmp_path, cheap_decoder):
    """Whatever the system says of them: names that are too long, that no system has, that lead nowhere."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    names = ["y" * 5000, "y" * 300 + ".safetensors", "a\0b", "\ud800", tmp_path / "loop", tmp_path / "file" / "x", ""]
    options = {"lora": "video", "image": "image", "video": "video", "mask_video": "video"}
    wrong = [{"prompt": "a", option: str(name)} for option in options for name in names]
    wrong += [{"prompt": "a", "lora": [{"file": str(name), "scale": 1}]} for name in names]
    wrong += ['{"prompt": "a", "lora": ' + "[" * 900 + "]" * 900 + "}"]
    code, made, err = queue("a", *wrong, "b")
    assert (code, made) == (2, ["v-0001-a-seed0.mp4", f"v-{len(wrong) + 2:04}-b-seed0.mp4"])
    assert err.count("\nline ") == len(wrong), err
    for said in ("File name too long", "is not UTF-8 text", "symbolic link", "a path is empty", "lora is "):
        assert said in err


def test_a_bad_line_with_an_image_is_a_bad_line(run, tmp_path):
    """Also where the model depends on whether all lines have images."""
    lines = [{"prompt": "a", "image": "x.png", "sed": 3}, '{"image": "x.png"', {"prompt": "c", "image": "nowhere.png"}]
    argv = ["--prompt-file", write(tmp_path, *lines), "--out", tmp_path / "v.mp4", "--steps", 1]
    code, _, err = run("generate", *argv)
    assert code == 2
    for number, message in enumerate(("no option 'sed'", "it is not JSON", "there is no image nowhere.png"), 1):
        assert f"line {number}: " in err and message in err


def folder_of(tmp_path):
    return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != PAGE}


def test_lines_are_matched_by_what_they_ask_for(queue, tmp_path, cheap_decoder):
    """A line put first renumbers the others, whose videos stay."""
    _, names, _ = queue("a", "b")
    before = folder_of(tmp_path)
    code, more, _ = queue("new", "a", "b")
    assert (code, more) == (0, ["v-0001-new-seed0.mp4"])
    assert folder_of(tmp_path).items() >= before.items()
    page = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    assert "3 of 3 videos" in page and all(f'src="{name}"' in page for name in [*names, *more])
    assert queue("b", "new", "a")[1] == []


def test_lines_that_ask_for_the_same_have_a_video_each(queue, cheap_decoder):
    assert queue("a", "a")[1] == ["v-0001-a-seed0.mp4", "v-0002-a-seed0.mp4"]
    assert queue("a", "a", "a")[1] == ["v-0003-a-seed0.mp4"]
    assert queue("a", "a", "a")[1] == []


def test_other_settings_keep_the_earlier_videos(queue, tmp_path, cheap_decoder):
    _, names, _ = queue("a", "b")
    before = folder_of(tmp_path)
    code, more, _ = queue("a", "b", argv=["--steps", 3])
    assert (code, more) == (0, ["v-0001-a-seed0-2.mp4", "v-0002-b-seed0-2.mp4"])
    assert folder_of(tmp_path).items() >= before.items()
    assert queue("a", "b")[1] == queue("a", "b", argv=["--steps", 3])[1] == []
    assert names == ["v-0001-a-seed0.mp4", "v-0002-b-seed0.mp4"]


def test_somebody_elses_video_stays(queue, tmp_path, cheap_decoder, run, native):
    """Under the very name of a line's."""
    (tmp_path / "out").mkdir()
    save_video(theirs := tmp_path / "out" / "v-0001-a-seed0.mp4", np.zeros((3, 16, 16, 3), np.uint8), 8)
    data = theirs.read_bytes()
    assert queue("a")[1] == ["v-0001-a-seed0-2.mp4"]
    assert theirs.read_bytes() == data


def test_the_directory_of_an_earlier_run_stays(queue, copied, tmp_path, cheap_decoder):
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    assert queue("a", argv=["--dir", copied])[0] == 0
    assert {path.name: path.read_bytes() for path in copied.iterdir() if path.name in before} == before


def test_a_step_cache_that_decides_by_the_video_makes_it_alone(queue, tmp_path, cheap_decoder):
    """A batch would decide once for all."""
    argv = ["--step-cache", "first_block", "--step-cache-threshold", 0.1, "--steps", 4]
    one = [np.load(tmp_path / "out" / name)["latents"] for name in queue("a", "b", argv=argv, out="x.npz")[1]]
    two = [
        np.load(tmp_path / "out" / name)["latents"]
        for name in queue("a", "b", argv=[*argv, "--batch", 2], out="y.npz")[1]
    ]
    assert all(map(np.array_equal, one, two))
