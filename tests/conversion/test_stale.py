"""Stale files are not reused: everything that determines a result is part of its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cogvideox_flax import checkpoint, hub
from cogvideox_flax.checkpoint.quantize import quantize_checkpoint
from cogvideox_flax.conversion import convert as conversion_module
from cogvideox_flax.conversion.convert import convert
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate import store
from cogvideox_flax.generate.pipeline import CogVideoXPipeline
from cogvideox_flax.io.contents import is_as_written
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.schedulers import DDIMScheduler
from tests.support.commands import generate, python
from tests.support.reference import make_transformer, save_layout

pytest_plugins = ["tests.support.commands"]

SPIECE = "tokenizer/spiece.model"


def edit_config(native: Path, component: str, **changes) -> None:
    path = native / "config.json"
    raw = json.loads(path.read_text())
    raw[component] |= changes
    path.write_text(json.dumps(raw))


@pytest.fixture
def own(native, tmp_path):
    """A checkpoint to be changed."""
    return shutil.copytree(native, tmp_path / "native")


def latents(paths, model, folder, *more) -> np.ndarray:
    (npz,) = paths(*generate(model, folder / "x.npz", "--dir", folder / "run", *more))
    return np.load(npz)["latents"]


# --- stages ---


def test_a_changed_noise_schedule_makes_the_latents_again(paths, own, tmp_path, work, caplog):
    first = latents(paths, own, tmp_path)
    edit_config(own, "scheduler", snr_shift_scale=1.0)
    work.clear()
    second = latents(paths, own, tmp_path)
    assert work == ["denoise"]
    assert "was edited or damaged after it was written; it is taken as it stands" in caplog.text
    fresh = latents(paths, own, tmp_path / "fresh")
    assert np.array_equal(second, fresh) and np.abs(second - first).max() > 0.1


def test_a_changed_transformer_config_makes_the_latents_again(paths, own, tmp_path, work):
    latents(paths, own, tmp_path)
    edit_config(own, "transformer", temporal_interpolation_scale=2.0)
    work.clear()
    latents(paths, own, tmp_path)
    assert work == ["denoise"]


def test_another_tokenizer_makes_the_embeddings_again(paths, own, tmp_path, work):
    latents(paths, own, tmp_path)
    shutil.copyfile(hub.EMBEDDED / "tokenizer" / "spiece.model", own / SPIECE)
    raw = json.loads((own / "config.json").read_text())
    del raw["tokenizer_sha256"]  # as a checkpoint of an older version
    (own / "config.json").write_text(json.dumps(raw))
    work.clear()
    latents(paths, own, tmp_path)
    assert work == ["encode", "denoise"]


@pytest.mark.parametrize(
    "name", ["text_encoder/model.safetensors", "transformer/model.safetensors", "vae/model.safetensors", SPIECE]
)
def test_files_that_are_not_what_was_converted_are_refused(paths, run, own, tmp_path, work, name):
    latents(paths, own, tmp_path)
    path = own / name
    facts, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    path.write_bytes(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    work.clear()
    code, _, err = run(*generate(own, tmp_path / "x.npz", "--dir", tmp_path / "run"))
    assert code == 2 and not work
    assert f"{path} is not the file that config.json describes" in err
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        CogVideoXPipeline.from_pretrained(own, "float32")
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        checkpoint.verify(own)


def test_weights_that_are_replaced_while_a_run_goes_on(own, tmp_path):
    pipe = CogVideoXPipeline.from_pretrained(own, "float32")
    other = tmp_path / "other"
    convert(save_layout(tmp_path / "hf", "cogvideox-2b", transformer=make_transformer("cogvideox-2b", seed=5)), other)
    shutil.rmtree(own)
    other.rename(own)
    with pytest.raises(CheckpointError, match="was replaced while this run was under way"):
        _ = pipe.transformer


def test_a_flipped_bit_in_a_finished_stage_is_noticed(paths, own, tmp_path, work):
    first = latents(paths, own, tmp_path)
    for name, made_again in ((store.LATENTS_FILE, ["denoise"]), (store.EMBEDDINGS_FILE, ["encode"])):
        path = tmp_path / "run" / name
        data = bytearray(path.read_bytes())
        data[-1001] ^= 4
        path.write_bytes(data)
        work.clear()
        assert np.array_equal(latents(paths, own, tmp_path), first)
        assert work == made_again


# --- a loop that was stopped ---

RUN = """
import os, signal, sys
from cogvideox_flax.generate import store
from cogvideox_flax.cli import main
store.StateKeeper.MIN_INTERVAL_S, store.StateKeeper.MAX_TIME_SHARE = 0.0, float("inf")  # each step is written
keep, steps = store.StateKeeper.keep, int(sys.argv.pop(1))
def kept(self, state):
    keep(self, state)
    if state.step == steps:
        os.kill(os.getpid(), signal.SIGKILL)
store.StateKeeper.keep = kept
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("scheduler", [pytest.param("ddim", marks=pytest.mark.further), "dpm"])
def test_denoising_goes_on_after_the_last_step(paths, native, tmp_path, caplog, scheduler):
    more = ("--steps", 6, "--scheduler", scheduler)
    expected = latents(paths, native, tmp_path / "whole", *more)
    command = generate(native, tmp_path / "x.npz", "--dir", tmp_path / "run", *more)
    killed = python("-c", RUN, "4", *command)
    assert killed.returncode == -9, killed.stderr
    state = tmp_path / "run" / store.STATE_FILE
    assert state.exists() and not (tmp_path / "run" / store.LATENTS_FILE).exists()
    caplog.clear()
    assert np.array_equal(latents(paths, native, tmp_path, *more), expected)
    assert "going on after step 4" in caplog.text
    assert not state.exists()


class Averaging(DDIMScheduler):
    """A scheduler whose state is two arrays of different shapes."""

    kind = "averaging"

    def init_state(self, sample):
        return {"sum": jnp.zeros(sample.shape, jnp.float32), "count": jnp.zeros((), jnp.float32)}

    def step(self, plan, i, prediction, sample, state=None, noise=None):
        x, _ = super().step(plan, i, prediction, sample)
        state = {"sum": state["sum"] + x, "count": state["count"] + 1}
        return 0.5 * (x + state["sum"] / state["count"]), state


def test_a_schedulers_state_of_several_arrays_is_gone_on_from(paths, run, native, tmp_path, monkeypatch, caplog):
    def stop(self, state):
        keep(self, state)
        if state.step == 3:
            raise KeyboardInterrupt

    keep = store.StateKeeper.keep
    monkeypatch.setitem(CogVideoX.schedulers, "averaging", Averaging)
    more = ("--steps", 4, "--scheduler", "averaging")
    expected = latents(paths, native, tmp_path / "whole", *more)
    with monkeypatch.context() as patch:
        patch.setattr(store.StateKeeper, "keep", stop)
        code, _, _ = run(*generate(native, tmp_path / "x.npz", "--dir", tmp_path / "run", *more))
    assert code == 130 and (tmp_path / "run" / store.STATE_FILE).exists()
    caplog.clear()
    assert np.array_equal(latents(paths, native, tmp_path, *more), expected)
    assert "going on after step 3" in caplog.text


@pytest.mark.parametrize("stopped_in", ["the last step", "writing the latents"])
def test_a_loop_that_was_stopped_at_its_end_loses_nothing(
    paths, run, native, tmp_path, monkeypatch, caplog, stopped_in
):
    def stop(self, state):
        self._last = state
        if state.step == 3:
            raise KeyboardInterrupt

    def save(path, *args):
        if path.name == store.LATENTS_FILE:
            raise KeyboardInterrupt
        real(path, *args)

    real = store.write_stage
    with monkeypatch.context() as patch:
        if stopped_in == "the last step":
            patch.setattr(store.StateKeeper, "keep", stop)
        else:
            patch.setattr(store, "write_stage", save)
        code, _, _ = run(*generate(native, tmp_path / "x.npz", "--dir", tmp_path / "run", "--steps", 3))
    assert code == 130 and (tmp_path / "run" / store.STATE_FILE).exists()
    expected = latents(paths, native, tmp_path / "fresh", "--steps", 3)
    caplog.clear()
    assert np.array_equal(latents(paths, native, tmp_path, "--steps", 3), expected)
    assert "going on after step 3" in caplog.text and not (tmp_path / "run" / store.STATE_FILE).exists()


def test_a_state_of_other_settings_is_not_gone_on_from(paths, run, native, tmp_path, monkeypatch, caplog):
    def interrupt(self, state):
        self._last = state
        if state.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.StateKeeper, "keep", interrupt)
        code, _, _ = run(*generate(native, tmp_path / "x.npz", "--dir", tmp_path / "run", "--steps", 4))
    assert code == 130 and (tmp_path / "run" / store.STATE_FILE).exists()
    expected = latents(paths, native, tmp_path / "fresh", "--steps", 4, "--seed", 5)
    caplog.clear()
    assert np.array_equal(latents(paths, native, tmp_path, "--steps", 4, "--seed", 5), expected)
    assert "going on" not in caplog.text and not (tmp_path / "run" / store.STATE_FILE).exists()


# --- conversion ---


def swap(layout: Path, other: Path, how: str) -> None:
    """Replace a layout by another one whose files have equal names, sizes and times."""
    for path in sorted(layout.rglob("*")):
        if path.is_file():
            source, facts = other / path.relative_to(layout), path.stat()
            if source.stat().st_size != facts.st_size:
                continue
            if how == "copied over":
                path.write_bytes(source.read_bytes())
            else:
                path.unlink()
                shutil.copyfile(source, path)
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.fixture
def two(tmp_path):
    """Two models whose files have equal names and sizes."""
    other = make_transformer("cogvideox-2b", seed=5)
    return save_layout(tmp_path / "a", "cogvideox-2b"), save_layout(tmp_path / "b", "cogvideox-2b", transformer=other)


def transformer_of(native: Path) -> np.ndarray:
    return load_file(checkpoint.weights_file(native, "transformer"))["blocks.attn.q.kernel"]


@pytest.mark.parametrize("how", ["copied over", "replaced"])
def test_the_cache_does_not_give_another_models_weights(home, two, how):
    layout, other = two
    first = transformer_of(hub.find(layout, progress=False))
    expected = transformer_of(hub.find(other, progress=False))
    swap(layout, other, how)
    found = transformer_of(hub.find(layout, progress=False))
    assert np.array_equal(found, expected) and not np.array_equal(found, first)


def stop_conversion(monkeypatch, where: str, layout: Path, dst: Path) -> None:
    """Begin a conversion that is stopped in the function `where`."""

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion_module, where, stop)
        with pytest.raises(KeyboardInterrupt):
            convert(layout, dst)


def test_a_killed_conversion_of_a_is_not_recorded_as_b(two, tmp_path, monkeypatch):
    layout, other = two

    stop_conversion(monkeypatch, "_finish", layout, tmp_path / "dst")
    (tmp_path / "dst" / ".conversion" / "config.json").unlink()  # killed just before
    swap(layout, other, "copied over")
    convert(layout, tmp_path / "dst")
    convert(other, tmp_path / "fresh")
    assert np.array_equal(transformer_of(tmp_path / "dst"), transformer_of(tmp_path / "fresh"))
    checkpoint.verify(tmp_path / "dst")
    ours, theirs = (checkpoint.read_manifest(tmp_path / name).weights for name in ("dst", "fresh"))
    assert {n: r["source"]["sha256"] for n, r in ours.items()} == {n: r["source"]["sha256"] for n, r in theirs.items()}


def test_what_a_killed_conversion_left_is_taken_over_if_it_is_whole(two, tmp_path, monkeypatch, caplog):
    layout, _ = two

    work = tmp_path / "dst" / ".conversion"
    stop_conversion(monkeypatch, "write_manifest", layout, tmp_path / "dst")
    damaged = work / "vae" / "model.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    (work / "text_encoder" / "record.json").write_text('{"key": {"form')
    with caplog.at_level("INFO"):
        convert(layout, tmp_path / "dst")
    assert "transformer was converted by an earlier attempt" in caplog.text
    assert "vae was converted by" not in caplog.text and "converting text_encoder again" in caplog.text
    checkpoint.verify(tmp_path / "dst")


def test_a_conversion_that_ends_anothers_is_locked_to_its_end(two, tmp_path, monkeypatch):
    layout, _ = two

    stop_conversion(monkeypatch, "_finish", layout, tmp_path / "dst")
    refused = []

    def progress(*_):
        if not refused:
            with pytest.raises(InputError, match="another conversion is writing to") as caught:
                convert(layout, tmp_path / "dst")
            refused.append(caught)

    convert(layout, tmp_path / "dst", dtype="bfloat16", progress=progress)
    assert refused and sorted(p.name for p in (tmp_path / "dst").iterdir() if p.name.startswith(".")) == []
    checkpoint.verify(tmp_path / "dst")


@pytest.mark.parametrize("how", ["removed", "cut", "edited"])
def test_a_damaged_config_in_the_cache_is_mended(home, two, how):
    layout, _ = two
    native = hub.find(layout, progress=False)
    path, manifest = native / "config.json", checkpoint.read_manifest(native)
    text = path.read_text()
    if how == "removed":
        path.unlink()
    else:
        path.write_text(text[:100] if how == "cut" else text.replace('scaling_factor": 1', 'scaling_factor": 2'))
    assert hub.find(layout, progress=False) == native
    assert is_as_written(json.loads(path.read_text())) and checkpoint.read_manifest(native).configs == manifest.configs
    checkpoint.verify(native)


def test_a_damaged_tokenizer_is_not_made_a_sound_one(own, tmp_path):
    path = own / SPIECE
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"spiece\.model is not the file that config\.json describes"):
        quantize_checkpoint(own, tmp_path / "int8")
    assert not (tmp_path / "int8").exists()


def test_a_source_that_changes_while_it_is_converted_is_refused(two, tmp_path, monkeypatch):
    layout, other = two
    real = conversion_module.write_tensors

    def write(source, *args):
        sums = real(source, *args)
        swap(layout, other, "replaced")
        return sums

    monkeypatch.setattr(conversion_module, "write_tensors", write)
    with pytest.raises(CheckpointError, match="changed while being read"):
        convert(layout, tmp_path / "dst", components=["transformer"])
    assert not checkpoint.is_native(tmp_path / "dst")


def test_a_folder_that_changes_while_it_is_converted_is_not_kept_as_it_was(two, tmp_path, monkeypatch):
    """The cache knows it by what it held before."""
    (layout, other), real, home = two, hub.convert, tmp_path / "own home"
    monkeypatch.setenv("COGVIDEOX_HOME", str(home))  # where nothing was converted yet

    def convert(*args, **kwargs):
        swap(layout, other, "replaced")
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(hub, "convert", convert)
        with pytest.raises(CheckpointError, match="changed while it was converted; start again"):
            hub.find(layout, progress=False)
    assert not list(home.glob("*/config.json"))
    checkpoint.verify(hub.find(layout, progress=False))


def test_a_damaged_conversion_in_the_cache_is_made_again(home, two, caplog):
    layout, _ = two
    native = hub.find(layout, progress=False)
    path = checkpoint.weights_file(native, "vae")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert hub.find(layout, progress=False) == native
    assert "is damaged and will be made again" in caplog.text
    checkpoint.verify(native)


@pytest.mark.parametrize(
    "name", ["vae/diffusion_pytorch_model.safetensors", "vae/config.json", "tokenizer/spiece.model"]
)
def test_a_damaged_download_is_not_converted(two, tmp_path, name):
    """The hub's cache names large files by their SHA-256 and small ones by git's hash."""
    layout, _ = two
    path = layout / name
    data = bytearray(path.read_bytes())
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    blob = tmp_path / "blobs" / (git if path.suffix == ".json" else hashlib.sha256(data).hexdigest())
    blob.parent.mkdir()
    path.rename(blob)
    path.symlink_to(blob)
    convert(layout, tmp_path / "good")
    data[-5] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CheckpointError, match="its hash is not the hub's"):
        convert(layout, tmp_path / "bad")
    assert not checkpoint.is_native(tmp_path / "bad")


def test_a_whole_conversion_is_read_where_nothing_can_be_written(home, two, monkeypatch):
    layout, _ = two
    native = hub.find(layout, progress=False)

    def locked(*args):
        raise AssertionError("a lock was wanted")

    monkeypatch.setattr(hub, "_locked", locked)
    assert hub.find(layout, progress=False) == native
    assert not list(native.parent.glob("*.lock"))
