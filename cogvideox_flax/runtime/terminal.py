"""Messages to the user, and a reliable Ctrl-C."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

log = logging.getLogger(__name__)

RESEND_S = 0.05
"""Longer than what drops an exception usually takes."""


def duration_text(seconds: float) -> str:
    """Such as "40 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def say(message: str, announce: bool) -> None:
    """Print a message to stderr if `announce`, else log it."""
    if announce:
        tqdm.write(message, file=sys.stderr)
    else:
        log.info(message)


@contextmanager
def reliable_interrupts() -> Iterator[None]:
    """Makes Ctrl-C stop the main thread wherever it is; also a decorator.

    Python drops an exception that is raised inside a destructor or a callback of the garbage collector, and JAX runs
    some of these in every step. A KeyboardInterrupt that was dropped is sent again a moment later.
    """
    before = sys.unraisablehook

    def send_again(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        main = threading.main_thread().ident
        assert main is not None
        again = threading.Timer(RESEND_S, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before
