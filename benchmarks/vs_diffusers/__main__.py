"""Compares this library with diffusers on one machine: same weights, inputs, precision and threads, at the same time.

    python -m benchmarks.vs_diffusers                                  # all parts at 240x368, some minutes on two cores
    python -m benchmarks.vs_diffusers --parts decode --height 480 --width 720 --latent-frames 3 5
    python -m benchmarks.vs_diffusers --released --device gpu --dtype bfloat16 --torch-compile

Each side runs in a process of its own, which loads the part, compiles or warms up, and then waits; timed runs
alternate between the two, so that whatever else the machine does hits both; a run ends when its result is on the
device. Reported are medians, the time to the first result, the peak of the process' memory (on a GPU: of the
device's), and how far the outputs are apart, so that nobody wins by computing something else. "matmul share" is what
our side computes a second, as a share of what one large matrix product of the same dtype does there (a convolution that
takes fewer products counts as a plain one); below the table, what one does in each side's library. Weights are random,
in the released widths, with fewer layers or all; speed does not depend on their values. Several --latent-frames give
slopes: seconds and GiB per thousand tokens, or per frame.
A side that stops, out of memory say, ends its row only; one run of the other side is then measured alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.runner import Report, make_parser
from benchmarks.vs_diffusers.cases import (
    COMPONENT,
    KERNELS,
    MODELS,
    OF_COGVIDEOX,
    PARTS,
    RELEASED,
    SIDES,
    Case,
    is_hunyuan,
)
from benchmarks.vs_diffusers.ours import flops_of
from benchmarks.vs_diffusers.report import COLUMNS, cells, plot, slopes_of_parts
from benchmarks.vs_diffusers.worker import Stopped, Worker
from cogvideox_flax.conversion.convert import convert
from tests.support import hunyuan_layout
from tests.support.released_layout import save_rest, write_component

PACKAGES = ("jax", "flax", "torch", "diffusers", "transformers")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("benchmarks.vs_diffusers", __doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="default: the models; with --released all of them but the video"
    )
    parser.add_argument(
        "--released", action="store_true", help="all layers, at the size it was made for: for GPUs of 80 GB"
    )
    names = [name for name, *_ in RELEASED]
    parser.add_argument("--release", choices=names, help=f"default: {names[0]}; with --released all of them")
    parser.add_argument("--height", type=int, help="default: 240")
    parser.add_argument("--width", type=int, help="default: 368")
    parser.add_argument("--latent-frames", type=int, nargs="+", help="odd; default: 3, which is 9 frames")
    parser.add_argument("--layers", type=int, help="of the text encoder and the transformer; default: 2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--torch-compile", action="store_true", help="the other side's blocks, one by one")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each side")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)

    own = [args.height, args.width, args.latent_frames, args.layers]
    if args.released and any(value is not None for value in own):
        parser.error("--released says sizes and layers itself; leave out --height, --width, --latent-frames, --layers")
    frames = args.latent_frames or [3]
    if any(n % 2 == 0 or n < 1 for n in frames):
        parser.error(f"--latent-frames must be odd, as 4 frames make one and the first makes one alone; got {frames}")
    release = args.release or RELEASED[0][0]
    sizes = [(release, args.height or 240, args.width or 368, n) for n in frames]
    if args.released:
        sizes = [size for size in RELEASED if args.release in (None, size[0])]
    parts = args.parts or [part for part in MODELS if not (args.released and part == "video")]
    for part in args.parts or ():
        if part in OF_COGVIDEOX and args.release and is_hunyuan(args.release):
            parser.error(f"{part}: compared for CogVideoX alone; leave it out of --parts for {args.release}")
    how = None if args.released else args.layers or 2, args.dtype, args.device, args.torch_compile
    cases = [
        Case(part, *size, *how)
        for size in sizes
        for part in parts
        if (part != "text_encoder" or size == sizes[0]) and not (part in OF_COGVIDEOX and is_hunyuan(size[0]))
    ]
    return measure(sorted(cases, key=lambda case: (names.index(case.release), parts.index(case.part))), args)


def measure(cases: list[Case], args: argparse.Namespace) -> int:
    """All cases, each release with its own weights; the JSON file is rewritten after each."""
    jax.config.update("jax_platforms", "cpu")  # here we only count; the device is the workers'
    stopped: list[dict[str, Any]] = []
    report = Report(args.json, COLUMNS, PACKAGES, repeat=args.repeat, stopped=stopped)
    rows = report.rows
    for release, found in groupby(cases, key=lambda case: case.release):
        group = list(found)
        with tempfile.TemporaryDirectory(prefix="vs-diffusers-") as folder:
            write_weights(Path(folder), release, [case.part for case in group], group[0].layers, group[0].dtype)
            for case in group:
                try:
                    row = compare(case, Path(folder), args.repeat)
                    report.add(row, cells(row))
                except (Stopped, Differ) as e:
                    left = e.alone if isinstance(e, Stopped) else {}
                    stopped.append(asdict(case) | {"why": str(e), "alone": left})
                    numbers = ", ".join(f"{name} {value:.2f}" for name, value in left.items())
                    print(f"| {release} | {case.part} | {case.frames} | {e} | {numbers} |", flush=True)
                    report.write()
    slopes = {} if args.released else slopes_of_parts(rows)
    for part, slope in slopes.items():
        print(f"{part}: " + ", ".join(f"{name} {value:.4g}" for name, value in slope.items()))
    for side in SIDES if rows else ():
        rate = statistics.median(row[f"{side}_matmul_flops_per_s"] for row in rows)
        print(f"large matrix products of {side}: {rate / 1e9:.0f} GFLOP/s")
    about = report.record["machine"] | {"device": rows[-1]["device_name"] if rows else None}
    print("\n" + ", ".join(f"{name} {value}" for name, value in about.items()))
    report.write(machine=about, slopes=slopes)
    if args.plot:
        plot(rows, args.plot)
    return 0


def write_weights(folder: Path, release: str, parts: list[str], layers: int | None, dtype: str) -> None:
    """The components that the parts need, in the released layout and converted."""
    wanted = (
        {"text_encoder", "transformer", "vae"}
        if "video" in parts
        else {COMPONENT.get(p, p) for p in parts if p not in KERNELS}
    )
    layers_of = {} if layers is None else {"num_layers": layers}
    for component in sorted(wanted):
        changes = {} if component == "vae" else layers_of
        if is_hunyuan(release):
            hunyuan_layout.write_component(folder / "hf", component, dtype, **changes)
        else:
            write_component(folder / "hf", component, release, dtype, **changes)
    if "video" in parts:
        save_rest(folder / "hf", release)
        convert(folder / "hf", folder / "native")
    elif wanted:
        convert(folder / "hf", folder / "native", components=sorted(wanted))


class Differ(Exception):
    """The two sides did not compute the same thing."""


def alone(worker: Worker) -> dict[str, float]:
    """Seconds and GiB of one run of the side that did not stop; empty if it stops as well."""
    try:
        if not worker.first:
            worker.start()
        return {f"{worker.side}_s": worker.run(), f"{worker.side}_gib": worker.peak()}
    except Stopped:
        return {}


def compare(case: Case, folder: Path, repeat: int) -> dict[str, Any]:
    """Both sides on one case."""
    workers = {side: Worker(side, folder, case) for side in SIDES}
    try:
        for worker in workers.values():
            worker.loaded()
        for worker in workers.values():
            worker.start()
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(repeat):
            for side, worker in workers.items():
                times[side].append(worker.run())
        peaks = {side: worker.peak() for side, worker in workers.items()}
        rates, name = {side: worker.matmul_rate() for side, worker in workers.items()}, workers["ours"].device()
    except Stopped as stopped:
        stopped.alone = alone(next(worker for worker in workers.values() if worker.side != stopped.side))
        raise
    finally:
        for worker in workers.values():
            worker.kill()
    ours, theirs = (np.load(folder / f"{side}.npy").astype(np.float64) for side in SIDES)
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise Differ(f"outputs of {ours.shape} and {theirs.shape}, or not finite: not of the same thing")
    row: dict[str, Any] = asdict(case) | {"frames": case.frames, "tokens": case.tokens}
    for side in SIDES:
        row |= {
            f"{side}_s": statistics.median(times[side]),
            f"{side}_times": times[side],
            f"{side}_first_s": workers[side].first,
            f"{side}_gib": peaks[side],
            f"{side}_matmul_flops_per_s": rates[side],
        }
    row["device_name"] = name
    row["flops"] = flops_of(case, folder)
    row["matmul_share"] = row["flops"] / row["ours_s"] / rates["ours"]
    row["time_ratio"] = row["ours_s"] / row["diffusers_s"]
    row["memory_ratio"] = row["ours_gib"] / row["diffusers_gib"]
    row["difference"] = float(np.abs(ours - theirs).max() / theirs.std())
    row["rms_difference"] = float(np.sqrt(np.square(ours - theirs).mean()) / theirs.std())
    return row


if __name__ == "__main__":
    sys.exit(main())
