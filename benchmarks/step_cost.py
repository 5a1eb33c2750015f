"""What fewer or cheaper steps save, and what they cost: schedulers, step counts, step caches, guidance.

    python -m benchmarks.step_cost [--model WHERE] [--prompts 8] [--seeds 2] [--lpips FILE] [--json FILE] [--plot FILE]
    python -m benchmarks.step_cost --only cache          # of the kinds steps, scheduler, cache, guidance

Each prompt is run with each seed and each setting, from the same noise. Times are of the denoising loop as one
program, without compiling: medians over all runs, in turn with those of the exact run of 50 steps in one process. PSNR,
SSIM and LPIPS (AlexNet; `benchmarks.lpips` makes its file) are of the frames against the exact run's of the same seed,
means over all videos; "right" is the share of videos that show what their prompt says, judged as for the embedded
model's card.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from benchmarks.fidelity import psnr, ssim
from benchmarks.lpips import Lpips
from benchmarks.runner import Report, make_parser, timed
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.predict.adaptive import FULL, AdaptiveState
from cogvideox_flax.generate.predict.step_cache import default_schedule
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.runtime.global_arrays import fetch
from weights.toy_world.judge.prompt_following import make_items
from weights.toy_world.judge.score import score

KINDS = ("steps", "scheduler", "cache", "guidance")
EXACT_STEPS = 50


@dataclass(frozen=True)
class Setting:
    """A row: its kind, its name, and the options of the request."""

    kind: str
    name: str
    options: dict[str, Any]


def settings(ratios: Sequence[float] | None = None) -> Iterator[Setting]:
    """All rows but the exact run. ratios: of magcache; None leaves it out."""
    for steps in (25, 15, 10, 8, 4):
        yield Setting("steps", "ddim", {"num_inference_steps": steps})
    for kind in ("euler", "uni_pc", "dpmpp_2m", "dpm", "dpmpp_2m_sde", "euler_ancestral", "lcm"):
        for steps in (50, 10) if kind in ("dpm", "dpmpp_2m_sde", "euler_ancestral", "lcm") else (25, 10, 6):
            yield Setting("scheduler", kind, {"scheduler": kind, "num_inference_steps": steps})
    start, end, interval = default_schedule(EXACT_STEPS)
    for form in ("deepcache", "residual"):
        for each in (interval // 2, interval, 2 * interval):
            name = f"{form} {start},{end},{each}"
            yield Setting("cache", name, {"step_cache": form, "step_cache_schedule": [start, end, each]})
    yield Setting("cache", "taylorseer", {"step_cache": "taylorseer"})
    for each in (2, 3, 8):
        name = f"taylorseer {start},{end},{each}"
        yield Setting("cache", name, {"step_cache": "taylorseer", "step_cache_schedule": [start, end, each]})
    for threshold in (0.05, 0.1, 0.2, 0.4):
        options = {"step_cache": "first_block", "step_cache_threshold": threshold}
        yield Setting("cache", f"first_block {threshold:g}", options)
    yield Setting("cache", "pab", {"step_cache": "pab"})
    yield Setting("cache", "fastercache", {"step_cache": "fastercache"})
    for threshold in () if ratios is None else (0.06, 0.2, 0.6):
        options = {"step_cache": "magcache", "step_cache_ratios": ratios, "step_cache_threshold": threshold}
        yield Setting("cache", f"magcache {threshold:g}", options)
    for interval_end in (0.3, 0.6):
        yield Setting("guidance", f"guidance interval 0,{interval_end:g}", {"guidance_interval": [0.0, interval_end]})
    yield Setting("guidance", "guidance off", {"guidance_scale": 1.0})
    yield Setting("guidance", "skip layer 2", {"skip_layer": 2})


class Runner:
    """Runs of one model."""

    def __init__(self, model: str | None):
        self.pipe = Pipeline.from_pretrained(model, "float32")

    def ratios(self, prompt: str) -> list[float]:
        """magcache's, measured in a run."""
        asked = GenerationRequest(prompt, num_inference_steps=EXACT_STEPS, step_cache="magcache")
        *_, last = self.pipe.denoise(self.pipe.encode(asked, progress=False), asked, progress=False)
        return [float(ratio) for ratio in fetch(last.cache.errors)]

    def run(self, prompt: str, seed: int, options: dict[str, Any]) -> tuple[float, float, UInt8[Any, "F H W 3"]]:
        """Seconds of the denoising loop, its full steps, and the frames."""
        how: dict[str, Any] = {"num_inference_steps": EXACT_STEPS, "compiled_loop": True}
        asked = GenerationRequest(prompt, seed=seed, **how | options)
        conditioning = self.pipe.encode(asked, progress=False)
        states = self.pipe.denoise(conditioning, asked, progress=False)  # compiled when this returns
        last, seconds = timed(lambda: jax.block_until_ready(list(states)[-1]))
        run = self.pipe.resolve(asked)
        full = np.ones(len(run.steps)) if run.full_steps is None else run.full_steps
        if isinstance(last.cache, AdaptiveState):
            full = fetch(last.cache.full) == FULL
        frames = fetch(self.pipe.decode(last, progress=False))[0]
        return seconds, float(full.sum()), frames


def measure(
    runner: Runner, rows: Sequence[Setting], prompts: Sequence[str], seeds: int, lpips: Lpips | None
) -> Iterator[dict[str, Any]]:
    """A row for the exact run, then one for each setting."""
    pairs = [(prompt, seed) for prompt in prompts for seed in range(seeds)]
    runner.run(*pairs[0], {})  # compiles
    exact = {pair: runner.run(*pair, {}) for pair in pairs}

    def row(setting: Setting, found: Sequence[tuple[Any, Any, Any]], times: Sequence[float]) -> dict[str, Any]:
        frames = [each[2] for each in found]
        return {
            "kind": setting.kind,
            "name": setting.name,
            "options": setting.options,
            "steps": setting.options.get("num_inference_steps", EXACT_STEPS),
            "full_steps": mean(each[1] for each in found),
            "seconds": median(each[0] for each in found),
            "relative": median(each[0] for each in found) / median(times),
            "right": mean(score(each, prompt)["all"] for each, (prompt, _) in zip(frames, pairs, strict=True)),
        }

    first = list(exact.values())
    yield row(Setting("steps", "exact", {}), first, [each[0] for each in first])
    for setting in rows:
        runner.run(*pairs[0], setting.options)  # compiles
        found, times = [], []
        for pair in pairs:
            found.append(runner.run(*pair, setting.options))
            times.append(runner.run(*pair, {})[0])
        both = [(exact[pair][2], each[2]) for pair, each in zip(pairs, found, strict=True)]
        fidelity = {"psnr": mean(psnr(*each) for each in both), "ssim": mean(ssim(*each) for each in both)}
        if lpips is not None:
            fidelity["lpips"] = mean(lpips(*each) for each in both)
        yield row(setting, found, times) | fidelity


def cells(row: dict[str, Any]) -> list[str]:
    """Of one row of the table."""
    quality = [f"{row[name]:{form}}" if name in row else "" for name, form in FORMATS.items()]
    name, full = f"`{row['name']}`", f"{row['full_steps']:.4g} of {row['steps']}"
    return [name, full, f"{row['relative']:.2f}", *quality, f"{100 * row['right']:.0f} %"]


FORMATS = {"psnr": ".1f", "ssim": ".3f", "lpips": ".3f"}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """PSNR over the share of time, a colour for each kind."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for kind in KINDS:
        those = [row for row in rows if row["kind"] == kind and "psnr" in row]
        if those:
            axes.scatter([row["relative"] for row in those], [row["psnr"] for row in those], label=kind, s=18)
        for row in those:
            axes.annotate(f"{row['name']} {row['full_steps']:.0f}", (row["relative"], row["psnr"]), fontsize=6)
    axes.set(xlabel="time of the denoising loop, exact run = 1", ylabel="PSNR to the exact run, dB")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print a table; write JSON and a plot."""
    parser = make_parser("benchmarks.step_cost", __doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=KINDS, help="the rows of one kind")
    parser.add_argument("--lpips", type=Path, metavar="FILE", help="from benchmarks.lpips; without it no LPIPS")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG or PNG of time and PSNR")
    args: argparse.Namespace = parser.parse_args()
    prompts = [item.clip.prompt for item in make_items(args.prompts, seed=0)]
    lpips = None if args.lpips is None else Lpips.load(args.lpips)
    runner = Runner(args.model)
    rows = [each for each in settings(runner.ratios(prompts[0])) if args.only in (None, each.kind)]
    columns = ("setting", "full steps", "time", "PSNR, dB", "SSIM", "LPIPS", "right")
    report = Report(args.json, columns, model=args.model or "embedded", prompts=prompts, seeds=args.seeds)
    for row in measure(runner, rows, prompts, args.seeds, lpips):
        report.add(row, cells(row))
    print(f"exact: {report.rows[0]['seconds']:.2f} s of denoising; {report.record['machine']}")
    if args.plot is not None:
        plot(report.rows, args.plot)


if __name__ == "__main__":
    main()
