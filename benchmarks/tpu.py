"""Programs for TPUs compiled on a machine without one, and their static schedules.

`prepare()` must run before jax loads a TPU library. Clock and matrix rate of a v6e chip are derived from its published
918 TFLOP/s; a schedule counts one cycle per bundle without stalls, so its times are modelled, not measured.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.runner import timed
from cogvideox_flax import sharding
from cogvideox_flax.plan.chips import topology_devices
from cogvideox_flax.plan.timing import Part
from cogvideox_flax.runtime.compile import compiling_on
from cogvideox_flax.runtime.libtpu import ENVIRONMENT

PACKAGES = ("jax", "libtpu")
"""Those whose versions determine a schedule."""

TOPOLOGY = "v6e:2x4"
CLOCK = 1.75e9
"""Cycles per second of a v6e core: 918 TFLOP/s at 2 x 256 x 256 multiply-adds x 2 a cycle."""


def prepare(dump: Path | None = None) -> None:
    """Set the environment; with `dump`, every compile leaves its final schedule in that folder."""
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")  # attached chips are not used
    if dump is not None:
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=^final_bundles$"
        )


@contextmanager
def dumped() -> Iterator[Path]:
    """A temporary folder for schedules."""
    folder = Path(tempfile.mkdtemp(prefix="schedule-"))
    try:
        prepare(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def topology_mesh(topology: str, shape: tuple[int, int, int] | None = None) -> Any:
    """A (dp, sp, tp) mesh over the chips of a topology such as "v6e:2x4"; of one chip if no shape is given."""
    return sharding.make_mesh(*(shape or (1, 1, 1)), devices=topology_devices(topology))


def compile_on_chip(topology: str, f: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    """A function of arrays of these shapes, compiled for one chip of a topology."""
    mesh = topology_mesh(topology)
    place = NamedSharding(mesh, PartitionSpec())
    with compiling_on(mesh):
        return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in shapes)).compile()


class KernelSchedule:
    """Bundles of one Pallas kernel: `step` of what runs once per grid step, `loops` of its inner loops, in order. Of a
    matrix product, both together are those of a window.

    Code under a condition that not every grid step meets is counted in `step` as if it were met.
    """

    def __init__(self, text: str):
        self.step, self.loops = 0, []
        for line in text.splitlines():
            match = re.match(r"\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2}:? ?)*):?\s*(>*)\s*\{", line)
            if match is None:
                continue
            labels, depth = match.group(1), len(match.group(2))
            if depth >= 2:
                if "LB" in labels:
                    self.loops.append(0)
                self.loops[-1] += 1
            elif depth == 1:
                self.step += 1


def kernel_schedules(dump: Path, name: str) -> list[KernelSchedule]:
    """The schedules of the kernels of this name that were compiled last; empties the folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(p for p in dump.glob(f"*{name}*final_bundles.txt") if "schedule-analysis" not in p.name)
    if not found:
        raise FileNotFoundError(f"no schedule of a kernel named {name} in {dump}")
    schedules = [KernelSchedule(path.read_text()) for path in found]
    empty(dump)
    return schedules


def compile_kernels(
    dump: Path, name: str, f: Callable[..., Any], *shapes: tuple[int, ...]
) -> tuple[list[KernelSchedule], float]:
    """The schedules of a function's kernels of this name on a v6e chip, and the seconds that compiling took."""
    empty(dump)
    _, seconds = timed(partial(compile_on_chip, TOPOLOGY, f, *shapes))
    return kernel_schedules(dump, name), seconds


def product_seconds(dump: Path, part: Part) -> float | None:
    """What the schedules of a part's matrix products take; None if it has none. Equal products may share a schedule."""
    bundles = []
    for name, windows in part.windows.items():
        for path in dump.glob(f"*-{name}-*final_bundles.txt"):
            if "schedule-analysis" not in path.name:
                schedule = KernelSchedule(path.read_text())
                bundles.append(windows * (schedule.step + sum(schedule.loops)))
    return part.count * sum(bundles) / len(bundles) / CLOCK if bundles else None


def empty(dump: Path) -> None:
    """Delete the schedules of earlier compilations."""
    for path in dump.iterdir():
        path.unlink()
