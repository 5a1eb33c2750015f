"""Memory of the releases on one NVIDIA GPU, from programs compiled without one.

    python -m benchmarks.gpu_aot [--gpu h100] [--cases 5b 768p] [--stages encode denoise decode] [--json FILE]

Each stage is compiled in bfloat16 as the pipeline runs it. Memory is the compiler's count of arguments, results and
temporaries, without cuDNN's workspace, which is chosen on the GPU. The last column lists the cuDNN operations in the
program's text, those in loops once, and their precision.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.runner import Report, make_parser
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.models.registry import get_release
from cogvideox_flax.plan.chips import GPUS, Gpu
from cogvideox_flax.plan.gpu import compile_program, compiling_without_gpu
from cogvideox_flax.runtime.devices import GIB

CASES = {
    "5b": ("cogvideox-5b", 480, 720, 49),
    "2b": ("cogvideox-2b", 480, 720, 49),
    "768p": ("cogvideox1.5-5b", 768, 1360, 81),
    "hunyuan-480p": ("hunyuanvideo1.5-480p-t2v", 480, 848, 121),
}
"""Name -> release, height, width, frames."""


def main() -> int:
    parser = make_parser("benchmarks.gpu_aot", __doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--stages", nargs="+", choices=("encode", "denoise", "decode", "run"), default=None)
    args = parser.parse_args()
    columns = ("GPU", "case", "stage", "GiB", "weights and inputs", "temporaries", "compile s", "cuDNN")
    try:
        with compiling_without_gpu():
            pass
    except InputError as e:
        raise SystemExit(f"error: {e}") from e
    report = Report(args.json, columns, ("jax", "jaxlib"))
    for case in args.cases:
        for stage in args.stages or ("encode", "denoise", "decode"):
            for found in compiled(case, stage, GPUS[args.gpu]):
                row = {"gpu": args.gpu, "case": case} | found
                report.add(row, _cells(row))
    return 0


def compiled(case: str, stage: str, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Bytes and calls of a stage's programs."""
    release, height, width, frames = CASES[case]
    manifest = Manifest.of_release(get_release(release))
    request = GenerationRequest("", num_frames=frames, height=height, width=width)
    for program, args, _ in resolve(request, manifest, "bfloat16").abstract(stage):
        found = compile_program(program, args, gpu, "bfloat16")
        calls = Counter(
            f"{match[2]} {match[1]}"
            for line in found.text.splitlines()
            if (match := re.search(r"= \((\w+)\[.*custom_call_target=\"__cudnn\$(fmha|conv)", line))
        )
        yield {
            "stage": program.name,
            "argument_gib": found.arguments / GIB,
            "temp_gib": found.temporaries / GIB,
            "gib": found.peak / GIB,
            "compile_s": found.seconds,
            "cudnn": dict(calls),
        }


def _cells(row: dict[str, Any]) -> list[str]:
    calls = ", ".join(f"{n} {kind}" for kind, n in row["cudnn"].items()) or "none"
    sizes = [f"{row[name]:.1f}" for name in ("gib", "argument_gib", "temp_gib")]
    return [row["gpu"], row["case"], row["stage"], *sizes, f"{row['compile_s']:.0f}", calls]


if __name__ == "__main__":
    sys.exit(main())
