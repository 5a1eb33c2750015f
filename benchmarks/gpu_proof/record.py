"""The results so far: written to disk after every row, and printed as lines of a table."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_proof.errors import BF16_BAR, EXACT_BAR, error

HEAD = (
    "| row | side | result | s | first s | TFLOP/s | GiB: allocator, compiler, nvidia-smi "
    "| error rms, max (rounding rms) | notes |"
)
PASSED, NOT_TRIED = "ok", "not tried"
"""Results that are not faults."""

MAX_ERROR_RATIO = 1.1
"""Largest ratio of this library's error in 16 bit to the reference's own."""


class Record:
    """One run of the proof.

    path: of the JSON file, which is rewritten after every row; None: no file.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]):
        self.path = path
        self._start = time.monotonic()
        self.about = about
        self.rows: dict[str, dict[str, Any]] = {}
        self.comparisons: list[dict[str, Any]] = []

    def expect(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Record all rows as not tried, so that the record of a killed run lists the missing rows."""
        for key, row in rows:
            self.rows[key] = row | {"status": "not tried", "reason": "the run ended before it"}
        self.keep()

    def set(self, key: str, **values: Any) -> None:
        """Update a row."""
        self.rows[key] |= values
        if values.get("status") != NOT_TRIED and "reason" not in values:
            self.rows[key].pop("reason", None)
        self.keep()

    def keep(self) -> None:
        """Write the record atomically."""
        if self.path is None:
            return
        record = self.about | {
            "elapsed_s": round(time.monotonic() - self._start, 1),
            "summary": self.summary(),
            "comparisons": self.comparisons,
            "rows": list(self.rows.values()),
        }
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(record, indent=1, default=str) + "\n")
        part.replace(self.path)

    def summary(self) -> dict[str, int]:
        """Result -> how many rows."""
        found: dict[str, int] = {}
        for row in self.rows.values():
            found[row["status"]] = found.get(row["status"], 0) + 1
        return found

    def not_tried(self) -> list[tuple[str, str]]:
        """(rows, reason), grouped by reason."""
        found: dict[str, list[str]] = {}
        for row in self.rows.values():
            if row["status"] == NOT_TRIED:
                found.setdefault(row.get("reason", ""), []).append(f"{row['row']} ({row['side']})")
        return [(", ".join(names), why) for why, names in found.items()]

    def faults(self) -> list[dict[str, Any]]:
        """The rows that were tried and did not hold."""
        return [row for row in self.rows.values() if row["status"] not in (PASSED, NOT_TRIED)]

    def differences(self) -> list[dict[str, Any]]:
        """The comparisons that did not hold."""
        return [found for found in self.comparisons if found.get("holds") is False]

    def compare(self, name: str, folder: Path) -> list[dict[str, Any]]:
        """The new comparisons between the finished rows of one name."""
        done = {(found["row"], found["side"]) for found in self.comparisons}
        rows = [row for row in self.rows.values() if row["row"] == name and "seconds" in row]
        fresh = [
            compare_rows(a, b, folder)
            for a in rows
            for b in rows
            if _comparable(a, b) and (name, f"{a['side']} : {b['side']}") not in done
        ]
        self.comparisons += fresh
        verdict = f"{name}, both from float32"
        if verdict not in {found["row"] for found in self.comparisons}:
            fresh += self._from_float32(name, verdict)
        return fresh

    def _from_float32(self, name: str, verdict: str) -> list[dict[str, Any]]:
        """Compares this library's 16-bit error from float32 with the reference's own, without `torch.compile`."""
        found = [c for c in self.comparisons if c["row"] == name and c["side"].endswith(" : diffusers float32")]
        ours = [c["difference_rms"] for c in found if c["side"].startswith("ours") and "difference_rms" in c]
        theirs = [c["difference_rms"] for c in found if c["side"].startswith("diffusers : ") and "difference_rms" in c]
        if not (ours and theirs):
            return []
        ratio = max(ours) / max(theirs)
        row = {"row": verdict, "side": "ours : diffusers", "error_ratio": ratio, "holds": ratio <= MAX_ERROR_RATIO}
        self.comparisons.append(row)
        return [row]


def _dtype(row: dict[str, Any]) -> str:
    return row["options"].get("dtype", "bfloat16")


def _comparable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two rows are compared: this library's with the others', and 16-bit rows with the float32 reference."""
    if a["side"].startswith("ours"):
        return not b["side"].startswith("ours")
    return b["side"] == "diffusers float32" and _dtype(a) != "float32"


def compare_rows(a: dict[str, Any], b: dict[str, Any], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"row": a["row"], "side": f"{a['side']} : {b['side']}"}
    if a.get("layers") != b.get("layers"):
        return found | {"note": f"{a.get('layers') or 'all'} and {b.get('layers') or 'all'} layers: not compared"}
    if _dtype(a) == _dtype(b):
        found["time_ratio"] = a["seconds"] / b["seconds"]
        if _model_gib(a) and _model_gib(b):
            found["memory_ratio"] = _model_gib(a) / _model_gib(b)
    if not (a.get("output") and b.get("output")):
        return found
    try:
        off = error(*(np.load(folder / row["output"]) for row in (a, b)))
    except (OSError, ValueError) as e:
        return found | {"note": f"outputs not compared: {e}"}
    found |= {"difference_rms": off["rms"], "difference_max": off["max"]}
    if _dtype(a) == _dtype(b) == "float32":
        found["holds"] = off["max"] <= EXACT_BAR
    elif _dtype(a) == _dtype(b):
        found["holds"] = off["rms"] <= BF16_BAR
    return found


def _model_gib(row: dict[str, Any]) -> float:
    """Memory of one evaluation, weights included: the compiler's count, or the peak of PyTorch's allocator."""
    return row.get("needed_gib") or row.get("peak_gib") or 0.0


def line(row: dict[str, Any]) -> str:
    """A row of the table."""

    def number(name: str, form: str, factor: float = 1.0) -> str:
        value = row.get(name)
        return "" if value is None else format(value * factor, form)

    memory = ", ".join(number(name, ".2f") or "-" for name in ("peak_gib", "needed_gib", "smi_gib"))
    memory = "" if memory == "-, -, -" else memory
    errors = ", ".join(filter(None, (number("error_rms", ".1e"), number("error_max", ".1e"))))
    errors += f" ({number('rounding_rms', '.1e')})" if row.get("rounding_rms") is not None else ""
    notes = [row.get(name) for name in ("backend", "calls", "note", "reason")]
    cells = (
        row["row"],
        row["side"],
        row["status"],
        number("seconds", ".4g"),
        number("first_s", ".1f"),
        number("flops_per_s", ".0f", 1e-12),
        memory,
        errors,
        "; ".join(note for note in notes if note),
    )
    return "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def comparison_line(found: dict[str, Any]) -> str:
    """A comparison as a row of the table: ratios, and the difference of the outputs."""

    def number(name: str, form: str, after: str = "") -> str:
        return "" if name not in found else format(found[name], form) + after

    differences = ", ".join(filter(None, (number("difference_rms", ".1e"), number("difference_max", ".1e"))))
    ratio = number("error_ratio", ".2f", " x")
    holds = {True: "holds", False: "DIFFERS", None: ""}[found.get("holds")]
    times, memory = number("time_ratio", ".2f", " x"), number("memory_ratio", ".2f", " x")
    cells = (found["row"], found["side"], holds, times, "", "", memory, differences or ratio, found.get("note", ""))
    return f"| {' | '.join(cells)} |"
