"""One request for all front ends: defaults, checks, warnings, several videos, the loop as a generator."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from cogvideox_flax import RELEASES, CogVideoXPipeline, GenerationRequest, Pipeline, hub
from cogvideox_flax.checkpoint import Manifest, read_manifest
from cogvideox_flax.cli.arguments import make_parser
from cogvideox_flax.cli.prepare import given_options
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import journey, store
from cogvideox_flax.generate.events import Denoised, Finished, LoopBegan, Step
from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.request import check_option, help_of, json_type, options, recorded
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.generate.store import request_json
from cogvideox_flax.io.values import expected_of
from cogvideox_flax.io.video import read_metadata, read_video
from cogvideox_flax.lora import add_lora, save_lora
from cogvideox_flax.models.cogvideox.model import CogVideoX
from tests.support import processes
from tests.support.commands import PROMPT, ROOT, generate
from tests.support.reference import save_layout

pytest_plugins = ["tests.support.commands"]

SMALL = {"num_frames": 1, "height": 32, "width": 48, "num_inference_steps": 3}


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("cogvideox-2b", (49, 480, 720, 50, 6.0, False, "ddim", 8)),
        ("cogvideox-5b", (49, 480, 720, 50, 6.0, True, "dpm", 8)),
        ("cogvideox1.5-5b", (81, 768, 1360, 50, 6.0, True, "dpm", 16)),
    ],
)
def test_none_is_what_the_authors_recommend(release, expected):
    found = resolve(GenerationRequest(PROMPT), Manifest.of_release(RELEASES[release]))
    names = ("num_frames", "height", "width", "num_inference_steps", "guidance_scale", "use_dynamic_cfg", "scheduler")
    assert tuple(getattr(found.request, name) for name in (*names, "fps")) == expected
    assert (found.request.prompt, found.request.negative_prompt, found.request.lora) == ([PROMPT], [""], None)


@pytest.mark.parametrize(
    ("release", "on", "off"),
    [
        ("cogvideox-5b", (1.5, 6), (1, 0.5, 0, -1)),
        ("hunyuanvideo1.5-480p-t2v", (1.5, 6, 0.5, 0, -1), (1, 1 + 1e-12)),  # diffusers' guider is off at 1 alone
    ],
)
def test_the_family_says_when_guidance_is_on(release, on, off):
    manifest = Manifest.of_release(RELEASES[release])
    for scale in (*on, *off):
        found = resolve(GenerationRequest(PROMPT, guidance_scale=scale), manifest)
        assert found.guided == found.varied(seed=3).guided == (scale in on)


def test_all_faults_are_in_one_error():
    request = GenerationRequest(
        [], num_frames=10, num_inference_steps=0, seed=-1, fps=0, output_type="pil", use_dynamic_cfg="often"
    )
    with pytest.raises(InputError) as error:
        resolve(request, Manifest.of_release(RELEASES["cogvideox-5b"]))
    for fault in ("prompts is empty", "num_frames is 10", "seed is -1", "fps is 0", "output_type is 'pil'", "'often'"):
        assert fault in str(error.value)
    assert "num_inference_steps is 0" in str(error.value)


def test_what_was_changed_is_checked_again(caplog):
    manifest = Manifest.of_release(RELEASES["cogvideox-5b"])
    with caplog.at_level(logging.WARNING):
        request = resolve(GenerationRequest(PROMPT, height=720), manifest).request
        more = resolve(dataclasses.replace(request, num_videos=3), manifest)
        assert [one.request.seed for one in more.seeds()] == [0, 1, 2]
    assert caplog.text.count("was trained at") == 2  # once for each request
    with pytest.raises(InputError, match="num_frames is 3"):
        resolve(dataclasses.replace(request, num_frames=3), manifest)
    assert resolve(request, Manifest.of_release(RELEASES["cogvideox1.5-5b"])).request.height == 720


def test_every_option_of_the_command_line_is_a_field_of_the_request():
    for command in ("generate", "denoise"):
        argv = [command, *(["--dir", "x"] if command == "denoise" else ["a prompt"])]
        assert given_options(make_parser().parse_args(argv)) == {}  # nothing was given, so all is left to `resolve`
    argv = ["generate", "p", "--steps", "3", "--dynamic-cfg", "off", "--lora", "a.safetensors:0.5", "--tiling"]
    found = given_options(make_parser().parse_args(argv))
    assert found == {
        "num_inference_steps": 3,
        "use_dynamic_cfg": False,
        "lora": [{"file": "a.safetensors", "scale": 0.5}],
        "tiling": True,
    }
    for name in recorded("encode", "denoise", "decode"):
        assert expected_of(json_type(name))  # a type that values out of a JSON file are checked for
    names = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert set(options("encode", "denoise", "decode", "generate")) <= names


def test_python_and_the_command_line_give_the_same_video(paths, layout_5b, tmp_path, monkeypatch, caplog):
    """A small model taken for the 5b release: its authors' scheduler and dynamic guidance on both; an untrained size is
    said once on each."""
    monkeypatch.setattr(CogVideoX, "find_release", lambda *_: RELEASES["cogvideox-5b"])
    (npz,) = paths(*generate(layout_5b, tmp_path / "x.npz"))
    assert caplog.text.count("was trained at") == 1
    caplog.clear()
    size = {"num_frames": 9, "height": 32, "width": 48, "num_inference_steps": 2}
    pipe = CogVideoXPipeline.from_pretrained(layout_5b, dtype="float32")
    video = pipe(PROMPT, **size, output_type="latent", progress=False)
    assert caplog.text.count("was trained at") == 1
    assert (video.frames == np.load(npz)["latents"]).all()
    settings = json.loads(str(np.load(npz)["metadata"]))["settings"]
    assert settings["scheduler"] == "dpm" and settings["use_dynamic_cfg"] is True
    same = pipe(GenerationRequest(PROMPT, **size, output_type="latent"), progress=False)
    assert (same.frames == video.frames).all() and same.metadata == video.metadata
    plain = pipe(PROMPT, **size, output_type="latent", scheduler="ddim", use_dynamic_cfg=False, progress=False)
    assert np.abs(plain.frames - video.frames).max() > 0.1


def test_several_videos_are_those_of_the_following_seeds(paths, native, tmp_path, work):
    found = paths(*generate(native, tmp_path / "v.mp4", "--num-videos", 2, "--seed", 4))
    assert [path.name for path in found] == ["v-0.mp4", "v-1.mp4"]
    assert work == ["encode", "denoise", "denoise", "decode", "decode"]
    assert [read_metadata(path)["seed"] for path in found] == [4, 5]
    (alone,) = paths(*generate(native, tmp_path / "alone.mp4", "--seed", 5))
    assert (read_video(alone)[0] == read_video(found[1])[0]).all()
    assert {path.name for path in tmp_path.iterdir()} == {"v-0.mp4", "v-1.mp4", "alone.mp4"}
    pipe = Pipeline.from_pretrained(native, dtype="float32")
    size = {"num_frames": 9, "height": 32, "width": 48, "num_inference_steps": 2}
    both = pipe([PROMPT, "red"], **size, num_videos=2, seed=4, progress=False)
    assert both.frames.shape[0] == 4 and both.metadata["seed"] == [4, 4, 5, 5]
    assert np.abs(both.frames[2].astype(int) - pipe(PROMPT, **size, seed=5, progress=False).frames[0]).max() <= 1


def test_a_killed_run_of_several_videos_goes_on_with_the_next(run, paths, native, tmp_path, monkeypatch, work):
    command = generate(native, tmp_path / "x.npz", "--num-videos", 3)
    real, calls = journey.denoise, []

    def second_is_interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return (yield from real(*args, **kwargs))

    with monkeypatch.context() as patch:
        patch.setattr(journey, "denoise", second_is_interrupted)
        assert run(*command)[0] == 130
    folder = tmp_path / "x.npz.stages"
    assert store.finished(folder) == [store.EMBEDDINGS_FILE, f"seed-0/{store.LATENTS_FILE}"]
    work.clear()
    assert [path.name for path in paths(*command)] == ["x-0.npz", "x-1.npz", "x-2.npz"]
    assert work == ["denoise", "denoise"] and not folder.exists()


def test_the_loop_belongs_to_the_caller(tmp_path):
    pipe = Pipeline.from_pretrained(save_layout(tmp_path / "hf", "cogvideox-5b"), dtype="float32")
    request = GenerationRequest(PROMPT, **SMALL)
    conditioning = pipe.encode(request, progress=False)
    states = list(pipe.denoise(conditioning, request))
    assert [int(state.step) for state in states] == [1, 2, 3]
    expected = pipe(request, progress=False)
    extra = pipe.resolve(request).size.extra_latents
    assert (np.asarray(pipe.decode(states[-1].latents[:, extra:], progress=False)) == expected.frames).all()
    resumed = list(pipe.denoise(conditioning, request, state=states[0]))
    assert [int(state.step) for state in resumed] == [2, 3]
    assert (np.asarray(resumed[-1].latents) == np.asarray(states[-1].latents)).all()
    with pytest.raises(InputError, match="without negative prompts; the request has 1 and guidance_scale 6"):
        pipe.denoise(dataclasses.replace(conditioning, negative_text=None), request)


def test_the_journey_belongs_to_the_caller(native, tmp_path, monkeypatch):
    """Its events can be read, and closing it is stopping it: with files, the next run goes on from there."""
    pipe = Pipeline.from_pretrained(native, dtype="float32")
    run = pipe.resolve(GenerationRequest(PROMPT, **SMALL, num_videos=2, seed=4))
    expected = pipe(run, progress=False)
    seen = list(pipe.run(run))
    assert [type(event) for event in seen] == [LoopBegan, *[Step] * 3, Denoised, Finished] * 2  # compiled before
    assert [event.request.seed for event in seen if isinstance(event, Finished)] == [4, 5]
    assert [event.timestep for event in seen if isinstance(event, Step)][:3] == [999, 666, 332]
    frames = np.concatenate([event.result.frames for event in seen if isinstance(event, Finished)])
    np.testing.assert_array_equal(frames, expected.frames)

    monkeypatch.setattr(store.StateKeeper, "MIN_INTERVAL_S", 1e9)  # written when it is closed, not before
    folder = tmp_path / "run"
    folder.mkdir()
    files = store.RunDirectory(folder, ModelChoice(str(native), str(native)), pipe.fingerprints())
    events = pipe.run(run, files)
    for event in events:
        if isinstance(event, Step) and (event.request.seed, int(event.state.step)) == (5, 2):
            break
    events.close()
    assert store.finished(folder) == [
        store.EMBEDDINGS_FILE,
        f"seed-4/{store.LATENTS_FILE}",
        f"seed-5/{store.STATE_FILE}",
    ]
    seen = list(pipe.run(run, files))
    assert [event.done for event in seen if isinstance(event, LoopBegan)] == [2]
    finished = [event.result for event in seen if isinstance(event, Finished)]
    np.testing.assert_array_equal(np.concatenate([result.frames for result in finished]), expected.frames)
    assert [result.metadata["seed"] for result in finished] == [4, 5]
    assert [result.metadata["settings"] for result in finished] == [expected.metadata["settings"]] * 2


def test_a_pipeline_of_one_family_refuses_another(tmp_path, monkeypatch):
    layout = save_layout(tmp_path / "hf", "cogvideox-2b")
    monkeypatch.setattr(CogVideoXPipeline, "family", "another")
    with pytest.raises(InputError, match="is a cogvideox model; open it with Pipeline"):
        CogVideoXPipeline.from_pretrained(layout)


def test_adapters_are_of_their_request(tmp_path):
    """Those of one request do not leak into the next, and what the pipeline has loaded stays loaded."""
    native = tmp_path / "native"
    convert(save_layout(tmp_path / "hf", "cogvideox-5b"), native)
    pipe = Pipeline.from_pretrained(native, dtype="float32")
    files = []
    for seed in (1, 2):
        adapted = add_lora(CogVideoX, pipe.transformer, 2, rngs=nnx.Rngs(seed))
        adapted.blocks.attn.q.b = nnx.Param(jax.random.normal(jax.random.key(seed), adapted.blocks.attn.q.b.shape))
        files.append(save_lora(CogVideoX, tmp_path / f"{seed}.safetensors", adapted))

    def latents(**options):
        video = pipe(PROMPT, **SMALL, output_type="latent", progress=False, **options)
        return video.frames, [record["scale"] for record in video.metadata["settings"].get("lora", [])]

    plain, scales = latents()
    assert scales == []
    once, scales = latents(lora=[f"{files[0]}:0.5"])
    assert scales == [0.5] and np.abs(once - plain).max() > 1e-3
    assert (latents()[0] == plain).all()
    pipe.load_lora(files[1])
    loaded, scales = latents()
    assert scales == [1.0] and np.abs(loaded - plain).max() > 1e-3
    assert (latents(lora=[{"file": files[0], "scale": 0.5}])[0] == once).all() and (latents(lora=[])[0] == plain).all()
    assert (latents()[0] == loaded).all()
    with pytest.raises(InputError, match="lora holds 5; expected a file"):
        latents(lora=[5])


def test_the_callback_stops_all_videos_of_a_run(tmp_path):
    pipe = Pipeline.from_pretrained(save_layout(tmp_path / "hf", "cogvideox-5b"), dtype="float32")
    options = {**SMALL, "num_videos": 3, "seed": 7, "output_type": "latent", "progress": False}
    calls = []
    video = pipe(PROMPT, **options, callback=lambda *args: calls.append(args) or len(calls) == 4)
    assert len(calls) == 4 and video.frames.shape[0] == 2 and video.metadata["seed"] == [7, 8]
    last_step = pipe(PROMPT, **options, callback=lambda step, *_: step == SMALL["num_inference_steps"] - 1)
    assert last_step.metadata["seed"] == 7


NEW_OPTION = """
    gain: tuple[float, float] | None = option(None, "factor and offset of noise", group=SAMPLING, affects_forecast=True)
"""
ITS_USE = """
        if request.gain is not None:
            latents = latents * request.gain[0] + request.gain[1]
"""
USED = """
import json, sys
import numpy as np
from cogvideox_flax import GenerationRequest, Pipeline
from cogvideox_flax.cli import main
from cogvideox_flax.cli.arguments import make_parser
from cogvideox_flax.cli.prepare import given_options
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.generate.store import request_json
from cogvideox_flax.io.values import expected_of
from cogvideox_flax.io.video import read_metadata

how = ["--steps", "1", "--quiet"]
gain = ["--gain", "0.5, 0.25"]
for name, more in (("plain", []), ("scaled", gain)):
    assert main(["generate", "a red circle", "--out", name + ".npz", *how, *more]) == 0
plain, scaled = (np.load(name + ".npz") for name in ("plain", "scaled"))
assert np.abs(plain["latents"] - scaled["latents"]).max() > 0.1
settings = [json.loads(str(each["metadata"]))["settings"] for each in (plain, scaled)]
assert "gain" not in settings[0] and settings[1]["gain"] == [0.5, 0.25]

pipe = Pipeline.from_pretrained(None, "float32")
options = {"num_inference_steps": 1, "output_type": "latent", "progress": False}
video = pipe("a red circle", gain=(0.5, 0.25), **options)
np.testing.assert_array_equal(video.frames, scaled["latents"])
assert video.metadata["settings"] == settings[1]

assert main(["encode", "a red circle", "--dir", "run"]) == 0
assert main(["denoise", "--dir", "run", *how, *gain]) == 0
kept = open("run/stage2_latents.safetensors", "rb").read()
assert main(["denoise", "--dir", "run"]) == 0  # the directory's settings
assert open("run/stage2_latents.safetensors", "rb").read() == kept
assert main(["decode", "--dir", "run"]) == 0
assert read_metadata("run/output_video.mp4")["settings"]["gain"] == [0.5, 0.25]
settings = json.load(open("run/generation_config.json"))
json.dump(settings | {"gain": [1, "x"]}, open("run/generation_config.json", "w"))
assert main(["denoise", "--dir", "run"]) == 2

planned = make_parser().parse_args(["plan", *gain])
assert resolve(GenerationRequest("", **given_options(planned)), pipe.manifest).request.gain == (0.5, 0.25)
"""


def test_a_new_option_is_a_field_and_the_code_that_uses_it(tmp_path):
    """Two lines are added to a copy of the library: it is then known to the shell, Python, stages, plan and recipe."""
    copied = tmp_path / "cogvideox_flax"
    shutil.copytree(ROOT / "cogvideox_flax", copied, ignore=shutil.ignore_patterns("__pycache__"))
    request, run = (copied / "generate" / f"{name}.py" for name in ("request", "run"))
    for path, before, added in (
        (request, "    noise: Float", NEW_OPTION),
        (run, "        scales = guidance_scales(", ITS_USE),
    ):
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, added.lstrip("\n") + before))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COGVIDEOX_HOME": str(tmp_path / "home")}
    done = processes.run([sys.executable, "-c", USED], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no usable gain") == 1 and "Traceback" not in done.stderr


def test_info_says_how_a_video_was_made(run, tmp_path):
    """Of every kind of file that `generate` writes."""
    for name in ("x.mp4", "x.gif", "x.npz", "frames"):
        how = ("--steps", 1, "--seed", 3, "--quiet", "--out", tmp_path / name)
        assert run("generate", "a red circle moves up", *how)[0] == 0
        code, out, err = run("info", tmp_path / name)
        assert code == 0, err
        lines = dict(line.split(maxsplit=1) for line in out.splitlines())
        assert (lines["prompt"], lines["seed"], lines["num_inference_steps"]) == ("a red circle moves up", "3", "1")
        made = json.loads(run("info", tmp_path / name, "--json")[1])
        assert made["prompt"] == lines["prompt"] and made["settings"]["num_inference_steps"] == 1
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:300])
    for name, message in (("other.npz", "did not write it"), ("cut.npz", "is damaged, or is no npz")):
        code, _, err = run("info", tmp_path / name)
        assert code == 2 and message in err and err.count("\n") == 1


ODD = [
    None, True, False, 0, -1, 1, 2.5, 1e300, 10**30, 10**400, 10**5000, float("nan"), float("-inf"), 1j,
    "", "17", "abc", "\ud800", b"x", Path("x"), [], [1], ["a"], [None], [[1]], (0.2, 0.5, 0.7), range(3),
    {}, {"a": 1}, {"file": 5}, {"image": "x"}, {1}, object(), int, len, np.float32("nan"), np.int64(3), np.bool_(True),
    np.zeros((2, 2)), np.zeros(3), np.array("x"), np.array(None), np.full((1, 2), np.inf), jnp.ones(2), torch.ones(2),
]  # fmt: skip
"""Values that hardly any option takes."""

OTHER_NAMES = ("prompt", "negative_prompt", "num_frames", "tiling", "lora", *MEDIA)
"""Options that some messages do not call by their names."""


@pytest.mark.parametrize("field", dataclasses.fields(GenerationRequest), ids=lambda field: field.name)
def test_odd_values_are_taken_or_refused(field, monkeypatch, tmp_path):
    """With a message of this library, of one line for each fault, that names the option; and never beyond `resolve`."""
    monkeypatch.chdir(tmp_path)
    manifest, taken = read_manifest(hub.EMBEDDED), []
    for value in ODD:
        try:
            found = resolve(GenerationRequest(**{"prompt": "a red circle", field.name: value}), manifest)
        except InputError as e:
            assert len(str(e)) < 1000 and (field.name.split("_")[0] in str(e) or field.name in OTHER_NAMES), str(e)
            continue
        assert json.dumps(request_json(found.request), default=lambda array: array.tolist())
        taken.append(value)
    assert len(taken) < len(ODD) / 2, taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": "17"}, "num_frames is '17'; expected a whole number"),
        ({"num_frames": True}, "num_frames is True; expected a whole number"),
        ({"seed": "1"}, "seed is '1'; expected a whole number"),
        ({"seed": None}, "seed is None; expected a whole number"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5; expected a whole number"),
        ({"height": "480"}, "height is '480'; expected a whole number"),
        ({"window": "9"}, "window is '9'; expected a whole number"),
        ({"fps": "8"}, "fps is '8'; expected a whole number"),
        ({"timesteps": "abc"}, "timesteps is 'abc'; expected a list of numbers"),
        ({"step_cache_full": 3}, "step_cache_full is 3; expected a list of whole numbers"),
        ({"guidance_interval": 0.5}, "guidance_interval is 0.5; expected a list of numbers"),
        ({"guidance_scale": "6"}, "guidance_scale is '6'; expected a number"),
        ({"guidance_scale": True}, "guidance_scale is True; expected a number"),
        ({"skip_layer": "x"}, "skip_layer is 'x'; expected a whole number"),
        ({"tiling": "no"}, "tiling is 'no'; expected true or false"),
        ({"prompt": 5}, "prompt is 5; expected a text or a list of texts"),
        ({"negative_prompt": [None]}, "negative_prompt is [None]; expected a text or a list of texts"),
        ({"encoder_noise": 5}, "encoder_noise is 5; expected a table"),
        ({"encoder_noise": {"image": "x"}}, "encoder_noise of 'image' is 'x'; expected an array of numbers"),
        ({"noise": [[1], 2]}, "noise is [[1], 2]; expected an array of numbers"),
        ({"latents": "x"}, "latents is 'x'; expected an array of numbers"),
        ({"latents": [1]}, "latents must be [B, T, h, w, C]"),
        ({"lora": 5}, "lora holds 5; expected a file"),
        ({"lora": {"file": 5}}, "lora holds {'file': 5}; expected a file"),
    ],
    ids=str,
)
def test_values_of_another_type(options, message):
    with pytest.raises(InputError) as error:
        resolve(GenerationRequest(**{"prompt": "a", **options}), read_manifest(hub.EMBEDDED))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("guidance_scale", float("nan"), "nan; expected a number"),
        ("guidance_scale", float("inf"), "inf; expected a number"),
        ("guidance_scale", 1e300, "1e+300; expected a number"),
        ("guidance_rescale", 2, "2; expected a number from 0 to 1"),
        ("guidance_rescale", float("nan"), "nan; expected a number from 0 to 1"),
        ("guidance", "strong", "'strong'; expected cfg or cfg_zero or apg"),
        ("guidance_interval", [0.5], "[0.5]; expected a list of numbers from 0 to 1: START,STOP"),
        ("guidance_interval", [0, 2], "[0, 2]; expected a list of numbers from 0 to 1: START,STOP"),
        ("skip_layer", -1, "-1; expected a whole number of 0 or more"),
        ("skip_layer_scale", float("nan"), "nan; expected a number"),
        ("timesteps", [], "[]; expected a list of numbers"),
        ("timesteps", [999, float("inf")], "[999, inf]; expected a list of numbers"),
        ("image_scale", 1e300, "1e+300; expected a number above 0"),
        ("image_scale", 0.0, "0.0; expected a number above 0"),
        ("strength", 0.0, "0.0; expected a number above 0 to 1"),
        ("strength", 1.5, "1.5; expected a number above 0 to 1"),
        ("seed", -1, "-1; expected a whole number from 0 to 4294967295"),
        ("seed", 2**32, "4294967296; expected a whole number from 0 to 4294967295"),
        ("num_videos", 0, "0; expected a whole number from 1 to 10000"),
        ("num_videos", 10_001, "10001; expected a whole number from 1 to 10000"),
        ("fps", 0, "0; expected a whole number from 1 to 1000 frames per second"),
        ("fps", -8, "-8; expected a whole number from 1 to 1000 frames per second"),
        ("fps", 7.5, "7.5; expected a whole number from 1 to 1000 frames per second"),
        ("fps", 10**6, "1000000; expected a whole number from 1 to 1000 frames per second"),
        ("fit", "squeeze", "'squeeze'; expected crop or stretch"),
        ("output_type", "pt", "'pt'; expected uint8 or float or latent"),
        ("sparse_attention", "all", "'all'; expected sliding or selective"),
        ("positions", "yarn", "'yarn'; expected riflex"),
        ("window_overlap", 0, "0; expected a whole number of 1 or more frames"),
        ("height", 10**30, f"{10**30}; expected a whole number of at most {2**63 - 1}"),
        ("step_cache", "fbcache", "'fbcache'; expected deepcache or residual"),
        ("step_cache_schedule", [0, 4, 2], "[0, 4, 2]; expected a list of whole numbers from 1 to 1000000: START,END"),
        ("step_cache_schedule", [1, 4], "[1, 4]; expected a list of whole numbers from 1 to 1000000: START,END"),
        ("step_cache_threshold", -1.0, "-1.0; expected a number of 0 or more"),
        ("step_cache_full", [-1], "[-1]; expected a list of whole numbers from 0 to 1000000"),
        ("step_cache_ratios", [], "[]; expected a list of numbers"),
        ("step_cache_ratios", [float("nan")], "[nan]; expected a list of numbers"),
    ],
)
def test_an_option_says_what_it_takes(name, value, words):
    """Without a model; and a whole request says the same."""
    message = f"{name} is {words}"
    with pytest.raises(InputError) as error:
        check_option(name, value)
    assert str(error.value).startswith(message)
    with pytest.raises(InputError) as error:
        resolve(GenerationRequest("a", **{name: value}), read_manifest(hub.EMBEDDED))
    assert str(error.value).startswith(message)


def test_help_says_range_and_default():
    helps = {field.name: help_of(field) for field in dataclasses.fields(GenerationRequest) if field.metadata}
    assert helps["seed"].endswith("; from 0 to 4294967295; default: 0")
    assert helps["fps"].endswith("; from 1 to 1000 frames per second; default: the release's")
    assert helps["strength"].endswith("; above 0 to 1; default: 0.8, with a mask 1")
    assert helps["guidance"].endswith("; default: cfg") and "default" not in helps["tiling"]


def test_noise_of_the_encoder_is_checked_before_anything_is_encoded():
    manifest, image = read_manifest(hub.EMBEDDED_MODELS["embedded-image-to-video"]), np.zeros((64, 64, 3), np.uint8)
    for noise, message in (
        ({"image": np.zeros((1, 1, 8, 8, 16))}, None),
        ({"image": np.zeros(3)}, r"encoder_noise of 'image' must be \(1, 1, 8, 8, 16\); got \(3,\)"),
        ({"imge": np.zeros((1, 1, 8, 8, 16))}, "encoder_noise is of 'imge'; expected that of image"),
        ({"video": np.zeros((1, 1, 8, 8, 16))}, "encoder_noise is of 'video'; expected that of image"),
    ):
        with nullcontext() if message is None else pytest.raises(InputError, match=message):
            resolve(GenerationRequest("a", image=image, encoder_noise=noise), manifest)


def test_values_of_numpy_are_values():
    """Also tuples, ranges, JAX's arrays, and None for no negative prompt."""
    manifest = read_manifest(hub.EMBEDDED)
    noise = np.zeros(manifest.model.resolve_size().latent_shape(2), np.float16)
    odd = GenerationRequest(
        np.array(["a", "b"]), None, num_frames=np.int64(17), height=np.uint16(64), guidance_scale=np.float32(3),
        seed=np.uint32(7), use_dynamic_cfg=np.bool_(False), num_inference_steps=jnp.int32(9),
        latents=jnp.asarray(noise), guidance_interval=(0, np.float64(0.5)), fps=np.array(8),
    )  # fmt: skip
    plain = GenerationRequest(
        ["a", "b"], "", num_frames=17, height=64, guidance_scale=3.0, seed=7, use_dynamic_cfg=False,
        num_inference_steps=9, latents=noise.tolist(), guidance_interval=[0.0, 0.5], fps=8,
    )  # fmt: skip
    found, expected = resolve(odd, manifest).request, resolve(plain, manifest).request
    assert found == expected and found.negative_prompt == ["", ""]
    assert isinstance(found.latents, jax.Array) and found.latents.dtype == jnp.float16
    values = request_json(dataclasses.replace(found, latents=None))
    assert values == request_json(dataclasses.replace(expected, latents=None)) == json.loads(json.dumps(values))
    cached = {"step_cache": "deepcache", "num_inference_steps": 9}
    steps = [
        resolve(GenerationRequest("a", **cached, step_cache_full=full), manifest).request.step_cache_full
        for full in (range(0, 9, 2), (0, 2, 4, 6, 8), np.arange(0, 9, 2))
    ]
    assert steps == [[0, 2, 4, 6, 8]] * 3
