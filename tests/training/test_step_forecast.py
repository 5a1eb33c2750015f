"""The forecast of a training step: it is of the step that runs, and refuses before anything is loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import pytest

from cogvideox_flax.errors import InputError
from cogvideox_flax.runtime.compile import compiled_once
from cogvideox_flax.training import finetune as finetuning
from cogvideox_flax.training import forecast as forecasting
from cogvideox_flax.training.config import OPTIMIZERS, read_config
from cogvideox_flax.training.finetune import finetune, loss_of
from cogvideox_flax.training.forecast import (
    StepForecast,
    Target,
    abstract_arguments,
    attached_devices,
    first_fit,
    fitting,
    forecast,
    smaller,
    stored_bytes,
    unmodelled,
)
from cogvideox_flax.training.job import RECORD_FILE, check
from cogvideox_flax.training.loop import Trainer
from tests.support.media import make_clips

CONFIG = """
clips = "{clips}"
out = "{out}"
num_frames = 9
height = 32
width = 48
batch = 4
[lora]
rank = 2
[loop]
steps = 2
"""
PLENTY = Target("cpu", None, 2**40, True)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return make_clips(tmp_path_factory.mktemp("data") / "clips")


@pytest.fixture
def job(tmp_path, clips):
    """Returns a job of the embedded model with some settings."""

    def job(**changes):
        path = tmp_path / "config.toml"
        path.write_text(CONFIG.format(clips=clips, out=tmp_path / "run"))
        return check(read_config(path, changes))

    return job


def test_bytes_of_a_step(job):
    """Arguments are weights, state and batch."""
    some = job()
    state, frozen, batch = abstract_arguments(some)
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, frozen["transformer"], batch)))
    step, executable = forecast(some, loss_of(some), attached_devices(some))
    assert executable is None and step.fits and step.mfu == step.estimated_s == 0 and step.clips == 4
    assert 0.95 * expected < step.argument_gib * 2**30 < expected + 2**20  # learned positions are for another size
    assert step.argument_gib + step.temp_gib <= step.hbm_gib_per_chip < 1


def test_what_is_said_of_a_step():
    step = StepForecast(**vars(unmodelled(30.827, 11.0, 19.0, 60.0)) | {"estimated_s": 3.588}, clips=8, mfu=0.3068)
    said = "30.83 GiB on each device; 3.59 s modelled, MFU 30.7%, 8,027 clips an hour, 60 min for 1,000 steps"
    assert step.describe(1000) == said


@pytest.mark.parametrize("method", ["lora", "full"])
def test_memory_and_disk_know_the_state_of_each_optimizer(job, method):
    jobs = {kind: job(**{"optimizer.kind": kind, "method": method, "lora.rank": 16}) for kind in OPTIMIZERS}
    moments = {kind: some.memory()["moments"] for kind, some in jobs.items()}
    for kind, some in jobs.items():
        state = abstract_arguments(some)[0].opt_state
        assert moments[kind] == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)), kind
        assert jobs["adamw"].disk() - some.disk() == 3 * (moments["adamw"] - moments[kind])
    assert 0 <= moments["adamw"] - 8 * some.trainable < 100
    assert moments["adamw_8bit"] < 0.5 * moments["adamw"] and moments["adamw_bfloat16"] < 0.76 * moments["adamw"]


def test_a_step_that_does_not_compile_does_not_fit(job, monkeypatch):
    said = "the total memory required for HLO temporaries (125.43G) exceeds available HBM (31.25G)."

    def compile_it(*args):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}")

    monkeypatch.setattr(forecasting, "compile_for", compile_it)
    step, executable = forecast(job(), loss_of(job()), PLENTY)
    assert not step.fits and executable is None and step.hbm_gib_per_chip == pytest.approx(125.43, abs=0.05)
    assert step.describe(10).endswith("GiB on each device; its time is not modelled")


def test_what_the_gradient_needs_is_known_without_compiling(job):
    """15 to 20 numbers of each layer's tokens and channels, if nothing is recomputed."""
    none, full = (job(remat=remat) for remat in ("none", "full"))
    more = stored_bytes(none, loss_of(none), "cpu") - stored_bytes(full, loss_of(full), "cpu")
    work = none.model.workload(none.size)
    assert 15 < more / (4 * 4 * work.tokens * work.width * work.layers) < 20


def test_what_does_not_fit_is_refused_with_what_fits(job, monkeypatch):
    monkeypatch.setattr(finetuning, "Pipeline", None)  # nothing is opened
    tried = []

    def of_settings(job, loss, target):
        config, gib = job.config, {"none": 9, "attention": 7, "full": 5, "offload": 4}[job.remat]
        gib -= 0.25 * config.loop.accumulate + 0.5 * (config.mesh is not None)
        tried.append(config)
        step = unmodelled(gib, 0.0, 0.0, 0.0)
        return StepForecast(**vars(step) | {"fits": gib * 2**30 <= target.memory}, clips=4, mfu=0.0), None

    monkeypatch.setattr(forecasting, "forecast", of_settings)
    monkeypatch.setattr(forecasting, "stored_bytes", lambda *_: 0)
    for limit, change in (
        (7.5, 'it fits with remat = "attention": 6.75 GiB on each device'),
        (5.5, 'it fits with remat = "full": 4.75 GiB'),
        (4.0, 'it fits with remat = "offload": 3.75 GiB'),
        (3.0, """nor does it fit with remat = "attention"; or remat = "full"; or remat = "offload"; or .* Take more"""),
    ):
        target = Target("tpu", None, int(limit * 2**30), True)
        monkeypatch.setattr(finetuning, "attached_devices", lambda job, target=target: target)
        with pytest.raises(InputError, match=rf"needs 8.75 GiB on each device, which has {limit:.2f} GiB.*{change}"):
            finetune(job(remat="none"), progress=False)
    assert tried[-1].mesh == "1,8,1,fsdp" and tried[-1].loop.accumulate == 4


def test_auto_is_the_first_that_fits(job, monkeypatch):
    """The fastest first; what cannot fit is not compiled; the last is tried in any case."""
    some, needs = job(remat="auto"), {"none": 9, "attention": 7, "full": 5, "offload": 4}
    tried = []

    def of_remat(job, loss, target):
        tried.append(job.remat)
        fits = needs[job.remat] * 2**30 <= target.memory
        return StepForecast(**vars(unmodelled(9.0, 0.0, 0.0, 0.0)) | {"fits": fits}, clips=4, mfu=0.0), None

    monkeypatch.setattr(forecasting, "forecast", of_remat)
    monkeypatch.setattr(forecasting, "stored_bytes", lambda job, loss, platform: needs[job.remat] * 2**30)
    for gib, platform, expected in (
        (9, "tpu", ["none"]),
        (5, "tpu", ["none", "attention", "full"]),
        (4, "tpu", ["attention", "full", "offload"]),
        (1, "tpu", ["offload"]),
        (5, "gpu", ["none", "full"]),
        (5, "cpu", ["none", "full"]),
    ):
        tried.clear()
        found, step, _ = first_fit(some, loss_of, Target(platform, None, gib * 2**30, True))
        assert tried == expected and found.remat == expected[-1] and step.fits == (gib >= needs[expected[-1]])
    monkeypatch.setattr(forecasting, "host_memory", lambda: 2**30)
    found, step, _ = fitting(
        some, loss_of, Target("cpu", None, None, True)
    )  # nothing is refused where no limit is known
    assert found.remat == "full" and not step.fits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"mesh": "2,1,2,fsdp", "method": "full", "loop.accumulate": 2}, marks=pytest.mark.further),
        pytest.param({"mesh": "2,1,2", "model": "embedded-image-to-video"}, marks=pytest.mark.further),
    ],
)
def test_a_run_has_the_step_that_was_compiled_and_goes_on_with_its_remat(job, changes, monkeypatch, caplog):
    caplog.set_level("INFO", "cogvideox_flax")  # which a command before may have set
    changes |= {"remat": "auto", "loop.steps": 2}
    with monkeypatch.context() as patch:
        patch.setattr(forecasting, "host_memory", lambda: 2**50)
        patch.setattr("cogvideox_flax.training.loop.compiled_once", lambda _, *rest: compiled_once(None, *rest))
        patch.setattr(Trainer, "_jit_validation", lambda _: lambda state: 0.0)
        some = job(**changes)
        assert finetune(some, stop_after=lambda done: done == 1, progress=False) is None
    assert caplog.text.count('remat = "auto": none, ') == 1
    assert json.loads((some.config.out / RECORD_FILE).read_text())["remat"] == "none"
    monkeypatch.setattr(finetuning, "fitting", lambda *_: pytest.fail("it was decided again"))
    assert finetune(job(**changes), progress=False).exists()


@pytest.mark.further
def test_of_several_buckets_the_largest_step_is_not_compiled_again(job, monkeypatch):
    compiled = []

    def watched(jitted, mesh, known=None):
        def lower(*args):
            compiled.append(args[2]["mean"].shape[2:-1])
            return jitted.lower(*args)

        return compiled_once(jitted if known is None else SimpleNamespace(lower=lower), mesh, known)

    monkeypatch.setattr(forecasting, "host_memory", lambda: 2**50)
    monkeypatch.setattr("cogvideox_flax.training.loop.compiled_once", watched)
    some = job(remat="auto", buckets=((9, 32, 48), (9, 32, 32)), **{"loop.steps": 3})
    assert [len(members) for members in some.members] == [2, 1]
    assert finetune(some, progress=False).exists()
    assert compiled == [(3, 4, 4)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {},
            [
                'remat = "offload"',
                "loop.accumulate = 2",
                "loop.accumulate = 4",
                'mesh = "1,8,1" and loop.accumulate = 4',
            ],
        ),
        ({"mesh": "4,1,2"}, ['remat = "offload"', 'mesh = "2,2,2" and loop.accumulate = 2']),
        ({"remat": "offload", "batch": 2}, ["loop.accumulate = 2", 'mesh = "1,8,1" and loop.accumulate = 2']),
    ],
)
def test_the_smallest_change_comes_first(job, settings, expected):
    changes = [" and ".join(words) for words, _ in smaller(job(**settings), PLENTY._replace(platform="tpu"))]
    assert changes[: len(expected)] == expected and changes[-1].startswith('mesh = "1,') and ",fsdp" in changes[-1]
