"""The training loop; on real modules where that is quick, on small functions where it is not."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import parameters
from cogvideox_flax.errors import CheckpointError, DivergedError, InputError
from cogvideox_flax.io.tensor_file import write_tensors
from cogvideox_flax.io.video import save_contact_sheet
from cogvideox_flax.lora import add_lora, lora_parameters, with_parameters
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.nn.remat import ATTENDED, recomputed
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.runtime.global_arrays import copy_own_shards, gather_on_first
from cogvideox_flax.runtime.terminal import duration_text
from cogvideox_flax.schedulers import DDIMScheduler
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.sharding import make_mesh
from cogvideox_flax.sharding.tables import FSDP
from cogvideox_flax.training import loop, snapshots
from cogvideox_flax.training.config import LoopConfig, OptimizerConfig
from cogvideox_flax.training.latent_cache import prepare
from cogvideox_flax.training.loop import Trainer, Validation
from cogvideox_flax.training.metrics import MetricsLog, plot_metrics, read_metrics
from cogvideox_flax.training.objectives import velocity_loss
from cogvideox_flax.training.optimizer import learning_rate
from cogvideox_flax.training.step import in_dtype, init_state, train_step
from tests.support import processes
from tests.support.training import ROWS, SMALL, TEXT, train


@pytest.fixture(autouse=True)
def _saved_as_often_as_asked(monkeypatch):
    monkeypatch.setattr(loop, "MAX_SAVE_SHARE", float("inf"))


def pull(params, _, batch, key):
    """Least squares towards the batch, with noise that depends on the key."""
    error = params["transformer"]["blocks.attn.q.bias"] - batch["x"]
    noise = 1e-3 * jax.random.normal(key, batch["x"].shape)
    return jnp.square(error + noise).mean(), {"worst": abs(error).max()}


def some_batches(step):
    return {"x": np.random.default_rng(step).normal(1.0, 0.1, size=(4, 2, 8)).astype(np.float32)}


START = {"transformer": {"blocks.attn.q.bias": np.zeros((2, 8), np.float32)}}
QUICK = LoopConfig(steps=30, ema_decay=0.9, log_every=1, optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=3))


def bias(tree):
    return np.asarray(tree["transformer"]["blocks.attn.q.bias"])


def test_training_reaches_the_target(tmp_path):
    state = train(START, pull, some_batches, replace(QUICK, steps=100), tmp_path)
    assert int(state.step) == 100
    assert abs(bias(state.params) - 1).max() < 0.1 and abs(bias(state.ema) - 1).max() < 0.1
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 101))
    assert lines[-1]["loss"] < 0.05 < lines[0]["loss"]
    plot_metrics([tmp_path / "metrics.jsonl"], ["loss", "learning_rate"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000
    with pytest.raises(InputError, match="no metric 'nothing'"):
        plot_metrics([tmp_path / "metrics.jsonl"], ["nothing"], tmp_path / "loss.png")


def test_the_log_says_what_takes_time_and_the_mean_loss(tmp_path, caplog):
    each = train(START, pull, some_batches, QUICK, tmp_path / "each")
    assert int(each.step) == 30
    caplog.clear()
    with caplog.at_level(logging.INFO):
        train(START, pull, some_batches, replace(QUICK, log_every=4), tmp_path / "few")
    every, few = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("each", "few"))
    losses = [line["loss"] for line in every]
    assert [line["mean_loss"] for line in every] == losses
    assert [line["step"] for line in few] == [4, 8, 12, 16, 20, 24, 28, 30]
    means = [np.mean(losses[start : line["step"]]) for start, line in zip(range(0, 30, 4), few, strict=True)]
    np.testing.assert_allclose([line["mean_loss"] for line in few], means, rtol=1e-4)
    said = [record.getMessage() for record in caplog.records]
    assert "compiling the training step ..." in said
    assert any(line.startswith("compiled it and did the first step in") for line in said)
    assert sum(" left" in line for line in said) == 7  # but not after the last step


@pytest.mark.parametrize(("seconds", "text"), [(1.23, "1.2 s"), (40, "40 s"), (130, "2 min"), (9000, "2.5 h")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_stopped_and_resumed_is_the_same_run(tmp_path):
    whole = train(START, pull, some_batches, QUICK, tmp_path / "whole")
    halted = train(START, pull, some_batches, QUICK, tmp_path / "cut", stop_after=11)
    assert int(halted.step) == 11
    resumed = train(START, pull, some_batches, QUICK, tmp_path / "cut")
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        assert np.array_equal(ours, theirs)
    losses = [[line["loss"] for line in read_metrics(tmp_path / run / "metrics.jsonl")] for run in ("whole", "cut")]
    assert losses[0] == losses[1]
    again = train(START, pull, some_batches, QUICK, tmp_path / "cut")  # done: nothing more to do
    assert np.array_equal(bias(again.params), bias(whole.params))


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    train(START, pull, some_batches, QUICK, tmp_path, stop_after=2)
    with pytest.raises(InputError, match="steps: there 30, now 29"):
        train(START, pull, some_batches, replace(QUICK, steps=29), tmp_path)
    with pytest.raises(InputError, match="seed: there 0, now 1"):
        train(START, pull, some_batches, replace(QUICK, steps=31, seed=1), tmp_path)


@pytest.mark.parametrize("first", [11, None])
def test_a_run_goes_on_with_more_steps(tmp_path, caplog, first):
    """Stopped or finished; with the learning rates of the longer schedule."""
    train(START, pull, some_batches, QUICK, tmp_path, stop_after=first)
    with caplog.at_level(logging.INFO):
        state = train(START, pull, some_batches, replace(QUICK, steps=40), tmp_path)
    assert int(state.step) == 40
    assert "steps was raised from 30 to 40" in caplog.text
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 41))
    rate = learning_rate(QUICK.optimizer, 40)
    for line in lines[first or 30 :]:
        np.testing.assert_allclose(line["learning_rate"], float(rate(line["step"] - 1)), rtol=1e-5)
    caplog.clear()
    train(START, pull, some_batches, replace(QUICK, steps=40), tmp_path)
    assert "raised" not in caplog.text, "the record knows it now"


@pytest.mark.parametrize("mesh", [None, (2, 1, 1)])
def test_the_validation_loss_has_the_same_noise_each_time(tmp_path, mesh):
    seen = []

    def noisy(params, _, batch, key):
        return pull(params, _, batch, key)[0] + jax.random.uniform(key), {}

    batches = [some_batches(1000 + i) for i in range(3)]
    frozen = {"frozen": np.zeros(2, np.float32)}
    for folder, stop_after in (("whole", None), ("cut", 7), ("cut", None)):
        trainer = Trainer(
            loss=noisy,
            batches=some_batches,
            config=replace(QUICK, log_every=100),
            folder=tmp_path / folder,
            frozen=frozen,
            mesh=None if mesh is None else make_mesh(*mesh),
            rows=ROWS,
            validation=Validation("validation_loss", lambda i: batches[i], len(batches), 5),
        )
        state = trainer.train(START, lambda done, _, last=stop_after: done == last)
        seen.append(state)
    lines = [read_metrics(tmp_path / folder / "metrics.jsonl") for folder in ("whole", "cut")]
    found = [{x["step"]: x["validation_loss"] for x in each if "validation_loss" in x} for each in lines]
    assert found[0] == found[1]
    assert list(found[0]) == [0, 5, 10, 15, 20, 25, 30]
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(3)]
    for step, params in ((0, START), (30, seen[0].ema)):
        losses = [float(noisy(params, None, batch, key)[0]) for batch, key in zip(batches, keys, strict=True)]
        np.testing.assert_allclose(found[0][step], np.mean(losses), rtol=1e-4)
    assert found[0][30] < found[0][0] - 0.5


def test_metrics_for_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    train(START, pull, some_batches, replace(QUICK, tensorboard=True), tmp_path, stop_after=3)
    train(START, pull, some_batches, replace(QUICK, steps=30, tensorboard=True), tmp_path, stop_after=5)
    values = {}
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:  # a length, its checksum, an event, its checksum
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            values |= {(event.step, each.tag): each.simple_value for each in event.summary.value}
            data = data[16 + size :]
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        for name in line.keys() - {"step"}:
            np.testing.assert_allclose(values[line["step"], name], line[name], rtol=1e-4)
    assert {step for step, _ in values} == {1, 2, 3, 4, 5}


def test_divergence_is_reported_and_not_saved(tmp_path):
    def poison(step):
        return {"x": np.full((4, 2, 8), np.nan if step == 6 else 1.0, np.float32)}

    with pytest.raises(DivergedError, match="step 7"):
        train(START, pull, poison, replace(QUICK, save_minutes=1e-9), tmp_path)
    assert (tmp_path / "states" / "6").is_dir() and not (tmp_path / "states" / "7").exists()


def test_accumulated_gradients_are_the_whole_batch(tmp_path):
    def plain(params, _, batch, key):
        return jnp.square(params["transformer"]["blocks.attn.q.bias"] - batch["x"]).mean(), {}

    one = train(START, plain, some_batches, QUICK, tmp_path / "one")
    four = train(START, plain, some_batches, replace(QUICK, accumulate=4), tmp_path / "four")
    np.testing.assert_allclose(bias(four.params), bias(one.params), atol=1e-5)
    with pytest.raises(InputError, match="batch of 4 does not divide into 3"):
        train(START, plain, some_batches, replace(QUICK, accumulate=3), tmp_path / "three")


def denoise(params, _, batch, key):
    def model(x, t):
        return params["transformer"](x, params["text_encoder"](batch["ids"]), t, remat=True)

    return velocity_loss(model, batch["latents"].astype(jnp.float32), key, DDIMScheduler(SchedulerConfig()))


def denoise_batches(step):
    rng = np.random.default_rng(step)
    latents = rng.normal(size=(4, 2, 4, 4, 16)).astype(np.float32)
    return {"latents": latents, "ids": rng.integers(3, 32, (4, 4)).astype(np.int32)}


def models():
    # zero-initialised layers would hide what is behind them
    noise = np.random.default_rng(0)
    fresh = {"text_encoder": TextEncoder(TEXT, rngs=nnx.Rngs(1)), "transformer": Transformer(SMALL, rngs=nnx.Rngs(2))}
    return jax.tree.map(lambda x: x + 0.05 * noise.normal(size=x.shape).astype(np.float32), fresh)


SHORT = LoopConfig(steps=3, log_every=1, ema_decay=0.5, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(models(), denoise, denoise_batches, SHORT, tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("shape", [(2, 1, 2, True), pytest.param((2, 1, 2), marks=pytest.mark.further)], ids=str)
def test_sharded_training_is_the_same(tmp_path, trained, shape):
    mesh = sharding.make_mesh(*shape)
    sharded = train(models(), denoise, denoise_batches, SHORT, tmp_path, mesh=mesh)
    q = sharded.opt_state[1][0].mu["transformer"].blocks.attn.q.kernel[...]
    stored = ("sp", "dp") if len(shape) > 3 else None
    assert tuple(q.sharding.spec) == (None, stored, "tp")  # the moments lie where their parameter lies
    for name, value in parameters(sharded.params).items():
        np.testing.assert_allclose(value, parameters(trained.params)[name], atol=3e-5, err_msg=name)
    resumed = train(models(), denoise, denoise_batches, SHORT, tmp_path, mesh=mesh)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(sharded), strict=True):
        assert np.array_equal(ours, theirs) and ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


@pytest.mark.further
@pytest.mark.parametrize("axes", [sharding.AXES, (*sharding.AXES, FSDP)], ids=["", "fsdp"])
def test_training_over_slices_is_the_same(tmp_path, trained, axes):
    """On devices as of two TPU slices: weights are split inside each, clips over both."""
    sizes = (2, 2, 1, 2, 1)[: 1 + len(axes)]
    mesh = Mesh(
        np.array(jax.devices()).reshape(sizes), (sharding.SLICE, *axes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    sharded = train(models(), denoise, denoise_batches, SHORT, tmp_path, mesh=mesh)
    q = sharded.params["transformer"].blocks.attn.q.kernel[...]
    assert tuple(q.sharding.spec) == (None, sharding.tables.STORED if FSDP in axes else None, "tp")
    for name, value in parameters(sharded.params).items():
        np.testing.assert_allclose(value, parameters(trained.params)[name], atol=3e-5, err_msg=name)


def test_bfloat16_trains_float32_weights(tmp_path, trained):
    state = train(models(), denoise, denoise_batches, replace(SHORT, dtype="bfloat16"), tmp_path)
    assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {"float32"}
    start, full, half = (parameters(tree) for tree in (models(), trained.params, state.params))
    moved = [np.asarray(x[n] - start[n]).ravel() for x in (full, half) for n in sorted(start)]
    full_way, half_way = np.concatenate(moved[: len(start)]), np.concatenate(moved[len(start) :])
    assert 0.99 < np.corrcoef(full_way, half_way)[0, 1] < 0.99999  # the same way, at another precision


def test_gradients_of_blocks_are_not_rounded():
    """In bfloat16, so that a mesh sums them in float32."""

    def loss(models):
        return in_dtype(denoise, "bfloat16")(models, None, denoise_batches(0), jax.random.key(0))[0]

    found = parameters(jax.jit(jax.grad(loss))(models())["transformer"])
    blocks = {name: gradient for name, gradient in found.items() if name.startswith("blocks.")}
    assert len(blocks) == 24
    for name, gradient in blocks.items():
        assert (gradient != gradient.astype(jnp.bfloat16)).mean() > 0.5, name


def test_remat_changes_nothing():
    model, batch = models()["transformer"], denoise_batches(0)
    context = np.random.default_rng(1).normal(size=(4, 4, 32)).astype(np.float32)

    def loss(model, remat):
        return jnp.square(model(batch["latents"], context, 500, remat=remat)).mean()

    choices = (False, True, "offload")
    found = {remat: parameters(jax.jit(jax.grad(partial(loss, remat=remat)))(model)) for remat in choices}
    for name, value in found[False].items():
        np.testing.assert_allclose(found[True][name], value, rtol=1e-3, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found["offload"][name], found[True][name], err_msg=name)


def test_a_layer_is_recomputed_but_for_what_is_kept():
    """The sine stands for attention: its result is named, and the gradient needs its cosine."""
    x, layers = jnp.arange(8.0), jnp.linspace(0.5, 1.5, 3)

    def body(x, w):
        return jnp.exp(-checkpoint_name(jnp.sin(w * x), ATTENDED[0])), None

    def gradient(remat):
        return jax.grad(lambda layers: jax.lax.scan(recomputed(body, remat), x, layers)[0].sum())

    expected = gradient("none")(layers)
    for remat, sines, exps in ((False, 1, 1), (True, 2, 2), ("full", 2, 2), ("attention", 1, 2), ("offload", 1, 2)):
        np.testing.assert_array_equal(jax.jit(gradient(remat))(layers), jax.jit(gradient("none"))(layers))
        np.testing.assert_allclose(gradient(remat)(layers), expected, rtol=1e-6)
        text = str(jax.make_jaxpr(gradient(remat))(layers))
        assert (text.count("= sin "), text.count("= exp ")) == (sines, exps), remat


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
os.environ["JAX_PLATFORMS"] = "cpu"
from pathlib import Path
from tests.training import test_training as t

def die(step, state):
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)

t.loop.MAX_SAVE_SHARE = float("inf")
t.train(t.START, t.pull, t.some_batches, t.OFTEN_SAVED, Path(sys.argv[1]), on_step=die)
"""
OFTEN_SAVED = replace(QUICK, steps=6, save_minutes=1e-9)


def test_killed_and_resumed_is_bit_identical(tmp_path):
    code = KILLED.format(root=str(Path(__file__).parents[2]))
    killed = processes.run([sys.executable, "-c", code, tmp_path / "cut"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folders = [tmp_path / name for name in ("cut", "whole")]
    states = [train(START, pull, some_batches, OFTEN_SAVED, folder) for folder in folders]
    assert int(states[0].step) == 6
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.array_equal(ours, theirs)
    steps = [line["step"] for line in read_metrics(tmp_path / "cut" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_settings_are_kept_beside_the_run(tmp_path):
    train(START, pull, some_batches, QUICK, tmp_path, stop_after=1)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["steps"] == 30 and settings["optimizer"]["learning_rate"] == 0.1


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_run_does_not_resume_from_a_damaged_state(tmp_path, caplog, damaged):
    """Of the two states that are kept, the newer one that is whole; if none is, nothing is lost without a word."""
    config = replace(QUICK, steps=8, save_minutes=1e-9)
    train(START, pull, some_batches, config, tmp_path / "run", stop_after=5)
    states = tmp_path / "run" / "states"
    assert sorted(path.name for path in states.glob("*.json")) == ["4.json", "5.json"]
    for step in (5, 4)[:damaged]:
        path = max((p for p in (states / str(step)).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 8
        path.write_bytes(data)
    if damaged == 2:
        with pytest.raises(InputError, match=r"all training states in .* are damaged; delete .* to begin anew"):
            train(START, pull, some_batches, config, tmp_path / "run")
        assert (states / "5").exists()
        return
    state = train(START, pull, some_batches, config, tmp_path / "run")
    assert "the training state of step 5 is damaged and is removed" in caplog.text
    expected = train(START, pull, some_batches, replace(QUICK, steps=8), tmp_path / "whole")
    assert np.array_equal(bias(state.params), bias(expected.params))
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert steps == list(range(1, 9))


def test_kept_states_are_hashed_after_others_were_removed(tmp_path, monkeypatch):
    real = snapshots.content_hashes

    def slow(files):
        time.sleep(0.3)
        return real(files)

    monkeypatch.setattr(snapshots, "content_hashes", slow)
    config = replace(QUICK, save_minutes=1e-9, keep=1)
    train(START, pull, some_batches, config, tmp_path, stop_after=6)
    assert [path.name for path in (tmp_path / "states").glob("*.json")] == ["6.json"]


def test_no_hashes_are_left_of_a_state_that_is_removed_late(tmp_path, monkeypatch):
    real = shutil.rmtree

    def slow(folder, *args, **kwargs):
        time.sleep(0.3)
        real(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    config = replace(QUICK, save_minutes=1e-9, keep=1)
    train(START, pull, some_batches, config, tmp_path, stop_after=2)
    assert [path.name for path in (tmp_path / "states").glob("*.json")] == ["2.json"]


def test_a_state_that_cannot_be_read_is_damaged(tmp_path, monkeypatch, caplog):
    config = replace(QUICK, steps=6, save_minutes=1e-9)
    train(START, pull, some_batches, config, tmp_path, stop_after=4)
    real = snapshots.content_hashes

    def unreadable(files):
        if "4" in files[0].parts:
            raise CheckpointError("cannot read it")
        return real(files)

    monkeypatch.setattr(snapshots, "content_hashes", unreadable)
    train(START, pull, some_batches, config, tmp_path, stop_after=3)
    assert "the training state of step 4 is damaged and is removed" in caplog.text


def test_steps_wait_for_states_for_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    """Each step takes 1 s, and each state keeps the steps waiting for half a second."""
    now, saved = 0.0, []

    def pass_time(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(loop, "MAX_SAVE_SHARE", 0.05)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(snapshots.Snapshots, "save", lambda self, step, _: (saved.append(step), pass_time(0.5)))
    config = replace(QUICK, save_minutes=1e-9)
    train(START, pull, some_batches, config, tmp_path, on_step=lambda *_: pass_time(1.0))
    assert saved == [1, 12, 23, 30]


def test_shards_are_gathered_in_the_background():
    """Of any sharding, each part once; a donation does not change them."""
    mesh, rng = make_mesh(2, 2, 2), np.random.default_rng(0)
    values = {"a": rng.normal(size=(8, 4, 6)), "b": rng.normal(size=4), "c": np.float64(3.0)}
    specs = {"a": P("sp", None, "tp"), "b": P(("dp", "sp")), "c": P()}
    dtypes = {"a": jnp.float32, "b": jnp.bfloat16, "c": jnp.float32}
    values = {name: np.asarray(x, dtypes[name]) for name, x in values.items()}
    arrays = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in values.items()}
    shards, shapes = copy_own_shards(arrays), {name: jax.typeof(x) for name, x in arrays.items()}
    assert {name: len(each) for name, each in shards.items()} == {"a": 4, "b": 4, "c": 1}
    jax.block_until_ready(jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)(arrays))
    gathered = gather_on_first(shards, shapes)
    for name, value in values.items():
        assert gathered[name].dtype == value.dtype
        np.testing.assert_array_equal(gathered[name], value)


def test_orbax_errors_are_not_logged_too(tmp_path, caplog):
    message = "failed: No space left on device; free"
    with snapshots.Snapshots(tmp_path, 1) as states, pytest.raises(InputError, match=message), states._errors():
        try:
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write 7 bytes: No space left on device [os_error='28']")
        except ValueError:
            logging.getLogger("absl").exception("_SignalingThread.run() raised an exception")
            raise
    assert "Traceback" not in caplog.text and "Signaling" not in caplog.text


def test_a_write_that_fails_ends_all_processes_at_once(tmp_path, monkeypatch):
    ended = []

    def fail(self, step):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshots.Snapshots, "_write_hashes", fail)
    monkeypatch.setattr(snapshots.hosts, "fail", lambda message, code: ended.append((message.split(";")[0], code)))
    message = f"writing a training state to {tmp_path} failed: No space left on device"
    with pytest.raises(InputError, match=message), snapshots.Snapshots(tmp_path, 1) as states:
        states.save(1, {"x": jnp.zeros(3)})
    assert ended == [(message, 2)]


def test_no_room_for_a_state_is_known_before_it_is_written(tmp_path, monkeypatch):
    config = replace(QUICK, steps=8, save_minutes=1e-9)
    usage = shutil.disk_usage(tmp_path)

    def fill(done, _):
        if done == 5:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**19))

    message = (
        r"^writing a training state to .*/states failed: No space left on device; free some space: it needs about "
        r"1 MiB, and its disk has 0\.5 MiB free\. The same command resumes from the last state$"
    )
    with pytest.raises(InputError, match=message):
        train(START, pull, some_batches, config, tmp_path, on_step=fill)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "states").iterdir() if path.is_dir()) == ["3", "4"]
    assert int(train(START, pull, some_batches, config, tmp_path).step) == 8
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], check=True, capture_output=True, timeout=9
        )
    except (OSError, subprocess.SubprocessError) as e:
        pytest.skip(f"no disk can be mounted here: {e}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True, timeout=9)


def fill(path, left):
    """Make a file larger until its disk has no more than so many bytes left."""
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(path, max(0, path.stat().st_size - left))


@pytest.mark.parametrize("checked", [True, False], ids=["before", "while it is written"])
@pytest.mark.parametrize("left", [4096, *(pytest.param(n, marks=pytest.mark.further) for n in (0, 8192))])
def test_a_full_disk_ends_a_run_in_a_line_from_which_it_resumes(small_disk, monkeypatch, checked, left):
    """A disk with so many bytes left, of which the run knows before it writes a state, or not."""
    config, filler = replace(QUICK, steps=8, save_minutes=1e-9), small_disk / "filler"
    expected = train(START, pull, some_batches, replace(QUICK, steps=8), small_disk / "whole")
    if not checked:
        monkeypatch.setattr(snapshots, "free_bytes", lambda _: 2**30)

    def on_step(done, _):
        if done >= 4:  # again and again: old states are removed
            fill(filler, left)

    with pytest.raises(InputError, match=r"^writing .*/run/\S+ failed: No space left on device; free some space") as e:
        train(START, pull, some_batches, config, small_disk / "run", on_step=on_step)
    assert "\n" not in str(e.value) and str(e.value).endswith(("resumes the run", "resumes from the last state"))
    filler.unlink()
    state = train(START, pull, some_batches, config, small_disk / "run")
    assert np.array_equal(bias(state.params), bias(expected.params))
    assert not list((small_disk / "run" / "states").glob("*tmp*"))


def test_what_is_written_beside_the_states_on_a_full_disk(small_disk):
    metrics, tensors = small_disk / "metrics.jsonl", {"x": np.zeros((64, 64), np.float32)}
    log = MetricsLog(metrics, 0)
    log.write({"step": 1, "loss": 1.0})
    fill(small_disk / "filler", 0)
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3)).astype(np.uint8)
    before = sorted(small_disk.iterdir())
    for name, write in {
        "metrics.jsonl": lambda: [log.write({"step": i, "loss": 1.0}) for i in range(2, 999)],
        "loss.png": lambda: plot_metrics([metrics], ["loss"], small_disk / "loss.png"),
        "sample.png": lambda: save_contact_sheet(small_disk / "sample.png", frames),
        "lora.safetensors": lambda: write_tensors(small_disk / "lora.safetensors", tensors, {}),
        "prepared": lambda: prepare(small_disk / "prepared", 1, lambda _: tensors, shard_size=1, meta={}),
    }.items():
        with pytest.raises(InputError, match=rf"^writing .*/{name}\S* failed: .*(No space left|no space|space left)"):
            write()
    (small_disk / "prepared").rmdir()
    assert sorted(small_disk.iterdir()) == before


def test_damaged_metrics_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n7\n{"loss": 1}\n{"step": "x"}\n\xff\n{"step": 2, "loss": 1.0}\n{"st')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_micro_batches_add_up(tmp_path):
    """Two micro-batches of one are a batch of two, where the loss draws nothing."""

    def loss(params, frozen, batch, key):
        error = batch["x"] @ params["transformer"]["w"] - batch["y"]
        return jnp.square(error).mean(), {}

    def batches(step):
        random = np.random.default_rng(step)
        return {"x": random.normal(size=(4, 3)).astype(np.float32), "y": random.normal(size=(4,)).astype(np.float32)}

    def run(accumulate):
        config = LoopConfig(
            steps=3, accumulate=accumulate, optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=0)
        )
        start = {"transformer": {"w": jnp.arange(3.0)}}
        return train(start, loss, batches, config, tmp_path / str(accumulate)).params["transformer"]["w"]

    whole, halves, single = (np.asarray(run(n)) for n in (1, 2, 4))
    assert np.abs(whole - np.arange(3)).min() > 0.02
    np.testing.assert_allclose(halves, whole, atol=1e-6)
    np.testing.assert_allclose(single, whole, atol=1e-6)


def test_a_frozen_base_is_neither_copied_nor_widened(tmp_path):
    """The step of a LoRA run on a bfloat16 base of which nothing but single layers may appear a second time."""
    config = TransformerConfig(layers=16, heads=8, rotary=True, text_width=64, text_length=8)
    base = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), CogVideoX.components["transformer"].abstract(config)
    )
    model = jax.eval_shape(lambda base: add_lora(CogVideoX, base, 2, rngs=nnx.Rngs(0)), base)
    settings = LoopConfig(steps=2, dtype="bfloat16")

    def loss(params, frozen, batch, key):
        x, context = batch
        v = with_parameters(frozen, params["transformer"])(x, context, jnp.zeros(1, jnp.int32), remat=True)
        return jnp.square(v).mean(), {}

    state = jax.eval_shape(lambda p: init_state({"transformer": p}, settings, None), lora_parameters(model))
    batch = tuple(jax.ShapeDtypeStruct((1, 1, *shape), jnp.float32) for shape in ((1, 4, 4, 16), (8, 64)))
    step = jax.jit(
        partial(train_step, loss=loss, config=settings), donate_argnums=0, compiler_options=compiler_options("bfloat16")
    )
    memory = step.lower(state, model, batch).compile().memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(base))
    assert memory.temp_size_in_bytes < 0.5 * held
