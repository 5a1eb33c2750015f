"""What a run will need before it runs: memory per chip, work, traffic and time, without weights and without devices.

Each stage is compiled ahead of time for the chips, exactly as the pipeline would run it, and the compiler says what it
takes. Times are modelled; `METHOD` says how.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import programs
from cogvideox_flax.generate.checks import check_dtype, check_model
from cogvideox_flax.models.cogvideox.sizes import Size, resolve_size
from cogvideox_flax.plan.chips import GIB, Chip, chip_of, topology_devices
from cogvideox_flax.plan.collectives import Traffic, collectives
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.plan.hlo import Program
from cogvideox_flax.plan.layout import Layout, chip_of_device, choose_mesh, layouts, meshes
from cogvideox_flax.plan.timing import KERNEL_RATES, seconds_in_kernels, seconds_outside_kernels
from cogvideox_flax.plan.wire import bytes_over_busiest_link
from cogvideox_flax.runtime.execution import Recipe, bytes_needed, compiler_options
from cogvideox_flax.schedulers import Scheduler, guidance_scales, make_scheduler

STAGES = ("encode", "denoise", "decode")
"""Of a run in stages. "run" is all of them as one program."""

_RATES = " and ".join(f"{name.removeprefix('cogvideox_')} at {rate}" for name, rate in KERNEL_RATES.items())
METHOD = (
    f"kernels at shares of the matrix rate ({_RATES}); other operations by the compiler's cycles, or by their bytes "
    "over the memory's rate if that is more; the bytes over the busiest link over its rate; nothing overlaps"
)


@dataclass(frozen=True)
class Stage:
    """One stage of a run, on each chip unless said otherwise.

    runs: how often the program runs (the denoising step: once a step); what follows is of one run.
    hbm_gib_per_chip: arguments, results and temporaries at the peak.
    flops: over all chips.
    kernels_s, outside_s, wire_s: modelled seconds of the Pallas kernels, of the rest, and of the collectives.
    estimated_s: of all runs; see METHOD.
    """

    name: str
    runs: int
    hbm_gib_per_chip: float
    argument_gib: float
    temp_gib: float
    flops: int
    collectives: dict[str, Traffic]
    collective_bytes: int
    compile_s: float
    kernels_s: float
    outside_s: float
    wire_s: float
    estimated_s: float
    fits: bool


@dataclass(frozen=True)
class Forecast:
    """All stages of a run on one mesh."""

    topology: str
    mesh: sharding.MeshShape
    size: Size
    stages: tuple[Stage, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def estimated_s(self) -> float:
        return sum(stage.estimated_s for stage in self.stages)


@dataclass(frozen=True)
class Request:
    """A run to be forecast; as the arguments of the pipeline."""

    manifest: checkpoint.Manifest
    dtype: str = "bfloat16"
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    prompts: int = 1
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    scheduler: str | Scheduler | None = None

    @property
    def batch(self) -> int:
        """What the transformer sees at once: twice the prompts, with guidance."""
        return self.prompts * (2 if self.guidance_scale > 1 else 1)

    def size(self) -> Size:
        """Sizes filled in and checked."""
        return resolve_size(
            self.manifest.configs["transformer"],
            self.manifest.configs["vae"],
            self.manifest.release,
            num_frames=self.num_frames,
            height=self.height,
            width=self.width,
        )


def forecast(
    request: Request, topology: str, mesh: sharding.MeshShape, stages: Sequence[str] = STAGES
) -> Iterator[Stage]:
    """The stages one after the other, as each is compiled.

    Raises:
        InputError: the model, the size or the mesh cannot be served; nothing is compiled then.
    """
    devices = topology_devices(topology)
    on = sharding.make_mesh(*mesh, devices=devices)
    check_model(request.manifest, "the model", request.dtype, on)
    sharding.check_batch(on, request.batch)
    size = request.size()
    for name in stages:
        yield _stage(name, request, size, on, chip_of(topology))


def best_mesh(
    request: Request, topology: str, report: Callable[[sharding.MeshShape, Stage | InputError], None]
) -> sharding.MeshShape:
    """The mesh over all chips of a topology with the least time for denoising among those that fit.

    Weights are split over dp and sp (FSDP) only if nothing fits otherwise.

    Args:
        report: called with each mesh that was tried, and its denoising stage or why it cannot be.

    Raises:
        InputError: none fits, or the dtype is not served.
    """
    check_dtype(request.manifest.configs["transformer"], request.dtype, "tpu")  # once, and not for every mesh
    whole = meshes(len(topology_devices(topology)))
    for candidates in (whole, [(*mesh, True) for mesh in whole if mesh[0] * mesh[1] > 1]):
        found: list[tuple[float, sharding.MeshShape]] = []
        for mesh in candidates:
            try:
                (stage,) = forecast(request, topology, mesh, ["denoise"])
            except InputError as e:
                report(mesh, e)
                continue
            report(mesh, stage)
            if stage.fits:
                found.append((stage.estimated_s, mesh))
        if found:
            return min(found)[1]
    raise InputError(f"no mesh of {topology} fits this run; take more chips, or fewer frames or pixels")


def _stage(name: str, request: Request, size: Size, mesh: Mesh, chip: Chip) -> Stage:
    recipe, args, runs = program_of(name, request, size)
    f = recipe.function()
    where = placed(args, mesh)
    start = time.perf_counter()
    options = compiler_options(request.dtype, platform="tpu", quickly=recipe.quickly)
    with jax.set_mesh(mesh):
        compiled = jax.jit(f, compiler_options=options).lower(*where).compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None
    peak = bytes_needed(memory)
    flops = count_flops(f, *(arg for _, arg in args))
    program = Program(text)
    traffic = collectives(program)
    wire_s = bytes_over_busiest_link(program, [device.coords for device in mesh.devices.flat]) / chip.link
    kernels, outside = seconds_in_kernels(program, chip), seconds_outside_kernels(program, chip)
    return Stage(
        name=name,
        runs=runs,
        hbm_gib_per_chip=peak / GIB,
        argument_gib=memory.argument_size_in_bytes / GIB,
        temp_gib=memory.temp_size_in_bytes / GIB,
        flops=flops.total,
        collectives=traffic,
        collective_bytes=sum(t.wire_bytes for t in traffic.values()),
        compile_s=seconds,
        kernels_s=kernels,
        outside_s=outside,
        wire_s=wire_s,
        estimated_s=runs * (kernels + outside + wire_s),
        fits=peak <= chip.hbm,
    )


def program_of(
    name: str, request: Request, size: Size
) -> tuple[Recipe, list[tuple[sharding.ParameterRows | None, Any]], int]:
    """A stage's program, its arguments as (rows of the component whose parameters they are, shapes), and how often it
    runs."""
    configs = request.manifest.configs
    parts = request.manifest.model_family.components
    encoder, transformer, vae = ((parts[name].sharding, _weights(name, request)) for name in parts)
    shape = (size.latent_height, size.latent_width, configs["vae"].latent_channels)
    guided = request.batch // request.prompts
    length = configs["tokenizer"].max_length

    def ids(batch: int) -> tuple[None, Any]:
        return None, jax.ShapeDtypeStruct((batch, length), jnp.int32)

    if name == "encode":
        return programs.encoding(), [encoder, ids(request.prompts)], guided
    to_frames = configs["vae"].scaling_factor, "uint8", None
    if name == "decode":
        z = jax.ShapeDtypeStruct((request.prompts, size.latent_frames - size.extra_latents, *shape), jnp.float32)
        return programs.decoding(*to_frames), [vae, (None, z)], 1
    sampler = _sampler(request)
    plan = sampler.plan(request.num_inference_steps)
    guidance = guidance_scales(plan.timesteps, request.num_inference_steps, request.guidance_scale, False)
    x = jax.ShapeDtypeStruct((request.prompts, size.latent_frames, *shape), jnp.float32)
    start = jax.eval_shape(lambda x: (plan, jnp.asarray(guidance), jax.random.key(0), (x, sampler.init_state(x))), x)
    *tables, carry = ((None, arg) for arg in start)
    if name == "run":
        run = programs.whole_run(sampler, to_frames[0], size.extra_latents, *to_frames[1:])
        return run, [encoder, transformer, vae, ids(request.batch), *tables, carry], 1
    width = configs["transformer"].text_width
    both = jax.ShapeDtypeStruct((request.batch, length, width), jnp.float32)
    step = (None, jax.ShapeDtypeStruct((), jnp.int32))
    return (
        programs.denoising_step(sampler),
        [transformer, (None, both), *tables, step, carry],
        request.num_inference_steps,
    )


def _sampler(request: Request) -> Scheduler:
    if isinstance(request.scheduler, Scheduler):
        return request.scheduler
    own = request.manifest.configs["scheduler"]
    return make_scheduler(dataclasses.replace(own, kind=request.scheduler or own.kind))


def _weights(component: str, request: Request) -> Any:
    return checkpoint.cast(request.manifest.abstract(component), request.dtype)


def placed(args: Sequence[tuple[sharding.ParameterRows | None, Any]], mesh: Mesh | None) -> list[Any]:
    """The arguments of `program_of`, where they will lie: weights by their rows, the rest whole on every device."""

    def place(rows: sharding.ParameterRows | None, path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        if mesh is None:
            return leaf
        if rows is None:
            where = NamedSharding(mesh, PartitionSpec())
        else:
            where = sharding.parameter_sharding(mesh, rows, sharding.parameter_name(path), leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return [jax.tree_util.tree_map_with_path(partial(place, rows), arg) for rows, arg in args]


def bytes_per_device(tree: Any) -> int:
    """Of arrays or shapes, split as they say."""

    def one(leaf: Any) -> int:
        where = getattr(leaf, "sharding", None)
        shape = where.shard_shape(leaf.shape) if where is not None else leaf.shape
        return math.prod(shape) * jnp.dtype(leaf.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def describe(forecast: Forecast) -> str:
    """The stages as a table, for people."""
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
    return f"{head}\nper chip and run; TFLOP over all chips\n{table}\nestimated: {METHOD}"


__all__ = [
    "STAGES",
    "Forecast",
    "Layout",
    "Request",
    "Stage",
    "best_mesh",
    "bytes_per_device",
    "chip_of_device",
    "choose_mesh",
    "describe",
    "forecast",
    "layouts",
    "meshes",
    "placed",
    "program_of",
    "topology_devices",
]
