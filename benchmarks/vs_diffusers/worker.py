"""One side in its own process, and the communication with its parent."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.runner import median_seconds, timed
from benchmarks.vs_diffusers.cases import Case

LIMIT_S = 3600.0
"""Seconds that an answer may take."""
DEAD_S = 60
"""Seconds that a process may take to end once it is killed, or has closed its output."""


class Stopped(Exception):
    """A side ended before it was done.

    side: which.
    alone: seconds and GiB of one run of the other side, without it; empty where that stopped as well.
    """

    def __init__(self, side: str, why: str):
        super().__init__(why)
        self.side = side
        self.alone: dict[str, float] = {}


class Worker:
    """One side, as a process that loads its part, and then answers each line that it is sent."""

    def __init__(self, side: str, folder: Path, case: Case):
        env = dict(os.environ, TOKENIZERS_PARALLELISM="false", XLA_PYTHON_CLIENT_PREALLOCATE="false")
        env.setdefault("JAX_PLATFORMS", "cpu" if case.device == "cpu" else "cuda")
        self.first, self.side = 0.0, side
        self._late = self._loaded = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vs_diffusers.worker", side, str(folder), json.dumps(asdict(case))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def _ask(self, word: str) -> str:
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the answer will be missing
            print(word, file=self._process.stdin, flush=True)
        return self._answer(word)

    def _answer(self, word: str) -> str:
        assert self._process.stdout
        watchdog = threading.Timer(LIMIT_S, self._too_late)
        watchdog.start()
        try:
            answer = self._process.stdout.readline().strip()
        finally:
            watchdog.cancel()
        if not answer:
            code = self._process.wait(DEAD_S)
            why = "killed, as when memory ends" if code == -9 else f"exit status {code}, see its message above"
            why = f"no answer within {LIMIT_S:g} s" if self._late else why
            raise Stopped(self.side, f"{self.side} stopped at {word!r}: {why}")
        return answer

    def _too_late(self) -> None:
        self._late = True
        self._process.kill()

    def loaded(self) -> None:
        """Wait until it is loaded, which it says without being asked."""
        if not self._loaded:
            self._answer("load")
            self._loaded = True

    def start(self) -> None:
        """Run once: seconds to the first result, loading not included."""
        self.loaded()
        self.first = float(self._ask("first"))

    def run(self) -> float:
        return float(self._ask("run"))

    def peak(self) -> float:
        """Peak memory so far, in GiB."""
        return float(self._ask("peak"))

    def matmul_rate(self) -> float:
        """Floating-point operations a second of a large matrix product."""
        return float(self._ask("rate"))

    def device(self) -> str:
        """Its name; of our side only."""
        return self._ask("device")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEAD_S)


def work(side: str, folder: Path, case: Case) -> None:
    """The loop of a worker; what it prints is for its parent."""
    module = importlib.import_module(f"benchmarks.vs_diffusers.{'ours' if side == 'ours' else 'theirs'}")
    call = module.build(case, folder)
    print("loaded", flush=True)
    for request in sys.stdin:
        word = request.strip()
        if word == "peak":
            print(_peak_gib() if case.device == "cpu" else module.gpu_peak_gib(), flush=True)
        elif word == "rate":
            n = 8192 if case.device == "gpu" else 2048
            print(_rate(2 * n**3, module.product(n, case)), flush=True)
        elif word == "device":
            print(module.device_name(), flush=True)
        else:
            result, seconds = timed(call)
            if word == "first":
                np.save(folder / f"{side}.npy", module.fetch(result))
            print(seconds, flush=True)


def _rate(flops: int, f: Callable[[], object]) -> float:
    """Operations a second, the median of five."""
    f()
    return flops / median_seconds(f, 5)


def _peak_gib() -> float:
    """Of this process."""
    # the peak of `resource` includes the parent's
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 2**20


if __name__ == "__main__":
    with suppress(OSError):  # when memory runs out, the kernel kills this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    work(sys.argv[1], Path(sys.argv[2]), Case(**json.loads(sys.argv[3])))
