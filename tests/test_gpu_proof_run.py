"""`benchmarks.gpu_proof` as a command: rows that go wrong in every way, a budget, a kill, no GPU, both sides."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_proof import __main__ as proof
from benchmarks.gpu_proof import machine
from benchmarks.gpu_proof.record import Record
from benchmarks.gpu_proof.rows import RELEASED, SMALL, Row, rows
from benchmarks.gpu_proof.run import Runner, Setting, environment

FAULTS = "gpu_faults"


# --- what can go wrong with a row


def row_of(name, side="ours", group="a", **fields):
    return Row(name, side, group, f"{FAULTS}:{name.replace(' ', '_')}", **{"expected_s": 0.1, "limit_s": 60} | fields)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Rows through a runner; gives the record as it is on disk, and what was printed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def call(todo, budget=600.0, missing=(), free_gib=None, known=None):
        said = []
        record = Record(tmp_path / "record.json", {})
        env = environment(tmp_path, dry_run=True)
        setting = Setting(tmp_path, budget, env, free_gib, frozenset(missing), known or {})
        Runner(todo, record, setting, say=said.append, used_mib=lambda: None).run()
        kept = json.loads((tmp_path / "record.json").read_text())
        return {row["row"]: row for row in kept["rows"]}, said

    return call


def test_a_fault_costs_its_own_row(run):
    faults = ["raises", "crashes", "exits", "hangs", "runs out of memory", "does not fit", "not a number"]
    todo = []
    for fault in faults:
        todo += [row_of(fault, limit_s=5 if fault == "hangs" else 60), replace(row_of("fine"), name=f"after {fault}")]
    found, said = run(todo)
    assert {name: row["status"] for name, row in found.items() if name in faults} == {
        "raises": "failed",
        "crashes": "crashed",
        "exits": "crashed",
        "hangs": "timed out",
        "runs out of memory": "out of memory",
        "does not fit": "not tried",
        "not a number": "ok",
    }
    after = [found[f"after {fault}"] for fault in faults]
    assert all(row["status"] == "ok" and row["seconds"] == 2.0 for row in after)
    assert found["raises"]["reason"] == "ValueError: a shape is off" and "gpu_faults.py" in found["raises"]["stderr"]
    assert "SIGABRT" in found["crashes"]["reason"] and found["crashes"]["first_s"] == 1.5
    assert "exit status 7" in found["exits"]["reason"] and "on the way out" in found["exits"]["reason"]
    assert found["hangs"]["first_s"] == 2.5 and "gpu_faults.py" in found["hangs"]["reason"]
    assert found["not a number"]["seconds"] is None
    # a process that is as good as before goes on
    assert found["after does not fit"]["pid"] == found["after runs out of memory"]["pid"]
    assert found["after crashes"]["pid"] != found["after raises"]["pid"]
    assert len(said) == len(todo)


def test_groups_have_processes_of_their_own(run):
    names = ["one", "two", "three"]
    todo = [replace(row_of("fine"), name=name, group=group) for name, group in zip(names, "aab", strict=True)]
    found, _ = run(todo)
    one, two, three = (found[name]["pid"] for name in names)
    assert one == two != three


@pytest.mark.parametrize("side", ["ours", "diffusers"])
def test_imports_start_no_device(side):
    """They are done while another process has the GPU."""
    code = f"""
import importlib
from benchmarks.gpu_proof.worker import IMPORTS
for name in IMPORTS[{side!r}]:
    importlib.import_module(name)
from jax._src import xla_bridge
import sys
assert not xla_bridge._backends, "JAX started a device"
torch = sys.modules.get("torch")
assert torch is None if {side!r} == "ours" else not torch.cuda.is_initialized()
assert "imageio_ffmpeg" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stderr


def test_what_is_not_tried_says_why(run):
    todo = [
        row_of("sees nothing", required=True),
        replace(row_of("fine"), name="blind"),
        row_of("fine", packages=("torch", "diffusers")),
        *(
            replace(row_of("fine", "torch", "b", packages=("torch",)), name=name, **fields)
            for name, fields in (
                ("too large", {"needs_gib": 80}),
                ("too long", {"expected_s": 1000}),
                ("last", {}),
            )
        ),
    ]
    found, _ = run(todo, missing=["diffusers"], free_gib=24.0)
    reasons = {name: row.get("reason") for name, row in found.items()}
    assert reasons["sees nothing"] == reasons["blind"] == "sees no NVIDIA GPU: none is there"
    assert reasons["fine"] == "diffusers is not installed"
    assert reasons["too large"] == "it needs about 80 GiB, 24 are free"
    assert re.fullmatch(r"it would take about 1008 s, \d+ of 600 s are left", reasons["too long"])
    assert found["last"]["status"] == "ok"


def test_a_spent_budget_ends_a_row_and_starts_none(run, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_proof.run.GRACE_S", 4.0)
    monkeypatch.setattr("benchmarks.gpu_proof.run.START_S", {"ours": 0})
    start = time.monotonic()
    found, _ = run([row_of("hangs"), row_of("fine")], budget=2.0)
    assert time.monotonic() - start < 30
    assert found["hangs"]["status"] == "timed out" and found["fine"]["status"] == "not tried"


def test_a_run_goes_on_where_another_ended(run):
    before, _ = run([row_of("fine")])
    known = {"fine | ours": before["fine"] | {"seconds": 77.0}}
    found, said = run([row_of("fine"), replace(row_of("fine"), name="new")], known=known)
    assert found["fine"]["seconds"] == 77.0 and found["fine"]["kept"] and found["new"]["seconds"] == 2.0
    assert len(said) == 1


def test_a_killed_run_leaves_what_it_knew_and_no_process(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_gpu_proof_run import Record, Runner, Setting, environment, row_of
from pathlib import Path
folder = Path({str(tmp_path)!r})
record = Record(folder / "record.json", {{}})
rows = [row_of("fine"), row_of("hangs"), row_of("raises")]
env = environment(folder, dry_run=True)
Runner(rows, record, Setting(folder, 600, env), used_mib=lambda: None).run()
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=Path(__file__).parents[1])
    path, deadline = tmp_path / "record.json", time.monotonic() + 120

    def statuses():
        return {row["row"]: row["status"] for row in json.loads(path.read_text())["rows"]} if path.exists() else {}

    while statuses().get("hangs") != "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    process.kill()
    process.wait()
    known = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    assert {name: row["status"] for name, row in known.items()} == {
        "fine": "ok",
        "hangs": "running",
        "raises": "not tried",
    }
    assert known["hangs"]["first_s"] == 2.5 and known["raises"]["reason"] == "the run ended before it"
    pid = known["fine"]["pid"]
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.2)
    else:
        assert not Path(f"/proc/{pid}").exists(), os.kill(pid, signal.SIGKILL)


# --- the whole command


def test_without_a_gpu_it_lists_what_it_could_not_try(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "no_gpu", lambda: "no driver: libcuda.so.1 is not there")
    start = time.monotonic()
    assert proof.main(["--json", str(tmp_path / "a.json")]) == 2
    assert time.monotonic() - start < 20
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["summary"] == {"not tried": len(rows(RELEASED))}
    out, err = capsys.readouterr()
    assert "5b step (ours)" in out and "no NVIDIA GPU here: no driver" in err


def test_hidden_gpus_are_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.no_gpu() == "CUDA_VISIBLE_DEVICES hides them all"


@pytest.mark.parametrize(("options", "message"), [(["--budget", "0"], "above 0"), (["--resume", "/none"], "no record")])
def test_refuses(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        proof.main(options)
    assert message in capsys.readouterr().err + str(stopped.value)


def dry_run(tmp_path, *options):
    path = tmp_path / "dry.json"
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--dry-run", "--json", str(path), *options]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1])
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(path.read_text())


def test_both_sides_compute_the_same_in_small(tmp_path):
    record = dry_run(tmp_path, "--only", "5b step", "transformer, 2 layers*", "--budget", "900")
    assert record["summary"] == {"ok": 9}
    found = {f"{c['row']} | {c['side']}": c for c in record["comparisons"]}
    exact = found["transformer, 2 layers of float32 | ours : diffusers"]
    assert exact["holds"] and exact["difference_max"] < 1e-4
    assert found["5b step | ours : diffusers compiled"]["difference_rms"] < 0.02
    assert found["5b step, both from float32 | ours : diffusers"]["holds"]


@pytest.mark.slow
def test_every_row_in_small(tmp_path):
    record = dry_run(tmp_path, "--budget", "3000")
    assert record["summary"] == {"ok": len(rows(SMALL)) - 1, "not tried": 1}
    assert all(c.get("holds", True) for c in record["comparisons"])
