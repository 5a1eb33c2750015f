"""The parent's end of a worker process: sends rows, reads results, and kills a worker that does not answer in time."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

END_S = 15.0
"""Seconds to wait for a process that closed its pipe, or was killed, to end."""

STACK_S = 1.0
"""Seconds to wait for the Python stack of a worker that hangs."""


class Died(Exception):
    """The process ended, or was killed, during a row. status: the row's."""

    def __init__(self, status: str, why: str):
        super().__init__(why)
        self.status = status


class Worker:
    """A process for the rows of one group.

    side: a key of `worker.IMPORTS`; another one imports nothing.
    """

    def __init__(self, side: str, env: dict[str, str]):
        self.side, self.ready = side, False
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # appended to, wherever it is read
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "benchmarks.gpu_proof.worker", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=env,
            start_new_session=True,  # so that it can be killed together with its children, such as compilers
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, deadline: float, doing: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            where = self._where()
            self.kill()
            raise Died("timed out", f"{doing}: no end in its time; {where}") from None
        if line is None:
            try:
                code = self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise Died("crashed", f"{doing}: closed its pipe and did not end; {self._tail(3)}") from None
            name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            self.kill()
            raise Died("crashed", f"{doing}: {name}; {self._tail(3)}")
        return json.loads(line)

    def start(self, timeout: float) -> None:
        """Wait until it has imported its libraries.

        Raises:
            Died: it did not.
        """
        if not self.ready:
            self._next(time.monotonic() + timeout, "importing")
            self.ready = True

    def ask(
        self, function: str, options: dict[str, Any], timeout: float, partly: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """The result of one row. partly: called with partial results. timeout: seconds, imports included.

        Raises:
            Died: the process crashed, or was killed as it took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self.start(timeout)
        assert self._process.stdin
        try:
            print(json.dumps({"function": function, "options": options}), file=self._process.stdin, flush=True)
        except OSError:
            self._next(deadline, "starting")
        while True:
            found = self._next(deadline, "running")
            event = found.pop("event")
            if event == "result":
                return found
            partly(found)

    def _where(self) -> str:
        """The innermost lines of the Python stack of a worker that hangs, which it writes on SIGUSR1."""
        before = os.fstat(self._errors.fileno()).st_size
        with suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STACK_S
        lines: list[str] = []
        while not lines and time.monotonic() < deadline:
            time.sleep(0.1)
            lines = [line.strip() for line in self._text(before).splitlines() if line.startswith("  File ")]
        return "in " + " < ".join(lines[:3]) if lines else "it does not say where"

    def _text(self, start: int = 0) -> str:
        """Its stderr from this byte on."""
        self._errors.seek(start)
        return self._errors.read().decode(errors="replace")[-20_000:]

    def _tail(self, lines: int) -> str:
        return " / ".join(self._text().strip().splitlines()[-lines:])[-600:] or "it said nothing"

    def errors(self) -> str:
        """The end of its stderr, for the record."""
        return self._text()[-3000:]

    def kill(self) -> None:
        """Kill it and its children."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a worker that hangs in a driver must not block this process
            self._process.wait(END_S)
