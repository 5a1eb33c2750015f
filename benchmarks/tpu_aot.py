"""Memory and modelled time of the releases on TPUs, from programs compiled without one. Nothing is measured.

    python -m benchmarks.tpu_aot [--cases 768p 720p ...] [--stages denoise] [--parts] [--json FILE]

Memory, collectives and the number of operations are the compiler's and exact. Time is a model, per denoising step and
chip, or per run of another stage: the attention kernel by its static schedule (`benchmarks.attention`, heads whose
scores are bounded), the convolutions' by their work, all other operations by the compiler's cycles or their bytes,
collectives by their bytes over the busiest link less what runs beside them, all without stalls. --parts lists the
operations that take longest, with how often each runs, and what matrix products take by their static schedules, which
the compiler's cycles may miss by half.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import tpu
from benchmarks.runner import Report, make_parser
from cogvideox_flax.sharding import MeshShape, describe_mesh


@dataclass(frozen=True)
class Case:
    """One release at one size on one mesh."""

    release: str
    height: int
    width: int
    num_frames: int
    topology: str
    mesh: MeshShape


_768P = Case("cogvideox1.5-5b", 768, 1360, 81, "v6e:2x4", (2, 4, 1))
_720P = replace(_768P, height=720, width=1280)
_480P = Case("cogvideox-5b", 480, 720, 49, "v6e:1x1", (1, 1, 1))

CASES = {
    "768p": _768P,
    "768p-tp": replace(_768P, mesh=(2, 1, 4)),
    "768p-fsdp": replace(_768P, mesh=(2, 4, 1, True)),
    "768p-161": replace(_768P, num_frames=161),
    "720p": _720P,
    "720p-4": replace(_720P, topology="v6e:2x2", mesh=(2, 2, 1)),
    "5b": _480P,
    "2b": replace(_480P, release="cogvideox-2b"),
    "hunyuan-720p": Case("hunyuanvideo1.5-720p-t2v", 720, 1280, 121, "v6e:2x4", (2, 4, 1)),
    "hunyuan-480p": Case("hunyuanvideo1.5-480p-t2v", 480, 848, 121, "v6e:2x4", (2, 4, 1)),
}


def main() -> int:
    parser = make_parser("benchmarks.tpu_aot", __doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=" ".join(CASES))
    parser.add_argument("--stages", nargs="+", choices=("encode", "denoise", "decode", "run"), default=["denoise"])
    parser.add_argument("--parts", action="store_true", help="print the longest operations of each stage")
    args = parser.parse_args()
    start = time.perf_counter()
    columns = ("case", "mesh", "stage", "HBM GiB", "args", "temp", "TFLOP", "collectives", "wire GB", "compile s")
    with tpu.dumped() as dump:
        report = Report(args.json, (*columns, "seconds"), tpu.PACKAGES)
        for name in args.cases:
            for row in forecast(dump, CASES[name], args.stages):
                report.add({"case": name} | row, _cells(name, row))
                for part in row["parts"] if args.parts else ():
                    print(_line(part))
                if args.parts:
                    known = [part for part in row["parts"] if part["schedule_s"] is not None]
                    by_schedule = row["seconds"] + sum(part["schedule_s"] - part["seconds"] for part in known)
                    print(f"  with these products by their schedules: {by_schedule:.3f} s")
    print(f"\n{time.perf_counter() - start:.0f} s in all; seconds are modelled: kernels + other operations + waiting")
    return 0


def forecast(dump: Path, case: Case, stages: list[str]) -> list[dict[str, Any]]:
    """A row per stage; `seconds` of one run of it, with its parts."""
    from benchmarks import attention
    from cogvideox_flax import plan
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.request import GenerationRequest
    from cogvideox_flax.generate.resolve import resolve
    from cogvideox_flax.models.registry import get_release
    from cogvideox_flax.plan import timing

    release = get_release(case.release)
    manifest = Manifest.of_release(release)
    kind = "ddim" if release.family == "cogvideox" else None
    request = GenerationRequest("", num_frames=case.num_frames, height=case.height, width=case.width, scheduler=kind)
    run = resolve(request, manifest, "bfloat16")
    rows = []
    for stage in plan.forecast(run, case.topology, case.mesh, stages):
        row: dict[str, Any] = asdict(case) | asdict(stage)
        row["seconds"] = row.pop("estimated_s") / stage.runs
        for listed, part in zip(row["parts"], stage.parts, strict=True):
            listed["schedule_s"] = tpu.product_seconds(dump, part)
        if stage.name == "denoise":
            config = release.configs["transformer"]
            tokens = manifest.model.workload(run.size).tokens
            dp, sp, tp, *_ = case.mesh
            heads = -(-(config.heads // tp) // sp)
            shape = attention.Shape(tokens, heads * run.denoiser_batch // dp, config.head_dim)
            others = stage.kernels_s - sum(part.seconds for part in stage.parts if timing.ATTENTION in part.name)
            row["kernels_s"] = config.layers * attention.forecast(dump, shape).bounded_ms / 1e3 + others
            row["seconds"] = row["kernels_s"] + stage.outside_s + stage.wire_s
        rows.append(row)
    return rows


def _line(part: dict[str, Any]) -> str:
    by_schedule = "" if part["schedule_s"] is None else f"{1e3 * part['schedule_s']:.2f}"
    return f"  {1e3 * part['seconds']:9.2f} ms {by_schedule:>9}  {part['count']:6g} x  {part['name']}"


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{t['count']} {kind}" for kind, t in row["collectives"].items()) or "none"
    parts = f"{row['seconds']:.3f} = {row['kernels_s']:.3f} + {row['outside_s']:.3f} + {row['wire_s']:.3f}"
    return [
        name,
        describe_mesh(tuple(row["mesh"])),
        row["name"],
        f"{row['hbm_gib_per_chip']:.2f}",
        f"{row['argument_gib']:.2f}",
        f"{row['temp_gib']:.2f}",
        f"{row['flops'] / 1e12:.0f}",
        kinds,
        f"{row['collective_bytes'] / 1e9:.2f}",
        f"{row['compile_s']:.0f}",
        parts,
    ]


if __name__ == "__main__":
    sys.exit(main())
