"""Training states of several processes, which share a disk or do not, killed while they write."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support import processes

ROOT = Path(__file__).parents[2]
STEPS = 8


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def train(folders, mesh="2,1,2,fsdp", steps=STEPS, killed=None, after=0.0):
    """A process in each folder, two devices each; returns exit codes and the state after so many steps.

    killed: number of the process that is killed so many seconds after its first step.
    """
    result, port = folders[0] / "result.npz", free_port()
    result.unlink(missing_ok=True)
    flags = "--xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    errors = [folders[0].parent / f"stderr {i}" for i in range(len(folders))]
    with ExitStack() as stack:
        running = []
        for i, folder in enumerate(folders):
            args = [i, len(folders), port, folder / "run", result, mesh, steps, *([after] if i == killed else [])]
            command = [sys.executable, "-m", "tests.support.training_host", *args]
            stderr = stack.enter_context(errors[i].open("w"))
            running.append(stack.enter_context(processes.running(command, env=env, stderr=stderr)))
        codes = [process.wait(processes.LIMIT_S) for process in running]
    said = "".join(path.read_text() for path in errors)
    assert killed is not None or codes == [0] * len(folders), said
    return codes, dict(np.load(result)) if result.exists() else None, said


def place(folder, shared, count=2):
    """The folders of so many processes."""
    folders = [folder / ("all" if shared else f"host {i}") for i in range(count)]
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
    return folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folders of a run that nothing interrupted, of two processes that share a disk, and its last state."""
    folders = place(tmp_path_factory.mktemp("whole"), shared=True)
    return folders, train(folders)[1]


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.further
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
def test_a_run_that_is_killed_while_it_saves_resumes_exactly(whole, tmp_path, shared, killed):
    after = random.Random(f"{shared} {killed}").uniform(0.0, 0.5)
    folders = place(tmp_path, shared)
    codes, _, said = train(folders, killed=killed, after=after)
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1, said
    _, state, said = train(folders)
    assert_equal(state, whole[1])
    states = folders[0] / "run" / "states"
    assert sorted(path.name for path in states.iterdir() if path.is_dir()) == ["7", "8"]
    assert ("goes through process 0" in said) == (not shared)


@pytest.mark.further
def test_a_state_is_the_same_on_other_processes(whole, tmp_path):
    """On one process; on another mesh of two that share no disk, and on what is written there."""
    folders, state = whole
    first, second = place(tmp_path, shared=False)
    shutil.copytree(folders[0] / "run", first / "run")
    for where, mesh in (([first], "1,1,2"), ([first, second], "1,2,2"), ([first, first], "1,4,1,fsdp")):
        _, there, said = train(where, mesh)
        assert_equal(there, state)
        assert "resuming from step 8 of 8" in said


@pytest.mark.further
def test_each_file_of_a_state_is_hashed_by_its_writer(whole, tmp_path):
    folders, state = whole
    run = place(tmp_path, shared=True)[0] / "run"
    shutil.copytree(folders[0] / "run", run)
    hashed = [set(json.loads((run / "states" / name).read_text())["sha256"]) for name in ("8.json", "8.1.json")]
    last = run / "states" / "8"
    assert hashed[0] | hashed[1] == {str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()}
    assert hashed[1] and all("process_1/" in name for name in hashed[1])

    damaged = max((last / name for name in hashed[1]), key=lambda path: path.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 8
    damaged.write_bytes(data)
    _, resumed, said = train([run.parent] * 2)
    assert "the training state of step 8 is damaged and is removed" in said
    assert_equal(resumed, state)
