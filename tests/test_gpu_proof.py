"""`benchmarks.gpu_proof` up to the device: its rows in small on the CPU, its programs lowered for a GPU."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_proof import __main__ as proof
from benchmarks.gpu_proof import attention, convolution, machine, models, peer_models, peers, programs, values
from benchmarks.gpu_proof.cases import HEAD_SCALES, attention_of
from benchmarks.gpu_proof.errors import NotTried, error, sample_indices, verdict
from benchmarks.gpu_proof.record import Record, line
from benchmarks.gpu_proof.rows import ON_A_GPU, RELEASED, SMALL, kernel_rows, rows
from benchmarks.gpu_proof.run import START_S
from benchmarks.vs_diffusers import theirs
from cogvideox_flax.attention import cudnn, nvidia, triton
from cogvideox_flax.plan.flops import count_flops


def silent(**values):
    """A row's `report` that nobody hears."""


# --- the rows in small


def unlike(found):
    """One row of each kind: those of a kind differ in sizes only."""
    kinds = {}
    for row in found:
        name = row.name.replace("1.5-5B", "5b")
        kinds.setdefault((row.function, name if "attention" in name else row.options.get("dtype")), row)
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


HEAD = slice(None), slice(None)


@pytest.mark.parametrize(
    ("heads", "at", "fault"),
    [
        pytest.param(4, (*HEAD, 0), 1.01, id="a head by a hundredth"),
        pytest.param(4, (0, 17, 0, 3), np.nan, id="one NaN"),
        pytest.param(4, (*HEAD, 1), 0, id="a head of zeros"),
        pytest.param(8, (*HEAD, 5), 0, id="a head of zeros that is not among the sampled heads"),
    ],
)
def test_a_kernel_that_is_off_is_found(heads, at, fault, monkeypatch):
    attention._OTHERS.clear()
    (row,) = [row for row in kernel_rows(SMALL) if row.key == "attention 1.5-5B | ours auto"]
    options = row.options | {"heads": heads, "tokens": 400}
    known = attention.program(attention_of(options))
    monkeypatch.setattr(attention, "program", lambda case: lambda *args: known(*args).at[at].multiply(fault))
    assert attention.run(silent, **options)["status"] == "wrong"
    assert not attention._OTHERS  # a wrong result is not what others are compared with


def test_an_output_that_no_sample_sees_is_found_beside_another_backend(monkeypatch):
    attention._OTHERS.clear()
    (row,) = [row for row in kernel_rows(SMALL) if row.key == "attention 1.5-5B | ours auto"]
    options = row.options | {"tokens": 400, "queries": 16}
    case = attention_of(options)
    assert attention.run(silent, **options)["status"] == "ok"
    seen = {*sample_indices(400, 16, 2), *sample_indices(400, attention.ALL_HEADS_QUERIES, 4)}
    unseen = jnp.asarray([n for n in range(400) if n not in seen])[:200]
    known = attention.program(case)
    monkeypatch.setattr(attention, "program", lambda case: lambda *args: known(*args).at[:, unseen, 1].set(0))
    found = attention.run(silent, **options)
    assert found["status"] == "wrong" and "off those of 'auto'" in found["reason"]
    assert found["error_rms"] < 0.02


@pytest.mark.parametrize("heads", [4, 6, 24, 30, 48])
def test_sampled_heads_have_all_scales(heads):
    """From attention that averages all keys to attention that takes a few."""
    sampled = attention_of({"name": "a", "batch": 1, "tokens": 9, "heads": heads}).sampled_heads
    assert {HEAD_SCALES[i % len(HEAD_SCALES)] for i in sampled} == set(HEAD_SCALES)
    assert {0, 1, 2, heads - 1} <= set(sampled) and len(sampled) <= 5


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
    assert {0, 500, 999} <= set(sample_indices(1000, 10, 0)) and len(sample_indices(1000, 10, 0)) == 10
    assert [len(sample_indices(100, count, 0)) for count in (0, 1, 2, 3, 4, 200)] == [0, 1, 2, 3, 4, 100]


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


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.key, marks=[pytest.mark.slow] if "all frames" in row.name else [])
        for row in rows(RELEASED)
        if not row.packages
    ],
)
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


def record_of(tmp_path, sides, name="a"):
    """A record with rows of one name: side -> (dtype, seconds, output, other fields)."""
    record = Record(None, {})
    record.expect(
        (f"{name} | {side}", {"row": name, "side": side, "options": {"dtype": dtype}})
        for side, (dtype, *_) in sides.items()
    )
    for side, (_, seconds, out, *fields) in sides.items():
        np.save(tmp_path / f"{side}.npy", out)
        record.set(f"{name} | {side}", status="ok", seconds=seconds, output=f"{side}.npy", **(fields or [{}])[0])
    return record, {c["side"]: c for c in record.compare(name, tmp_path) if c["row"] == name}


def noise(seed):
    return np.random.default_rng(seed).normal(size=1000)


def test_comparisons_say_what_is_known(tmp_path):
    truth = noise(0)
    sides = {
        "ours": ("bfloat16", 2.0, truth + 0.003 * noise(1), {"needed_gib": 6.0, "peak_gib": 9.0}),
        "diffusers": ("bfloat16", 4.0, truth + 0.006 * noise(2), {"peak_gib": 12.0}),
        "diffusers compiled": ("bfloat16", 3.0, truth + 0.02 * noise(3)),
        "diffusers float32": ("float32", 9.0, truth),
    }
    record, found = record_of(tmp_path, sides)
    pair = found["ours : diffusers"]
    assert pair["time_ratio"] == 0.5 and pair["memory_ratio"] == 0.5 and pair["holds"]
    assert "time_ratio" not in found["ours : diffusers float32"]
    (verdict,) = [c for c in record.comparisons if c["row"] == "a, both from float32"]
    assert verdict["holds"] and verdict["error_ratio"] == pytest.approx(0.5, rel=0.2)  # not of the compiled row
    assert record.compare("a", tmp_path) == []  # said once
    record.set("a | ours", layers=16)
    record.comparisons.clear()
    assert any("16 and all layers: not compared" in c.get("note", "") for c in record.compare("a", tmp_path))


@pytest.mark.parametrize(("dtype", "off", "holds"), [("bfloat16", 0.05, True), ("float32", 1e-3, False)])
def test_both_sides_must_agree(dtype, off, holds, tmp_path):
    out = noise(0)
    sides = {"ours": (dtype, 1.0, out), "diffusers": (dtype, 1.0, out + off * noise(1))}
    record, found = record_of(tmp_path, sides)
    assert found["ours : diffusers"]["holds"] is holds and (not record.differences()) is holds


def test_two_unrelated_outputs_in_16_bit_are_a_fault(tmp_path):
    record, found = record_of(
        tmp_path, {"ours": ("bfloat16", 1.0, noise(0)), "diffusers": ("bfloat16", 1.0, noise(1))}, "5b step"
    )
    assert found["ours : diffusers"]["difference_rms"] > 1 and record.differences()
    assert proof._exit_status(record) == 1


def test_operations_of_a_step_are_counted_on_a_gpu_too(on_a_gpu):
    """Also after its program is made, whose trace JAX keeps: cuDNN's attention counts as its products."""
    (row,) = [row for row in rows(RELEASED) if row.key == "5b step | ours"]
    f, (module, *given), _ = programs.program_of(row)
    assert "__cudnn$fmha" in jax.jit(f).trace(module, *given).lower(lowering_platforms=("cuda",)).as_text()
    case, small = models.case_of({k: v for k, v in row.options.items() if k not in ("name", "repeat")})
    attention_flops = 42 * 2 * 4 * 17_776**2 * 3072
    assert count_flops(f, module, *given).kernels == attention_flops
    assert models.flops_of(case, small, dict(enumerate(given))) > 2 * attention_flops
    q = jax.ShapeDtypeStruct((2, 1500, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1700, 4, 64), jnp.bfloat16)
    both = jax.grad(lambda q, k: cudnn.attend(q, k, k).astype(jnp.float32).sum(), (0, 1))
    assert count_flops(both, q, k).kernels == (2 + 5) * 2 * 2 * 4 * 1500 * 1700 * 64


def test_the_exact_rows_have_the_weights_and_inputs_of_the_rounded_ones():
    (row,) = [row for row in rows(SMALL) if row.key == "5b step | diffusers float32"]
    assert row.options["rounded_to"] == "bfloat16" and row.options["dtype"] == "float32"
    fields = {k: v for k, v in row.options.items() if k not in ("name", "repeat", "rounded_to")}
    case, small = models.case_of(fields | {"device": "cpu"})
    exact = peer_models.module_of(case, small, "bfloat16")
    same = dict(peer_models.module_of(dataclasses.replace(case, dtype="bfloat16"), small).state_dict())
    for name, value in exact.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, same[name].float()), name
    x = np.random.default_rng(0).normal(size=100).astype(np.float32)
    rounded = theirs._put(x, case, "bfloat16")
    assert rounded.dtype == torch.float32 and torch.equal(rounded, torch.tensor(x).bfloat16().float())


def test_the_peak_is_that_of_later_runs(monkeypatch):
    said = []
    monkeypatch.setattr(peer_models, "reset_peak", lambda: said.append("reset"))
    (row,) = [row for row in rows(SMALL) if row.key == "transformer, 2 layers of float32 | diffusers"]
    peer_models.run(lambda **values: said.extend(values), **row.options)
    assert said[said.index("first_s") :][:3] == ["first_s", "reset", "seconds"]


def test_blocks_of_a_decoder_are_compiled_each():
    """In small they compile in the dry run."""
    (row,) = [row for row in rows(SMALL) if row.key == "480p first chunk decoded | diffusers compiled"]
    assert row.options["compiled"] and row.options["part"] == "decode"
    case, small = models.case_of(
        {k: v for k, v in row.options.items() if k not in ("name", "repeat", "compiled", "compile_backend")}
    )
    module = peer_models.module_of(case, small)
    assert "decoder" in peer_models.compile_blocks(module, "eager")
    compiled = {name for name, each in module.named_modules() if each._compiled_call_impl is not None}
    assert compiled == {"decoder.mid_block", *(f"decoder.up_blocks.{i}" for i in range(4))}
    peer_models._kept.clear()


def test_the_default_budget_reaches_a_verdict_by_the_guesses():
    elapsed, group, reached = 0.0, "", set()
    for row in rows(RELEASED):
        expected = row.expected_s + (START_S[row.process] if row.group != group else 0)
        if elapsed + expected <= proof.BUDGET_S - 10:
            elapsed, group = elapsed + expected, row.group
            reached.add(row.key)
    name = "transformer, 2 layers of float32"
    assert {f"{name} | ours", f"{name} | diffusers", "1.5-5B step | diffusers compiled"} <= reached


def test_one_of_the_plugins_for_cuda_suffices():
    known = dict.fromkeys(machine.PACKAGES, "1.0")
    assert machine.missing(known) == []
    assert machine.missing(known | {"jax-cuda12-plugin": None, "torch": None}) == ["torch"]
    both = known | {"jax-cuda12-plugin": None, "jax-cuda13-plugin": None}
    assert machine.missing(both) == ["jax-cuda13-plugin or jax-cuda12-plugin"]


def test_an_old_cudnn_of_pytorch_is_named(monkeypatch):
    class About:
        name, major, minor = "NVIDIA H200", 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: About)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = peers.sees(silent)
    assert found["cudnn"] == (9, 10, 2) and "cuDNN 9.10.2: 3-D convolutions wrong" in found["note"]


def test_a_line_is_one_row_of_a_table():
    row = {"row": "a|b", "side": "ours", "status": "ok", "seconds": 1.5, "note": "two\nlines"}
    assert line(row).count("|") == 10 and "\n" not in line(row)


def test_a_line_shows_what_the_compiler_counts_beside_the_peak():
    row = {"row": "a", "side": "ours", "status": "ok", "peak_gib": 9.0, "needed_gib": 6.0}
    assert "| 9.00, 6.00, - |" in line(row)
