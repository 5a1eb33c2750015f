"""The command line: parse, call the library, report. Messages go to stderr, results to stdout.

Exit codes: 0 done, 2 the input cannot be served (one message, no traceback), 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cogvideox_flax.cli import reporting
from cogvideox_flax.cli.arguments import MODULES, TRAINING_OPTIONS, make_parser, with_drawn_seed, with_paths
from cogvideox_flax.errors import InputError, describe_file_error
from cogvideox_flax.io.interrupts import EXIT_CODE, ended, is_interrupt, loaded
from cogvideox_flax.runtime import libtpu
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.multihost.rendezvous import ProcessAddress, find_address
from cogvideox_flax.runtime.terminal import leave, reliable_interrupts

STOPPED = "\nstopped; the same command goes on from what was finished"

CLOSED_PIPE = 128 + 13
"""The exit code where what is printed has no reader, such as `head`, any more: that of a program which SIGPIPE ends."""

log = logging.getLogger("cogvideox_flax")


@reliable_interrupts()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    is_process = argv is None  # it is this command's and ends with it
    args = make_parser().read(sys.argv[1:] if argv is None else argv)
    reporting.set_up(args)
    if args.command != "serve":  # which answers before its thread imports JAX
        libtpu.quiet_without_tpu()
    try:
        return _main(args, is_process)
    finally:
        reporting.close_log()


def _main(args: argparse.Namespace, is_process: bool) -> int:
    try:
        args = with_paths(args)
        if args.log is not None:
            reporting.open_log(args.log)
        with hosts.joined(_place(args), _same_on_all(args), _outcome) as is_first:
            _run(with_drawn_seed(args) if is_first else _only_computing(args))
    except BaseException as e:
        if isinstance(e, BrokenPipeError) and _reader_is_gone():
            return CLOSED_PIPE
        code, message = _outcome(e)
        if code == EXIT_CODE and is_process:
            ended()
        if message is None:
            raise
        reporting.print_end(code, message)
        if code == EXIT_CODE and is_process:
            leave(code)
        return code
    if is_process:
        ended()
    return 0


def _run(args: argparse.Namespace) -> None:
    """Import the command, which takes JAX, and run it. Until then Ctrl-C ends the process at once."""
    module = importlib.import_module(f"{__name__}.{MODULES.get(args.command, args.command)}")
    loaded()
    getattr(module, args.command)(args)


def _reader_is_gone() -> bool:
    """Whether standard output is a closed pipe; what is left in it is then dropped."""
    found = select.poll()
    found.register(1, 0)  # errors alone
    if not found.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _place(args: argparse.Namespace) -> ProcessAddress | None:
    """Which process of several this one is, by its options; None: the only one."""
    if "coordinator" not in args:
        return None
    return find_address(args.coordinator, args.num_processes, args.process_id, args.distributed, args.join_timeout)


def _same_on_all(args: argparse.Namespace) -> dict[str, Any]:
    """The options that must be the same on all processes."""
    names = ["command", "no_jit", "prompt_file"]  # of the others, process 0 decides
    if args.command == "train":
        names += [option.removeprefix("--").replace("-", "_") for option, _ in TRAINING_OPTIONS.values()]
    values = {name: getattr(args, name, None) for name in names}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _only_computing(args: argparse.Namespace) -> argparse.Namespace:
    """The options of a process that is not the first, which prints nothing and writes no profile."""
    log.setLevel(logging.ERROR)
    silent = {"quiet": True} | ({"profile": None} if "profile" in args else {})
    return argparse.Namespace(**vars(args) | silent)


def _outcome(error: BaseException) -> tuple[int, str | None]:
    """The exit code, and the message; None: a traceback."""
    if isinstance(error, InputError):
        return 2, f"error: {error}"
    if isinstance(error, OSError) and (reason := describe_file_error(error)) is not None:
        return 2, f"error: {reason}"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_CODE, str(error) or STOPPED
    if is_interrupt(error):  # such as the ImportError of an extension module
        return EXIT_CODE, STOPPED
    return 1, None
