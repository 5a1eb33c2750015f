"""Every feature in every way of running it: a row of FEATURES is a video, and each test is a way of making it again.

What is resumed, done in stages, made again from its recipe or from a line of a queue is the uninterrupted run. A new
feature that changes a video is a new row.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from cogvideox_flax import GenerationRequest, Pipeline
from cogvideox_flax.conversion.export import export
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.journey import generate
from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.queue import batches, items_of, jobs_of, run_of
from cogvideox_flax.generate.recipe import fields_of
from cogvideox_flax.hub import EMBEDDED
from cogvideox_flax.sharding import make_mesh
from tests.support import xla_options
from tests.support.commands import ROOT, python
from tests.support.reference import relative_error
from tests.support.runs import files_in, latents_of, stop_after

XLA_OPTIONS = {"xla_backend_optimization_level": 1} | xla_options.AS_USERS
"""With users' way of rounding, loops and single steps have equal bits; a program that is optimized a little takes twice
as long to compile, and 2,000 steps half as long to run."""

STEPS = 6

FEATURES = {
    "ddim": {"scheduler": "ddim"},
    "dpm": {"scheduler": "dpm"},
    "euler_ancestral": {"scheduler": "euler_ancestral"},
    "dpmpp_2m": {"scheduler": "dpmpp_2m"},
    "dpmpp_2m_sde": {"scheduler": "dpmpp_2m_sde"},
    "uni_pc": {"scheduler": "uni_pc"},
    "lcm": {"scheduler": "lcm", "guidance_scale": 1.0},
    "timesteps": {"num_inference_steps": None, "timesteps": [999, 800, 500, 300, 100, 0]},
    "seed": {"seed": 7},
    "negative prompt": {"negative_prompt": "a blue circle"},
    "no guidance": {"guidance_scale": 1.0},
    "dynamic guidance": {"use_dynamic_cfg": True},
    "guidance that rises by the index": {"use_dynamic_cfg": "index"},
    "cfg_zero": {"guidance": "cfg_zero"},
    "apg": {"guidance": "apg", "guidance_scale": 4.0},
    "rescaled": {"guidance_rescale": 0.7},
    "interval": {"guidance_interval": [0.2, 0.6]},
    "skip_layer": {"skip_layer": 3, "skip_layer_scale": 1.5},
    "window": {"num_frames": 25, "window": 17, "window_overlap": 8},
    "deepcache": {"step_cache": "deepcache", "step_cache_schedule": [1, 5, 2]},
    "residual": {"step_cache": "residual", "scheduler": "dpm"},
    "taylorseer": {"step_cache": "taylorseer"},
    "taylorseer, few full": {"step_cache": "taylorseer", "step_cache_full": [0, 1, 3], "scheduler": "uni_pc"},
    "first_block": {"step_cache": "first_block", "step_cache_threshold": 0.3},
    "first_block, uni_pc": {"step_cache": "first_block", "step_cache_threshold": 0.3, "scheduler": "uni_pc"},
    "first_block again": {"step_cache": "first_block", "step_cache_full": [0, 2, 5]},
    "magcache measures": {"step_cache": "magcache"},
    "magcache": {"step_cache": "magcache", "step_cache_ratios": [1.0, 1.01, 0.98, 1.02, 0.97, 0.9]},
    "pab": {"step_cache": "pab"},
    "fastercache": {"step_cache": "fastercache"},
    "compiled loop": {"compiled_loop": True},
    "adapter": {"lora": ["embedded-four-steps:0.5"], "distilled": "off"},
    "four steps": {"lora": ["embedded-four-steps"], "num_inference_steps": None, "scheduler": None},
    "video": {"video": [str(ROOT / "docs/images/seeds.gif")], "strength": 0.6},
    "video, dpm, taylorseer": {"video": [str(ROOT / "docs/images/seeds.gif")], "strength": 0.9, "scheduler": "dpm"}
    | {"step_cache": "taylorseer"},
    "crf": {"crf": 30},
    "transformer": {},
    "image": {"image": ["IMAGE"]},
    "image, stretched": {"image": ["IMAGE"], "fit": "stretch", "image_scale": 0.8, "step_cache": "residual"},
}
"""Name -> options beside those of `options_of`; those with an image are the image-to-video model's."""

MODELS = {name: "embedded-image-to-video" for name, how in FEATURES.items() if "image" in how}
MODELS["transformer"] = "another transformer"
"""Name -> the model, where it is not the embedded one of text to video."""

OTHERS_COVER = {"dpmpp_2m", "uni_pc", "no guidance", "deepcache", "taylorseer, few full", "video, dpm, taylorseer"}
OTHERS_COVER |= {"image, stretched"}
"""Features whose code runs in a batch of other rows too: dpm, lcm, residual, taylorseer, video and image."""

PROMPT = "a large green square moves to the left"
OTHER = "a small red circle stays still"


def options_of(name):
    how = {"num_inference_steps": STEPS, "scheduler": "ddim", "seed": 3, "num_frames": 9}
    given = {**how, "force": True, **FEATURES[name]}
    if "image" in given:
        given["image"] = [image_file()]
    return {key: value for key, value in given.items() if value is not None}


@cache
def image_file():
    """A PNG of another aspect ratio than the model's."""
    path = Path(tempfile.mkdtemp(prefix="cogvideox-tests-")) / "image.png"
    Image.linear_gradient("L").resize((96, 64)).convert("RGB").save(path)
    atexit.register(shutil.rmtree, path.parent)
    return str(path)


def open_model(model, mesh=None):
    """A pipeline of one of MODELS; one has another transformer."""
    if model != MODELS["transformer"]:
        return Pipeline.from_pretrained(model, "float32", mesh)
    return Pipeline.from_pretrained(None, "float32", mesh, transformer=transformer_folder())


@cache
def transformer_folder():
    """The embedded model's transformer in diffusers' layout, with another bias at its end."""
    folder = Path(tempfile.mkdtemp(prefix="cogvideox-tests-"))
    atexit.register(shutil.rmtree, folder)
    export(EMBEDDED, folder / "hf", components=["transformer"])
    (file,) = (folder / "hf" / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    tensors["proj_out.bias"] = tensors["proj_out.bias"] + np.float32(0.1)
    save_file(tensors, file)
    return folder / "hf" / "transformer"


@pytest.fixture(scope="module")
def pipes():
    """Name of a feature -> its pipeline."""
    return cache(open_model)


@pytest.fixture
def pipe(pipes, name):
    return pipes(MODELS.get(name))


@pytest.fixture(scope="module")
def whole(pipes):
    """Name -> the run, and its latents when nothing interrupts it."""
    made = {}

    def whole(name):
        if name not in made:
            pipe = pipes(MODELS.get(name))
            run = pipe.resolve(GenerationRequest(PROMPT, **options_of(name)))
            made[name] = run, latents_of(pipe, run)
        return made[name]

    return whole


@pytest.mark.parametrize("name", FEATURES)
def test_killed_and_resumed(pipe, whole, tmp_path, name):
    """After each step, one after the other."""
    run, expected = whole(name)
    files = files_in(pipe, tmp_path)
    for stop in range(1, run.num_steps if not run.request.compiled_loop else 1):
        stop_after(pipe, run, files, stop)
    np.testing.assert_array_equal(latents_of(pipe, run, files), expected)


@pytest.mark.parametrize("name", FEATURES)
def test_stages(pipe, whole, tmp_path, name):
    run, expected = whole(name)
    files = files_in(pipe, tmp_path)
    latents_of(pipe, run, files, ["encode"])
    np.testing.assert_array_equal(latents_of(pipe, run, files, ["denoise"]), expected)


@pytest.mark.parametrize("name", FEATURES)
def test_a_loop_goes_on_from_each_state(pipe, whole, name):
    """With its step cache; without it the loop makes the same, or refuses to."""
    run, expected = whole(name)
    conditioning = pipe.encode(run, progress=False)
    states = list(pipe.denoise(conditioning, run))
    for state in [] if run.request.compiled_loop else states[:-1:2]:
        for given in {id(x): x for x in (state, dataclasses.replace(state, cache=None))}.values():
            try:
                *_, last = pipe.denoise(conditioning, run, state=given)
            except InputError as e:
                assert given.cache is None and "use the step cache of earlier ones" in str(e)
                continue
            np.testing.assert_array_equal(last.latents, expected, err_msg=f"{given}, cache {given.cache is not None}")


@pytest.mark.parametrize("name", FEATURES)
def test_made_again_from_its_recipe(pipe, whole, name):
    run, _ = whole(name)
    recipe = json.loads(json.dumps(pipe.recipe(run)))
    fields = fields_of(recipe, "the recipe")
    fields.pop("dtype")
    fields |= {key: options_of(name)[key] for key in MEDIA if key in fields}  # by their contents in the recipe
    again = pipe.resolve(GenerationRequest(**{"lora": [], **fields, "distilled": "off"}))
    assert pipe.recipe(again) == recipe
    assert again.denoise == run.denoise or run.request.compiled_loop


@pytest.mark.parametrize("name", FEATURES)
def test_a_line_of_a_queue(pipe, whole, name):
    run, _ = whole(name)
    line = json.dumps({"prompt": PROMPT, **options_of(name)})
    (job,), faults = jobs_of({1: line}, {"lora": []}, pipe.manifest, pipe.dtype)
    assert not faults and pipe.recipe(job.run) == pipe.recipe(run)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.further] * (name in OTHERS_COVER)) for name in FEATURES]
)
def test_in_a_batch_of_a_queue(pipe, whole, name):
    """The same up to rounding; what would be another video is not joined."""
    _, expected = whole(name)
    lines = {i: json.dumps({"prompt": prompt, **options_of(name)}) for i, prompt in enumerate((PROMPT, OTHER))}
    jobs, _ = jobs_of(lines, {"lora": []}, pipe.manifest, pipe.dtype)
    groups = batches(jobs, 2)
    assert len(groups) == (2 if name in ("first_block", "first_block, uni_pc") else 1)
    run = run_of(groups[0])
    latents = latents_of(pipe, run)
    assert relative_error(latents[:1], expected) < 1e-3
    assert pipe.recipe(items_of(run, [0])) == pipe.recipe(jobs[0].run)


@pytest.mark.further
@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_a_mesh(pipe, whole, name, mesh):
    run, expected = whole(name)
    on_mesh = open_model(MODELS.get(name), make_mesh(*mesh))
    assert relative_error(latents_of(on_mesh, run), expected) < 1e-3


PROCESS = """
import hashlib, json, pathlib, sys
from cogvideox_flax import GenerationRequest
from tests.support.runs import latents_of
from tests.generate.test_composition import FEATURES, MODELS, PROMPT, open_model, options_of
pipes = {model: open_model(model) for model in {None, *MODELS.values()}}
for pipe in pipes.values():
    pipe.keep_programs(pathlib.Path(sys.argv[1]))
for name in FEATURES:
    pipe = pipes[MODELS.get(name)]
    run = pipe.resolve(GenerationRequest(PROMPT, **options_of(name)))
    print(json.dumps([name, hashlib.sha256(latents_of(pipe, run).tobytes()).hexdigest()]))
"""


@pytest.mark.further
def test_a_second_process(tmp_path):
    """It runs the programs that the first one has compiled."""
    done = [python("-c", PROCESS, tmp_path / "programs", cwd=ROOT) for _ in range(2)]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    first, second = (dict(map(json.loads, each.stdout.splitlines())) for each in done)
    assert first == second and len(first) == len(FEATURES)


def test_the_next_run_of_a_pipeline_is_the_first(pipes, whole):
    """Whatever ran between: other adapters, other options."""
    for name in FEATURES:
        run, expected = whole(name)
        np.testing.assert_array_equal(latents_of(pipes(MODELS.get(name)), run), expected, err_msg=name)


def test_another_transformer_is_another_model(pipes, whole):
    run, latents = whole("transformer")
    plain, expected = whole("ddim")
    assert run.request == plain.request and not np.array_equal(latents, expected)
    own, other = (pipes(MODELS.get(name)).recipe(run)["checkpoint"] for name in ("ddim", "transformer"))
    assert [part for part in own if own[part] != other[part]] == ["transformer"]


def test_two_runs_take_turns(pipes, whole):
    """Each has its own adapters."""
    names = "adapter", "ddim", "four steps"
    turns = {}
    for name in names:
        run, _ = whole(name)
        turns[name] = generate(pipes(None), run.varied(output_type="latent")), []
    while any(events is not None for events, _ in turns.values()):
        for name, (events, seen) in turns.items():
            if events is not None and (event := next(events, None)) is not None:
                seen.append(event)
            else:
                turns[name] = None, seen
    for name, (_, seen) in turns.items():
        np.testing.assert_array_equal(seen[-1].result.frames, whole(name)[1], err_msg=name)
