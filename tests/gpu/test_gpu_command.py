"""`python -m benchmarks.gpu` without a GPU: parts that hold, fail, crash and hang, a budget, and what is kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import gpu
from benchmarks.gpu import Part
from tests.support import processes

ROW = {"part": "decode", "dtype": "float32", "difference": 1e-6, "rms_difference": 1e-7}
WRITE = "import sys; open(sys.argv[-1], 'w').write(TEXT); "


def writes(*rows, stopped=(), then=""):
    code = WRITE.replace("TEXT", repr(json.dumps({"rows": rows, "stopped": stopped})))
    return Part((), ("-c", code + then))


@pytest.fixture
def command(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "what_jax_sees", lambda: {"device": "a GPU", "fault": ""})
    monkeypatch.setattr(gpu, "LEAST_S", 1.0)

    def run(budget=60.0, **parts):
        monkeypatch.setattr(gpu, "PARTS", parts)
        path = tmp_path / "gpu.json"
        code = gpu.main(["--json", str(path), "--budget", str(budget), "--parts", *parts])
        return code, {row["part"]: row for row in json.loads(path.read_text())["rows"]}

    return run


def test_what_holds_is_ok(command, capsys):
    half = ROW | {"dtype": "bfloat16", "difference": 0.5, "rms_difference": 0.02}
    peer = {"part": "decode", "why": "diffusers stopped at 'first': killed, as when memory ends"}
    code, found = command(exact=writes(ROW), half=writes(half, stopped=[peer]))
    assert code == 0 and found["exact"]["done"] == [ROW] and found["half"]["stopped"] == [peer]
    assert "| exact | ok |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "says"),
    [
        pytest.param(writes(ROW | {"difference": 1e-3}), "outputs differ by 1.0e-03", id="float32"),
        pytest.param(writes(ROW | {"dtype": "bfloat16", "rms_difference": 0.2}), "beyond 0.1", id="bfloat16"),
        pytest.param(writes(ROW | {"difference": float("nan")}), "differ by nan", id="NaN"),
        pytest.param(writes(stopped=[{"part": "decode", "why": "ours stopped"}]), "ours stopped", id="ours stopped"),
        pytest.param(Part((), ("-c", "")), "without a result", id="no result"),
    ],
)
def test_what_does_not_hold_is_a_fault(part, says, command):
    code, found = command(part=part)
    assert code == 1 and says in found["part"]["faults"][0]


def test_a_part_that_ends_badly_costs_what_it_had_not_finished(command):
    crash, hang = writes(ROW, then="import os; os.abort()"), writes(ROW, then="import time; time.sleep(600)")
    hang = replace(hang, limit_s=3)
    code, found = command(crash=crash, hang=hang, last=writes(ROW))
    assert code == 1 and [row["status"] for row in found.values()] == ["exit status -6", "timed out", "ok"]
    assert all(row["done"] == [ROW] for row in found.values())


def test_the_budget_is_kept(command):
    code, found = command(2.0, long=writes(ROW, then="import time; time.sleep(600)"), never=writes(ROW))
    assert code == 0 and found["long"]["status"] == "budget ended" and found["long"]["done"] == [ROW]
    assert found["never"]["status"] == "not tried" and "of the budget are left" in found["never"]["why"]


def test_nothing_could_be_tried(command, monkeypatch, tmp_path, capsys):
    code, found = command(part=Part(("no_such_package",), ("-c", "")))
    assert code == 2 and found["part"]["why"] == "without no_such_package"
    monkeypatch.setattr(gpu, "what_jax_sees", lambda: {"fault": "it needs an NVIDIA GPU"})
    assert gpu.main(["--json", str(tmp_path / "none.json")]) == 2
    assert "it needs an NVIDIA GPU" in capsys.readouterr().err


def test_tests_are_kept_one_by_one(command, tmp_path):
    """pytest in a process of its own, with this command as a plugin of it; an interrupted run has what is finished."""
    test = tmp_path / "test_some.py"
    test.write_text(
        "import os, pytest\n"
        "def test_right(record_property): record_property('error', 0.5)\n"
        "def test_wrong(): assert False\n"
        "def test_skipped(): pytest.skip('why')\n"
        "def test_crashes(): os.abort()\n"
    )
    part = Part(("pytest",), ("-m", "pytest", "-o", "addopts=", "-p", "benchmarks.gpu", "-q", str(test)))
    code, found = command(tests=part)
    assert code == 1 and found["tests"]["faults"] == ["test_wrong"] and found["tests"]["status"] == "exit status -6"
    assert [t["outcome"] for t in found["tests"]["done"]] == ["passed", "failed", "skipped"]
    assert found["tests"]["done"][0]["measured"] == {"error": 0.5}


def test_jax_is_asked_on_the_machine():
    assert "NVIDIA GPU" in gpu.what_jax_sees()["fault"] or not gpu.what_jax_sees()["fault"]


def test_as_a_plugin_it_imports_no_jax():
    """The tests' own process decides its platform before JAX is imported."""
    code = "import sys, benchmarks.gpu; assert 'jax' not in sys.modules"
    run = processes.run([sys.executable, "-c", code])
    assert run.returncode == 0, run.stderr
