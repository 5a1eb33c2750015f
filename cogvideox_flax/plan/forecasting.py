"""Forecasts of a run: memory per chip, work, traffic and time, without weights and without devices.

Each stage is compiled ahead of time for the chips, exactly as the pipeline runs it. Memory and work are the compiler's;
times are modelled, as `METHOD` says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.predict import step_cache
from cogvideox_flax.generate.request import STAGES
from cogvideox_flax.generate.resolve import check_model
from cogvideox_flax.generate.run import ProgramCall, Run
from cogvideox_flax.io.values import is_finite_number, short_repr
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.plan.chips import GPUS, Chip, Gpu, chip_of, topology_devices
from cogvideox_flax.plan.collectives import Traffic, between_slices, collectives, started_by
from cogvideox_flax.plan.flops import Flops, Shares, count_flops
from cogvideox_flax.plan.gpu import (
    GPU_METHOD,
    Compiled,
    compile_program,
    compiling_without_gpu,
    modelled_seconds,
    moved_bytes,
    usable_memory,
)
from cogvideox_flax.plan.hlo import Op, Program
from cogvideox_flax.plan.layout import suitable_layouts
from cogvideox_flax.plan.timing import ATTENTION_RATES, CONVOLUTION_RATES, Part, parts, waits
from cogvideox_flax.plan.wire import Links
from cogvideox_flax.runtime.compile import compile_for, compiler_options
from cogvideox_flax.runtime.devices import GIB, bytes_needed

_RATES = ", ".join(
    [
        *(f"attention of head size {size} at {rate}" for size, rate in ATTENTION_RATES.items()),
        *(f"convolutions to {n} channels or more at {rate}" for n, rate in CONVOLUTION_RATES.items()),
    ]
)
TRAIN = "train"
"""The stage of a training step."""

PARTS = 20
"""How many of a program's longest parts a forecast keeps."""
METHOD = (
    f"kernels at shares of the matrix rate (on a v6e {_RATES}; a matrix unit of half its size has those of twice the "
    "head size or channels); other operations by the compiler's cycles, or by their bytes "
    "over the memory's rate if that is more; collectives by the bytes over the busiest link, and between slices by a "
    "chip's bytes over its share of the data centre's network, less what the compiler's schedule runs beside them"
)


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """One stage of a run, on each chip unless stated otherwise. What is not modelled has its default.

    runs: how often the program runs (the denoising step: once per step). The fields below are of one run; with a step
        cache, work, traffic and times are the mean over its full and cached steps.
    hbm_gib_per_chip: arguments, results and temporaries at the peak.
    flops: over all chips.
    kernels_s, outside_s, wire_s: modelled seconds of the Pallas kernels, of the rest, and of waiting for collectives.
    hidden_s: of collectives beside which something else runs; not in the sum.
    estimated_s: of all runs; see METHOD.
    parts: the longest parts of a run on one chip, without collectives.
    """

    name: str
    runs: int
    hbm_gib_per_chip: float
    argument_gib: float
    temp_gib: float
    flops: int = 0
    collectives: dict[str, Traffic] = field(default_factory=dict)
    collective_bytes: int = 0
    compile_s: float
    kernels_s: float = 0.0
    outside_s: float = 0.0
    wire_s: float = 0.0
    hidden_s: float = 0.0
    estimated_s: float = 0.0
    fits: bool = True
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """All stages of a run on one mesh, which makes so many videos."""

    topology: str
    mesh: sharding.MeshShape
    size: Size
    stages: tuple[StageForecast, ...]
    videos: int = 1

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def estimated_s(self) -> float:
        """Of a video; of a training step, where nothing else is forecast."""
        videos = [stage for stage in self.stages if stage.name != TRAIN]
        return sum(stage.estimated_s for stage in videos or self.stages)

    @property
    def chips(self) -> int:
        return math.prod(self.mesh[:3])

    def dollars(self, price: float) -> float:
        """What a video costs at this price of a chip's hour."""
        return self.estimated_s / self.videos / 3600 * self.chips * price


def check_price(price: float | None) -> None:
    """Refuse a price that is none."""
    if price is not None and not (is_finite_number(price) and price >= 0):
        raise InputError(f"the price is {short_repr(price)}; expected the dollars of a chip's hour, 0 or more")


def forecast(
    run: Run, topology: str, mesh: sharding.MeshShape, stages: Sequence[str] = STAGES
) -> Iterator[StageForecast]:
    """The forecast of each stage, when it is compiled; what cannot be forecast is refused at once.

    Raises:
        InputError: the model or the mesh is not supported; nothing is compiled.
    """
    gpu, on = GPUS.get(topology), None
    if gpu is None:
        on = sharding.make_mesh(*mesh, devices=topology_devices(topology))
    elif mesh != (1, 1, 1):
        raise InputError(f"a plan for {topology} is of one GPU; expected --mesh 1,1,1, or none")
    check_model(run.manifest, "the model", run.dtype, on)
    sharding.check_batch(on, run.denoiser_batch)
    if gpu is not None:
        usable_memory(gpu)  # a share of the memory that is none is refused at once
        with compiling_without_gpu():  # whether the compiler is there
            pass

    def each_stage() -> Iterator[StageForecast]:
        for stage in stages:
            compiled = run.abstract(stage, on)
            # work is counted without a mesh, which pads tokens
            for each, (_, args, _) in zip(compiled, run.abstract(stage), strict=True):
                name = stage if len(compiled) == 1 else f"{stage} {each[0].name}"
                if gpu is not None:
                    yield _on_gpu(name, each, run, gpu)
                else:
                    flops = count_flops(each[0], *args, shares=_shares(run)).total
                    yield _on_tpu(name, each, flops, run, on, chip_of(topology))

    return each_stage()


def best_mesh(
    run: Run, topology: str, report: Callable[[sharding.MeshShape, StageForecast | None], None]
) -> tuple[sharding.MeshShape, StageForecast]:
    """The mesh over all chips of a topology with the shortest modelled denoising time (`layout`), which is then
    compiled; if it does not fit, the next one.

    Args:
        report: called with each mesh that is to be compiled, and None; then with it and its denoising stage.

    Returns:
        The mesh and its denoising stage.

    Raises:
        InputError: none fits, or the dtype is not supported.
    """
    devices = topology_devices(topology)
    for layout in suitable_layouts(run, len(devices), chip_of(topology), sharding.slice_count(devices)):
        stages = forecast(run, topology, layout.mesh, ["denoise"])
        report(layout.mesh, None)
        (stage,) = stages
        report(layout.mesh, stage)
        if stage.fits:
            return layout.mesh, stage
    raise InputError(f"no mesh of {topology} fits this run; take more chips, or fewer frames or pixels")


def _on_gpu(name: str, compiled: ProgramCall, run: Run, gpu: Gpu) -> StageForecast:
    program, args, runs = compiled
    with compiling_without_gpu():
        found = compile_program(program, args, gpu, run.dtype)
        flops = count_flops(program, *args, shares=_shares(run), platform="cuda")
    how: Any = {"head_dim": run.model.workload(run.size).head_dim, "dtype": run.dtype, "shares": _shares(run)}
    return analyse_gpu(name, found, gpu, runs=runs, flops=flops, **how)


def analyse_gpu(
    name: str,
    program: Compiled,
    gpu: Gpu,
    *,
    runs: int,
    flops: Flops,
    head_dim: int,
    dtype: str,
    shares: Shares = MappingProxyType({}),
) -> StageForecast:
    """The forecast of a stage from its program, compiled for one GPU.

    flops: of the forms that run on a GPU.
    """
    attention, rest = modelled_seconds(flops, moved_bytes(program.text, shares), head_dim, dtype, gpu)
    return StageForecast(
        name=name,
        runs=runs,
        hbm_gib_per_chip=program.peak / GIB,
        argument_gib=program.arguments / GIB,
        temp_gib=program.temporaries / GIB,
        flops=flops.total,
        compile_s=program.seconds,
        kernels_s=attention,
        outside_s=rest,
        estimated_s=runs * (attention + rest),
        fits=program.peak <= usable_memory(gpu),
    )


def _shares(run: Run) -> dict[str, tuple[float, float]]:
    """How often a step with a step cache is cached, and full."""
    if run.request.step_cache is None:
        return {}
    if run.full_steps is None:
        raise InputError(
            f"{run.request.step_cache} decides in each step; name the full steps that a run logged (--step-cache-full)"
        )
    full = float(run.full_steps.mean())
    return {step_cache.SCOPE: (1 - full, full)}


def _on_tpu(name: str, compiled: ProgramCall, flops: int, run: Run, mesh: Mesh | None, chip: Chip) -> StageForecast:
    program, args, runs = compiled
    start = time.perf_counter()
    options = compiler_options(run.dtype, platform="tpu", fast_compile=program.fast_compile)
    jitted = jax.jit(program, compiler_options=options, donate_argnames=program.donate)
    executable = compile_for(jitted, args, program.mesh_for(mesh, *args))
    seconds = time.perf_counter() - start
    return analyse(name, executable, on=mesh, chip=chip, runs=runs, flops=flops, compile_s=seconds, shares=_shares(run))


def analyse(
    name: str,
    executable: Any,
    *,
    on: Mesh | None,
    chip: Chip,
    runs: int,
    flops: int,
    compile_s: float,
    shares: Shares = MappingProxyType({}),
    keep: int | None = PARTS,
) -> StageForecast:
    """The forecast of a stage from its program, compiled for the TPU chips of a mesh; None: for one chip.

    keep: how many of its longest parts; None: all.
    """
    memory, text = executable.memory_analysis(), executable.as_text()
    assert memory is not None and text is not None
    peak = bytes_needed(memory)
    hlo = Program(text, shares)
    traffic = collectives(hlo)
    chips = [] if on is None else list(on.devices.flat)
    slices = 1 if on is None else on.shape.get(sharding.SLICE, 1)
    links = Links([chip.coords for chip in chips[: len(chips) // slices]])  # all slices are alike

    def link_seconds(op: Op) -> float:
        if (received := between_slices(op)) is not None:
            return received[1].wire_bytes / chip.network
        return sum(map(links.busiest_bytes, started_by(hlo, op))) / chip.link

    wire_s, hidden_s = waits(hlo, chip, link_seconds)
    listed = parts(hlo, chip)
    kernels, outside = (sum(part.seconds for part in listed if part.in_kernel == inside) for inside in (True, False))
    return StageForecast(
        name=name,
        runs=runs,
        hbm_gib_per_chip=peak / GIB,
        argument_gib=memory.argument_size_in_bytes / GIB,
        temp_gib=memory.temp_size_in_bytes / GIB,
        flops=flops,
        collectives=traffic,
        collective_bytes=sum(t.wire_bytes for t in traffic.values()),
        compile_s=compile_s,
        kernels_s=kernels,
        outside_s=outside,
        wire_s=wire_s,
        hidden_s=hidden_s,
        estimated_s=runs * (kernels + outside + wire_s),
        fits=peak <= chip.hbm,
        parts=tuple(listed[:keep]),
    )


def describe(forecast: Forecast, price: float | None = None) -> str:
    """The stages as a table, for people; and what a video takes.

    price: dollars of a chip's hour; None leaves out what it costs.
    """
    size, mesh = forecast.size, forecast.mesh
    head = (
        f"{size.num_frames} frames of {size.height}x{size.width} on {forecast.topology}, "
        f"mesh dp={mesh[0]} sp={mesh[1]} tp={mesh[2]}{', fsdp' if mesh[3:] == (True,) else ''}"
    )
    rows = [("stage", "HBM GiB", "args", "temp", "TFLOP", "wire MiB", "compile s", "estimated s", "fits")]
    rows += [
        (
            f"{s.name} x{s.runs}" if s.runs > 1 else s.name,
            f"{s.hbm_gib_per_chip:.2f}",
            f"{s.argument_gib:.2f}",
            f"{s.temp_gib:.2f}",
            f"{s.flops / 1e12:.1f}",
            f"{s.collective_bytes / 2**20:.1f}",
            f"{s.compile_s:.0f}",
            f"{s.estimated_s:.2f}",
            "yes" if s.fits else "NO",
        )
        for s in forecast.stages
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    method = METHOD if forecast.topology not in GPUS else GPU_METHOD
    if all(s.name == TRAIN for s in forecast.stages):
        return f"{head}\nper chip and step; TFLOP over all chips\n{table}\nestimated: {method}"
    takes = f"{forecast.estimated_s / forecast.videos:.1f} s of {forecast.chips} chips"
    if price is not None:
        takes += f", ${forecast.dollars(price):.4f} at ${price:g} for an hour of each"
    return f"{head}\nper chip and run; TFLOP over all chips\n{table}\nestimated: {method}\na video takes {takes}"
