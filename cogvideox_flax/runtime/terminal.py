"""What a run says to people, and how Ctrl-C reaches it."""

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
    """To people where they watch, else to the log."""
    if announce:
        tqdm.write(message, file=sys.stderr)
    else:
        log.info(message)


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Makes Ctrl-C reliable in a loop: yields a function that raises a pending KeyboardInterrupt.

    Python drops an exception that is raised while a destructor or the garbage collector's callbacks run, of which JAX
    has some in every step.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    pressed = threading.Event()

    def press(number: int, frame: Any) -> None:
        try:
            before(number, frame)  # one of another kind may do without an exception
        except KeyboardInterrupt:
            pressed.set()
            raise

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
