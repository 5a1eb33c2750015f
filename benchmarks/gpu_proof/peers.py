"""Rows of PyTorch's own attention and convolution, on the inputs of this library's rows."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_proof.cases import HEAD_SCALES, Convolution, attention_of
from benchmarks.gpu_proof.errors import NotTried, error, load, verdict
from benchmarks.gpu_proof.machine import cudnn_tuple, of_cudnn
from benchmarks.gpu_proof.values import in_torch

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def device() -> str:
    """Where the rows run: in a dry run, the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def fresh() -> None:
    """Free the unused memory of earlier rows in this process, and reset the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    reset_peak()


def reset_peak() -> None:
    """Let `peak_gib` count from here on."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def timed(call: Callable[[], Any], repeat: int) -> float:
    """Seconds, the median of several runs."""
    times = []
    for _ in range(repeat):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_gib() -> float | None:
    """Peak of PyTorch's allocator since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def attention(report: Callable[..., None], *, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """`scaled_dot_product_attention`: the default, whose errors are the row's, and each of its backends."""
    case = attention_of(options)
    fresh()
    kind = getattr(torch, case.dtype)
    q, k, v = (in_torch(x, torch.empty(case.shape, dtype=kind, device=device())) for x in case.values().values())
    scales = [HEAD_SCALES[i % len(HEAD_SCALES)] for i in range(case.heads)]
    q *= torch.tensor(scales, dtype=q.dtype, device=q.device)[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Any:
        return F.scaled_dot_product_attention(q, k, v)

    start = time.perf_counter()
    out = call()
    wait()
    report(first_s=time.perf_counter() - start)
    seconds = timed(call, case.repeat)
    report(seconds=seconds, flops_per_s=case.flops / seconds)
    notes = []
    for backend, kind in BACKENDS.items():
        try:
            with sdpa_kernel(kind):
                call()
                notes.append(f"{backend} {1e3 * timed(call, case.repeat):.2f} ms")
        except RuntimeError as e:
            notes.append(f"{backend}: {str(e).splitlines()[0][:60]}")
    row: dict[str, Any] = {"note": ", ".join(notes)}
    kept = load(folder, case.name)
    if kept is None:
        return row | {"status": "ok", "note": row["note"] + "; no reference was kept: errors not known"}
    found = out.transpose(1, 2)[:, kept["queries"]][:, :, kept["heads"]].float().cpu().numpy()
    rounding_error = error(kept["rounded"], kept["reference"], (0, 1, 3))
    return (
        verdict(error(found, kept["reference"], (0, 1, 3)), None if case.dtype == "float32" else rounding_error) | row
    )


def convolution(report: Callable[..., None], *, folder: str | None = None, **options: Any) -> dict[str, Any]:
    """`conv3d` on B C T H W, as in diffusers' autoencoder."""
    case = Convolution(**options)
    fresh()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    kind = getattr(torch, case.dtype)
    shapes = (case.input_shape, case.kernel_shape, (case.out_channels,))
    x, kernel, bias = (
        in_torch(values, torch.empty(shape, dtype=kind, device=device()))
        for values, shape in zip(case.values(), shapes, strict=True)
    )
    x = x.permute(0, 4, 1, 2, 3).contiguous()

    def call() -> Any:
        return F.conv3d(x, kernel, bias, padding=(0, 1, 1))

    with torch.no_grad():
        start = time.perf_counter()
        y = call()
        wait()
        report(first_s=time.perf_counter() - start)
        seconds = timed(call, case.repeat)
    report(seconds=seconds, flops_per_s=case.flops / seconds)
    kept = load(folder, case.name)
    if kept is None:
        return {"status": "ok", "note": "no reference was kept: errors not known"}
    frame, row, column = torch.tensor(kept["points"]).T
    found = y[0, :, frame, row, column].T.float().cpu().numpy()
    exact = kept["reference"]
    narrow = torch.tensor(exact).to(kind).double().numpy()
    return verdict(error(found, exact), None if case.dtype == "float32" else error(narrow, exact))


def products(report: Callable[..., None], *, size: int = 8192, dtype: str = "bfloat16", **_: Any) -> dict[str, Any]:
    """The rate of one large matrix product."""
    x = torch.randn(size, size).to(device(), getattr(torch, dtype))
    start = time.perf_counter()
    torch.matmul(x, x)
    wait()
    report(first_s=time.perf_counter() - start)
    seconds = timed(lambda: torch.matmul(x, x), 9)
    return {"seconds": seconds, "flops_per_s": 2 * size**3 / seconds, "status": "ok"}


def sees(report: Callable[..., None], *, dry_run: bool = False, **_: Any) -> dict[str, Any]:
    """What PyTorch finds on this machine.

    Raises:
        NotTried: no GPU.
    """
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        if dry_run:
            return found | {"status": "ok", "note": "dry run on the CPU"}
        raise NotTried(f"PyTorch {torch.__version__} sees no NVIDIA GPU (built for CUDA {torch.version.cuda})")
    cudnn, about = cudnn_tuple(torch.backends.cudnn.version()), torch.cuda.get_device_properties(0)
    says = of_cudnn(cudnn, "diffusers' autoencoder uses them")
    free, total = torch.cuda.mem_get_info()
    found |= {"cudnn": cudnn, "cudnn_says": says, "device": about.name, "capability": f"{about.major}.{about.minor}"}
    found |= {"free_gib": free / 2**30, "total_gib": total / 2**30}
    note = f"{about.name}, CUDA {torch.version.cuda}, {says}, {total / 2**30:.0f} GiB"
    return found | {"status": "ok", "note": note}
