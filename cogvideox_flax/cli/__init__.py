"""The command line: parse, call the library, report. Messages go to stderr, results to stdout.

Exit codes: 0 done, 2 the input cannot be served (one message, no traceback), 1 anything else, 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from cogvideox_flax.cli.arguments import make_parser
from cogvideox_flax.errors import InputError, describe_file_error
from cogvideox_flax.runtime import libtpu


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    for name in ("cogvideox_flax", "conversion"):
        logging.getLogger(name).setLevel(logging.WARNING if getattr(args, "quiet", False) else logging.INFO)
    libtpu.quiet_without_tpu()
    try:
        args.run(args)
    except InputError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        if (message := describe_file_error(e)) is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from what was finished", file=sys.stderr)
        return 130
    return 0
