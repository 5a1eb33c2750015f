"""Ctrl-C: while a command starts, which is mostly imports of JAX, the process ends at once; then it raises a
KeyboardInterrupt, but not while JAX waits for XLA to compile.

A KeyboardInterrupt that is raised inside an import is not reliable: extension modules turn it into an ImportError or
print it. So there is none until `loaded` is called. A program that imports the library keeps its own handler.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

EXIT_CODE = 130
"""128 + SIGINT, as shells report it."""

RESEND_S = 0.05
"""Seconds until an interrupt that came at a wrong moment is sent again: longer than such a moment usually takes."""

_COMPILER = os.path.join("jax", "_src", "compiler.py")

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
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of SIGINT: raises a KeyboardInterrupt; where JAX waits for XLA to compile, when it has compiled.

    The exception would end the wait, and XLA's threads would go on to read a module that JAX frees. What takes long to
    compile is compiled `runtime.terminal.out_of_reach`; this is for single operations beside it.
    """
    if frame is None or not frame.f_code.co_filename.endswith(_COMPILER):
        raise KeyboardInterrupt
    send_later()


def ended() -> None:
    """The command has ended: another Ctrl-C breaks neither its last line nor the interpreter's teardown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def send_later() -> None:
    """Send Ctrl-C to the main thread a moment later."""
    main = threading.main_thread().ident
    assert main is not None
    again = threading.Timer(RESEND_S, signal.pthread_kill, (main, signal.SIGINT))
    again.daemon = True
    again.start()


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is a KeyboardInterrupt, or was raised because of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in a shell's background
    signal.signal(signal.SIGINT, _exit)
