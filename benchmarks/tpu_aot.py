"""Memory and modelled time of the releases on TPUs, from programs compiled without one. Nothing is measured.

    python -m benchmarks.tpu_aot [--cases 768p 720p ...] [--stages denoise] [--parts] [--json FILE]
    python -m benchmarks.tpu_aot --stages train [--cases train-2b train-5b ...] [--parts] [--json FILE]

Memory, collectives and the number of operations are the compiler's and exact. Time is a model, per denoising step and
chip, or per run of another stage: the attention kernel by its static schedule (`benchmarks.attention`, heads whose
scores are bounded), the convolutions' by their work, all other operations by the compiler's cycles or their bytes,
collectives by their bytes over the busiest link less what runs beside them, all without stalls. --parts lists the
operations that take longest, with how often each runs, and what matrix products take by their static schedules, which
the compiler's cycles may miss by half. Of a training step it lists what each kind of operation takes, by the names in
the compiled program; a product that the compiler fuses with others counts as what it is named after.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True)
class Training(Case):
    """A training step of adapters (rank 128) or of all weights, without a moving average."""

    clips: int
    remat: Literal["none", "full", "attention", "offload"]
    method: str = "lora"


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

_5B = Training("cogvideox-5b", 480, 720, 49, "v6e:2x4", (8, 1, 1), 8, "attention")

TRAINING = {
    "train-2b": replace(_5B, release="cogvideox-2b", topology="v6e:1x1", mesh=(1, 1, 1), clips=1),
    "train-5b": _5B,
    "train-5b-slices": replace(_5B, topology="2xv6e:8x8", mesh=(128, 1, 1), clips=128),
    "train-480p": replace(_5B, release="cogvideox1.5-5b"),
    "train-768p": Training("cogvideox1.5-5b", 768, 1360, 81, "v6e:2x4", (2, 4, 1), 2, "attention"),
    "train-2b-all": replace(_5B, release="cogvideox-2b", mesh=(8, 1, 1, True), method="full"),
    "train-768p-all": Training(
        "cogvideox1.5-5b", 768, 1360, 81, "v6e:8x8", (32, 2, 1, True), 32, "attention", method="full"
    ),
    "train-768p-all-v5p": Training(
        "cogvideox1.5-5b", 768, 1360, 81, "v5p:4x4x4", (64, 1, 1, True), 64, "attention", method="full"
    ),
    "train-hunyuan-480p": Training("hunyuanvideo1.5-480p-t2v", 480, 848, 121, "v6e:2x4", (2, 4, 1), 2, "attention"),
}
"""Cases of the stage train."""

KINDS = {
    "attention, backward": r"cogvideox_splash_backward",
    "attention, recomputed": r"rematted_computation.*cogvideox_splash",
    "attention, forward": r"cogvideox_splash",
    "adapters, backward": r"transpose\(.*/adapter/",
    "adapters, forward": r"/adapter/",
    "kernels of norms": r"cogvideox_(adaln|qk_norm)",
    "products, recomputed": r"rematted_computation.*(dot_general|conv)",
    "products, backward": r"transpose\(.*(dot_general|conv)",
    "products, forward": r"(dot_general|conv_general)",
    "other, recomputed": r"rematted_computation",
    "other, backward": r"transpose\(",
    "other, forward": r"jvp\(",
    "optimizer": r"^jit\(train_step\)/",
    "copies without a name": r"",
}
"""Kind of operation -> a pattern of its name; the first that matches counts."""


def main() -> int:
    parser = make_parser("benchmarks.tpu_aot", __doc__)
    cases: dict[str, Case] = {**CASES, **TRAINING}
    parser.add_argument("--cases", nargs="+", choices=cases, metavar="CASE", help=" ".join(cases))
    stages = ("encode", "denoise", "decode", "run", "train")
    parser.add_argument("--stages", nargs="+", choices=stages, default=["denoise"])
    parser.add_argument("--parts", action="store_true", help="print the longest operations of each stage")
    args = parser.parse_args()
    start = time.perf_counter()
    columns = ("case", "mesh", "stage", "HBM GiB", "args", "temp", "TFLOP", "collectives", "wire GB", "compile s")
    tpu.prepare()
    with nullcontext(Path()) if args.stages == ["train"] else tpu.dumped() as dump:  # no schedule of a step is read
        report = Report(args.json, (*columns, "seconds", *["MFU"] * ("train" in args.stages)), tpu.PACKAGES)
        for name in args.cases or (TRAINING if args.stages == ["train"] else CASES):
            if isinstance(case := cases[name], Training):
                row = training(case)
                report.add({"case": name} | row, [*_cells(name, row), f"{row['mfu']:.1%}"])
                for kind, seconds in row["kinds"].items() if args.parts else ():
                    print(f"  {1e3 * seconds:9.2f} ms  {kind}")
                continue
            for row in forecast(dump, case, [stage for stage in args.stages if stage != "train"]):
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


def training(case: Training) -> dict[str, Any]:
    """The row of a training step; `seconds` of one, and by `KINDS`."""
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.models.registry import get_release
    from cogvideox_flax.training import forecast as forecasting
    from cogvideox_flax.training.config import LoopTable, LoRAConfig, TrainingConfig
    from cogvideox_flax.training.finetune import loss_of
    from cogvideox_flax.training.job import FinetuneJob, check_trainable

    config = TrainingConfig(
        clips=Path(),
        out=Path(),
        method=case.method,
        lora=LoRAConfig(rank=128),
        num_frames=case.num_frames,
        height=case.height,
        width=case.width,
        mesh=describe_mesh(case.mesh),
        batch=case.clips,
        remat=case.remat,
        loop=LoopTable(steps=1000, dtype="bfloat16", ema_decay=0.0),
    )
    job = FinetuneJob(config=config, manifest=Manifest.of_release(get_release(case.release)))
    job, target = forecasting.on_topology(job, case.topology)
    check_trainable(job, case.release)
    step, _ = forecasting.forecast(job, loss_of(job), target, keep=None)
    row: dict[str, Any] = asdict(case) | asdict(step)
    row["seconds"], row["kinds"] = row.pop("estimated_s"), dict.fromkeys(KINDS, 0.0)
    for part in row.pop("parts"):
        row["kinds"][kind_of(part["name"])] += part["seconds"]
    row["kinds"]["waiting for collectives"] = step.wire_s
    return row


def kind_of(name: str) -> str:
    """The kind of an operation by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))


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
