"""`benchmarks.gpu_proof` as a command: rows that go wrong in every way, a budget, a kill, no GPU, both sides."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import processes
import pytest

from benchmarks.gpu_proof import __main__ as proof
from benchmarks.gpu_proof import machine
from benchmarks.gpu_proof.process import Died, Worker
from benchmarks.gpu_proof.record import Record
from benchmarks.gpu_proof.rows import RELEASED, SMALL, Row, rows
from benchmarks.gpu_proof.run import START_S, Runner, Setting, environment

FAULTS = "gpu_faults"


# --- what can go wrong with a row


class Fake(Row):
    """A row whose process imports nothing."""

    process = "fakes"


def row_of(name, side="ours", group="a", **fields):
    return Fake(name, side, group, f"{FAULTS}:{name.replace(' ', '_')}", **{"expected_s": 0.1, "limit_s": 60} | fields)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Rows through a runner; gives the record as it is on disk, and what was printed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setitem(START_S, "fakes", 0)

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
        todo += [row_of(fault, limit_s=1 if fault == "hangs" else 60), replace(row_of("fine"), name=f"after {fault}")]
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
    assert re.fullmatch(r"it would take about 1000 s, \d+ of 600 s are left", reasons["too long"])
    assert found["last"]["status"] == "ok"


def test_a_spent_budget_ends_a_row_and_starts_none(run, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_proof.run.GRACE_S", 1.0)
    start = time.monotonic()
    found, _ = run([row_of("hangs"), row_of("fine")], budget=2.0)
    assert 2.5 < time.monotonic() - start < 30
    hangs = found["hangs"]
    assert hangs["status"] == "not tried" and hangs["reason"] == "the budget ended in it"  # no fault of the row
    assert hangs["first_s"] == 2.5 and found["fine"]["status"] == "not tried"


def test_imports_and_row_share_one_deadline(monkeypatch, tmp_path):
    """A worker that imports for long leaves its row the rest of the budget; `started` is before the runner."""
    asked = []

    class Slow:
        def __init__(self, side, env):
            pass

        def start(self, timeout):
            asked.append(timeout)
            time.sleep(0.5)

        def ask(self, function, options, timeout, partly):
            asked.append(timeout)
            return {"status": "ok"}

        def kill(self):
            pass

    monkeypatch.setattr("benchmarks.gpu_proof.run.Worker", Slow)
    monkeypatch.setattr("benchmarks.gpu_proof.run.GRACE_S", 0.0)
    monkeypatch.setitem(START_S, "fakes", 0)
    setting = Setting(tmp_path, 20.0, {}, started=time.monotonic() - 10)
    Runner([row_of("fine")], Record(None, {}), setting, say=len, used_mib=lambda: None).run()
    importing, running = asked
    assert importing < 10 and running < importing - 0.4


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    found = Worker("fakes", environment(tmp_path, dry_run=True))
    yield found
    found.kill()


def test_the_stack_of_a_hang_is_that_of_the_row(worker):
    with pytest.raises(Died, match=r"in File .*gpu_faults\.py.* in hangs_beside_a_thread") as died:
        worker.ask(f"{FAULTS}:hangs_beside_a_thread", {}, 1, len)
    assert died.value.status == "timed out" and "threading.py" not in str(died.value)


def test_a_process_that_closes_its_pipe_and_goes_on_is_ended(worker, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_proof.process.END_S", 0.5)
    with pytest.raises(Died, match="closed its pipe and did not end") as died:
        worker.ask(f"{FAULTS}:closes_its_pipe", {}, 60, len)
    assert died.value.status == "crashed"


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
    path, deadline = tmp_path / "record.json", time.monotonic() + 120

    def statuses():
        return {row["row"]: row["status"] for row in json.loads(path.read_text())["rows"]} if path.exists() else {}

    with processes.running([sys.executable, "-c", code], env=env, cwd=Path(__file__).parents[1]):  # and killed
        while statuses().get("hangs") != "running" and time.monotonic() < deadline:
            time.sleep(0.2)
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


RECORD = {
    "machine": {"nvidia_smi": {"name": "NVIDIA H200"}, "packages": {"jax": "0.10.2", "torch": None}},
    "rows": [
        {**row.about(), "status": "ok", "seconds": 1.0}
        for row in rows(SMALL)
        if row.name in ("5b step", "text encoder")
    ],
}


def test_a_record_of_the_same_machine_and_options_is_taken_over():
    known, refused = proof.known_rows(json.loads(json.dumps(RECORD)), rows(SMALL), RECORD["machine"])
    assert set(known) == {f"{row['row']} | {row['side']}" for row in RECORD["rows"]} and refused == []
    steps = [row for row in rows(SMALL) if row.name == "5b step"]
    known, refused = proof.known_rows(json.loads(json.dumps(RECORD)), steps, RECORD["machine"])
    assert set(known) == {row.key for row in steps} and refused == ["2 rows that this run does not have"]


def test_rows_with_other_options_are_not_taken_over():
    """Rows of a dry run have the names of those at released sizes."""
    known, refused = proof.known_rows(json.loads(json.dumps(RECORD)), rows(RELEASED), RECORD["machine"])
    assert known == {} and "5b step | ours: other options" in refused


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"nvidia_smi": {"name": "NVIDIA H100"}}, "another GPU: NVIDIA H200, here NVIDIA H100"),
        ({"packages": {"jax": "0.11.2", "torch": None}}, "other package versions: jax 0.10.2, here 0.11.2"),
    ],
)
def test_a_record_of_another_machine_is_not_taken_over(facts, says):
    known, refused = proof.known_rows(json.loads(json.dumps(RECORD)), rows(SMALL), RECORD["machine"] | facts)
    assert known == {} and refused == [f"no row: {says}"]


def test_the_handler_of_sigterm_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "no_gpu", lambda: "none here")
    before = signal.getsignal(signal.SIGTERM)
    proof.main(["--json", str(tmp_path / "a.json")])
    assert signal.getsignal(signal.SIGTERM) is before


def dry_run(tmp_path, *options):
    path = tmp_path / "dry.json"
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--dry-run", "--json", str(path), *options]
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = processes.run(command, env=env, cwd=Path(__file__).parents[1], timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(path.read_text())


def test_both_sides_compute_the_same_in_small(tmp_path):
    """In this process, as their workers do it."""
    from benchmarks.gpu_proof import models, peer_models  # not by `import` of this file in a process of its own

    todo = [row for row in rows(SMALL) if row.name in ("5b step", "transformer, 2 layers of float32")]
    record = Record(None, {})
    record.expect((row.key, row.about()) for row in todo)
    tensors = [["transformer", "cogvideox-5b"]]
    peer_models.tensors(lambda **values: None, folder=str(tmp_path), components=tensors, small=True)
    for row in todo:
        run = models.run if row.side == "ours" else peer_models.run
        values = {}
        values |= run(lambda values=values, **more: values.update(more), folder=str(tmp_path), **row.options)
        record.set(row.key, **values)
        record.compare(row.name, tmp_path)
    assert len(todo) == 6 and record.summary() == {"ok": 6} and record.differences() == []
    found = {f"{c['row']} | {c['side']}": c for c in record.comparisons}
    exact = found["transformer, 2 layers of float32 | ours : diffusers"]
    assert exact["holds"] and exact["difference_max"] < 1e-4
    for side in ("diffusers", "diffusers compiled"):
        assert found[f"5b step | ours : {side}"]["holds"]
        assert found[f"5b step | ours : {side}"]["difference_rms"] < 0.02
    assert found["5b step, both from float32 | ours : diffusers"]["holds"]


def test_a_pair_of_processes_as_the_command_runs_them(tmp_path, monkeypatch):
    """Their imports start no device, for they are done while another process has the GPU."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    ours, torch = (row for row in rows(SMALL) if row.name == "matrix product")
    pairs = [(replace(row, name="imports", function=f"{FAULTS}:started"), row) for row in (ours, torch)]
    monkeypatch.setattr(proof, "rows", lambda sizes: [row for pair in pairs for row in pair])
    path = tmp_path / "dry.json"
    assert proof.main(["--dry-run", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["summary"] == {"ok": 4}
    found = {f"{row['row']} | {row['side']}": row for row in record["rows"]}
    for side, imported in (("ours", "jax"), ("torch", "torch")):
        assert imported in found[f"imports | {side}"]["imported"] and found[f"imports | {side}"]["devices"] == []
    assert found["imports | ours"]["imported"] == ["jax"]
    assert "imageio_ffmpeg" not in found["imports | torch"]["imported"]
    (product,) = [c for c in record["comparisons"] if c["row"] == "matrix product"]
    assert product["side"] == "ours : torch" and product["time_ratio"] > 0


@pytest.mark.slow
def test_every_row_in_small(tmp_path):
    record = dry_run(tmp_path, "--budget", "3000")
    assert record["summary"] == {"ok": len(rows(SMALL)) - 1, "not tried": 1}
    assert all(c.get("holds", True) for c in record["comparisons"])
