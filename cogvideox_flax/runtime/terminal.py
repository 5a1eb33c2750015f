"""Messages to the user, and a reliable Ctrl-C."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from tqdm import tqdm

from cogvideox_flax.io.interrupts import EXIT_CODE, interrupt, send_later
from cogvideox_flax.io.values import printable

log = logging.getLogger(__name__)

T = TypeVar("T")


def duration_text(seconds: float) -> str:
    """Format seconds as "1.2 s", "40 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.{int(seconds < 10)}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


said = logging.getLogger("cogvideox_flax.said")
"""What is printed, for a log file alone."""
said.propagate = False
said.addHandler(logging.NullHandler())


class _Report:
    as_json = False


def report_as_json(on: bool) -> None:
    """Whether messages and progress are lines of JSON."""
    _Report.as_json = on


def reports_as_json() -> bool:
    """Whether they are."""
    return _Report.as_json


def say(message: str, announce: bool, event: str = "message", **facts: Any) -> None:
    """Print a message to stderr if `announce`, else log it.

    event, facts: what it says, for machines.
    """
    if not announce:
        log.info(message)
        return
    said.info(message)
    if reports_as_json():
        emit(event, message=message, **facts)
    else:
        tqdm.write(printable(message), file=sys.stderr)


def emit(event: str, **facts: Any) -> None:
    """Print an event to stderr as a line of JSON."""
    print(json.dumps({"event": event, **facts}), file=sys.stderr, flush=True)


class JSONLines(logging.Formatter):
    """Log records as lines of JSON like those of `emit`."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"event": "log", "level": record.levelname, "message": record.getMessage()})


class Progress:
    """Progress on stderr: a bar on a terminal or in a notebook; elsewhere, such as in a log, a line at the
    beginning, at the end, and every `LINE_EVERY_S` between them; or a line of JSON for every step.

    done: how many are done already.
    unit: such as "step".
    shown: nothing is printed otherwise.
    """

    LINE_EVERY_S = 10.0

    def __init__(self, what: str, total: int, done: int = 0, unit: str = "step", *, shown: bool = True):
        self._what, self._total, self._unit = what, total, unit
        self._first = self.done = done
        self._events = shown and reports_as_json()
        is_live = not self._events and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._bar = tqdm(total=total, initial=done, desc=what, unit=unit, disable=not (shown and is_live))
        self._lines = shown and not is_live and not self._events
        self._begun = self._said = time.monotonic()
        if self._lines:
            self._say("")
        self._emit()

    def advance_to(self, done: int) -> None:
        """Set how many are done in all."""
        self._bar.update(done - self.done)
        self.done, now = done, time.monotonic()
        self._emit()
        if done == self._total:
            self.close()
        elif self._lines and now - self._said >= self.LINE_EVERY_S and done > self._first:
            passed = now - self._begun
            left = passed / (done - self._first) * (self._total - done)
            self._say(f", {duration_text(passed)}, about {duration_text(left)} left")
            self._said = now

    def close(self) -> None:
        """End the bar; say how long all of it took, if all is done."""
        self._bar.close()
        if self._lines and self.done == self._total:
            self._say(f" in {duration_text(time.monotonic() - self._begun)}")
        self._lines = False

    def _emit(self) -> None:
        if self._events:
            emit("progress", what=self._what, done=self.done, total=self._total, unit=self._unit)

    def _say(self, more: str) -> None:
        say(f"{self._what}: {self.done} of {self._total} {self._unit}s{more}", True)


@contextmanager
def reliable_interrupts() -> Iterator[None]:
    """Makes Ctrl-C stop the main thread wherever it is; also a decorator.

    Python drops an exception that is raised inside a destructor or a callback of the garbage collector, and JAX runs
    some of these in every step. A KeyboardInterrupt that was dropped is sent again a moment later. Nor does it break
    what JAX compiles (`interrupt`), where a program has no handler of SIGINT of its own.
    """
    before = sys.unraisablehook

    def send_again(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            send_later()
        else:
            before(dropped)

    is_main = threading.current_thread() is threading.main_thread()
    handles = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.unraisablehook = send_again
    if handles:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = before
        if handles and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


_compiling: WeakSet[threading.Thread] = WeakSet()


def out_of_reach(function: Callable[[], T]) -> T:
    """Return `function()`, called in a thread of its own: Ctrl-C ends this call at once, and the thread goes on.

    For whatever traces or compiles. A KeyboardInterrupt, which Python raises in the main thread, ends JAX's wait for
    XLA, whose threads then go on to read a module that JAX frees. In tracing it can leave JAX's own state changed.
    """
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as e:
            result.set_exception(e)

    thread = threading.Thread(target=call, daemon=True)  # of what it leaves, `_wait_for_compiling` takes care
    _compiling.add(thread)
    thread.start()
    return result.result()


@atexit.register
def _wait_for_compiling() -> None:
    """Wait for what interrupted calls have left, since XLA's threads crash if they outlive the interpreter. Ctrl-C ends
    the process."""
    try:
        for thread in tuple(_compiling):
            thread.join()
    except KeyboardInterrupt:
        leave(EXIT_CODE)


def leave(code: int) -> NoReturn:
    """End the process at once, without waiting for what still compiles or computes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
