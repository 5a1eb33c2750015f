"""Processes that tests start: every wait for one has a limit, and none outlives its test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LIMIT_S = 300.0
"""Seconds that a process may take: many times what any of them takes on a busy machine."""


def run(command: Sequence[object], *, text: bool = True, timeout: float = LIMIT_S, **how: Any):
    """The process when it has ended, with what it wrote; how: as for `subprocess.run`."""
    return subprocess.run(list(map(str, command)), capture_output=True, text=text, timeout=timeout, check=False, **how)


@contextmanager
def running(command: Sequence[object], **how: Any) -> Iterator[subprocess.Popen]:
    """A process that is killed at the end of the block, where it has not ended by then; how: as for `Popen`."""
    with subprocess.Popen(list(map(str, command)), **how) as process:
        try:
            yield process
        finally:
            process.kill()
