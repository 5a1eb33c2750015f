"""Ctrl-C while a command starts, which is mostly imports of JAX: the process ends at once.

A KeyboardInterrupt that is raised inside an import is not reliable: extension modules turn it into an ImportError or
print it. So there is none until `loaded` is called. A program that imports the library keeps its own handler.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_CODE = 130
"""128 + SIGINT, as shells report it."""

_MODULES = {f"{option}{module}" for option in ("", "-m") for module in ("cogvideox_flax", "conversion")}


def _is_command() -> bool:
    """Whether this process is one of our commands; the path is "-m" while Python looks for the module."""
    path = sys.argv[0] if getattr(sys, "argv", None) else ""
    if path == "-m":
        return not _MODULES.isdisjoint(sys.orig_argv)
    return path.endswith(("/cogvideox", "/conversion/__main__.py"))


def _exit(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"\n" * os.isatty(2) + b"stopped; nothing was begun\n")
    finally:
        os._exit(EXIT_CODE)


def loaded() -> None:
    """The command is about to begin: from now on, Ctrl-C raises a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is a KeyboardInterrupt, or was raised because of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a shell's background
    signal.signal(signal.SIGINT, _exit)
