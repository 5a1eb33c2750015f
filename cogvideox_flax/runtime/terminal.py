"""Messages to the user, and a reliable Ctrl-C."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tqdm import tqdm

log = logging.getLogger(__name__)


def say(message: str, announce: bool) -> None:
    """Print a message to stderr if `announce`, else log it."""
    if announce:
        tqdm.write(message, file=sys.stderr)
    else:
        log.info(message)


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Makes Ctrl-C reliable in a loop: yields a function that raises a pending KeyboardInterrupt.

    Python drops an exception that is raised inside a destructor or a callback of the garbage collector; JAX runs some
    of these in every step.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    pressed = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)  # another handler may not raise
        except KeyboardInterrupt:
            pressed.set()
            if not _drops_exceptions(frame):
                raise

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _drops_exceptions(frame: FrameType | None) -> bool:
    """Whether Python only prints what is raised here: in a destructor, or in JAX's garbage collection callback."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_xla_gc_callback"):
            return True
        frame = frame.f_back
    return False
