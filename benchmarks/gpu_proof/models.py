"""Rows of this library's models: one evaluation of a part at a size, its seconds, its memory and its output."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_proof.cases import ENOUGH_S
from benchmarks.gpu_proof.errors import NotTried
from benchmarks.gpu_proof.weights import config_of, random_module, reference_tensors
from benchmarks.vs_diffusers import ours
from benchmarks.vs_diffusers.cases import COMPONENT, Case
from cogvideox_flax import checkpoint
from cogvideox_flax.models.cogvideox.model import CogVideoX
from cogvideox_flax.plan.flops import count_flops
from cogvideox_flax.runtime.devices import GIB, bytes_needed
from cogvideox_flax.runtime.global_arrays import fetch


def case_of(options: dict[str, Any]) -> tuple[Case, bool]:
    """The case of a row, and whether it is a small one."""
    fields = {"layers": None, "dtype": "bfloat16", "device": "gpu", "torch_compile": False} | options
    small = fields.pop("small", False)
    return Case(**fields), small


def text_of(case: Case, small: bool) -> dict[str, int]:
    """The text sizes for `inputs`."""
    config = config_of("transformer", case.release, small=small)
    return {"text_length": config.text_length, "text_width": config.text_width}


def abstract_of(case: Case, small: bool) -> Any:
    """The part's module in shapes."""
    component = COMPONENT.get(case.part, case.part)
    config = config_of(component, case.release, case.layers, small)
    return checkpoint.cast(CogVideoX.components[component].abstract(config), case.dtype)


def run(
    report: Callable[..., None], *, folder: str | None = None, name: str = "", repeat: int = 3, **options: Any
) -> dict[str, Any]:
    """One row. name: of its output, for the comparison with other sides.

    Raises:
        NotTried: it does not fit into the GPU's memory, by the compiler's count, not even with two layers.
    """
    case, small = case_of(options)
    component = COMPONENT.get(case.part, case.part)
    given = ours.arguments(case, **text_of(case, small))
    case, needed, compile_s, program = _compiled(case, small, given, report)
    flops = flops_of(case, small, given)
    report(compile_s=compile_s, needed_gib=needed / GIB, layers=case.layers, flops=flops)
    start = time.perf_counter()
    config = config_of(component, case.release, case.layers, small)
    shapes = reference_tensors(folder, component, case.release, case.layers)
    module = jax.block_until_ready(random_module(component, config, case.dtype, shapes))
    report(weights_s=time.perf_counter() - start, same_weights=shapes is not None)

    def call() -> Any:
        return jax.block_until_ready(program(module, *given.values()))

    out, row = measured(call, repeat, report)
    row["first_s"] = compile_s + row["first_run_s"]
    row |= {"peak_gib": peak_gib(), "finite": bool(jnp.isfinite(out).all())}
    row["flops_per_s"] = flops / row["seconds"]
    if folder is not None and shapes is not None:
        np.save(Path(folder) / f"{name}.npy", fetch(out).astype(np.float32))
        row["output"] = f"{name}.npy"
    return row | {"status": "ok" if row["finite"] else "wrong"}


def measured(call: Callable[[], Any], repeat: int, report: Callable[..., None]) -> tuple[Any, dict[str, Any]]:
    """The result, and the seconds of the first run and of later ones, reported as they come."""
    start = time.perf_counter()
    out = call()
    first = time.perf_counter() - start
    times: list[float] = []
    report(first_run_s=first)
    while len(times) < repeat and (len(times) < 2 or sum(times) < ENOUGH_S):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        report(seconds=statistics.median(times), times=times)
    return out, {"seconds": statistics.median(times), "times": times, "first_run_s": first}


def _compiled(
    case: Case, small: bool, given: dict[str, Any], report: Callable[..., None]
) -> tuple[Case, int, float, Any]:
    """The case with as many layers as fit, the bytes that it needs, the seconds of the compile, and its program."""
    while True:
        program, abstract = ours.program_of(case), abstract_of(case, small)
        start = time.perf_counter()
        executable = program.prepare(abstract, *given.values())
        seconds = time.perf_counter() - start
        memory, free = executable.memory_analysis(), free_bytes()
        needed = bytes_needed(memory) if memory is not None else 0
        if free is None or needed <= free:
            return case, needed, seconds, program
        layers = layers_that_fit(abstract, needed, free)
        say = f"{needed / GIB:.1f} GiB are needed with all layers, {free / GIB:.1f} are free"
        if layers is None:
            raise NotTried(f"does not fit: {say}")
        report(note=f"{layers} layers only: {say}")
        case = Case(**{**case.__dict__, "layers": layers})


def layers_that_fit(abstract: Any, needed: int, free: int) -> int | None:
    """How many of a module's layers fit beside the rest; None if fewer than two, or if there are no layers."""
    blocks = jax.tree.leaves(getattr(abstract, "blocks", None))
    if not blocks:
        return None
    layers = blocks[0].shape[0]
    each = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in blocks)
    found = layers - math.ceil((needed - free) / each)
    return found if 2 <= found < layers else None


def flops_of(case: Case, small: bool, given: dict[str, Any]) -> int:
    """Floating-point operations of one evaluation's products, whichever kernel computes the attention."""
    return count_flops(ours.FUNCTIONS[case.part], abstract_of(case, small), *given.values()).total


def free_bytes() -> int | None:
    """Bytes that the GPU's allocator can still allocate; None if unknown."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def peak_gib() -> float | None:
    """Peak of JAX's allocator in this process, creating the weights included; None on a CPU."""
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if peak is None else peak / GIB


def products(report: Callable[..., None], *, size: int = 8192, dtype: str = "bfloat16", **_: Any) -> dict[str, Any]:
    """The rate of one large matrix product, for comparison."""
    case = Case("transformer", "cogvideox-5b", 480, 720, 13, None, dtype, "gpu", False)
    start = time.perf_counter()
    call = ours.product(size, case)
    call()
    report(first_s=time.perf_counter() - start)
    _, row = measured(call, 9, report)
    return {"seconds": row["seconds"], "flops_per_s": 2 * size**3 / row["seconds"], "status": "ok"}
