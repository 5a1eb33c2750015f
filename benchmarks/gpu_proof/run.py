"""Runs rows in separate processes, within a budget: a crash, a hang or running out of memory costs one row."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof import machine
from benchmarks.gpu_proof.process import ROOT, Died, Worker
from benchmarks.gpu_proof.record import Record, comparison_line, line
from benchmarks.gpu_proof.rows import Row

GRACE_S = 10.0
"""Seconds after the budget in which a row that was started may still end."""

START_S = {"ours": 5.0, "diffusers": 8.0}
"""Side -> seconds until a new process runs its first row, about."""

IMPORT_LIMIT_S = 180.0
"""Seconds after which a worker that still imports is killed; the first import reads from a cold disk."""

PREFETCH_CORES = 8
"""With at least this many cores, the next group's process imports its libraries while a row runs."""

POLL_S = 0.5


def environment(folder: Path, dry_run: bool) -> dict[str, str]:
    """Of the workers."""
    env = dict(
        os.environ,
        CUDA_DEVICE_ORDER="PCI_BUS_ID",  # as nvidia-smi counts
        CUDA_VISIBLE_DEVICES=machine.first_gpu(),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        JAX_ENABLE_COMPILATION_CACHE="false",  # seconds of compiling are of compiling
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    )
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env:
        env.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")
    if dry_run:
        env["CUDA_VISIBLE_DEVICES"] = ""
    env["JAX_PLATFORMS"] = "cpu" if dry_run else "cuda,cpu"
    return env


class Memory:
    """Peak GPU memory of all processes, polled from nvidia-smi."""

    def __init__(self, ask: Callable[[], float | None]):
        self._ask, self._most, self._stop = ask, 0.0, threading.Event()
        self._base = ask()
        if self._base is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            self._most = max(self._most, self._ask() or 0)

    def reset(self) -> None:
        self._most = 0.0

    def most_gib(self) -> float | None:
        """Peak minus the memory in use at the start; None if unknown."""
        now = self._ask() if self._base is not None else None
        if self._base is None or now is None:
            self._base = None
            self.stop()  # a query without an answer may be slow
            return None
        self._most = max(self._most, now)
        return max(self._most - self._base, 0) / 1024

    def stop(self) -> None:
        self._stop.set()


@dataclass(frozen=True)
class Setting:
    """What rows are given.

    folder: for files that one row writes for another. budget: seconds from `started`, by `time.monotonic`. env: of
    their processes. free_gib: of the GPU; None if unknown. missing: packages that are not installed. known: key ->
    reused result of an earlier run.
    """

    folder: Path
    budget: float
    env: dict[str, str]
    free_gib: float | None = None
    missing: frozenset[str] = frozenset()
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


class Runner:
    """All rows in their order. say: prints a line. used_mib: of the GPU's memory."""

    def __init__(
        self,
        rows: list[Row],
        record: Record,
        setting: Setting,
        *,
        say: Callable[[str], None] = print,
        used_mib: Callable[[], float | None] = machine.used_mib,
    ):
        self.rows, self.record, self.setting, self.say = rows, record, setting, say
        self._worker: Worker | None = None
        self._group = ""
        self._next: tuple[str, Worker] | None = None
        self._unavailable: dict[str, str] = {}
        self._memory = Memory(used_mib)
        record.expect((row.key, row.about()) for row in rows)
        self.known = {row.key for row in rows if not (row.required or row.always)} & set(setting.known)
        for key in self.known:
            record.rows[key] = setting.known[key] | {"output": None, "kept": True}  # its output is gone

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.setting.started

    def run(self) -> None:
        """Run every row that can be tried; always ends the worker processes."""
        try:
            for i, row in enumerate(self.rows):
                if row.key in self.known:
                    continue
                if reason := self.why_not(row):
                    self.record.set(row.key, status="not tried", reason=reason)
                    continue
                self._run(row, self.rows[i + 1 :])
                self.say(line(self.record.rows[row.key]))
                for comparison in self.record.compare(row.name, self.setting.folder):
                    self.say(comparison_line(comparison))
                self.record.keep()
        finally:
            self.close()

    def why_not(self, row: Row) -> str | None:
        """Why a row is not tried; None if it is."""
        if lacking := [name for name in row.packages if name in self.setting.missing]:
            return f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed"
        if row.side_key in self._unavailable:
            return self._unavailable[row.side_key]
        free = self.setting.free_gib
        if free is not None and row.needs_gib > free:
            return f"it needs about {row.needs_gib:.0f} GiB, {free:.0f} are free"
        expected = row.expected_s + (0 if row.group == self._group else START_S.get(row.process, 0))
        budget = self.setting.budget
        left = budget - self.elapsed
        if expected > left:
            return f"it would take about {expected:.0f} s, {max(left, 0):.0f} of {budget:.0f} s are left"
        return None

    def _run(self, row: Row, later: list[Row]) -> None:
        worker = self._worker_of(row)
        self._prefetch(row, later)
        self._memory.reset()
        known: dict[str, Any] = {}
        start = time.monotonic()

        def partly(found: dict[str, Any]) -> None:
            known.update(found)
            self.record.set(row.key, **known, status="running", reason="the run ended in it")

        options = row.options | {"folder": str(self.setting.folder)}
        by_budget = False

        def limit(own: float) -> float:
            """Seconds for the next wait: its own limit, or what the budget leaves."""
            nonlocal by_budget
            left = self.setting.budget + GRACE_S - self.elapsed
            by_budget = left < own
            return min(own, left)

        try:
            worker.start(limit(IMPORT_LIMIT_S))
            found = worker.ask(row.function, options, limit(row.limit_s), partly)
        except Died as e:
            found = {"status": e.status, "reason": str(e)}
            if e.status == "timed out" and by_budget:
                found = {"status": "not tried", "reason": "the budget ended in it"}
            self._drop()
        is_fault = found["status"] not in ("ok", "wrong", "not tried")
        errors = worker.errors() if is_fault or (row.required and found["status"] != "ok") else ""
        if is_fault and not found.pop("alive", False):
            self._drop()  # its state is unknown
        note = "; ".join(filter(None, (known.get("note"), found.get("note"))))
        values = known | found | {"wall_s": round(time.monotonic() - start, 2)}
        if row.is_model:
            values["smi_gib"] = self._memory.most_gib()
        self.record.set(row.key, **values | ({"note": note} if note else {}) | ({"stderr": errors} if errors else {}))
        if row.required and found["status"] != "ok":
            last = errors.strip().splitlines()[-1:]  # a plugin that does not start says why there
            why = "; ".join([found.get("reason") or f"{row.name}: {found['status']}", *last])
            self._unavailable[row.side_key] = why[:600]
            self.record.set(row.key, reason=why[:600])

    def _worker_of(self, row: Row) -> Worker:
        """The group's process; one of another group ends first, so that the GPU is free."""
        if self._worker is not None and self._group == row.group:
            return self._worker
        self._drop()
        if self._next is not None and self._next[0] == row.group:
            self._worker, self._next = self._next[1], None
        else:
            self._worker = Worker(row.process, self.setting.env)
        self._group = row.group
        return self._worker

    def _prefetch(self, row: Row, later: list[Row]) -> None:
        """Start the next group's process, which imports its libraries without using the GPU."""
        wanted = (other for other in later if other.group != row.group and other.key not in self.known)
        following = next((other for other in wanted if not self.why_not(other)), None)
        if (os.cpu_count() or 1) < PREFETCH_CORES or following is None:
            return
        if self._next is not None and self._next[0] == following.group:
            return
        if self._next is not None:
            self._next[1].kill()
        self._next = following.group, Worker(following.process, self.setting.env)

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker, self._group = None, ""

    def close(self) -> None:
        """End all processes."""
        self._memory.stop()
        with suppress(OSError):
            self._drop()
        if self._next is not None:
            self._next[1].kill()
            self._next = None
