"""NVIDIA GPUs that need not be there: compiling for them, and the modelled time of what is compiled.

XLA's compiler for GPUs comes with the `cuda` extra and needs no driver if it is given a GPU's properties. It then
cannot autotune, as it does on a GPU, so it may choose other algorithms for matrix products.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import jax

from cogvideox_flax.errors import InputError, install_extra
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.plan.chips import Gpu
from cogvideox_flax.plan.flops import Flops, Shares
from cogvideox_flax.plan.hlo import Op
from cogvideox_flax.plan.hlo import Program as HLO
from cogvideox_flax.plan.timing import FREE, attention_rate, is_product
from cogvideox_flax.runtime.compile import Program, compiler_options
from cogvideox_flax.runtime.devices import bytes_needed, bytes_per_device

ATTENTION_RATES = {64: 0.41, 128: 0.58}
"""Head size -> share of `Gpu.flops` that cuDNN's attention reached on an H200."""

PRODUCT_RATE, CONVOLUTION_RATE, BANDWIDTH_RATE = 0.83, 0.67, 0.65
"""That of matrix products and of the decoders' convolutions, and the share of `Gpu.bandwidth` of all else: fitted to
the steps and decodings in docs/benchmarks.md, of which the model misses none by more than 6 %."""

GPU_METHOD = (
    "attention, products and convolutions at shares of the matrix rate (head size 64 "
    f"{ATTENTION_RATES[64]}, 128 {ATTENTION_RATES[128]}; {PRODUCT_RATE}; {CONVOLUTION_RATE}), other operations by "
    f"their bytes at {BANDWIDTH_RATE} of the memory's rate, as measured on an H200 and on no other GPU; fits: in the "
    "three quarters of its memory that JAX takes, or the share in XLA_PYTHON_CLIENT_MEM_FRACTION"
)


def usable_memory(gpu: Gpu) -> int:
    """The bytes that JAX takes for programs: three quarters, or the share in `XLA_PYTHON_CLIENT_MEM_FRACTION`."""
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    try:
        return int(float(share) * gpu.memory)
    except ValueError as e:
        raise InputError(
            f"XLA_PYTHON_CLIENT_MEM_FRACTION is {share!r}; expected a share of the memory, such as 0.9"
        ) from e


def installed() -> bool:
    """Whether the compiler is installed."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = list(plugins.submodule_search_locations or ()) if plugins else []
    return any("cuda" in module.name for module in pkgutil.iter_modules(folders))


@contextmanager
def compiling_without_gpu() -> Iterator[None]:
    """Context in which programs are compiled for GPUs that are not there. No GPU is used.

    Raises:
        InputError: the compiler is not installed.
    """
    if not installed():
        raise InputError(f"a plan for GPUs needs their compiler: {install_extra('cuda')}")
    jax.config.update("jax_platforms", "cpu")
    from jax._src import xla_bridge

    logger = logging.getLogger(xla_bridge.__name__)
    known = xla_bridge.canonicalize_platform
    platform: Any = (xla_bridge, "canonicalize_platform", lambda name: "cuda" if name == "gpu" else known(name))
    with ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)  # that no driver is there
        jax.devices()  # registers the plugins
        for module, name, answer in [platform, *answers()]:
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, answer)
        yield


def answers() -> list[tuple[Any, str, Callable[..., Any]]]:
    """(module, name of a function, its replacement): JAX's and this library's queries of the attached GPU's generation
    and cuDNN, answered as on a Hopper GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    from cogvideox_flax.attention import nvidia

    found: list[tuple[Any, str, Callable[..., Any]]] = [
        (fused_attention_stablehlo, "check_cudnn_version", lambda: 91001),
        (nvidia, "present", lambda: True),
    ]
    with suppress(ImportError):  # JAX from 0.11 on; before, Triton assumes a Hopper GPU without a GPU
        gpu_info: Any = importlib.import_module("jax._src.pallas.triton.gpu_info")
        hopper = gpu_info.GpuInfo(gpu_version=None, arch_name="9.0", compute_capability=90)
        found.append((gpu_info, "get_gpu_info", lambda: hopper))
    return found


def device(gpu: Gpu) -> jax.Device:
    """A device of this kind, as a compile target."""
    from jax.experimental import topologies

    return topologies.get_topology_desc("one GPU", "cuda", target_config=gpu.config(), topology="1x1x1").devices[0]


class Compiled(NamedTuple):
    """A program compiled for a GPU. Bytes of its arguments, of its temporaries, and at the peak; without cuDNN's
    workspace, which is chosen on the GPU."""

    arguments: int
    temporaries: int
    peak: int
    seconds: float
    text: str


def compile_program(program: Program, args: Any, gpu: Gpu, dtype: str) -> Compiled:
    """Compile a program as the pipeline runs it on one GPU.

    args: as shapes.

    Raises:
        InputError: the compiler is not installed.
    """
    with compiling_without_gpu():
        where = jax.sharding.SingleDeviceSharding(device(gpu))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), args)
        options = compiler_options(dtype, platform="gpu", fast_compile=program.fast_compile)
        start = time.perf_counter()
        with compiling_for("cuda"):
            jitted = jax.jit(program, compiler_options=options, donate_argnames=program.donate)
            executable = jitted.lower(*shapes).compile()
        return compiled(executable, shapes, time.perf_counter() - start)


def compiled(executable: Any, args: Any, seconds: float) -> Compiled:
    """What is known of an executable for one GPU.

    args: its arguments as shapes.
    """
    memory, text = executable.memory_analysis(), executable.as_text()
    assert memory is not None and text is not None
    plain = [x for x in jax.tree.leaves(args) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]
    held = bytes_per_device(plain)  # weights that the program does not use among them
    peak = held + bytes_needed(memory) - memory.argument_size_in_bytes
    return Compiled(held, memory.temp_size_in_bytes, peak, seconds, text)


def moved_bytes(text: str, shares: Shares) -> float:
    """The bytes that a compiled program's operations read and write, but for products, convolutions and attention.

    Args:
        text: its HLO.
        shares: as for `count_flops`.
    """
    hlo, moved = HLO(text, shares), 0.0
    for ops, op, times in hlo.run():
        if op.kind not in FREE and not op.kind.endswith(("-start", "-done")) and not _is_product(hlo, op):
            moved += times * (hlo.written_bytes(ops, op) + hlo.read_bytes(ops, op))
    return moved


def modelled_seconds(flops: Flops, moved: float, head_dim: int, dtype: str, gpu: Gpu) -> tuple[float, float]:
    """The modelled time of a program: of attention, and of all else; see `GPU_METHOD`.

    Args:
        flops: of the forms that run on a GPU.
        moved: from `moved_bytes`.
        head_dim: of its attention.
    """
    rate = gpu.flops if dtype != "float32" else gpu.cores * gpu.lanes * 2 * gpu.clock * 1e9
    products = flops.rest / (PRODUCT_RATE * rate) + flops.convolutions / (CONVOLUTION_RATE * rate)
    attention = flops.kernels / (attention_rate(head_dim, ATTENTION_RATES) * rate)
    return attention, products + moved / (BANDWIDTH_RATE * gpu.bandwidth)


def _is_product(hlo: HLO, op: Op) -> bool:
    """Whether an operation's time is in its products': these and cuDNN's attention, with what is fused into them."""
    return is_product(hlo, op) or (
        op.kind == "custom-call" and re.search(r"__cu(dnn|blas)|triton", op.text) is not None
    )
