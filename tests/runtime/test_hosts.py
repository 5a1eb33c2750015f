"""Several hosts from the command line: two real processes on this machine, with disks of their own and shared ones."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import store
from cogvideox_flax.io.video import read_video
from cogvideox_flax.runtime.multihost.messages import Connection
from cogvideox_flax.runtime.multihost.rendezvous import ProcessAddress, find_address, join
from cogvideox_flax.training.config import read_config
from cogvideox_flax.training.finetune import finetune
from cogvideox_flax.training.job import check
from cogvideox_flax.training.metrics import read_metrics
from tests.support.commands import PROMPT, ROOT
from tests.support.media import make_clips
from tests.support.reference import save_layout

pytest_plugins = ["tests.support.commands"]

MESH = ("--mesh", "1,2,2")


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Hosts:
    """Processes that run one command, each in a folder and with a cache of its own unless `shared`."""

    def __init__(self, folder: Path, *argv, shared: bool = False, num_processes: int = 2):
        self.folders = [folder if shared else folder / f"host {i}" for i in range(2)]
        self.errors = [folder / f"stderr {i}" for i in range(2)]
        join = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", num_processes, "--process-id"]
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
        self.processes = []
        for i, place in enumerate(self.folders):
            place.mkdir(parents=True, exist_ok=True)
            env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT), "COGVIDEOX_HOME": str(place / "cache")}
            command = [sys.executable, "-m", "cogvideox_flax", *argv, *join, i]
            with self.errors[i].open("w") as stderr:
                self.processes.append(
                    subprocess.Popen(
                        list(map(str, command)), cwd=place, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait(60)

    def said(self, i: int) -> str:
        return self.errors[i].read_text()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.said(0):
            assert time.monotonic() < deadline, self.said(0)
            assert self.processes[0].poll() is None, self.said(0)
            time.sleep(0.05)

    def finish(self, timeout: float = 90) -> tuple[list[int], list[str]]:
        """Exit codes and standard outputs."""
        outputs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        return [process.returncode for process in self.processes], outputs

    def succeed(self) -> list[str]:
        codes, (printed, nothing) = self.finish()
        assert codes == [0, 0], self.said(0) + self.said(1)
        assert nothing == ""
        assert "Traceback" not in self.said(0) + self.said(1)
        return printed.splitlines()


@pytest.mark.further
def test_stages_on_hosts_that_share_no_disk(paths, layout, tmp_path):
    """The same as one process computes. Each host converts the model; process 0 alone has the stage files."""
    model, size = ["--dtype", "float32", *MESH], ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 2]
    # frames are compared as PNGs: H.264 turns a difference of one level into many
    for argv in (["encode", PROMPT, "--model", layout], ["denoise", *size], ["decode", "--out", "frames"]):
        with Hosts(tmp_path, *argv, *model, "--dir", "run") as hosts:
            (printed,) = hosts.succeed()
    assert printed == "frames"
    run = hosts.folders[0] / "run"
    names = (store.CONFIG_FILE, store.EMBEDDINGS_FILE, store.LATENTS_FILE)
    assert {path.name for path in run.iterdir()} == set(names)
    assert not (hosts.folders[1] / "run").exists()
    assert all(len(list(folder.glob("cache/*/config.json"))) == 1 for folder in hosts.folders)

    alone = ["--dir", tmp_path / "alone", "--out", tmp_path / "frames"]
    (folder,) = paths("generate", PROMPT, "--model", layout, *model, *size, *alone)
    latents = [load_file(folder / store.LATENTS_FILE)["latents"] for folder in (run, tmp_path / "alone")]
    np.testing.assert_allclose(*latents, atol=1e-4)
    frames = [read_video(path)[0].astype(int) for path in (hosts.folders[0] / "frames", folder)]
    assert np.abs(frames[0] - frames[1]).max() <= 1


def test_generate_on_hosts_that_share_a_disk(layout, tmp_path):
    """One conversion, one video, one process that prints."""
    quick = ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 1, "--dtype", "float32", *MESH]
    with Hosts(tmp_path, "generate", PROMPT, "--model", layout, *quick, "--out", "x.npz", shared=True) as hosts:
        assert hosts.succeed() == ["x.npz"]
    assert hosts.said(0).count("INFO: converting ") == 1
    assert not re.search("INFO|WARNING|compil|step/s", hosts.said(1))
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "x.npz", "stderr 0", "stderr 1"}
    assert len(list(tmp_path.glob("cache/*/config.json"))) == 1


@pytest.mark.further
def test_a_queue_on_hosts_that_share_no_disk(layout, tmp_path):
    """Process 0 has the file of prompts, and writes; what is there already is not made again."""
    (tmp_path / "host 0").mkdir()
    (tmp_path / "host 0" / "prompts.txt").write_text('a circle\n{"prompt": 3}\n{"prompt": "b", "seed": 2}\n')
    quick = ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 1, "--dtype", "float32", *MESH]
    command = ["generate", "--prompt-file", "prompts.txt", "--model", layout, *quick, "--out", "x.npz"]
    for left in (["x-0001-a-circle-seed0.npz", "x-0003-b-seed2.npz"], []):
        with Hosts(tmp_path, *command) as hosts:
            codes, (printed, nothing) = hosts.finish()
        assert codes == [2, 2]
        assert printed.splitlines() == left
        assert nothing == ""
        assert "line 2: prompt is 3" in hosts.said(0)
    assert not {path.name for path in hosts.folders[1].iterdir()} - {"cache"}


@pytest.mark.further
def test_an_image_is_read_by_process_0(paths, tmp_path):
    """It is on no other disk; the result is that of one process."""
    layout = save_layout(tmp_path / "hf", "cogvideox1.5-5b-i2v")
    (tmp_path / "host 0").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    Image.fromarray(pixels).save(tmp_path / "host 0" / "first.png")
    quick = ["--num-frames", 9, "--height", 32, "--width", 48, "--steps", 2, "--dtype", "float32", *MESH]
    command = ["generate", PROMPT, "--model", layout, *quick]
    with Hosts(tmp_path, *command, "--image", "first.png", "--out", "x.npz") as hosts:
        hosts.succeed()
    (alone,) = paths(*command, "--image", tmp_path / "host 0" / "first.png", "--out", tmp_path / "alone.npz")
    latents = [np.load(path)["latents"] for path in (tmp_path / "host 0" / "x.npz", alone)]
    np.testing.assert_allclose(*latents, atol=1e-4)
    with Hosts(tmp_path, *command, "--image", "nowhere.png", "--out", "x.npz") as hosts:
        codes, _ = hosts.finish(60)
    assert codes == [2, 2] and "there is no image nowhere.png" in hosts.said(0)


@pytest.mark.further
def test_a_long_clip_is_streamed_by_all_hosts(layout, paths, tmp_path):
    """Decoding in chunks needs every host, also those that write nothing."""
    size = ["--num-frames", 17, "--window", 9, "--height", 32, "--width", 48, "--steps", 1]
    command = ["generate", PROMPT, "--model", layout, *size, "--dtype", "float32", *MESH]
    with Hosts(tmp_path, *command, "--out", "frames") as hosts:
        hosts.succeed()
    (alone,) = paths(*command, "--out", tmp_path / "alone")
    frames = [read_video(path)[0].astype(int) for path in (hosts.folders[0] / "frames", alone)]
    assert frames[0].shape == (17, 32, 48, 3) and np.abs(frames[0] - frames[1]).max() <= 1


LENGTH = "--num-frames", 9, "--force", "--steps", 800
LONG = ["generate", PROMPT, *LENGTH, "--dtype", "float32", *MESH, "--out", "long.npz"]
"""A run of the embedded model that is stopped."""


def test_killed_and_interrupted_hosts_end_the_run_which_goes_on(tmp_path):
    """The loop goes on from process 0's disk."""
    with Hosts(tmp_path, *LONG) as hosts:
        deadline = time.monotonic() + 60
        while not (hosts.folders[0] / "long.npz.stages" / store.STATE_FILE).exists():
            assert time.monotonic() < deadline, hosts.said(0)
            time.sleep(0.05)
        hosts.processes[1].kill()
        codes, outputs = hosts.finish(20)
    assert codes == [1, -signal.SIGKILL] and outputs == ["", ""]
    assert "process 1 of 2: ended without a message" in hosts.said(0)
    assert "Traceback" not in hosts.said(0)
    assert (hosts.folders[0] / "long.npz.stages" / store.STATE_FILE).exists()
    assert not (hosts.folders[1] / "long.npz.stages").exists()

    with Hosts(tmp_path, *LONG) as hosts:
        hosts.wait_for("going on after step")
        hosts.wait_for("denoising:")
        hosts.processes[1].send_signal(signal.SIGINT)
        codes, outputs = hosts.finish(20)
    assert codes == [130, 130] and outputs == ["", ""]
    assert "process 1 of 2: stopped" in hosts.said(0)
    assert "Traceback" not in hosts.said(0) + hosts.said(1)


def test_the_others_end_when_process_0_is_killed(tmp_path):
    with Hosts(tmp_path, *LONG) as hosts:
        hosts.wait_for("compiling the text encoder")
        hosts.processes[0].kill()
        codes, _ = hosts.finish(20)
    assert codes == [-signal.SIGKILL, 1]
    assert "process 0 of 2: ended without a message" in hosts.said(1)


def test_an_error_on_one_host_ends_both(tmp_path):
    with Hosts(tmp_path, *LONG[:-1], "/proc/nothing/video.mp4") as hosts:
        codes, _ = hosts.finish(40)
    assert codes == [2, 2]
    assert "error: cannot write /proc/nothing/video.mp4" in hosts.said(0)
    assert "error: process 0 of 2: cannot write /proc/nothing/video.mp4" in hosts.said(1)


def test_a_host_that_never_comes(tmp_path):
    with Hosts(tmp_path, *LONG, "--join-timeout", 4, num_processes=4) as hosts:
        codes, _ = hosts.finish(40)
    assert codes == [2, 2]
    for i in range(2):
        assert "error: processes 2, 3 of 4 have not joined within 4 s" in hosts.said(i)


TRAINING = """
model = "{model}"
clips = "clips"
out = "run"
method = "{method}"
num_frames = 9
height = 32
width = 48
batch = 2
seed = 7
mesh = "2,1,2,fsdp"

[lora]
rank = 2

[loop]
steps = 20
log_every = 1
ema_decay = 0.9

[optimizer]
learning_rate = 1e-2
warmup_steps = 0
eps = 1e-6
"""
SAMPLES = """
[sample]
prompts = ["a red circle"]
every = 3
num_inference_steps = 1
"""


def write_training(folder: Path, model: Path, method: str, more: str = "") -> list:
    """Clips and settings in a folder; returns the command that trains on them."""
    make_clips(folder / "clips")
    (folder / "kites.toml").write_text(TRAINING.format(model=model, method=method) + more)
    return ["train", "--config", "kites.toml"]


@pytest.mark.further
def test_training_stops_on_all_hosts_and_resumes(layout, tmp_path, monkeypatch):
    """Clips, settings and the run's directory are on process 0's disk alone. The same as one process computes.

    Two processes add in another order. With a smaller `eps`, a number whose gradient is almost 0 would move by the sign
    of what rounding leaves of it.
    """
    first = tmp_path / "host 0"
    command = write_training(first, layout, "full")
    with Hosts(tmp_path, *command) as hosts:
        hosts.wait_for("step 2 of 20")
        hosts.processes[1].send_signal(signal.SIGINT)
        codes, outputs = hosts.finish(40)
    assert codes == [130, 130] and outputs == ["", ""]
    assert "the same command resumes it" in hosts.said(0)
    assert "Traceback" not in hosts.said(0) + hosts.said(1)
    (state,) = [path for path in (first / "run" / "training" / "states").iterdir() if path.is_dir()]
    assert 2 <= int(state.name) < 20

    with Hosts(tmp_path, *command) as hosts:
        (printed,) = hosts.succeed()
    assert f"resuming from step {state.name} of 20" in hosts.said(0)
    assert not (hosts.folders[1] / "run").exists()
    lines = read_metrics(first / "run" / "training" / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 21)]
    assert [line["step"] for line in lines if "fixed_noise_loss" in line] == [0, 20]
    monkeypatch.chdir(first)
    alone = finetune(check(read_config(Path("kites.toml"), {"out": "alone"})), progress=False)
    ours, theirs = (load_file(first / path / "transformer" / "model.safetensors") for path in (printed, alone))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, err_msg=name)


@pytest.mark.further
def test_adapters_are_trained_on_hosts_that_share_a_disk(layout, tmp_path):
    command = write_training(tmp_path, layout, "lora", SAMPLES)
    with Hosts(tmp_path, *command, "--steps", 3, shared=True) as hosts:
        (printed,) = hosts.succeed()
    assert all(np.abs(value).max() > 0 for value in load_file(tmp_path / printed).values())
    assert {path.name for path in tmp_path.glob("run/training/states/*.json")} == {"3.json", "3.1.json"}
    with Image.open(tmp_path / "run" / "samples" / "000003.png") as sheet:
        assert np.asarray(sheet).std() > 5


# --- without processes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinator", "h:1"], "--num-processes and --process-id is missing"),
        (["--coordinator", "h:1", "--num-processes", "2"], "--process-id is missing"),
        (["--coordinator", "h", "--num-processes", "2", "--process-id", "0"], "must be ADDRESS:PORT"),
        (["--coordinator", "h:70000", "--num-processes", "2", "--process-id", "0"], "must be ADDRESS:PORT"),
        (["--coordinator", "h:1", "--num-processes", "0", "--process-id", "0"], "--num-processes must be 1 or more"),
        (["--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"], "--process-id must be 0 to 1"),
        (
            ["--coordinator", "h:1", "--num-processes", "2", "--process-id", "0", "--join-timeout", "0"],
            "above 0 s",
        ),
        (["--join-timeout", "nan"], "above 0 s, at most 86400 s; got nan"),
        (["--distributed", "--join-timeout", "inf"], "above 0 s, at most 86400 s; got inf"),
        (["--distributed", "--join-timeout", "1e300"], "above 0 s, at most 86400 s; got 1e+300"),
        (["--coordinator", "a..b:1", "--num-processes", "2", "--process-id", "1"], "must be ADDRESS:PORT"),
        (["--coordinator", f"{'a' * 64}:1", "--num-processes", "2", "--process-id", "1"], "must be ADDRESS:PORT"),
        (["--coordinator", f"h:{'9' * 5000}", "--num-processes", "2", "--process-id", "1"], "must be ADDRESS:PORT"),
        (["--coordinator", "fd00::2:1", "--num-processes", "2", "--process-id", "1"], "or [fd00::2]:9999"),
        (["--coordinator", "[fd00:]:1", "--num-processes", "2", "--process-id", "1"], "or [fd00::2]:9999"),
        (["--coordinator", "h:1", "--num-processes", "9" * 30, "--process-id", "0"], "at most 10000"),
        (["--distributed", "--process-id", "1"], "give either it or them"),
        (["--distributed"], "finds no cluster"),
    ],
)
def test_options_that_do_not_fit_are_refused(run, tmp_path, options, message):
    for command in (["generate", "x"], ["encode", "x", "--dir", tmp_path], ["decode", "--dir", tmp_path]):
        code, out, err = run(*command, *options)
        assert code == 2 and out == "" and err.count("error: ") == 1
        assert message in err


def test_one_process_of_one_needs_no_other(run, tmp_path):
    code, _, err = run("decode", "--dir", tmp_path, "--coordinator", "h:1", "--num-processes", 1, "--process-id", 0)
    assert code == 2 and "generation_config.json" in err


def test_an_address_may_be_ipv6():
    assert ProcessAddress("[fd00::2]:9999", 2, 1).host_and_port == ("fd00::2", 9999)


def test_a_cluster_that_jax_knows_is_found(monkeypatch):
    for name, value in {"NTASKS": "2", "PROCID": "1", "LOCALID": "0", "JOB_ID": "5", "STEP_NODELIST": "n1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    address = find_address(None, None, None, True)
    assert (address.num_processes, address.process_id) == (2, 1)
    assert address.host_and_port[0] == "n1"


def test_messages_hold_values_and_arrays():
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = Connection(socket.create_connection(server.getsockname()))
        right = Connection(server.accept()[0])
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int8), np.array(True)]
    message = ["value", {"a": [1, None, "ü", arrays[0]], "b": {"c": arrays[1]}, "d": (arrays[2], 2.5)}]
    threading.Thread(target=left.send, args=(message,)).start()
    kind, found = right.receive()
    assert kind == "value" and found["a"][:3] == [1, None, "ü"]
    for got, sent in zip([found["a"][3], found["b"]["c"], found["d"][0]], arrays, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype and got.shape == sent.shape
    left.close()
    assert right.receive() is None


def test_processes_that_do_not_belong_are_refused():
    """A stray connection, another count of processes, a number that is taken: the run begins without them."""
    port, results = free_port(), {}
    address = f"127.0.0.1:{port}"

    def start(name, place):
        def run():
            try:
                results[name] = join(place)
            except InputError as e:
                results[name] = str(e)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    first = start("first", ProcessAddress(address, 3, 0, 20))
    start("other count", ProcessAddress(address, 2, 1, 20)).join(60)
    with socket.create_connection(("127.0.0.1", port)) as stray:
        stray.sendall(b"GET / HTTP/1.1\r\n\r\n")
    second = start("second", ProcessAddress(address, 3, 1, 20))
    time.sleep(0.5)
    start("again", ProcessAddress(address, 3, 1, 20)).join(60)
    third = start("third", ProcessAddress(address, 3, 2, 20))
    for thread in (first, second, third):
        thread.join(60)
    assert "--num-processes 2, process 0 says 3" in results["other count"]
    assert "--process-id 1 is taken" in results["again"]
    links, jax_port = results["first"]
    assert set(links) == {1, 2}
    assert results["second"][1] == results["third"][1] == jax_port


def test_what_is_not_process_0_is_not_waited_for():
    def listen(answer):
        with server.accept()[0] as peer:
            peer.sendall(answer)
            stop.wait(20)

    for answer in (b"", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", bytes(16)):
        stop = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=listen, args=(answer,))
            thread.start()
            start = time.monotonic()
            with pytest.raises(InputError, match=r"accepts a connection at .* and does not answer within 0.5 s"):
                join(ProcessAddress("{}:{}".format(*server.getsockname()), 2, 1, 0.5))
            assert time.monotonic() - start < 5
            stop.set()
            thread.join(60)


def test_a_process_that_ended_while_it_waited_may_join_again():
    address, results = f"127.0.0.1:{free_port()}", {}
    first = threading.Thread(target=lambda: results.update(links=join(ProcessAddress(address, 3, 0, 20))[0]))
    first.start()
    with pytest.raises(InputError, match=r"accepts a connection at .* does not answer within 1 s"):
        join(ProcessAddress(address, 3, 1, 1))
    others = [threading.Thread(target=join, args=(ProcessAddress(address, 3, i, 10),)) for i in (1, 2)]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(15)
    assert set(results["links"]) == {1, 2}
