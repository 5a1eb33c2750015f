"""`generate --prompt-file --ray` over a real cluster of this machine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from cogvideox_flax.cli import main
from cogvideox_flax.io.video import read_metadata, read_video
from tests.support.servers import ROOT

ray = pytest.importorskip("ray")

LINES = 12


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster of one machine with two cores; `add_node` adds more."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 * 2**20})
    yield own
    ray.shutdown()
    own.shutdown()


def workers():
    """The processes of workers that make a video."""
    named = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [process for process in named if process.info["cmdline"][0].startswith("ray::Worker")]


def start(cluster, prompts, out):
    command = [sys.executable, "-m", "cogvideox_flax", "generate", "--prompt-file", str(prompts), "--out", str(out)]
    command += ["--steps", "4", "--ray", cluster.address, "--ray-worker", "CPU=1"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, process):
    end = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=60)
        time.sleep(0.1)


def test_a_queue_over_a_cluster(cluster, tmp_path):
    """Twelve lines, a worker killed in mid-run, one that joins late, the driver killed and started again: every video
    is there once, as one machine makes it."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "clips"
    shapes = "circle", "square", "triangle"
    lines = [f"a large {colour} {shape}" for colour in ("red", "green", "blue", "yellow") for shape in shapes]
    prompts.write_text("\n".join(lines))
    made = lambda: sorted(out.glob("*.mp4"))  # noqa: E731
    driver = start(cluster, prompts, out)
    wait_for(lambda: len(made()) >= 2, driver)
    victim = workers()[0]
    victim.send_signal(signal.SIGKILL)
    cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    wait_for(lambda: len(made()) >= 5, driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=60)
    before = {path: path.stat().st_mtime_ns for path in made()}
    driver = start(cluster, prompts, out)
    printed, messages = driver.communicate(timeout=300)
    assert driver.returncode == 0, messages
    assert len(made()) == LINES and f"{len(before)} of {LINES} videos are there already" in messages
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())  # none was made again
    assert {Path(line) for line in printed.split()} == set(made()) - set(before)
    assert [read_metadata(path)["prompt"] for path in made()] == lines
    alone = tmp_path / "alone"
    prompts.write_text("\n".join(lines[:3]))
    assert main(["generate", "--prompt-file", str(prompts), "--out", str(alone), "--steps", "4", "--quiet"]) == 0
    for path in sorted(alone.glob("*.mp4")):
        np.testing.assert_array_equal(read_video(out / path.name)[0], read_video(path)[0])
    assert not (tmp_path / "clips.stages").exists() or not list((tmp_path / "clips.stages").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["a red circle", "--ray", "local"], "--ray is of a --prompt-file"),
        (["--prompt-file", "p.txt", "--ray", "local", "--batch", "2"], "--batch cannot be given with --ray"),
        (["--prompt-file", "p.txt", "--ray", "local", "--out", "x/%04d.png"], "as one file"),
        (["--prompt-file", "p.txt", "--ray", "local", "--ray-worker", "CPU"], "such as CPU=8,GPU=1"),
        (["--prompt-file", "p.txt", "--ray", "127.0.0.1:1"], "there is no Ray cluster"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    (tmp_path / "p.txt").write_text("a red circle")
    assert main(["generate", *options]) == 2
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["p.txt"]
