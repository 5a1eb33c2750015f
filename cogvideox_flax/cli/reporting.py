"""Where messages go: to stderr, for people or as lines of JSON, and to a log file."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import printable
from cogvideox_flax.runtime.terminal import JSONLines, emit, report_as_json, reports_as_json, said

log = logging.getLogger("cogvideox_flax")


class _Printable(logging.Formatter):
    """What files and requests hold goes into messages, and is shown, not obeyed."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up(args: argparse.Namespace) -> None:
    """Choose what goes to stderr, and how."""
    as_json, is_quiet = args.progress == "json", getattr(args, "quiet", False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if as_json else _Printable("%(levelname)s: %(message)s"))
    handler.setLevel(logging.WARNING if is_quiet else logging.NOTSET)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.WARNING if is_quiet and args.log is None else logging.INFO)
    said.setLevel(logging.INFO)
    report_as_json(as_json)
    if as_json:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def open_log(path: Path) -> None:
    """Append messages to this file, with their times, until `close_log`.

    Raises:
        InputError: it cannot be written.
    """
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror}; give --log another file") from e
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    said.addHandler(handler)


def close_log() -> None:
    """Close the file of `open_log`, if there is one."""
    for handler in [each for each in said.handlers if isinstance(each, logging.FileHandler)]:
        logging.getLogger().removeHandler(handler)
        said.removeHandler(handler)
        handler.close()


def print_end(code: int, message: str) -> None:
    """Print what ended the command."""
    said.error(message)
    if reports_as_json():
        emit("error", code=code, message=message)
    else:
        print(printable(message), file=sys.stderr)
