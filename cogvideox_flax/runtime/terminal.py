"""Messages to the user, and a reliable Ctrl-C."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    def on_interrupt(number: int, frame: Any) -> None:
        try:
            before(number, frame)  # another handler may not raise
        except KeyboardInterrupt:
            pressed.set()
            raise

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
