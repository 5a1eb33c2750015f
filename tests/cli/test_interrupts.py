"""Ctrl-C while something compiles: a command ends at once, in order; a program that catches it goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cogvideox_flax import hub
from cogvideox_flax.generate.pipeline import Pipeline
from tests.support import processes
from tests.support.commands import ROOT
from tests.support.media import make_clips

PROMPT = "a large yellow circle goes up against a black background"
LAST_LINE = "stopped; the same command goes on from what was finished"
# without a cache, so that there is something to compile
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_COMPILATION_CACHE": "0"}

COMMANDS = {
    "generate": ["generate", PROMPT, "--steps", 2],
    "train": ["train", "--config", "config.toml"],
}
CONFIG = """
model = "embedded"
clips = "clips"
out = "run"
method = "lora"
num_frames = 1
height = 32
width = 48
batch = 2
lora = { rank = 2, targets = ["q"] }
loop = { steps = 4, dtype = "float32" }
"""


@pytest.fixture
def folder(tmp_path):
    """Where commands run that find nothing compiled."""
    make_clips(tmp_path / "clips")
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def stop(folder: Path, command: str, times: list[float], after: str = "") -> tuple[int, str]:
    """Start a command, and once it has said something send Ctrl-C, after each of these seconds.

    Returns:
        Its exit code, and what it has written to stderr from its first Ctrl-C on.
    """
    home = folder / "home"
    argv, said = [sys.executable, "-m", "cogvideox_flax", *COMMANDS[command]], folder / "stderr"
    # as users compile, which takes seconds: the suite's own flags are for quick compilations
    environment = {**ENVIRONMENT, "COGVIDEOX_HOME": str(home), "XLA_FLAGS": ""}
    how = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL}
    with said.open("w") as stderr, processes.running(argv, stderr=stderr, **how) as process:
        deadline = time.monotonic() + 200
        while after not in said.read_text():
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        for i, seconds in enumerate(times):
            time.sleep(seconds)
            if i == 0:
                before = len(said.read_text())
            process.send_signal(signal.SIGINT)
        code = process.wait(100)
    return code, said.read_text()[before:]


@pytest.mark.parametrize(
    ("command", "after", "times"),
    [
        ("generate", "compiling the denoising step", [0.3]),
        pytest.param("generate", "compiling the VAE decoder", [1.5], marks=pytest.mark.further),
        # in XLA, which JAX's wait for it leaves
        pytest.param("generate", "compiling the VAE decoder", [1.5, 0.1], marks=pytest.mark.further),
        ("train", "compiling the training step", [1, 1]),  # the first asks it to stop after the step
    ],
)
def test_a_command_that_compiles_ends_at_once(folder, command, after, times):
    began = time.monotonic()
    code, said = stop(folder, command, times, after)
    assert code == 130
    assert said.splitlines()[-1] == LAST_LINE
    assert "Traceback" not in said
    assert time.monotonic() - began < 100


@pytest.mark.further
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("seed", range(8))
def test_a_command_ends_at_any_time(folder, command, seed):
    chance = random.Random(seed)
    times = [chance.uniform(2, 14), *[chance.uniform(0.05, 1)] * chance.randrange(2)]
    code, said = stop(folder, command, times)
    if code != 0:  # it was not done
        assert code == 130, said
        assert said.splitlines()[-1] in (LAST_LINE, "stopped; nothing was begun")
        assert "Traceback" not in said


SIZE = {"num_frames": 9, "num_inference_steps": 2, "force": True}
SCRIPT = f"""
import signal, sys, threading
import numpy as np
from jax._src import compiler
from cogvideox_flax import Pipeline

real, interrupted = compiler.backend_compile_and_load, ["denoising_step", "VAE_decoder"]

def compile_and_load(backend, module, *args, **options):
    if interrupted and interrupted[0] in str(module.operation.attributes["sym_name"]):
        interrupted.pop(0)
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    return real(backend, module, *args, **options)

compiler.backend_compile_and_load = compile_and_load
pipe = Pipeline.from_pretrained("embedded", dtype="float32")
for path in sys.argv[1:]:
    if path.endswith("last.npy"):
        pipe, interrupted = Pipeline.from_pretrained("embedded", dtype="bfloat16"), ["denoising_step"]
    try:
        np.save(path, pipe("{PROMPT}", **{SIZE}).frames)
    except KeyboardInterrupt:
        pass
"""


def test_a_program_goes_on_with_the_same_pipeline(tmp_path):
    """It is interrupted while XLA compiles the step, while it compiles the decoder, and once more before it ends."""
    paths = [tmp_path / name for name in ("first.npy", "second.npy", "third.npy", "last.npy")]
    done = processes.run([sys.executable, "-c", SCRIPT, *paths], env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert [path.exists() for path in paths] == [False, False, True, False]
    pipe = Pipeline.from_pretrained(hub.EMBEDDED, dtype="float32")
    np.testing.assert_array_equal(np.load(paths[2]), pipe(PROMPT, **SIZE, progress=False).frames)


def test_ctrl_c_after_the_end_of_a_command_changes_nothing():
    """As when the interpreter's teardown takes its time."""
    code = """
import atexit, signal, sys
atexit.register(signal.raise_signal, signal.SIGINT)
from cogvideox_flax.cli import main
sys.argv[1:] = ["info"]
sys.exit(main())
"""
    done = processes.run([sys.executable, "-c", code], env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")


EAGER = """
import signal, sys, threading
import jax, jax.numpy as jnp
from jax._src import compiler
from cogvideox_flax.runtime.terminal import reliable_interrupts

def heavy(x):
    for i in range(400):
        x = jnp.sin(jnp.sort(x) + i)
    return x

real = compiler.backend_compile_and_load

def compile_and_load(backend, module, *args, **options):
    if "heavy" in str(module.operation.attributes["sym_name"]):
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    return real(backend, module, *args, **options)

compiler.backend_compile_and_load = compile_and_load
try:
    with reliable_interrupts():
        jax.jit(heavy)(jnp.arange(8.0))
        while True:
            pass
except KeyboardInterrupt:
    print("caught")
"""


def test_an_operation_that_compiles_on_its_own_is_not_broken():
    done = processes.run([sys.executable, "-c", EAGER], env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (0, "caught\n"), done.stderr
