"""The programs of this library's rows, to be lowered and compiled where there is no GPU.

    python -m benchmarks.gpu_proof.programs [--gpu h100] [PATTERN ...]     # needs pip install '.[cuda]'

Prints the compiler's count for each: arguments, results and temporaries in GiB, and the calls of cuDNN. Without a GPU
the compiler does not autotune.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_proof import attention, cases, convolution, models
from benchmarks.gpu_proof.rows import RELEASED, Row, rows
from benchmarks.vs_diffusers import ours
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.runtime.devices import GIB, bytes_needed

CALLS = re.compile(r'custom_call_target="(__cudnn\$\w+|__gpu\$xla.gpu.triton)"')


def program_of(row: Row) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """What a row of this library runs: (function to be jitted, its arguments in shapes, options for the compiler).

    None for rows that run none, or another library's.
    """
    module, name = row.function.split(":")
    options = {key: value for key, value in row.options.items() if key != "folder"}
    if module == attention.__name__:
        case = cases.attention_of(options)
        f = attention.program(case)
        return (f if name == "run" else attention.gradient_program(case, f)), attention.shapes(case), {}
    if module == convolution.__name__:
        conv = cases.Convolution(**options)
        if name == "run":
            return convolution.program(conv), convolution.shapes(conv), {}
        dy = jax.ShapeDtypeStruct(conv.output_shape, conv.dtype)
        return convolution.gradient_program, (*convolution.shapes(conv), dy), {}
    if module == models.__name__ and name == "run":
        case_, small = models.case_of({k: v for k, v in options.items() if k not in ("name", "repeat")})
        given = jax.eval_shape(lambda: tuple(ours.arguments(case_, **models.text_of(case_, small)).values()))
        f, whole = ours.FUNCTIONS[case_.part], compiler_options(case_.dtype, platform="gpu")
        return f, (models.abstract_of(case_, small), *given), whole
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_proof.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from benchmarks.gpu import GPUS, device, prepare

    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="of rows' names")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    args = parser.parse_args()
    prepare()
    where = jax.sharding.SingleDeviceSharding(device(GPUS[args.gpu]))
    print("| row | GiB | arguments | temporaries | compile s | calls |\n|---|---|---|---|---|---|")
    for row in rows(RELEASED):
        found = program_of(row)
        if found is None or not any(fnmatch.fnmatch(row.key, pattern) for pattern in args.patterns):
            continue
        f, shapes, options = found
        here = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype), sharding=where), shapes)
        start = time.perf_counter()
        compiled = jax.jit(f, compiler_options=options).lower(*here).compile()
        seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
        assert memory is not None
        calls = Counter(CALLS.findall(compiled.as_text() or ""))
        sizes = bytes_needed(memory), memory.argument_size_in_bytes, memory.temp_size_in_bytes
        cells = [row.key.replace("|", "/"), *(f"{n / GIB:.2f}" for n in sizes), f"{seconds:.0f}"]
        cells.append(", ".join(f"{n} {name}" for name, n in calls.items()) or "none")
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
