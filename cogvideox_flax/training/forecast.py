"""The forecast of a training step: memory, work and time of the real step, compiled before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from cogvideox_flax import lora, sharding
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.run import abstract_weights, shape_on, shapes_on
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.nn.remat import RematChoice
from cogvideox_flax.plan import GPUS, StageForecast, chip_of_device
from cogvideox_flax.plan.chips import Chip, Gpu, chip_of, topology_devices
from cogvideox_flax.plan.flops import Flops, count_flops
from cogvideox_flax.plan.forecasting import PARTS, TRAIN, analyse, analyse_gpu
from cogvideox_flax.plan.gpu import Compiled, compile_program, compiled, compiling_without_gpu, usable_memory
from cogvideox_flax.runtime.compile import Program, compile_for
from cogvideox_flax.runtime.devices import GIB, bytes_needed, bytes_per_device, host_memory, memory_limit
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.settings import random_key
from cogvideox_flax.runtime.terminal import duration_text
from cogvideox_flax.training.config import AUTO, LoopConfig
from cogvideox_flax.training.job import FinetuneJob
from cogvideox_flax.training.step import Loss, abstract_state, in_dtype, jit_step, train_step

log = logging.getLogger(__name__)

LossOf = Callable[[FinetuneJob], Loss]


class Target(NamedTuple):
    """The devices that a step is compiled for.

    chip: whose rates model its time; None: it is not modelled.
    memory: bytes on each of them; None: not known.
    attached: whether they are there.
    """

    platform: str
    chip: Chip | Gpu | None
    memory: int | None
    attached: bool


@dataclass(frozen=True)
class StepForecast(StageForecast):
    """One training step. Times are 0 where they are not modelled: of a step that does not compile and, as flops are, on
    CPUs.

    flops: three times those of the forward pass; what is recomputed does not count.
    clips: of a step.
    mfu: flops over what the chips can do in this time.
    """

    clips: int
    mfu: float

    def describe(self, steps: int) -> str:
        """Memory and modelled time in one line."""
        memory = f"{self.hbm_gib_per_chip:.2f} GiB on each device"
        if not self.estimated_s:
            return f"{memory}; its time is not modelled"
        rate, hours = 3600 * self.clips / self.estimated_s, duration_text(steps * self.estimated_s)
        of_peak = f"MFU {self.mfu:.1%}, {rate:,.0f} clips an hour"
        return f"{memory}; {self.estimated_s:.3g} s modelled, {of_peak}, {hours} for {steps:,} steps"


@dataclass(frozen=True)
class TrainStep(Program):
    """One optimizer step."""

    donate: ClassVar[tuple[str, ...]] = ("state",)
    loss: Loss
    config: LoopConfig

    @property
    def name(self) -> str:
        return "training step"

    def __call__(self, state: Any, frozen: Any, batch: Any) -> Any:
        return train_step(state, frozen, batch, loss=self.loss, config=self.config)


def attached_devices(job: FinetuneJob) -> Target:
    """The devices that the job runs on."""
    device = jax.devices()[0] if job.mesh is None else job.mesh.devices.flat[0]
    chip: Chip | Gpu | None = None
    if device.platform == "tpu":
        chip = chip_of_device(device)
    elif device.platform == "gpu" and (job.mesh is None or job.mesh.size == 1):
        chip = next((gpu for gpu in GPUS.values() if device.device_kind.startswith(gpu.name)), None)
    memory = hosts.broadcast(lambda: memory_limit(job.mesh))  # all hosts decide alike
    return Target(device.platform, chip, memory, True)


def on_topology(job: FinetuneJob, topology: str) -> tuple[FinetuneJob, Target]:
    """The job on chips that need not be there, named as for `plan`.

    Raises:
        InputError: an unknown topology, or more than one GPU.
    """
    if topology in GPUS:
        if job.config.mesh not in (None, "1,1,1"):
            raise InputError(f"a plan for {topology} is of one GPU; expected --mesh 1,1,1, or none")
        return with_settings(job, mesh=None), Target("gpu", GPUS[topology], usable_memory(GPUS[topology]), False)
    chip, devices = chip_of(topology), tuple(topology_devices(topology))
    job = dataclasses.replace(with_settings(job, mesh=job.config.mesh or "1,1,1"), devices=devices)
    return job, Target("tpu", chip, chip.hbm, False)


def with_settings(job: FinetuneJob, **changes: Any) -> FinetuneJob:
    """The job with other settings than of its size and samples."""
    other = dataclasses.replace(job, config=dataclasses.replace(job.config, **changes))
    vars(other)["samples"] = job.samples  # whose warnings are said once
    return other


def abstract_arguments(job: FinetuneJob) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The first state, the frozen arrays and the batch of the job's step, as shapes with their shardings; of several
    buckets, the largest."""
    config, mesh, model, name = job.config, job.mesh, job.model, job.model.denoiser
    rows, micro = model.components[name].sharding, config.batch // config.loop.accumulate
    features = {key: shape[1:] for key, shape in model.feature_shapes(1).items()}
    empty = {key: shape_on(jax.ShapeDtypeStruct(shape, jnp.float32), mesh) for key, shape in features.items()}
    frozen: dict[str, Any] = {"empty": empty}
    for component in job.condition.encoders:
        frozen[component] = abstract_weights(job.manifest, component, config.trainer.dtype, mesh)
    if config.method == "lora":
        base = abstract_weights(job.manifest, name, config.trainer.dtype, None)
        frozen[name] = shapes_on(jax.eval_shape(partial(job.add_lora, mesh=None), base), mesh, rows)
        params = {name: lora.lora_parameters(frozen[name])}
    else:
        params = {name: shapes_on(job.manifest.abstract(name), mesh, rows)}

    def batch(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        shape = config.loop.accumulate, micro, *shape
        where = None if mesh is None else sharding.named(mesh, (None, "batch"), shape, "a training batch")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    latents = batch(job.largest.video_latent_shape(1)[1:], jnp.float16)
    clips: dict[str, Any] = {"mean": latents, "std": latents}
    clips |= {key: batch(*array) for key, array in job.condition.arrays(job.largest).items()}
    clips["text"] = {key: batch(shape, jnp.float32) for key, shape in features.items()}
    return abstract_state(params, config.trainer, mesh, {name: rows}), frozen, clips


def forecast(job: FinetuneJob, loss: Loss, target: Target, keep: int | None = PARTS) -> tuple[StepForecast, Any]:
    """The forecast of the job's step, and the executable; None for devices that are not there, or whose memory is not
    known, for which it is compiled without optimizations, which need no other memory.

    keep: how many of its longest parts; None: all.
    """
    config, args, executable = job.config.trainer, abstract_arguments(job), None
    work = 0 if target.chip is None else 3 * _forward_flops(job, loss)
    start = time.perf_counter()
    try:
        if target.platform == "gpu" and not target.attached:
            stage = _on_gpu_elsewhere(job, loss, target.chip)
        else:
            quickly = {} if target.memory is not None else {"xla_backend_optimization_level": 0}
            executable = compile_for(jit_step(loss, config, args[0], target.platform, **quickly), args, job.mesh)
            seconds = time.perf_counter() - start
            if isinstance(target.chip, Gpu):
                flops = count_flops(TrainStep(loss, config), *args, platform="cuda")
                stage = _on_gpu(job, compiled(executable, args, seconds), flops, target.chip)
            elif target.chip is not None:
                how: dict[str, Any] = {"runs": 1, "flops": work, "compile_s": seconds, "keep": keep}
                stage = analyse(TRAIN, executable, on=job.mesh, chip=target.chip, **how)
            else:
                memory = executable.memory_analysis()
                arguments, temporaries = memory.argument_size_in_bytes / GIB, memory.temp_size_in_bytes / GIB
                stage = unmodelled(bytes_needed(memory) / GIB, arguments, temporaries, seconds)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        stage = _too_large(str(e), bytes_per_device(args) / GIB, time.perf_counter() - start)
    fits = stage.fits and (target.memory is None or stage.hbm_gib_per_chip * GIB <= target.memory)
    peak = 0.0 if target.chip is None else target.chip.flops * (1 if job.mesh is None else job.mesh.size)
    mfu = work / (peak * stage.estimated_s) if peak and stage.estimated_s else 0.0
    values = vars(stage) | {"flops": work, "fits": fits, "clips": job.config.batch, "mfu": mfu}
    return StepForecast(**values), executable if target.attached and target.memory is not None else None


def _forward_flops(job: FinetuneJob, loss: Loss) -> int:
    """Those of all micro-batches, counted without a mesh, which pads tokens."""
    loss = in_dtype(loss, job.config.trainer.dtype)

    def forward(params: Any, frozen: Any, batch: Any) -> Any:
        return loss(params, frozen, jax.tree.map(lambda x: x[0], batch), random_key(0))[0]

    state, frozen, batch = abstract_arguments(with_settings(job, mesh=None))
    return job.config.loop.accumulate * count_flops(forward, state.params, frozen, batch).total


def _on_gpu_elsewhere(job: FinetuneJob, loss: Loss, gpu: Any) -> StageForecast:
    step, args = TrainStep(loss, job.config.trainer), abstract_arguments(job)
    with compiling_without_gpu():
        program = compile_program(step, args, gpu, job.config.trainer.dtype)
        flops = count_flops(step, *args, platform="cuda")
    return _on_gpu(job, program, flops, gpu)


def _on_gpu(job: FinetuneJob, program: Compiled, flops: Flops, gpu: Gpu) -> StageForecast:
    dtype, head_dim = job.config.trainer.dtype, job.model.workload(job.largest).head_dim
    return analyse_gpu(TRAIN, program, gpu, runs=1, flops=flops, head_dim=head_dim, dtype=dtype)


def unmodelled(gib: float, argument_gib: float, temp_gib: float, seconds: float) -> StageForecast:
    """Memory alone."""
    memory: Any = {"hbm_gib_per_chip": gib, "argument_gib": argument_gib, "temp_gib": temp_gib}
    return StageForecast(name=TRAIN, runs=1, **memory, compile_s=seconds)


def _too_large(message: str, argument_gib: float, seconds: float) -> StageForecast:
    """What the compiler says of a program that no device of this kind holds."""
    said = re.search(r"temporaries \(([\d.]+)([KMGT])\)", message)
    temp_gib = float(said[1]) * 1024.0 ** ("KMGT".index(said[2]) - 2) if said else math.inf
    return dataclasses.replace(unmodelled(argument_gib + temp_gib, argument_gib, temp_gib, seconds), fits=False)


def fitting(job: FinetuneJob, loss_of: LossOf, target: Target) -> tuple[FinetuneJob, StepForecast, Any]:
    """As `first_fit`, of a step that fits, where the devices' memory is known.

    Raises:
        InputError: none does; names the smallest change that fits.
    """
    log.info("compiling the training step to see what it needs ...")
    job, step, executable = first_fit(job, loss_of, target)
    if not step.fits and target.memory is not None:
        raise InputError(describe_excess(job, loss_of, target, step))
    return job, step, executable


def first_fit(job: FinetuneJob, loss_of: LossOf, target: Target) -> tuple[FinetuneJob, StepForecast, Any]:
    """The job, with the fastest `remat` that fits in place of "auto", and what `forecast` returns for it.

    If none fits, the last is returned.
    """
    choices = [job]
    if job.config.remat == AUTO:
        if target.memory is None:  # a CPU's devices share what the host has
            share = hosts.broadcast(host_memory) // (1 if job.mesh is None else job.mesh.size)
            target = target._replace(memory=share)
        choices = [with_settings(job, remat=choice) for choice in _remat_choices(target)]
    for other in choices:
        if other is not choices[-1] and is_hopeless(other, loss_of(other), target):
            continue
        step, executable = forecast(other, loss_of(other), target)
        if step.fits:
            break
    if len(choices) > 1:
        log.info('remat = "auto": %s, %s', other.remat, step.describe(other.config.loop.steps))
    return other, step, executable


def describe_excess(job: FinetuneJob, loss_of: LossOf, target: Target, step: StepForecast) -> str:
    """What a step that does not fit needs, and the smallest change that fits, which is found by compiling."""
    assert target.memory is not None
    needs = f"the training step needs {step.hbm_gib_per_chip:.2f} GiB on each device, which has "
    needs += f"{target.memory / GIB:.2f} GiB"
    tried = []
    for changes, other in smaller(job, target):
        change = " and ".join(changes)
        tried.append(change)
        if is_hopeless(other, loss_of(other), target):
            continue
        log.info("%s; trying %s ...", needs, change)
        found, _ = forecast(other, loss_of(other), target)
        if found.fits:
            return f"{needs}; it fits with {change}: {found.describe(job.config.loop.steps)}"
    too = f", nor does it fit with {'; or '.join(tried)}" if tried else ""
    return f"{needs}{too}. Take more devices, or fewer frames or pixels"


def _remat_choices(target: Target) -> tuple[RematChoice, ...]:
    """The fastest first. Only a TPU's kernel keeps attention's result, and a CPU has no other memory."""
    known: dict[str, tuple[RematChoice, ...]] = {
        "tpu": ("none", "attention", "full", "offload"),
        "gpu": ("none", "full", "offload"),
    }
    return known.get(target.platform, ("none", "full"))


def smaller(job: FinetuneJob, target: Target) -> Iterator[tuple[list[str], FinetuneJob]]:
    """The same training in less memory on each device, the smallest change first: settings as in the file, and the job.

    Another `remat`; then smaller micro-batches; then a mesh over all devices that splits more.
    """
    config, remat, choices = job.config, job.remat, _remat_choices(target)
    for choice in choices[choices.index(remat) + 1 if remat in choices else 1 :]:
        yield [f'remat = "{choice}"'], with_settings(job, remat=choice)
    words = []
    if remat not in ("full", "offload"):
        job, words = with_settings(job, remat="full"), ['remat = "full"']
    dp = 1 if config.mesh is None else sharding.parse_mesh(config.mesh)[0]
    for accumulate in range(config.loop.accumulate + 1, config.batch // dp + 1):
        if config.batch % accumulate == 0 and config.batch // accumulate % dp == 0:
            yield [*words, f"loop.accumulate = {accumulate}"], _accumulating(job, accumulate)
    devices = job.devices or (jax.devices() if target.attached else [])
    for mesh, other in meshes(job, devices):
        accumulate = other.config.loop.accumulate
        more = [f"loop.accumulate = {accumulate}"] if accumulate != config.loop.accumulate else []
        yield [*words, f'mesh = "{mesh}"', *more], other


def meshes(job: FinetuneJob, devices: Sequence[jax.Device]) -> Iterator[tuple[str, FinetuneJob]]:
    """The job on other meshes over all devices, of those with one clip at a time for each part of dp: first those that
    only split tokens more, then those that split the weights too."""
    config = job.config
    dp, _, tp, *_ = (1, 1, 1) if config.mesh is None else sharding.parse_mesh(config.mesh)
    count, slices = len(devices), sharding.slice_count(devices)
    for fsdp in ("", ",fsdp"):
        for parts in range(dp, 0, -1):
            mesh = f"{parts},{count // (parts * tp)},{tp}{fsdp}"
            if dp % parts or parts % slices or count % (parts * tp):
                continue
            if count > 1 and mesh != config.mesh:
                yield mesh, _accumulating(with_settings(job, mesh=mesh), config.batch // parts)


def _accumulating(job: FinetuneJob, micro_batches: int) -> FinetuneJob:
    return with_settings(job, loop=dataclasses.replace(job.config.loop, accumulate=micro_batches))


def is_hopeless(job: FinetuneJob, loss: Loss, target: Target) -> bool:
    """Whether the step needs twice of the memory that there is, or more, as is known without compiling."""
    return target.memory is not None and stored_bytes(job, loss, target.platform) > 2 * target.memory


def stored_bytes(job: FinetuneJob, loss: Loss, platform: str) -> int:
    """Bytes on each device of what the forward pass stores for the gradient, split over all devices: at least."""
    loss = in_dtype(loss, job.config.trainer.dtype)

    def stored(params: Any, frozen: Any, batch: Any) -> Any:
        micro = jax.tree.map(lambda x: x[0], batch)
        return jax.vjp(lambda params: loss(params, frozen, micro, random_key(0))[0], params)[1]

    state, frozen, batch = abstract_arguments(with_settings(job, mesh=None))
    with compiling_for("cuda" if platform == "gpu" else platform):
        shapes = jax.eval_shape(stored, state.params, frozen, batch)
    return bytes_per_device(shapes) // (1 if job.mesh is None else job.mesh.size)
