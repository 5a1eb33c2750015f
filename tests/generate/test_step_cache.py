"""The step cache: its schedule, what a cached step computes, and that every kind of run agrees with the step loop."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from cogvideox_flax import GenerationRequest, Pipeline, cli, sharding
from cogvideox_flax.checkpoint import Manifest, read_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import journey, store
from cogvideox_flax.generate.denoise import MIN_ROWS
from cogvideox_flax.generate.events import result_of
from cogvideox_flax.generate.media import UNSEEN
from cogvideox_flax.generate.predict.step_cache import SCOPE, default_schedule, scheduled_steps
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.hub import EMBEDDED
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.video import read_metadata
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.nn.stack import scan_attended, scan_layers
from cogvideox_flax.plan import forecast
from tests.support import xla_options

XLA_OPTIONS = xla_options.AS_USERS
"""As users compile: with them, loops and single steps have equal bits."""

LAST_BLOCK = ("deepcache", "residual")
"""The forms whose cached steps run the last block."""

PROMPT = "a red circle moves to the right"
STEPS = 5
SCHEDULE = (1, 4, 2)  # full, full, cached, full, full: the last step of the middle is full again
SOME_CACHED = (1, 5, 3)  # full, full, cached, cached, full
ALL_FULL = (5, 5, 1)


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained(None, "float32")


def request(form=None, schedule=None, **options):
    how = {
        "num_frames": 9,
        "force": True,
        "num_inference_steps": STEPS,
        "seed": 3,
        "scheduler": "ddim",
        "output_type": "latent",
    }
    return GenerationRequest(PROMPT, step_cache=form, step_cache_schedule=schedule, **how | options)


def latents_of(pipe, asked):
    return np.asarray(pipe(asked, progress=False).frames)


# --- the schedule


def test_the_reference_schedule():
    full = np.flatnonzero(scheduled_steps((11, 45, 4), 50)).tolist()
    assert full == [*range(11), *range(11, 45, 4), *range(45, 50)] and len(full) == 25
    np.testing.assert_array_equal(scheduled_steps(None, 50), scheduled_steps((11, 45, 4), 50))


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 20, 30, 100])
def test_the_default_is_scaled_to_the_steps(steps):
    start, end, interval = default_schedule(steps)
    assert 1 <= start <= end <= steps and interval == 4
    assert scheduled_steps(None, steps)[0]
    if steps >= 20:
        assert 0.45 <= scheduled_steps(None, steps).mean() <= 0.55


def test_some_schedules():
    assert scheduled_steps(SCHEDULE, 5).astype(int).tolist() == [1, 1, 0, 1, 1]
    assert scheduled_steps(SOME_CACHED, 5).astype(int).tolist() == [1, 1, 0, 0, 1]
    assert scheduled_steps(ALL_FULL, 5).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_cache_schedule": (1, 2, 3)}, "give step_cache too"),
        ({"step_cache": "residual", "step_cache_schedule": (1, 6, 2)}, "START <= END <= 5"),
        ({"step_cache": "residual", "step_cache_schedule": (4, 2, 2)}, "START <= END <= 5"),
        ({"step_cache": "deepcache", "num_frames": 25, "window": 9}, "leave step_cache or the window out"),
    ],
)
def test_refused(pipe, options, message):
    asked = dataclasses.replace(GenerationRequest(PROMPT, num_frames=9, force=True, num_inference_steps=5), **options)
    with pytest.raises(InputError, match=message):
        pipe.resolve(asked)


# --- what a step computes


def by_hand(pipe, asked):
    """The loop with the transformer's own methods."""
    run, conditioning = pipe.resolve(asked), pipe.encode(asked, progress=False)
    guided, form = run.guided, run.request.step_cache
    x, noise = result_of(journey._start_noise(pipe, run))
    _, state = run.start(conditioning, x, noise)
    x, scheduler_state, model, cache = state.latents, state.scheduler_state, pipe.transformer, None
    embed = jax.jit(CogVideoX.embed)
    blocks = jax.jit(type(model).run_blocks, static_argnames=("start", "stop"))
    head = jax.jit(type(model).head)
    for i, is_full in enumerate(run.full_steps):
        doubled = jnp.concatenate([x, x]) if guided else x
        tokens = embed(model, doubled, run.guidance.features(conditioning), run.steps.timesteps[i])
        if is_full:
            before = blocks(model, tokens, stop=model.config.layers - 1)
            cache = before.x if form == "deepcache" else before.x - tokens.x
        else:
            before = dataclasses.replace(tokens, x=cache if form == "deepcache" else tokens.x + cache)
        v = head(model, blocks(model, before, start=model.config.layers - 1)).astype(jnp.float32)
        if guided:
            scale = run.start(conditioning, x, noise)[0].guidance[i]
            v = v[:1] + scale * (v[1:] - v[:1])
        draw = None
        if run.scheduler.needs_noise:
            key = jax.random.fold_in(jax.random.fold_in(noise, i), 0)
            draw = jax.random.normal(key, x.shape[1:], jnp.float32)[None]
        x, scheduler_state = run.scheduler.step(run.steps, i, v, x, scheduler_state, draw)
    return np.asarray(x)


@pytest.mark.parametrize("form", LAST_BLOCK)
@pytest.mark.parametrize(("scheduler", "guidance"), [("ddim", 1), ("ddim", 6), ("dpm", 6)])
def test_a_cached_step_is_its_definition(pipe, form, scheduler, guidance):
    asked = request(form, SOME_CACHED, scheduler=scheduler, guidance_scale=guidance)
    found, expected = latents_of(pipe, asked), by_hand(pipe, asked)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())
    exact = latents_of(pipe, request(scheduler=scheduler, guidance_scale=guidance))
    assert np.abs(found - exact).max() > 1e-2 * exact.std()  # it does leave something out


@pytest.mark.parametrize("form", LAST_BLOCK)
@pytest.mark.parametrize(("scheduler", "guidance"), [("ddim", 6), ("dpm", 1)])
def test_full_steps_alone_are_the_exact_run(pipe, form, scheduler, guidance):
    how = {"scheduler": scheduler, "guidance_scale": guidance}
    np.testing.assert_array_equal(
        latents_of(pipe, request(form, ALL_FULL, **how)), latents_of(pipe, request(**how)), strict=True
    )


def test_without_a_cache_there_is_no_choice_in_the_program(pipe):
    def text(asked):
        ((program, args, _),) = pipe.resolve(asked).abstract("denoise")
        return str(jax.make_jaxpr(program)(*args)), args

    (without, args), (cached, cached_args) = text(request()), text(request("residual"))
    assert args[1].full_steps is None and args[2].cache is None
    assert cached_args[2].cache.dtype == np.float32 and cached_args[1].full_steps.shape == (MIN_ROWS,)
    assert cached.count("branches=") == without.count("branches=") + 1 and f"{SCOPE}=" not in without


def test_one_program_serves_all_schedules(pipe, capsys):
    latents_of(pipe, request("residual", SCHEDULE, compiled_loop=True))
    capsys.readouterr()
    pipe(request("residual", ALL_FULL, compiled_loop=True))
    assert "compiling the denoising" not in capsys.readouterr().err


# --- kinds of runs


@pytest.mark.parametrize("form", [pytest.param("deepcache", marks=pytest.mark.further), "residual"])
def test_loops_agree(pipe, form):
    one_by_one = latents_of(pipe, request(form, SOME_CACHED))
    np.testing.assert_array_equal(latents_of(pipe, request(form, SOME_CACHED, compiled_loop=True)), one_by_one)
    frames, at_once = (
        pipe(request(form, SOME_CACHED, output_type="float", one_program=one), progress=False).frames
        for one in (False, True)
    )
    np.testing.assert_allclose(at_once, frames, atol=1e-4)


def test_several_videos_and_callbacks(pipe):
    both = pipe(request("residual", SOME_CACHED, num_videos=2), progress=False)
    for i, seed in enumerate((3, 4)):
        alone = pipe(request("residual", SOME_CACHED, seed=seed), progress=False)
        np.testing.assert_array_equal(both.frames[i : i + 1], alone.frames)
    settings = both.metadata["settings"]
    assert (settings["step_cache"], settings["step_cache_schedule"]) == ("residual", list(SOME_CACHED))
    seen = []
    pipe(request("deepcache", SCHEDULE), callback=lambda i, t, x: seen.append((i, t)) or i == 3, progress=False)
    assert seen == [(0, 999), (1, 799), (2, 599), (3, 399)]


@pytest.mark.parametrize("mesh", [(2, 4, 1), pytest.param((2, 2, 1, True), marks=pytest.mark.further)], ids=str)
def test_a_mesh_computes_the_same(pipe, mesh):
    on = sharding.make_mesh(*mesh)
    spread = Pipeline.from_pretrained(None, "float32", on)
    asked = request("residual", SOME_CACHED)
    *_, state = spread.denoise(spread.encode(asked, progress=False), asked)
    assert state.cache.sharding.spec == PartitionSpec("dp", "sp")
    expected = latents_of(pipe, asked)
    np.testing.assert_allclose(state.latents, expected, atol=1e-3 * expected.std())
    shapes = spread.resolve(asked).cache_shapes(on)
    assert (shapes.shape, shapes.sharding.spec) == (state.cache.shape, PartitionSpec("dp", "sp", None))


def test_images_are_part_of_the_tokens():
    manifest = Manifest.of_release(RELEASES["cogvideox-5b-i2v"])
    asked = GenerationRequest(PROMPT, image=[UNSEEN], step_cache="residual")
    shape = resolve(asked, manifest, "bfloat16").cache_shapes(None)
    assert (shape.shape, shape.dtype) == ((2, 226 + 13 * 30 * 45, 48 * 64), np.float32)


# --- going on


@pytest.mark.parametrize("form", LAST_BLOCK)
def test_a_loop_goes_on_from_each_of_its_states(pipe, form):
    asked = request(form, SOME_CACHED, scheduler="dpm")
    conditioning = pipe.encode(asked, progress=False)
    found = list(pipe.denoise(conditioning, asked))
    for state in found[:-1]:
        *_, last = pipe.denoise(conditioning, asked, state=state)
        np.testing.assert_array_equal(last.latents, found[-1].latents)
    run = pipe.resolve(asked)
    assert [run.may_resume(done) for done in range(STEPS + 1)] == [True, True, False, False, True, True]
    for done, state in enumerate(found[:-1], 1):
        bare = dataclasses.replace(state, cache=None)
        if run.may_resume(done):
            *_, last = pipe.denoise(conditioning, asked, state=bare)
            np.testing.assert_array_equal(last.latents, found[-1].latents)
        else:
            with pytest.raises(InputError, match="use the step cache of earlier ones"):
                pipe.denoise(conditioning, asked, state=bare)


COMMAND = ["generate", PROMPT, "--num-frames", "9", "--force", "--steps", "6", "--dtype", "float32", "--quiet"]
COMMAND += ["--step-cache", "deepcache", "--step-cache-schedule", "1,6,3"]  # full: 0, 1, 4


@pytest.mark.parametrize("stopped_after", [2, 3, 4, 5])
def test_a_stopped_run_goes_on_before_a_full_step(tmp_path, monkeypatch, capsys, stopped_after):
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    assert cli.main([*COMMAND, "--out", str(whole)]) == 0
    keep, began, started = store.StateKeeper.keep, journey.LoopBegan, []

    def interrupted(self, state):
        keep(self, state)
        if int(state.step) == stopped_after and len(started) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(store.StateKeeper, "keep", interrupted)
    monkeypatch.setattr(journey, "LoopBegan", lambda *args: started.append(args[-1]) or began(*args))
    assert cli.main([*COMMAND, "--out", str(parts)]) == 130
    folder = tmp_path / "parts.npz.stages"
    full_next = 1 if stopped_after < 4 else 4
    with TensorFile(folder / store.STATE_FILE) as file:
        assert set(file.tensors) <= {"latents", "sampler"}  # what the cache keeps is not written
        assert int(file.metadata["step"]) == full_next
    capsys.readouterr()
    assert cli.main([*COMMAND, "--out", str(parts)]) == 0
    assert started == [0, full_next]
    np.testing.assert_array_equal(np.load(parts)["latents"], np.load(whole)["latents"])


def test_stage_files_know_the_cache(tmp_path, capsys):
    folder = str(tmp_path / "run")
    how = ["--dir", folder, "--dtype", "float32", "--quiet"]
    assert cli.main(["encode", PROMPT, "--num-frames", "9", "--force", *how]) == 0
    cached = ["denoise", "--steps", "4", "--step-cache", "residual", "--step-cache-schedule", "1,4,3"]
    assert cli.main([*cached, *how]) == 0
    latents = (tmp_path / "run" / store.LATENTS_FILE).read_bytes()
    assert cli.main(["denoise", *how]) == 0  # the directory's settings
    assert (tmp_path / "run" / store.LATENTS_FILE).read_bytes() == latents
    assert cli.main(["decode", *how]) == 0
    settings = read_metadata(tmp_path / "run" / store.VIDEO_FILE)["settings"]
    assert (settings["step_cache"], settings["step_cache_schedule"]) == ("residual", [1, 4, 3])
    assert cli.main(["denoise", "--step-cache-schedule", "1,9,3", *how]) == 2
    assert "START <= END <= 4" in capsys.readouterr().err


# --- layers and the planner


def test_a_range_of_layers_copies_no_stack():
    weights = jax.random.normal(jax.random.key(0), (12, 64, 64)) / 8
    x = jnp.ones((2, 64))

    def body(x, weight):
        return jnp.tanh(x @ weight), None

    for start, stop in ((0, None), (0, -1), (-1, None), (3, 7), (5, 5)):
        program = jax.jit(lambda x, w, start=start, stop=stop: scan_layers(body, x, w, start, stop)).lower(x, weights)
        expected = x
        for weight in weights[start:stop]:
            expected = body(expected, weight)[0]
        compiled = program.compile()
        np.testing.assert_allclose(compiled(x, weights), expected, atol=1e-6)
        assert compiled.memory_analysis().temp_size_in_bytes < 3 * weights[0].nbytes
        single = nnx.List(list(weights))
        np.testing.assert_allclose(scan_layers(body, x, single, start, stop), expected, atol=1e-6)


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_layer_that_does_not_attend_once_is_refused(calls, stacked):
    """Such as one with self- and cross-attention: the second would get the first one's result."""

    def layer(x, weight, attend):
        for _ in range(calls):
            x = x + attend(x, x, x) * weight
        return x

    weights = jnp.ones(3) if stacked else nnx.List([jnp.ones(()) for _ in range(3)])
    with pytest.raises(ValueError, match=f"attends {calls} times; expected once"):
        scan_attended(layer, lambda q, k, v: v, jnp.ones((1, 4, 2, 2)), weights)


@pytest.mark.slow
def test_on_a_tpu_no_stack_of_weights_is_copied():
    """With the whole step in the choice, XLA copied those of q and k into another layout: 1.6 GiB."""
    manifest = Manifest.of_release(RELEASES["cogvideox-5b"])
    runs = (resolve(GenerationRequest("", step_cache=form), manifest, "bfloat16") for form in (None, "residual"))
    exact, cached = (next(forecast(run, "v6e:2x4", (2, 4, 1), ["denoise"])) for run in runs)
    assert cached.temp_gib - exact.temp_gib < 0.5


def test_the_planner_counts_cached_steps():
    manifest = read_manifest(EMBEDDED)

    def work(**options):
        run = resolve(GenerationRequest("", **options), manifest, "float32")
        (stage,) = forecast(run, "v6e:2x2", (1, 2, 1), ["denoise"])
        return stage

    exact, half = work(), work(step_cache="residual")
    blocks = manifest.configs["transformer"].layers
    assert 0.5 < half.flops / exact.flops < 0.5 + 0.8 / blocks  # 25 of 50 full steps, and 25 of one block
    assert half.estimated_s < 0.8 * exact.estimated_s
