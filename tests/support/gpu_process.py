"""A process for checks on a GPU, since the tests' own has the CPU: a check that crashes or hangs costs its own test.

Imports neither JAX nor PyTorch, whose platform the environment of the new process decides.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

END_S = 10.0
"""Seconds beyond its limit after which a process that cannot end itself is killed."""

NEEDED = "RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory"
"""How JAX and PyTorch say that a device's memory is full."""


class Failed(Exception):
    """A check raised an error, crashed, or ran out of time or memory."""


def environment(platforms: str) -> dict[str, str]:
    """Of the process; platforms: JAX's, "cuda,cpu" or "cpu"."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": platforms, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}
    return env | ({"CUDA_VISIBLE_DEVICES": ""} if platforms == "cpu" else {})


class Process:
    """Calls functions of importable modules, one after the other; a new process follows one that ended."""

    def __init__(self, platforms: str):
        self._platforms = platforms
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, limit_s: float = 120, **options: Any) -> Any:
        """What the function returns.

        Raises:
            Failed: it raised, crashed, or took longer than `limit_s` seconds; its stack is then on stderr.
        """
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((function, args, options, limit_s))
            if not self._pipe.poll(limit_s + END_S):
                raise Failed(f"no end within {limit_s:g} s")
            done, result = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            code = self._process.exitcode
            self.close()
            raise Failed(f"the process ended with status {code}, or within {limit_s:g} s did not end") from None
        except Failed:
            self.close()
            raise
        if not done:
            self.close()  # its state is unknown
            raise Failed(result)
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        env = environment(self._platforms)
        self._process = context.Process(target=_serve, args=(theirs, env), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen when the process ends

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join(END_S)
        self._process = self._pipe = None


def _serve(pipe: Connection, env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    with suppress(EOFError):
        while True:
            function, args, options, limit_s = pipe.recv()
            faulthandler.dump_traceback_later(limit_s, exit=True)
            try:
                answer = True, function(*args, **options)
            except Exception as e:
                why = " ".join(f"{type(e).__name__}: {e}".split())[:600]
                answer = False, f"out of memory: {why}" if any(word in why for word in NEEDED) else why
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)
