"""What decides a result is in its recipe and in the keys of kept results: nothing stale is given back."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from cogvideox_flax import GenerationRequest, Pipeline
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import journey
from cogvideox_flax.generate.events import Finished, last_of
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.recipe import UNREPEATABLE, deciding, read_recipe, request_values
from cogvideox_flax.generate.request import STAGES
from cogvideox_flax.io.video import read_video
from cogvideox_flax.schedulers import DDIMScheduler
from tests.support.commands import PROMPT, SIZE, generate
from tests.support.reference import make_vae, save_layout
from tests.support.runs import files_in, latents_of

pytest_plugins = ["tests.support.commands"]

QUICK = {"num_frames": 9, "height": 32, "width": 48, "num_inference_steps": 2}


class Halved(DDIMScheduler):
    """A user's own: the same config, another computation."""

    def step(self, *args, **kwargs):
        x, state = super().step(*args, **kwargs)
        return x / 2, state


@pytest.fixture(scope="module")
def pipe(native):
    return Pipeline.from_pretrained(native, "float32")


def array(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def variants(pipe):
    """Requests of which no two make the same video."""
    shape = pipe.resolve(GenerationRequest(PROMPT, **QUICK)).size.latent_shape(1)
    config, features = pipe.manifest.configs["scheduler"], pipe.manifest.model.feature_shapes(1)["prompt_embeds"]
    text = [{"prompt_embeds": array(features, 0), "negative_prompt_embeds": array(features, n)} for n in (1, 2)]
    return {
        "plain": {},
        "seed": {"seed": 1},
        "latents": {"latents": array(shape, 0)},
        "other latents": {"latents": array(shape, 1)},
        "noise": {"scheduler": "dpm", "noise": array((2, *shape), 0)},
        "other noise": {"scheduler": "dpm", "noise": array((2, *shape), 1)},
        "drawn noise": {"scheduler": "dpm"},
        "embeds": {"prompt": "", "text_features": text[0]},
        "other negative embeds": {"prompt": "", "text_features": text[1]},
        "an empty prompt": {"prompt": ""},
        "another schedule": {"scheduler": DDIMScheduler(dataclasses.replace(config, snr_shift_scale=1.0))},
        "a user's scheduler": {"scheduler": Halved(config)},
        "another scheduler": {"scheduler": "uni_pc"},
    }


def run_of(pipe, how):
    return pipe.resolve(GenerationRequest(**{"prompt": PROMPT, **QUICK, **how}))


def test_no_two_videos_have_one_recipe(pipe):
    seen = {}
    for name, how in variants(pipe).items():
        stored = json.dumps(pipe.recipe(run_of(pipe, how)), sort_keys=True)
        assert stored not in seen, f"{name} is recorded as {seen[stored]}"
        seen[stored] = name


def test_kept_results_are_of_the_same_arrays_and_schedulers(pipe, tmp_path, caplog):
    """In one folder one after the other, each makes what it makes alone."""
    caplog.set_level("INFO", "cogvideox_flax")
    files = files_in(pipe, tmp_path)
    for name, options in variants(pipe).items():
        run = run_of(pipe, options)
        alone = latents_of(pipe, run)
        for _ in range(2):
            caplog.clear()
            np.testing.assert_array_equal(latents_of(pipe, run, files), alone, err_msg=name)
        is_foreign = name == "a user's scheduler"
        assert ("reusing" in caplog.text.replace("reusing " + str(tmp_path / "stage1"), "")) != is_foreign, name
        assert caplog.text.count("is not used again") == is_foreign, name


def test_an_object_that_is_the_checkpoints_scheduler_is_its_name(pipe):
    config = pipe.manifest.configs["scheduler"]
    by_name, by_object = (run_of(pipe, {"scheduler": each}) for each in ("ddim", DDIMScheduler(config)))
    assert request_values(by_name) == request_values(by_object)
    assert deciding(request_values(by_name), "encode", "denoise")["noise_schedule"] is None


def test_a_module_of_the_users_is_no_fingerprint_of_the_checkpoint(pipe):
    own = pipe.fingerprints()
    pipe.replace_component("vae", pipe.vae)
    try:
        assert {name for name, value in pipe.fingerprints().items() if value != own[name]} == {"vae"}
    finally:
        pipe.release("vae")
    assert pipe.fingerprints() == own


@pytest.mark.parametrize("name", ["latents", "embeds", "another schedule", "a user's scheduler", "stopped"])
def test_like_says_what_only_python_can_make(run, pipe, native, tmp_path, name):
    options = {"prompt": PROMPT, **variants(pipe).get(name, {}), **QUICK}
    stop = {"callback": lambda step, t, x: True} if name == "stopped" else {}
    prompt = options.pop("prompt")
    pipe(GenerationRequest(prompt, **options), progress=False, **stop).save(tmp_path / "v.mp4")
    recipe = read_recipe(tmp_path / "v.mp4")
    assert any(each in recipe | recipe["settings"] for each in UNREPEATABLE)
    code, _, err = run("generate", "--like", tmp_path / "v.mp4", "--model", native, "--out", tmp_path / "w.mp4")
    assert code == 2 and "was made with more than the options of a run" in err and err.count("\n") == 1


def test_a_directory_of_pythons_is_gone_on_with_there(run, pipe, tmp_path):
    files = dataclasses.replace(files_in(pipe, tmp_path), choice=ModelChoice(None, "embedded"))
    latents_of(pipe, run_of(pipe, variants(pipe)["embeds"]), files, ["encode"])
    code, _, err = run("denoise", "--dir", tmp_path)
    assert code == 2 and "with more than the options of a run (arrays" in err and "go on with it there" in err


@pytest.fixture(scope="module")
def other(tmp_path_factory, native):
    """The same but for its VAE."""
    folder = tmp_path_factory.mktemp("other") / "2b"
    convert(save_layout(tmp_path_factory.mktemp("layout"), "cogvideox-2b", vae=make_vae(seed=9)), folder)
    return folder


def test_another_models_decoder_is_said_and_recorded(paths, native, other, tmp_path, caplog):
    (npz,) = paths(*generate(native, tmp_path / "x.npz"))
    (own,) = paths("decode", npz, "--model", native, "--out", tmp_path / "own.mp4")
    assert "another vae" not in caplog.text
    assert read_recipe(own)["checkpoint"] == read_recipe(npz)["checkpoint"]
    (mixed,) = paths("decode", npz, "--model", other, "--out", tmp_path / "mixed.mp4")
    assert f"{npz} was made by" in caplog.text and "with another vae than this model's" in caplog.text
    made_with = read_recipe(npz)["checkpoint"], read_recipe(mixed)["checkpoint"]
    assert {part for part in made_with[0] if made_with[0][part] != made_with[1][part]} == {"vae"}
    caplog.clear()
    paths("generate", "--like", mixed, "--model", native, "--out", tmp_path / "again.mp4")
    assert f"{mixed} was made by" in caplog.text and "with another vae than this model's" in caplog.text


def test_another_dtype_of_decoding_is_recorded(paths, run, native, tmp_path):
    (npz,) = paths(*generate(native, tmp_path / "x.npz"))
    (video,) = paths("decode", npz, "--model", native, "--dtype", "bfloat16", "--out", tmp_path / "v.mp4")
    settings = read_recipe(video)["settings"]
    assert (settings["dtype"], settings["decode_dtype"]) == ("float32", "bfloat16")


def test_a_run_that_is_stopped_later_says_so(pipe):
    """Of several videos, the one that was stopped."""
    count = []
    stop = lambda step, t, x: count.append(step) or len(count) == 3  # noqa: E731
    result = pipe(PROMPT, num_videos=2, callback=stop, progress=False, **QUICK)
    assert result.metadata["seed"] == [0, 1] and result.metadata["steps_done"] == [None, 1]


def test_a_module_of_the_users_is_used_in_every_stage(pipe, tmp_path):
    """Also where the weights of a stage leave when the next begins."""
    run = run_of(pipe, {})
    plain = latents_of(pipe, run, files_in(pipe, tmp_path / "a"), STAGES)
    pipe.replace_component("transformer", jax.tree.map(lambda x: 0.5 * x, pipe.transformer))
    try:
        used = latents_of(pipe, run, files_in(pipe, tmp_path / "b"), STAGES)
        assert np.abs(used - plain).max() > 0.1
    finally:
        pipe.release("transformer")


def test_a_directory_decoded_with_another_model(paths, copied, other, caplog):
    paths("decode", "--dir", copied, "--model", other, "--overwrite")
    assert "with another vae than this model's" in caplog.text


def test_tiling_is_part_of_a_video(paths, native, tmp_path, monkeypatch):
    """It is in the recipe, of `decode` and of --like; and a directory's later stages have it."""
    tiled = []
    real = journey.decode

    def decode(*args, tiling=False, **how):
        tiled.append(tiling)
        return (yield from real(*args, tiling=False, **how))

    monkeypatch.setattr(journey, "decode", decode)
    monkeypatch.setattr("cogvideox_flax.models.codec.Codec.check_tiling", lambda self: None)
    (video,) = paths(*generate(native, tmp_path / "v.mp4", "--tiling"))
    assert read_recipe(video)["settings"]["tiling"] is True
    (plain,) = paths(*generate(native, tmp_path / "p.mp4"))
    assert "tiling" not in read_recipe(plain)["settings"]
    paths("generate", "--like", video, "--model", native, "--out", tmp_path / "again.mp4")
    folder = tmp_path / "run"
    paths("encode", PROMPT, "--model", native, "--dir", folder, "--dtype", "float32")
    paths("denoise", "--dir", folder, *SIZE, "--steps", 2)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"tiling": True}))
    (staged,) = paths("decode", "--dir", folder)
    assert read_recipe(staged)["settings"]["tiling"] is True
    assert tiled == [True, False, True, True]


def test_the_state_knows_its_extra_frames(tmp_path, home):
    """CogVideoX 1.5: the loop of the README decodes what a call returns."""
    pipe = Pipeline.from_pretrained(save_layout(tmp_path / "1.5", "cogvideox1.5-5b"), "float32")
    request = GenerationRequest(PROMPT, **QUICK)
    *_, state = pipe.denoise(pipe.encode(request, progress=False), request)
    assert (state.extra_latents, state.latents.shape[1], state.video_latents.shape[1]) == (1, 4, 3)
    frames = pipe.decode(state, progress=False)
    assert frames.shape == (1, 9, 32, 48, 3)
    np.testing.assert_array_equal(frames, pipe(request, progress=False).frames)
    np.testing.assert_array_equal(frames, pipe.decode(state.video_latents, progress=False))


def test_a_state_of_something_else_is_refused(pipe):
    request = GenerationRequest(PROMPT, scheduler="uni_pc", **QUICK)
    conditioning = pipe.encode(request, progress=False)
    *_, state = pipe.denoise(conditioning, request)
    wrong = {
        "of another scheduler, uni_pc; this run's is ddim": (state, {"scheduler": "ddim"}),
        "of another scheduler, uni_pc; this run's is euler": (state, {"scheduler": "euler"}),
        "the state has latents": (state, {"num_frames": 17}),
        "after step 7; this run has 2 steps": (dataclasses.replace(state, step=np.int32(7)), {}),
        "of another step cache": (dataclasses.replace(state, cache=np.zeros(3)), {"step_cache": "residual"}),
    }
    for message, (given, changes) in wrong.items():
        with pytest.raises(InputError, match=message):
            pipe.denoise(conditioning, dataclasses.replace(request, **changes), state=given)


def test_what_encode_filled_in_was_not_asked_for(run, paths, native, copied, tmp_path):
    """`denoise` may still choose it, as `generate` may; what was asked for stays."""
    how = ("--model", native, "--dtype", "float32", *SIZE)
    (npz,) = paths("generate", PROMPT, *how, "--timesteps", "999,500,100", "--out", tmp_path / "x.npz")
    folder = tmp_path / "run"
    paths("encode", PROMPT, *how, "--dir", folder)
    assert json.loads((folder / "generation_config.json").read_text())["num_inference_steps"] == 50
    paths("denoise", "--dir", folder, "--timesteps", "999,500,100")
    (video,) = paths("decode", "--dir", folder)
    expected = read_recipe(npz)["settings"]
    assert read_recipe(video)["settings"] == expected and len(expected["timesteps"]) == 3
    paths("denoise", "--dir", folder, "--steps", 2)
    assert "timesteps" not in json.loads((folder / "generation_config.json").read_text())
    shutil.rmtree(folder)
    asked = ("--guidance-scale", 3)  # asked for where it can be
    paths("encode", PROMPT, "--model", native, "--dir", folder, "--dtype", "float32")
    paths("denoise", "--dir", folder, *SIZE, "--steps", 2, *asked)
    paths("denoise", "--dir", folder, "--seed", 5)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert (settings["guidance_scale"], settings["num_inference_steps"], settings["seed"]) == (3, 2, 5)


def test_stages_take_an_adapters_few_steps(paths, tmp_path):
    """As `generate` does."""
    prompt, folder = "a red circle moves up", tmp_path / "run"
    (whole,) = paths("generate", prompt, "--lora", "embedded-four-steps", "--out", tmp_path / "v.mp4")
    paths("encode", prompt, "--dir", folder)
    paths("denoise", "--dir", folder, "--lora", "embedded-four-steps")
    (staged,) = paths("decode", "--dir", folder)
    assert read_recipe(whole)["settings"] == read_recipe(staged)["settings"]
    assert read_recipe(whole)["settings"]["num_inference_steps"] == 4
    np.testing.assert_array_equal(read_video(whole)[0], read_video(staged)[0])


def test_a_finished_video_holds_its_recipe(pipe):
    finished = last_of(journey.generate(pipe, run_of(pipe, {})))
    assert (
        isinstance(finished, Finished) and finished.result.metadata["checkpoint"].keys() == pipe.fingerprints().keys()
    )
