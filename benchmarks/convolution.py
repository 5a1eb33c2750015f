"""The autoencoder's convolution kernel on a v6e chip by its static schedule: no TPU needed, nothing measured.

    python -m benchmarks.convolution [--json FILE]

Each convolution of one decoder chunk of CogVideoX1.5-5B at 768x1360 on eight chips (rows split) is compiled ahead of
time by libtpu. The number of bundles that run, one per cycle at 1.75 GHz, gives its time, without memory stalls. XLA's
own convolution is reported beside it, with the compiler's estimate of its cycles.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import tpu
from benchmarks.runner import Report, make_parser, timed

RATE = 918e12
"""Bfloat16 operations per second of a v6e chip."""


@dataclass(frozen=True)
class Case:
    """Output frames, rows and columns of one chip, channels in and out, taps in time."""

    frames: int
    rows: int
    columns: int
    channels: int
    out_channels: int
    taps: int = 3

    @property
    def flops(self) -> int:
        pixels = self.frames * self.rows * self.columns
        return 2 * 9 * self.taps * pixels * self.channels * self.out_channels

    @property
    def arguments(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of x, kernel and bias."""
        return (
            (1, self.frames + self.taps - 1, self.rows, self.columns, self.channels),
            (self.taps, 3, 3, self.channels, self.out_channels),
            (self.out_channels,),
        )


CASES = (
    Case(2, 12, 170, 512, 512),
    Case(2, 24, 340, 512, 512, 1),
    Case(4, 24, 340, 512, 256),
    Case(4, 24, 340, 256, 256),
    Case(8, 48, 680, 256, 256),
    Case(8, 96, 1360, 256, 256, 1),
    Case(8, 96, 1360, 256, 128),
    Case(8, 96, 1360, 128, 128),
    Case(8, 96, 1360, 128, 3),
)


def main() -> int:
    parser = make_parser("benchmarks.convolution", __doc__)
    parser.add_argument("--without-xla", action="store_true", help="leave XLA's own convolution out")
    args = parser.parse_args()
    start = time.perf_counter()
    columns = ("frames, rows, columns", "channels", "taps", "ms", "share of the matrix rate", "compile s")
    with tpu.dumped() as dump:
        report = Report(args.json, (*columns, "XLA ms", "its s"), tpu.PACKAGES, topology=tpu.TOPOLOGY)
        for case in CASES:
            row = asdict(case) | kernel(dump, case) | ({} if args.without_xla else xla(case))
            size = f"{case.frames}, {case.rows}, {case.columns}", f"{case.channels} to {case.out_channels}", case.taps
            ours = f"{row['kernel_ms']:.3f}", f"{row['share']:.2f}", f"{row['compile_s']:.1f}"
            other = (f"{row['xla_ms']:.3f}", f"{row['xla_compile_s']:.1f}") if "xla_ms" in row else ("", "")
            report.add(row, (*size, *ours, *other))
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return 0


def kernel(dump: Path, case: Case) -> dict[str, float]:
    """Ours, which reads the frames before a chunk from an array of their own."""
    from cogvideox_flax.nn.conv import tpu_kernel

    before = case.taps - 1

    def convolve(x: Any, kernel: Any, bias: Any) -> Any:
        return tpu_kernel.convolve(x[:, before:], kernel, bias, None, past=x[:, :before] if before else None)

    (schedule,), seconds = tpu.compile_kernels(dump, tpu_kernel.NAME, convolve, *case.arguments)
    channels, out_channels = (max(n, tpu_kernel.LANES) for n in (case.channels, case.out_channels))
    held = sum(tpu_kernel.frames_held(case.frames, case.taps, before > 0))
    tiles = tpu_kernel.Tiles.of(case.rows, case.columns, channels, out_channels, case.taps, 2, held)
    groups = tiles.block // tiles.group
    steps = tiles.parts * case.frames * (case.rows // tiles.block)
    # the longest loop is that of the products; others write what is around an image
    loops = sum(schedule.loops) + (groups - 1) * max(schedule.loops, default=0)
    cycles = steps * (schedule.step + loops)
    return {
        "kernel_ms": 1e3 * cycles / tpu.CLOCK,
        "share": case.flops / RATE / (cycles / tpu.CLOCK),
        "compile_s": seconds,
    }


def xla(case: Case) -> dict[str, float]:
    """The compiler's own."""
    from cogvideox_flax.nn.conv.xla import convolve

    f = lambda x, kernel, bias: (convolve(x, kernel, stride=1, padding=((1, 1), (1, 1))) + bias).astype(x.dtype)  # noqa: E731
    compiled, seconds = timed(lambda: tpu.compile_on_chip(tpu.TOPOLOGY, f, *case.arguments))
    cycles = sum(int(n) for n in re.findall(r'"estimated_cycles":"?(\d+)', compiled.as_text()))
    return {"xla_ms": 1e3 * cycles / tpu.CLOCK, "xla_compile_s": seconds}


if __name__ == "__main__":
    sys.exit(main())
