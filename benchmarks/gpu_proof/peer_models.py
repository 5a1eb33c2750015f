"""Rows of the reference's models, diffusers and transformers, with the weights of this library's rows."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_proof.cases import ENOUGH_S
from benchmarks.gpu_proof.errors import NotTried
from benchmarks.gpu_proof.peers import device, fresh, peak_gib, reset_peak, wait
from benchmarks.gpu_proof.values import in_torch, of_weight
from benchmarks.vs_diffusers import theirs
from benchmarks.vs_diffusers.cases import COMPONENT, Case
from tests.released_layout import build

TIED = "encoder.embed_tokens.weight"
"""A second name of `shared.weight`, which a file does not hold."""

_kept: dict[tuple[Any, ...], Any] = {}
"""The model of the last row, for the next one: `_key` and layers -> module."""


def tensors(
    report: Callable[..., None], *, folder: str, components: list[tuple[str, str]], small: bool = False, **_: Any
) -> dict[str, Any]:
    """Write the names and shapes of the reference's tensors, for our side. Needs no GPU and no memory."""
    for component, release in components:
        with torch.device("meta"):
            module: Any = build(component, release, small=small)
        shapes = {name: list(x.shape) for name, x in module.state_dict().items() if name != TIED}
        path = Path(folder) / f"tensors-{component}-{release}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(shapes))
        part.replace(path)
    return {"status": "ok"}


def _key(case: Case, small: bool, rounded_to: str | None) -> tuple[Any, ...]:
    """The key of a cached module, without its layers."""
    return COMPONENT.get(case.part, case.part), case.release, case.dtype, small, rounded_to


def module_of(case: Case, small: bool, rounded_to: str | None = None) -> Any:
    """The reference's module with our weights on the device, kept for the next row; others are freed.

    rounded_to: a dtype that the weights are rounded to first.
    """
    component = COMPONENT.get(case.part, case.part)
    key = *_key(case, small, rounded_to), case.layers
    if key not in _kept:
        _kept.clear()
        fresh()
        changes = {} if case.layers is None or component == "vae" else {"num_layers": case.layers}
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, case.dtype))  # so that it is never held in float32
        try:
            with torch.device(device()):
                module: Any = build(component, case.release, small=small, **changes)
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for name, value in module.state_dict().items():
                if name != TIED:
                    in_torch(of_weight(name, tuple(value.shape)), value)
                    if rounded_to is not None:
                        value.copy_(value.to(getattr(torch, rounded_to)))
        _kept[key] = module.eval().requires_grad_(False)
    return _kept[key]


def run(
    report: Callable[..., None],
    *,
    folder: str | None = None,
    name: str = "",
    repeat: int = 3,
    compiled: bool = False,
    compile_backend: str = "inductor",
    needs_gib: float = 0,
    rounded_to: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One row.

    Args:
        name: of its output, for the comparison with the other side.
        compiled: with `torch.compile`.
        needs_gib: approximate memory besides the weights; with less, fewer layers are used.
        rounded_to: a dtype that weights and inputs are rounded to first, so that the row is the exact result of what a
            row in that dtype is given.
    """
    fields = {"layers": None, "dtype": "bfloat16", "torch_compile": False} | options
    small = fields.pop("small", False)
    case = Case(device="gpu" if torch.cuda.is_available() else "cpu", **fields)
    theirs.prepare()
    fresh()
    case = _fitting(case, small, needs_gib, report, rounded_to)
    start = time.perf_counter()
    module = module_of(case, small, rounded_to)
    wait()
    report(weights_s=time.perf_counter() - start, layers=case.layers)
    if compiled:
        report(note=compile_blocks(module, compile_backend))
    call = theirs.part(case, module, rounded_to, **text_of(case, small))
    times: list[float] = []
    first, out = _seconds(call)
    report(first_s=first)
    reset_peak()  # without the making of the weights, compiling, and cuDNN's trials
    while len(times) < repeat and (len(times) < 2 or sum(times) < ENOUGH_S):
        seconds, out = _seconds(call)
        times.append(seconds)
        report(seconds=statistics.median(times), times=times)
    finite = bool(torch.isfinite(out).all())
    row = {"peak_gib": peak_gib(), "finite": finite, "status": "ok" if finite else "wrong"}
    if folder is not None:
        np.save(Path(folder) / f"{name}.npy", theirs.fetch(out))
        row["output"] = f"{name}.npy"
    return row


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    wait()
    start = time.perf_counter()
    out = call()
    wait()
    return time.perf_counter() - start, out


def text_of(case: Case, small: bool) -> dict[str, int]:
    """As `models.text_of`."""
    from tests.released_layout import SMALL_T5, SMALL_TRANSFORMER

    if not small:
        return {}
    return {"text_length": SMALL_TRANSFORMER["max_text_seq_length"], "text_width": SMALL_T5["d_model"]}


def compile_blocks(module: Any, backend: str = "inductor") -> str:
    """`torch.compile` for each block: a transformer's identical blocks compile once, while 42 layers as one program
    take minutes. For an autoencoder, the decoder's blocks."""
    if hasattr(module, "decoder"):
        for block in (module.decoder.mid_block, *module.decoder.up_blocks):
            block.compile(backend=backend)
        return "torch.compile of each block of the decoder"
    if getattr(module, "_repeated_blocks", None) and hasattr(module, "compile_repeated_blocks"):
        module.compile_repeated_blocks(backend=backend)
        return "compile_repeated_blocks"
    for block in module.transformer_blocks:
        block.compile(backend=backend)
    return "torch.compile of each block (diffusers names no repeated blocks of this class)"


def _fitting(
    case: Case, small: bool, beside_gib: float, report: Callable[..., None], rounded_to: str | None = None
) -> Case:
    """The case with as many layers as fit into the GPU's memory.

    Raises:
        NotTried: not even two layers fit, or there are no layers to leave out.
    """
    if not torch.cuda.is_available():
        return case
    component = COMPONENT.get(case.part, case.part)
    with torch.device("meta"):
        module: Any = build(component, case.release, small=small)
    size = getattr(torch, case.dtype).itemsize
    whole = size * sum(x.numel() for x in module.parameters())
    _free_if_other(_key(case, small, rounded_to))
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - beside_gib * 2**30
    if whole <= free:
        return case
    blocks = getattr(module, "transformer_blocks", None)
    say = f"{whole / 2**30 + beside_gib:.0f} GiB are needed, about, {free / 2**30 + beside_gib:.0f} are free"
    if blocks is None:
        raise NotTried(f"does not fit: {say}")
    layers = len(blocks) - int((whole - free) / (size * sum(x.numel() for x in blocks[0].parameters()))) - 1
    if layers < 2:
        raise NotTried(f"does not fit: {say}")
    report(note=f"{layers} layers only: {say}")
    return Case(**{**case.__dict__, "layers": layers})


def _free_if_other(key: tuple[Any, ...]) -> None:
    """Free a cached model that is not this row's."""
    if not any(kept[:-1] == key for kept in _kept):
        _kept.clear()
        fresh()
