"""What all benchmarks share: options, the machine, medians, and rows that are printed and written as they come."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cogvideox_flax.io.atomic import write_json

VECTORS = ("avx512f", "avx2", "asimd")
"""Vector instructions, widest first, by their names in Linux. They determine how fast a CPU multiplies."""

PACKAGES = ("jax", "flax", "numpy")


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Of `python -m NAME`: the module's docstring as its help, and --json."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every row, with command and machine")
    return parser


class Report:
    """Rows of one run: lines of a Markdown table, and the JSON file with the command and the machine.

    path: of the JSON file; None: no file. packages: whose versions are kept. about: further fields of the record.
    """

    def __init__(
        self, path: Path | None, columns: Sequence[str], packages: Sequence[str] = PACKAGES, **about: Any
    ) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self.record = {"command": sys.argv, "machine": machine(packages), **about, "rows": self.rows}
        print_row(columns)
        print_row(["---"] * len(columns))

    def add(self, row: dict[str, Any], cells: Sequence[object]) -> None:
        """One more row: what is kept of it, and its cells in the table."""
        self.rows.append(row)
        print_row(cells)
        self.write()

    def write(self, **about: Any) -> None:
        """Write the file, atomically; about: further fields."""
        self.record |= about
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.record)


def print_row(cells: Sequence[object]) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(" ".join(str(cell).replace("|", "/").split()) for cell in cells) + " |", flush=True)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns, and its seconds; it waits for its result itself."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def median_seconds(call: Callable[[], Any], repeat: int) -> float:
    """Seconds of a call that waits for its result, the median of several."""
    return statistics.median(timed(call)[1] for _ in range(repeat))


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """The CPU, its widest vector instructions, its cores, and versions of Python and of these packages (None where one
    is not installed)."""
    cpuinfo = Path("/proc/cpuinfo")
    return {
        **cpu(cpuinfo.read_text() if cpuinfo.exists() else ""),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu(info: str) -> dict[str, str | None]:
    """Name and vectors from the text of /proc/cpuinfo; vectors are None if it does not list them."""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in info.splitlines())}
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "vectors": next((name for name in VECTORS if name in flags), None),
    }
