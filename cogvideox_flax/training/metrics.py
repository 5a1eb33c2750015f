"""Training metrics: means over micro-batches, a file of JSON lines, a plot."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jaxtyping import Array, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import atomic_write, write_text
from cogvideox_flax.io.paths import read_text
from cogvideox_flax.runtime.multihost import hosts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """Sum and count of numbers. Micro-batches add up both, so that the mean is over the whole batch."""

    total: Float32[Array, ""]
    count: Float32[Array, ""]

    def __float__(self) -> float:
        """The mean; NaN if the count is 0."""
        return float(self.total) / float(self.count) if float(self.count) else float("nan")


class MetricsLog:
    """A file with one JSON object per line, each with its `step`. On several hosts process 0 writes it.

    Args:
        path: the file; lines are appended.
        last_step: lines of later steps are removed, so that a resumed run leaves none twice.
        tensorboard: write them to a folder for TensorBoard too, beside the file.
    """

    def __init__(self, path: Path, last_step: int, tensorboard: bool = False):
        self._path, self._board = path, None
        self._remove_after(last_step)
        if tensorboard and hosts.is_first():
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(
                str(path.parent / "tensorboard"), purge_step=last_step + 1, filename_suffix=f".{last_step}"
            )

    @hosts.on_process_0
    def _remove_after(self, last_step: int) -> None:
        kept = [line for line in read_metrics(self._path) if line["step"] <= last_step] if self._path.exists() else []
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    @hosts.on_process_0
    def write(self, values: Mapping[str, float]) -> None:
        """Append one line; the operating system has it when this returns."""
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({name: _rounded(value) for name, value in values.items()}) + "\n")
        except OSError as e:
            raise InputError(
                f"writing {self._path} failed: {e.strerror}; free some space; the same command resumes the run"
            ) from e
        if self._board is not None:
            for name in values.keys() - {"step"}:
                self._board.add_scalar(name, values[name], values["step"])

    def close(self) -> None:
        """Wait until TensorBoard's file is written."""
        if self._board is not None:
            self._board.close()


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics file. Lines that are damaged, or cut short by a kill, are skipped.

    Raises:
        InputError: it cannot be read.
    """
    lines = []
    try:
        texts = read_text(path, errors="replace").splitlines()
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}; remove it, or choose another place") from e
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and all(type(value) in (int, float) for value in line.values()) and "step" in line:
            lines.append(line)
    return lines


def check_tensorboard() -> None:
    """Refuse to write for TensorBoard where that is not possible.

    Raises:
        InputError: tensorboardX is not installed.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise InputError("loop.tensorboard needs tensorboardX: pip install tensorboardX; or leave it out")


def plot_metrics(paths: Sequence[Path], names: Sequence[str], out: Path) -> None:
    """Plot metrics over steps as a PNG: one panel per metric, with a running mean.

    Args:
        paths: metrics files. The steps of each are counted on from the last step of the one before it.
        names: of the metrics.

    Raises:
        InputError: no line of the files has one of the metrics.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines: list[dict[str, float]] = []
    for path in paths:
        start = lines[-1]["step"] if lines else 0
        lines += [line | {"step": start + line["step"]} for line in read_metrics(path)]
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 3.5), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], names, strict=True):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if not points:
            known = sorted({k for line in lines for k in line})
            raise InputError(f"{', '.join(map(str, paths))}: no metric {name!r}; there are {known}")
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
        axis.plot(steps, _running_mean(values, max(1, len(values) // 50)), color="tab:blue")
        axis.set(xlabel="step", title=name)
        if min(values) > 0 and max(values) > 20 * min(values):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    with atomic_write(out) as partial:
        figure.savefig(partial, dpi=120)
    pyplot.close(figure)


def _running_mean(values: Sequence[float], radius: int) -> list[float]:
    windows = [values[max(0, i - radius) : i + radius + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
