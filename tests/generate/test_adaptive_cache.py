"""Step caches that decide themselves, extrapolate, or leave out a part of a step: against diffusers' hooks; meshes,
stops, replays."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from flax import nnx

from cogvideox_flax import GenerationRequest, Pipeline, cli, sharding
from cogvideox_flax.checkpoint import Manifest, load_transformer
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import journey, store
from cogvideox_flax.generate.predict.adaptive import CACHED, FULL, FirstBlocks, MagCache, TeaCache, magcache_steps
from cogvideox_flax.generate.predict.parts import FasterCache, PyramidBroadcast, TaylorSeer
from cogvideox_flax.generate.predict.plain import Plain, StepInfo
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.models.cogvideox.few_steps import TEACACHE
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.hunyuan_video15 import few_steps as hunyuan_few_steps
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig
from cogvideox_flax.models.hunyuan_video15.transformer import Transformer
from cogvideox_flax.models.registry import RELEASES
from cogvideox_flax.plan import forecast
from tests.models.test_hunyuan_transformer import inputs as hunyuan_inputs
from tests.models.test_transformer import Rope
from tests.support import xla_options
from tests.support.reference import convert_component, make_transformer, random, relative_error

XLA_OPTIONS = xla_options.AS_USERS
"""As users compile: with them, loops and single steps have equal bits."""

BAR = 1e-4
STEPS = 12
PROMPT = "a red circle moves to the right"


# --- against diffusers, step by step on given latents


@pytest.fixture(scope="module")
def reference():
    return make_transformer("cogvideox-5b", num_layers=4)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    return load_transformer(convert_component("transformer", reference, tmp_path_factory.mktemp("model")), "float32")


@pytest.fixture(scope="module")
def sequence(reference):
    """Latents [2, T, C, h, w] of each step, as from a run: they change slowly, and at different rates."""
    channels = reference.config.in_channels
    start, end = np.array(random(1, 2, 3, channels, 8, 12)), np.array(random(2, 2, 3, channels, 8, 12))
    amounts = np.linspace(0, 1, STEPS) ** 2
    timesteps = np.linspace(999, 20, STEPS).astype(int)
    context = np.array(random(3, 2, 10, reference.config.text_embed_dim))
    return [
        ((start * (1 - a) + end * a).astype(np.float32), context, int(t))
        for a, t in zip(amounts, timesteps, strict=True)
    ]


NOW = [0]
"""The timestep, for hooks that ask for it."""


def run_hooked(reference, sequence, config):
    """diffusers' outputs with a cache, and at which steps the second block ran."""
    ran, outputs = [], []
    handle = reference.transformer_blocks[1].ff.register_forward_hook(lambda *_: ran.append(len(outputs)))
    reference.enable_cache(config)
    try:
        for latents, context, timestep in sequence:
            latents = torch.tensor(latents)
            NOW[:] = [timestep]
            with torch.no_grad(), reference.cache_context("cond_uncond"):
                out = reference(
                    hidden_states=latents,
                    encoder_hidden_states=torch.tensor(context),
                    timestep=torch.tensor([timestep] * 2),
                    image_rotary_emb=Rope(reference)(latents),
                    return_dict=False,
                )[0]
            outputs.append(out.permute(0, 1, 3, 4, 2).numpy())
    finally:
        reference.disable_cache()
        handle.remove()
    return outputs, ran


def run_ours(model, cache, sequence, full=None):
    """Our outputs, and the state at the end."""
    latents, context, _ = sequence[0]
    latents = latents.transpose(0, 1, 3, 4, 2)
    features = {"prompt_embeds": jnp.array(context)}
    tokens = jax.eval_shape(CogVideoX.embed, model, latents, features, np.int32(0))
    shape = jax.ShapeDtypeStruct(latents.shape, jnp.float32)
    state, outputs = empty_of(cache.shapes(model, tokens, shape, len(sequence))), []
    step = jax.jit(cache)
    for i, (latents, _, timestep) in enumerate(sequence):
        is_full = None if full is None else jnp.array(full[i])
        info = StepInfo(jnp.int32(timestep), jnp.int32(0), is_full, jnp.int32(i))
        out, state = step(model, latents.transpose(0, 1, 3, 4, 2), features, info, state)
        outputs.append(np.asarray(out))
    return outputs, state


def empty_of(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


PLAIN = Plain(CogVideoX.embed)


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
def test_first_block_is_diffusers(reference, model, sequence, threshold):
    expected, ran = run_hooked(reference, sequence, FirstBlockCacheConfig(threshold=threshold))
    outputs, state = run_ours(model, FirstBlocks(PLAIN, threshold), sequence)
    errors = np.asarray(state.errors)[1:]
    assert np.abs(errors / threshold - 1).min() > 1e-3, "no decision hangs on rounding"
    assert np.flatnonzero(np.asarray(state.full) == FULL).tolist() == ran
    for ours, theirs in zip(outputs, expected, strict=True):
        assert relative_error(ours, theirs) < BAR


def test_the_thresholds_decide_differently(model, sequence):
    counts = [
        int((np.asarray(run_ours(model, FirstBlocks(PLAIN, t), sequence)[1].full) == FULL).sum()) for t in (0, 0.6, 1e9)
    ]
    assert counts[0] == STEPS > counts[1] > counts[2] == 1


def test_taylorseer_is_diffusers(reference, model, sequence):
    config = TaylorSeerCacheConfig(use_lite_mode=True, taylor_factors_dtype=torch.float32)
    expected, _ = run_hooked(reference, sequence, config)
    outputs, _ = run_ours(model, TaylorSeer(PLAIN), sequence, TaylorSeer.default_steps(timesteps_of(sequence)))
    for ours, theirs in zip(outputs, expected, strict=True):
        assert relative_error(ours, theirs) < BAR
    exact, _ = run_ours(model, TaylorSeer(PLAIN), sequence, np.ones(STEPS, bool))
    assert relative_error(outputs[8], exact[8]) > 10 * BAR


def test_taylorseers_schedule():
    full = TaylorSeer.default_steps(np.linspace(999, 19, 50))
    assert np.flatnonzero(full).tolist() == [0, 1, 2, 4, 9, 14, 19, 24, 29, 34, 39, 44, 49]


def timesteps_of(sequence):
    return np.array([timestep for _, _, timestep in sequence])


def assert_cached_as_by(config, reference, model, sequence, cache, full):
    """diffusers' outputs with the config; those of cached steps are not the exact ones."""
    expected, _ = run_hooked(reference, sequence, config)
    outputs, _ = run_ours(model, cache, sequence, full)
    exact, _ = run_ours(model, cache, sequence, np.ones(STEPS, bool))
    for ours, theirs, right, is_full in zip(outputs, expected, exact, full, strict=True):
        assert relative_error(ours, theirs) < BAR
        assert is_full or relative_error(ours, right) > 10 * BAR


def test_pab_is_diffusers(reference, model, sequence):
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: NOW[0]
    )
    full = PyramidBroadcast.default_steps(timesteps_of(sequence))
    assert 3 < full.sum() < STEPS
    assert_cached_as_by(config, reference, model, sequence, PyramidBroadcast(PLAIN), full)
    assert PyramidBroadcast.default_steps(np.linspace(999, 19, 50)).sum() == 33


def test_fastercache_is_diffusers_without_its_attentions(reference, model, sequence):
    config = FasterCacheConfig(
        spatial_attention_timestep_skip_range=(-2, -1),
        tensor_format="BFCHW",
        current_timestep_callback=lambda: NOW[0],
    )
    full = FasterCache.default_steps(timesteps_of(sequence))
    assert 3 < full.sum() < STEPS
    assert_cached_as_by(config, reference, model, sequence, FasterCache(PLAIN), full)
    assert FasterCache.default_steps(np.linspace(999, 19, 50)).sum() == 24


def test_teacache_is_its_definition(reference, model, sequence):
    """A restatement in numpy, with the reference's time embedding, and its blocks for the updates."""
    coefficients = 0.03, 0.1, 0.05
    threshold = 0.6

    def embedding(timestep):
        with torch.no_grad():
            t = reference.time_proj(torch.tensor([timestep] * 2))
            return reference.time_embedding(t).numpy().astype(np.float64)

    total, before, full, totals = 0.0, None, [], []
    for i, (_, _, timestep) in enumerate(sequence):
        now = embedding(timestep)
        if before is not None:
            total += np.polyval(coefficients, np.abs(now - before).mean() / np.abs(before).mean())
        before = now
        totals.append(total)
        full.append(i in (0, STEPS - 1) or total > threshold)
        total = 0.0 if full[-1] else total
    assert 2 < sum(full) < STEPS and np.abs(np.array(totals[1:]) / threshold - 1).min() > 1e-3
    outputs, state = run_ours(model, TeaCache(PLAIN, threshold, coefficients), sequence)
    assert (np.asarray(state.full) == FULL).tolist() == full
    np.testing.assert_allclose(np.asarray(state.errors)[1:], totals[1:], rtol=1e-4)

    blocks, head = jax.jit(type(model).run_blocks), jax.jit(type(model).head)
    for i, (latents, context, timestep) in enumerate(sequence):
        features = {"prompt_embeds": jnp.array(context)}
        tokens = CogVideoX.embed(model, latents.transpose(0, 1, 3, 4, 2), features, np.int32(timestep))
        if full[i]:
            after = blocks(model, tokens)
            update = after.x - tokens.x
        after = dataclasses.replace(tokens, x=tokens.x + update)
        assert relative_error(outputs[i], head(model, after)) < BAR


def test_magcache_is_diffusers(reference, model, sequence, capsys):
    """Its measured ratios, and the run with them; also at another number of steps."""
    calibrated, _ = run_hooked(reference, sequence, MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
    measured = [
        float(x) for x in re.search(r"\[([\d., ]+)\]", capsys.readouterr().out.split("=...):")[1])[1].split(",")
    ]
    outputs, state = run_ours(model, MagCache(PLAIN, measures=True), sequence)
    np.testing.assert_allclose(state.errors, measured, rtol=1e-4)
    assert all(relative_error(ours, theirs) < BAR for ours, theirs in zip(outputs, calibrated, strict=True))
    for ratios, threshold in ((measured, 0.3), ([1.0, 0.9, 0.97, 0.8, 0.99], 0.5), ([1.0] * 3, 0.1)):
        config = MagCacheConfig(threshold=threshold, num_inference_steps=STEPS, mag_ratios=ratios)
        expected, ran = run_hooked(reference, sequence, config)
        full = magcache_steps(ratios, STEPS, threshold)
        assert np.flatnonzero(full).tolist() == ran and len(ran) < STEPS
        outputs, _ = run_ours(model, MagCache(PLAIN), sequence, full)
        assert all(relative_error(ours, theirs) < BAR for ours, theirs in zip(outputs, expected, strict=True))


def test_magcache_measures_and_is_replayed(pipe, caplog):
    caplog.set_level("INFO", "cogvideox_flax")
    exact = pipe(request(None), progress=False).frames
    measuring = pipe(request("magcache"), progress=False).frames
    assert relative_error(measuring, exact) < 1e-5
    (found,) = re.findall(r"measured for magcache: --step-cache-ratios ([\d.,]+)", caplog.text)
    ratios = [float(x) for x in found.split(",")]
    assert len(ratios) == 8 and ratios[0] == 1
    asked = request("magcache", step_cache_ratios=ratios, step_cache_threshold=0.5)
    assert not pipe.resolve(asked).full_steps.all()
    assert relative_error(pipe(asked, progress=False).frames, exact) > 1e-3


def test_dbcache_warms_up_and_computes_the_first_blocks(model, sequence):
    outputs, state = run_ours(model, FirstBlocks(PLAIN, 1e9, first=2, warm_up=5), sequence)
    assert np.flatnonzero(np.asarray(state.full) == FULL).tolist() == [0, 1, 2, 3, 4]
    exact, _ = run_ours(model, FirstBlocks(PLAIN, 0.0), sequence)
    assert all(relative_error(outputs[i], exact[i]) < 1e-5 for i in range(5))
    assert relative_error(outputs[8], exact[8]) > 10 * BAR


def test_hunyuans_streams():
    """The video's tokens decide, and the text's updates are kept too."""
    config = TransformerConfig(layers=2, refiner_layers=1, heads=2, head_dim=16, rope_axes=(4, 6, 6), in_channels=9,
                               out_channels=4, text_width=32, glyph_width=24, image_width=20)  # fmt: skip
    leaves, structure = jax.tree.flatten(Transformer(config, rngs=nnx.Rngs(0)))
    model = jax.tree.unflatten(structure, [0.2 * random(i, *x.shape) for i, x in enumerate(leaves)])
    given = {name: jnp.array(x) for name, x in hunyuan_inputs(False).items()}
    latents = jnp.array(random(0, 2, 3, 4, 6, 9))

    def embed(model, latents, features, timestep, next_timestep=None):
        return model.embed(latents, timestep, **features)

    cache = FirstBlocks(Plain(embed), 0.0)
    tokens = jax.eval_shape(embed, model, latents, given, jnp.float32(0))
    state = empty_of(cache.shapes(model, tokens, jax.ShapeDtypeStruct(latents.shape, jnp.float32), 3))
    step = jax.jit(cache)
    info = StepInfo(jnp.float32(900), jnp.float32(0), None, jnp.int32(0))
    first, state = step(model, latents, given, info, state)
    exact = jax.jit(lambda model: model(latents, jnp.float32(900), **given))(model)
    assert relative_error(first, exact) < BAR
    again, after = step(model, latents, given, info._replace(step=jnp.int32(1)), state)
    assert float(after.errors[1]) == 0 and int(after.full[1]) == CACHED
    assert relative_error(again, first) < BAR, "cached, of the same latents"

    # the attentions of both streams
    cache = PyramidBroadcast(Plain(embed))
    state, step = empty_of(cache.shapes(model, tokens, latents, 3)), jax.jit(cache)
    out, state = step(model, latents, given, info._replace(is_full=jnp.array(True)), state)
    assert relative_error(out, exact) < BAR and [x.ndim for x in state] == [4, 4]
    cached = info._replace(is_full=jnp.array(False))
    again, state = step(model, latents, given, cached, state)
    assert relative_error(again, exact) < BAR
    other, _ = step(model, latents + 1, given, cached, state)
    assert relative_error(other, exact) > BAR


# --- whole runs


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained(None, "float32")


def request(form="first_block", **options):
    how = {"num_frames": 9, "force": True, "num_inference_steps": 8, "seed": 3, "output_type": "latent"}
    return GenerationRequest(PROMPT, step_cache=form, **how | options)


def decisions(pipe, asked):
    *_, state = pipe.denoise(pipe.encode(asked, progress=False), asked)
    return np.flatnonzero(np.asarray(state.cache.full) == FULL).tolist(), np.asarray(state.latents)


def test_loops_agree_and_a_run_is_replayed(pipe, caplog):
    caplog.set_level("INFO", "cogvideox_flax")
    asked = request(step_cache_threshold=0.7)
    full, latents = decisions(pipe, asked)
    assert full[0] == 0 and 1 < len(full) < 8
    np.testing.assert_array_equal(decisions(pipe, dataclasses.replace(asked, compiled_loop=True))[1], latents)
    replayed = pipe(request(step_cache_full=full), progress=False)
    np.testing.assert_array_equal(replayed.frames, latents)
    assert replayed.metadata["settings"]["step_cache_full"] == full
    caplog.clear()
    whole = pipe(dataclasses.replace(asked, one_program=False), progress=False).frames
    np.testing.assert_array_equal(whole, latents)
    assert f"{len(full)} of 8 steps were full; --step-cache-full {','.join(map(str, full))} makes" in caplog.text
    exact = pipe(request(None), progress=False).frames
    assert relative_error(decisions(pipe, request(step_cache_threshold=0.0))[1], exact) < 1e-5


@pytest.mark.further
def test_one_program(pipe):
    for asked in (request(step_cache_threshold=0.7), request("taylorseer"), request("pab"), request("fastercache")):
        frames, at_once = (
            pipe(dataclasses.replace(asked, output_type="float", one_program=one), progress=False).frames
            for one in (False, True)
        )
        np.testing.assert_allclose(at_once, frames, atol=1e-4)


@pytest.mark.parametrize(
    "mesh",
    [(1, 2, 2), *(pytest.param(mesh, marks=pytest.mark.further) for mesh in [(2, 4, 1), (2, 2, 1, True), (1, 8, 1)])],
    ids=str,
)
def test_every_mesh_decides_the_same(pipe, mesh):
    spread = Pipeline.from_pretrained(None, "float32", sharding.make_mesh(*mesh))
    asked = request(step_cache_threshold=0.7)
    (full, ours), (expected, theirs) = decisions(spread, asked), decisions(pipe, asked)
    assert full == expected
    np.testing.assert_allclose(ours, theirs, atol=1e-3 * theirs.std())
    forms = ["pab"] + ["taylorseer"] * (mesh != (1, 2, 2))
    forms += ["fastercache"] * (mesh[0] == 1)  # a half of guidance alone does not divide over dp
    for form in forms:
        ours, theirs = (pipe_(request(form), progress=False).frames for pipe_ in (spread, pipe))
        np.testing.assert_allclose(ours, theirs, atol=1e-3 * theirs.std())


COMMAND = [
    "generate",
    PROMPT,
    "--num-frames",
    "9",
    "--force",
    "--steps",
    "8",
    "--seed",
    "3",
    "--dtype",
    "float32",
    "--quiet",
]
COMMAND += ["--step-cache", "first_block", "--step-cache-threshold", "0.7"]


def test_a_stopped_run_goes_on_before_a_full_step(pipe, tmp_path, monkeypatch):
    full, _ = decisions(pipe, request(step_cache_threshold=0.7))
    whole = tmp_path / "whole.npz"
    assert cli.main([*COMMAND, "--out", str(whole)]) == 0
    keep, began, started = store.StateKeeper.keep, journey.LoopBegan, []
    stop = 7

    def interrupted(self, state):
        keep(self, state)
        if int(state.step) == stop and len(started) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(store.StateKeeper, "keep", interrupted)
    monkeypatch.setattr(journey, "LoopBegan", lambda *args: started.append(args[-1]) or began(*args))
    parts = tmp_path / "parts.npz"
    assert cli.main([*COMMAND, "--out", str(parts)]) == 130
    real, said = FirstBlocks.summary, []
    monkeypatch.setattr(FirstBlocks, "summary", lambda *args: said.append(real(*args)))
    assert cli.main([*COMMAND, "--out", str(parts)]) == 0
    assert "makes the same" not in said[0], "the steps of the first process are not known"
    assert started == [0, max(i for i in full if i < stop)], full
    np.testing.assert_array_equal(np.load(parts)["latents"], np.load(whole)["latents"])


# --- refusals, and the releases


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "fastercache", "guidance_scale": 1.0}, "leaves out a half of guidance, which is off"),
        ({"form": "dbcache"}, "dbcache computes 8 blocks in every step; this model has 6 in all"),
        ({"form": "teacache"}, "were published for cogvideox-2b, cogvideox-5b, .*; this model is another one"),
        ({"step_cache_schedule": [1, 4, 2]}, "first_block decides itself which steps are full"),
        ({"form": "residual", "step_cache_threshold": 0.1}, "of first_block, dbcache, teacache, magcache"),
        ({"form": None, "step_cache_threshold": 0.1}, "step_cache_threshold is of a step cache"),
        ({"step_cache_full": [1, 2]}, r"step_cache_full is \[1, 2\]; expected steps from 0 to 7, the first among them"),
        ({"step_cache_full": [0, 8]}, "expected steps from 0 to 7"),
        ({"step_cache_ratios": [1.0]}, "step_cache_ratios are of magcache; leave them out for first_block"),
        ({"form": "residual", "step_cache_full": [0], "step_cache_schedule": [1, 4, 2]}, "give one"),
    ],
)
def test_refused(pipe, options, message):
    with pytest.raises(InputError, match=message):
        pipe.resolve(request(**options))


@pytest.mark.parametrize("release", [*TEACACHE, *hunyuan_few_steps.TEACACHE])
def test_the_releases_have_what_needs_their_blocks(release):
    """As programs, from shapes."""
    manifest = Manifest.of_release(RELEASES[release])
    image = {"image": [np.zeros((480, 720, 3), np.uint8)]} if release.endswith("i2v") else {}
    for form in ("pab", "teacache", "dbcache"):
        run = resolve(GenerationRequest(PROMPT, step_cache=form, **image), manifest, "bfloat16")
        # what a step decides, nobody knows before it: a loop goes on from the cache alone
        assert (run.full_steps is None and not run.may_resume(17)) or form == "pab"
        ((program, args, _),) = run.abstract("denoise")
        state, _ = jax.eval_shape(program, *args)
        assert jax.tree.structure(state) == jax.tree.structure(args[2])
    assert run.predict.first == run.predict.warm_up == 8


def test_a_forecast_asks_for_the_full_steps():
    manifest = Manifest.of_release(RELEASES["cogvideox-2b"])
    run = resolve(GenerationRequest("", step_cache="first_block"), manifest, "bfloat16")
    with pytest.raises(InputError, match=re.escape("(--step-cache-full)")):
        list(forecast(run, "v6e:2x2", (1, 2, 1), ["denoise"]))
