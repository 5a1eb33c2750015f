"""Rows, slopes and plots of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.vs_diffusers.cases import PARTS, SIDES

COLUMNS = (
    *("release", "part", "frames", "tokens", "ours s", "diffusers s", "ratio", "first s", "GiB", "ratio", "difference"),
    "matmul share",
)


def cells(row: dict[str, Any]) -> list[object]:
    """A row of the table."""
    of_tokens = row["part"] in ("transformer", "video", "attention")
    tokens = row["tokens"] if of_tokens else 226 if row["part"] == "text_encoder" else ""
    frames = "" if row["part"] == "text_encoder" else 2 if row["part"] == "convolution" else row["frames"]
    digits = 4 if row["ours_s"] < 0.1 else 2
    return [
        row["release"],
        row["part"],
        frames,
        tokens,
        f"{row['ours_s']:.{digits}f}",
        f"{row['diffusers_s']:.{digits}f}",
        f"{row['time_ratio']:.2f}",
        f"{row['ours_first_s']:.1f}, {row['diffusers_first_s']:.1f}",
        f"{row['ours_gib']:.2f}, {row['diffusers_gib']:.2f}",
        f"{row['memory_ratio']:.2f}",
        f"{row['difference']:.1e}",
        f"{row['matmul_share']:.2f}",
    ]


def slopes_of_parts(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Part -> its slopes, of those that were measured at several sizes."""
    return {part: slope for part in PARTS if (slope := slopes_of(part, rows))}


def slopes_of(part: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds and GiB per thousand tokens (transformer) or per frame, by least squares; nothing for one size."""
    mine = [row for row in rows if row["part"] == part]
    if len(mine) < 2:
        return {}
    x = [row["tokens"] / 1000 if part == "transformer" else row["frames"] for row in mine]
    per = "1000 tokens" if part == "transformer" else "frame"
    return {
        f"{side} {unit} per {per}": float(np.polyfit(x, [row[f"{side}_{unit}"] for row in mine], 1)[0])
        for unit in ("s", "gib")
        for side in SIDES
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds and GiB of both sides, part by part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{row['part']}\n{row['frames']} frames" for row in rows]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(1, 2, figsize=(4 + 1.4 * len(rows), 4))
    for axis, unit, title in zip(axes, ("s", "gib"), ("seconds", "GiB at most"), strict=True):
        for i, side in enumerate(SIDES):
            axis.bar(x + 0.4 * i - 0.2, [row[f"{side}_{unit}"] for row in rows], 0.38, label=side)
        axis.set_xticks(x, labels, fontsize=8)
        axis.set_title(title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
