"""`benchmarks.gpu_proof` up to the device: its rows in small on the CPU, its programs lowered for a GPU."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_proof import attention, convolution, machine, models, peer_models, programs, values
from benchmarks.gpu_proof.cases import attention_of
from benchmarks.gpu_proof.errors import NotTried, error, sample_indices, verdict
from benchmarks.gpu_proof.record import Record, line
from benchmarks.gpu_proof.rows import ON_A_GPU, RELEASED, SMALL, kernel_rows, rows
from cogvideox_flax.attention import nvidia, triton


def silent(**values):
    """A row's `report` that nobody hears."""


# --- the rows in small


def unlike(found):
    """One row of each kind: those of a kind differ in sizes only."""
    kinds = {}
    for row in found:
        kinds.setdefault((row.function, row.name if "attention" in row.name else row.options.get("dtype")), row)
    return list(kinds.values())


@pytest.mark.parametrize("row", unlike(kernel_rows(SMALL)), ids=lambda row: row.key)
def test_kernels_in_small(row, tmp_path):
    module, name = row.function.split(":")
    run = getattr({attention.__name__: attention, convolution.__name__: convolution}[module], name)
    found = run(silent, folder=str(tmp_path), **row.options)
    assert found["status"] == "ok", found
    assert found["error_rms"] < 0.02


def test_cudnn_is_not_tried_without_a_gpu():
    (row,) = [row for row in kernel_rows(SMALL) if row.side == "ours cudnn"]
    with pytest.raises(NotTried, match="needs an NVIDIA GPU"):
        attention.run(silent, **row.options)
    (row,) = [row for row in kernel_rows(ON_A_GPU) if row.key == "attention 5b | ours triton"]
    with pytest.raises(NotTried, match="needs an NVIDIA GPU"):
        attention.run(silent, **row.options)


@pytest.mark.parametrize("fault", [1.01, np.nan])
def test_a_kernel_that_is_off_is_found(fault, monkeypatch):
    """One head by a hundredth, or one number that is none, among the outputs that are looked at or not."""
    (row,) = [row for row in kernel_rows(SMALL) if row.key == "attention 1.5-5B | ours auto"]
    case = attention_of(row.options)
    known = attention.program(case)
    at = (0, 17, 0, 3) if np.isnan(fault) else (slice(None), slice(None), 0)
    monkeypatch.setattr(attention, "program", lambda case: lambda *args: known(*args).at[at].multiply(fault))
    assert attention.run(silent, **row.options)["status"] == "wrong"


def test_a_convolution_that_is_off_is_found(monkeypatch):
    row = next(row for row in kernel_rows(SMALL) if row.name.startswith("convolution"))
    monkeypatch.setattr(convolution, "program", lambda case: lambda x, k, b: convolution.conv3d(x[..., ::-1], k, b))
    assert convolution.run(silent, **row.options)["status"] == "wrong"


def test_errors_are_in_standard_deviations_and_nan_is_never_small():
    reference = np.asarray([[1.0, -1.0], [100.0, -100.0]])
    found = reference + np.asarray([[0.1, 0.0], [0.0, 10.0]])
    assert error(found, reference, (1,)) == {"rms": pytest.approx(0.1 / 2**0.5), "max": pytest.approx(0.1)}
    assert verdict({"rms": float("nan"), "max": 0.0}, {"rms": 1.0, "max": 1.0})["status"] == "wrong"
    assert verdict({"rms": 1e-6, "max": 1e-5}, None)["status"] == "ok"
    with pytest.raises(ValueError, match="is not one of"):
        error(np.zeros(3), np.zeros((3, 1)))
    assert (
        {0, 500, 999} <= set(sample_indices(1000, 10, 0))
        and len(sample_indices(1000, 10, 0)) == 10
        and len(sample_indices(4, 10, 0)) == 4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_the_same_in_all_libraries(dtype):
    for mine in (values.Values("q"), values.of_weight("a.b.weight", (30, 70)), values.of_weight("norm.weight", (70,))):
        ours = np.asarray(jax.jit(partial(values.in_jax, mine, (30, 70), dtype))(), np.float64)
        theirs = values.in_torch(mine, torch.empty(30, 70, dtype=getattr(torch, dtype))).double().numpy()
        host = np.asarray(values.in_numpy(mine, (30, 70), jnp.dtype(dtype)), np.float64)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6 if dtype == "float32" else 0)
        np.testing.assert_allclose(ours, host, rtol=1e-6 if dtype == "float32" else 0)
        assert abs(ours.mean() - mine.mean) < 0.1 * mine.scale and abs(ours.std() / mine.scale - 1) < 0.1


# --- the programs at their released sizes, lowered for a GPU that is not there


@pytest.fixture
def on_a_gpu(monkeypatch):
    for module, name, answer in gpu.answers():
        monkeypatch.setattr(module, name, answer)


@pytest.mark.parametrize("row", [row for row in rows(RELEASED) if not row.packages], ids=lambda row: row.key)
def test_programs_lower_for_a_gpu(row, on_a_gpu):
    found = programs.program_of(row)
    if found is None:
        assert row.name in ("what JAX sees", "matrix product")
        return
    f, shapes, _ = found
    text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    backend = row.side.removeprefix("ours").strip()
    is_attention = "attention" in row.name or "step" in row.name
    assert ("__cudnn$fmha" in text) == (is_attention and backend in ("auto", "cudnn", ""))
    assert (triton.NAME in text) == (backend == "triton")
    ranks = {operand.count("x") for operand in re.findall(r"stablehlo\.convolution.*?: \(tensor<(\w+)>", text)}
    assert ranks <= ({5} if row.side == "not used" else {4})


def test_sizes_are_those_of_the_releases():
    released = {row.key: row.options for row in rows(RELEASED)}
    for name, tokens in (("5b", 17_776), ("1.5-5B", 45_106)):
        fields = {k: v for k, v in released[f"{name} step | ours"].items() if k not in ("name", "repeat")}
        case, small = models.case_of(fields)
        assert case.tokens == released[f"attention {name} | ours auto"]["tokens"] == tokens and not small
        assert models.abstract_of(case, small).config.layers == 42
    keys = [row.key for sizes in (RELEASED, SMALL) for row in rows(sizes)]
    assert len(set(keys[: len(keys) // 2])) == len(set(keys[len(keys) // 2 :])) == len(keys) // 2


# --- the rest


@pytest.mark.parametrize(
    ("number", "version", "says"),
    [
        (91501, (9, 15, 1), "cuDNN 9.15.1"),
        (91002, (9, 10, 2), "wrong in bfloat16 on large shapes before 9.15"),
        (8907, (8, 9, 7), "cuDNN 8.9.7: 3-D convolutions wrong"),
        (None, None, "not known"),
    ],
)
def test_which_cudnn_there_is(number, version, says, monkeypatch):
    class Versions:
        @staticmethod
        def cudnn_get_version():
            if number is None:
                raise RuntimeError("no cuDNN")
            return number

    monkeypatch.setattr("jax._src.lib.cuda_versions", Versions)
    assert nvidia.cudnn_version() == version
    assert says in machine.of_cudnn(nvidia.cudnn_version())
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    assert nvidia.cudnn_version() is None


def test_with_less_memory_fewer_layers_are_taken():
    case, small = models.case_of(
        {"part": "transformer", "release": "cogvideox-5b", "height": 480, "width": 720, "latent_frames": 13}
    )
    module = models.abstract_of(case, small)
    gib = 2**30
    layers = models.layers_that_fit(module, int(13.3 * gib), 10 * gib)
    assert 25 < layers < 30  # a quarter of a GiB each
    assert models.layers_that_fit(module, int(13.3 * gib), 2 * gib) is None
    case, _ = models.case_of(case.__dict__ | {"part": "decode", "device": "gpu"})
    assert models.layers_that_fit(models.abstract_of(case, small), 9 * gib, 8 * gib) is None


@pytest.mark.parametrize(("free_gib", "layers"), [(80, None), (10, 16), (3, "not tried")])
def test_the_reference_takes_fewer_layers_too(free_gib, layers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(peer_models, "fresh", lambda: None)
    case, small = models.case_of(
        {"part": "transformer", "release": "cogvideox-5b", "height": 480, "width": 720, "latent_frames": 13}
    )
    if layers == "not tried":
        with pytest.raises(NotTried, match="does not fit: 16 GiB are needed"):
            peer_models._fitting(case, small, 6, silent)
    else:
        assert peer_models._fitting(case, small, 6, silent).layers == layers


def test_comparisons_say_what_is_known(tmp_path):
    record = Record(None, {})
    sides = {
        "ours": ("bfloat16", 2.0, 0.003),
        "diffusers": ("bfloat16", 4.0, 0.006),
        "diffusers float32": ("float32", 9.0, 0),
    }
    truth = np.random.default_rng(0).normal(size=1000)
    record.expect(
        (f"a | {side}", {"row": "a", "side": side, "options": {"dtype": d}}) for side, (d, *_) in sides.items()
    )
    for side, (_, seconds, off) in sides.items():
        np.save(tmp_path / f"{side}.npy", truth + off * np.random.default_rng(len(side)).normal(size=1000))
        record.set(f"a | {side}", status="ok", seconds=seconds, output=f"{side}.npy")
    found = {c["side"]: c for c in record.compare("a", tmp_path) if c["row"] == "a"}
    assert found["ours : diffusers"]["time_ratio"] == 0.5 and "time_ratio" not in found["ours : diffusers float32"]
    (verdict,) = [c for c in record.comparisons if c["row"] == "a, both from float32"]
    assert verdict["holds"] and verdict["error_ratio"] == pytest.approx(0.5, rel=0.2)
    assert record.compare("a", tmp_path) == []  # said once
    record.set("a | ours", layers=16)
    record.comparisons.clear()
    assert any("16 and all layers: not compared" in c.get("note", "") for c in record.compare("a", tmp_path))


def test_a_line_is_one_row_of_a_table():
    row = {"row": "a|b", "side": "ours", "status": "ok", "seconds": 1.5, "note": "two\nlines"}
    assert line(row).count("|") == 10 and "\n" not in line(row)
