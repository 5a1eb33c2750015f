"""The command line: parse, call the library, report. Messages go to stderr, results to stdout.

Exit codes: 0 done, 2 the input cannot be served (one message, no traceback), 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from cogvideox_flax.cli.arguments import expand_paths, make_parser
from cogvideox_flax.errors import InputError, describe_file_error
from cogvideox_flax.io.interrupts import EXIT_CODE, is_interrupt
from cogvideox_flax.runtime import hosts, libtpu
from cogvideox_flax.runtime.rendezvous import find_place
from cogvideox_flax.runtime.terminal import reliable_interrupts

STOPPED = "\nstopped; the same command goes on from what was finished"

LOGGERS = ("cogvideox_flax", "conversion")


@reliable_interrupts()
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING if getattr(args, "quiet", False) else logging.INFO)
    libtpu.quiet_without_tpu()
    try:
        expand_paths(args)
        _join_hosts(args)
        args.run(args)
        hosts.finish()
    except BaseException as e:
        code, message = _outcome(e)
        hosts.leave(code, message)
        if message is None:
            raise
        print(message, file=sys.stderr)
        return code
    return 0


def _join_hosts(args: argparse.Namespace) -> None:
    """Where the options say so, become one process of several."""
    if "coordinator" not in args:
        return
    place = find_place(args.coordinator, args.num_processes, args.process_id, args.distributed, args.join_timeout)
    hosts.initialize(place)
    same = ("command", "tiling", "no_jit")
    hosts.check_same("the options", {name: getattr(args, name, None) for name in same})
    if not hosts.is_first():
        args.quiet = True
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


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
