"""A model that knows little says so: words, images and sizes outside of its training, and none inside."""

from __future__ import annotations

import dataclasses
import logging
import re

import numpy as np
import pytest
from PIL import Image

from cogvideox_flax import GenerationRequest, hub
from cogvideox_flax.checkpoint import Domain, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.queue import jobs_of
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.io.values import load_json
from cogvideox_flax.io.video import read_video
from tests.support.commands import ROOT
from tests.support.reference import SHARED
from weights.toy_world import world
from weights.toy_world.make.diffusion import domain

pytest_plugins = ["tests.support.commands"]

IMAGE_TO_VIDEO = hub.EMBEDDED.with_name("embedded_image_to_video")

OUTSIDE = (
    "a panda plays guitar",
    "a cat",
    "two red circles move to the right",
    "three blue squares",
    "a pink circle moves up",
    "a red circle bounces",
    "a red hexagon moves left",
    "A dog runs on the beach at sunset.",
    "ein roter Kreis bewegt sich nach rechts",
    "красный круг движется вправо",
    "赤い丸が右へ動く",
    "a red circle moves to the right and rotates",
    "a huge green triangle moves down",
    "a blue square on a green lawn",
    "a red circel moves to the right",
    "cinematic, 4k, a red circle moves to the right",
    "a small red circle on a red background with text",
    "a grey square moves up",
    "an orange ball rolls to the left",
    "12 circles move up",
    "red",
    "a circle moves up",
    "a circle moves up on a white background",
)

INSIDE = (  # no motion, which the model chooses; a colour that it knows as that of backgrounds
    "a red circle",
    "a red circle on a white background",
    "a green triangle and a blue square",
    "a small white square",
    "a black circle moves up on a white background",
)


@pytest.fixture(scope="module")
def known():
    return read_manifest(hub.EMBEDDED).domain


def first_frames(count):
    return [world.sample_clip(3, i, "any").video[0] for i in range(count)]


def warnings(caplog, request):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resolve(request, read_manifest(hub.EMBEDDED))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("folder", [hub.EMBEDDED, IMAGE_TO_VIDEO], ids=["text", "image"])
def test_the_embedded_models_know_the_world_that_they_were_trained_on(folder):
    assert read_manifest(folder).domain == domain()


@pytest.mark.parametrize("prompt", OUTSIDE)
def test_what_a_prompt_says_that_the_model_does_not_know_is_named(known, caplog, prompt):
    (said,) = warnings(caplog, GenerationRequest(prompt))
    assert all(works in said for works in known.prompts) and len(known.prompts) == 3
    unknown = [word for word in prompt.lower().replace(",", "").replace(".", "").split() if word not in known.words]
    assert all(repr(word) in said for word in unknown)
    if not unknown:
        assert " says no " in said


@pytest.mark.parametrize("prompt", INSIDE)
def test_what_a_prompt_may_leave_out_or_call_otherwise(caplog, prompt):
    assert warnings(caplog, GenerationRequest(prompt)) == []


@pytest.mark.parametrize("page", ["README.md", "docs/queue.md", "docs/few_steps.md", "docs/benchmarks.md"])
def test_the_prompts_of_our_own_pages_are_known(known, page):
    text = (ROOT / page).read_text().replace("\n", " ")
    calls = re.findall(r'(?:cogvideox generate|pipe\(|GenerationRequest\(|"prompt":) ?"([^"]+)"([^\n`]{0,60})', text)
    quoted = re.findall(r'"(an? [^"]*(?:circle|square|triangle|ball)[^"]*)"', text)
    prompts = {prompt for prompt, rest in calls if "--model" not in rest} | {*quoted}
    prompts = {prompt for prompt in prompts if re.search("circle|square|triangle|ball", prompt)}
    assert prompts and {prompt: known.prompt_warning(prompt) for prompt in prompts} == dict.fromkeys(prompts)


def test_an_image_shows_what_a_prompt_leaves_out(known, caplog):
    image = first_frames(1)[0]
    with caplog.at_level(logging.WARNING):
        resolve(GenerationRequest("it moves up", image=image), read_manifest(IMAGE_TO_VIDEO))
        assert "does not know the word 'it'" in caplog.text
        caplog.clear()
        for prompt in ("the circle moves up", "moves up"):
            resolve(GenerationRequest(prompt, image=image), read_manifest(IMAGE_TO_VIDEO))
            resolve(GenerationRequest(prompt, video=np.stack([image] * 17)), read_manifest(hub.EMBEDDED))
    assert caplog.messages == []
    assert "says no colour" in known.prompt_warning("the circle moves up")


def test_a_run_says_once_what_the_model_shows(known, caplog):
    (said,) = warnings(caplog, GenerationRequest(["a panda", "a circle moves up", "a red ball moves up"]))
    assert said.count(known.subject) == 1
    assert "'panda'; the prompt 'a circle moves up' says no colour" in said


def test_a_queue_says_once_which_lines_hold_unknown_words(known, caplog):
    lines = {1: "a red ball moves up", 3: "a panda", 4: "a circel", 6: "a panda", 7: "a dog"}
    lines |= {number: f"word{number}" for number in range(10, 20)}
    with caplog.at_level(logging.WARNING):
        jobs, faults = jobs_of(lines, {}, read_manifest(hub.EMBEDDED))
    assert (len(jobs), faults) == (len(lines), {})
    (said,) = caplog.messages
    assert said.startswith(
        "line 3 and 1 more: the model does not know the word 'panda'; line 4: the model does not know"
    )
    assert "(did you mean 'circle'?); line 7: the model does not know the word 'dog'; line 10: " in said
    assert "line 11: " in said and "line 12" not in said
    assert said.endswith(f"; 8 more such lines{known.summary}")


def test_a_near_word_is_offered(known):
    assert "'circel' (did you mean 'circle'?)" in known.prompt_warning("a red circel moves up")


def test_no_prompt_of_the_training_is_unknown(known):
    prompts = [world.sample_clip(5, i, "any", frames=17, size=8).prompt for i in range(256)]
    assert len(set(prompts)) > 200
    assert [said for prompt in (*prompts, *known.prompts, "") if (said := known.prompt_warning(prompt))] == []
    assert known.prompt_warning(prompts[0].upper() + "!") is None


def test_negative_prompts_are_read_and_each_is_said_once(caplog):
    (said,) = warnings(caplog, GenerationRequest(["a red ball moves up"] * 2, negative_prompt="blurry"))
    assert "'blurry'" in said


def test_an_adapter_may_bring_words(known, monkeypatch, caplog):
    monkeypatch.setattr("cogvideox_flax.generate.resolve.describe_lora", lambda *_: {"file": "a", "scale": 1.0})
    assert warnings(caplog, GenerationRequest("a panda", lora="a.safetensors")) == []


def test_images_of_the_training_are_known_and_others_are_not(known):
    rng = np.random.default_rng(0)
    inside = first_frames(256)
    pure = np.full((64, 64, 3), 255, np.uint8)
    pure[10:40, 10:40] = 0, 0, 255
    inside.append(pure)
    assert [i for i, image in enumerate(inside) if known.image_warning("x", image)] == []
    slope = np.linspace(0, 255, 64).astype(np.uint8)[None, :, None].repeat(64, 0).repeat(3, 2)
    noise, cyan = rng.integers(0, 256, (64, 64, 3)), np.full((64, 64, 3), (0, 255, 255))
    for image in (noise.astype(np.uint8), slope, cyan.astype(np.uint8)):
        assert "x is like no image of the model's training" in known.image_warning("x", image)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real images and clips at {SHARED}")
def test_photographs_are_named(known, caplog):
    files = [SHARED / "data" / "media" / name for name in ("hiker_240x368_49f.mp4", "horse_480x720_49f.mp4")]
    frames = [read_video(file)[0][0] for file in files]
    for frame in frames:
        small = np.asarray(Image.fromarray(frame).resize((64, 64)))
        assert known.image_warning("x", small)
    beach = SHARED / "data" / "media" / "beach_480x720.png"
    request = GenerationRequest("a red circle moves up", image=beach)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        resolve(request, read_manifest(IMAGE_TO_VIDEO))
    assert any(f"{beach} is like no image" in record.getMessage() for record in caplog.records)
    said = warnings(caplog, GenerationRequest("a red circle moves up", video=files[0]))
    assert any(f"{files[0]} is like no image" in line for line in said)


SIZES = [{"num_frames": 9}, {"num_frames": 33}, {"height": 128, "width": 128}, {"height": 64, "width": 96}]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_without_a_usable_video_is_refused(caplog, size):
    manifest, prompt = read_manifest(hub.EMBEDDED), "a red circle moves up"
    with pytest.raises(InputError, match=r"no usable video of .*; it knows 17 frames at 64x64. .*--force"):
        resolve(GenerationRequest(prompt, **size), manifest)
    assert resolve(GenerationRequest(prompt, force=True, **size), manifest).request.force
    assert warnings(caplog, GenerationRequest(prompt, num_frames=33, window=17)) == []


def test_on_the_command_line(run, tmp_path, caplog):
    code, _, stderr = run("generate", "a panda plays guitar", "--num-frames", 33, "--out", tmp_path / "x.mp4")
    assert code == 2 and stderr.count("\n") == 1 and "33 frames" in stderr and "--window 17" in stderr
    how = ("--steps", 1, "--out", tmp_path / "x.npz", "--dir", tmp_path / "run", "--quiet")
    code, _, stderr = run("generate", "a panda plays guitar", "--num-frames", 9, "--force", *how)
    assert code == 0 and caplog.text.count("'panda', 'plays', 'guitar'") == 1
    code, _, stderr = run("decode", "--dir", tmp_path / "run", "--out", tmp_path / "x.gif", "--quiet")
    assert code == 0, stderr  # its settings say that it was forced


def test_a_checkpoint_without_a_domain_takes_everything(caplog):
    manifest = dataclasses.replace(read_manifest(hub.EMBEDDED), domain=None)
    with caplog.at_level(logging.WARNING):
        resolve(GenerationRequest("a panda"), manifest)
    assert not caplog.records
    assert "domain" not in manifest.to_json()


@pytest.mark.parametrize(
    ("field", "value"), [("words", "a b"), ("num_frames", "17"), ("colours", [[1, 2]]), ("stated", []), ("more", 1)]
)
def test_a_damaged_domain_is_refused(tmp_path, field, value):
    raw = load_json(hub.EMBEDDED / "config.json")
    raw["domain"][field] = value
    with pytest.raises(ValueError, match="domain"):
        Domain.from_json(raw["domain"])


def test_it_is_read_back(known):
    assert Domain.from_json(dataclasses.asdict(known)) == known
