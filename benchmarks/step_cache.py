"""What a step cache saves, and how far its videos are from those of the exact run.

    python -m benchmarks.step_cache [--model WHERE] [--prompts 4] [--seeds 2] [--steps 50] [--json FILE]

Each prompt is run with each seed, exactly and with each form and schedule of the cache, from the same noise. Times are
of the denoising loop as one program, without compiling: medians over all runs, exact and cached ones in turn in one
process. PSNR and SSIM are of the frames against the exact run's, means over all videos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import Any

import jax
from jaxtyping import UInt8

from benchmarks.fidelity import psnr, ssim
from benchmarks.runner import Report, make_parser, timed
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.generate.predict.step_cache import default_schedule, full_steps
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.runtime.global_arrays import fetch
from weights.toy_world.prompt_following import make_items


def schedules(steps: int) -> list[list[int]]:
    """The default one, and two with fewer full steps; all end with full steps."""
    start, end, interval = default_schedule(steps)
    return [[start, end, interval // 2], [start, end, interval], [start, end, 2 * interval]]


def settings_of(steps: int) -> Iterator[dict[str, Any]]:
    """The options of each row: the exact run, as many exact steps as the default schedule has full ones, the caches."""
    yield {}
    yield {"num_inference_steps": int(full_steps(None, steps).sum())}
    for form in ("deepcache", "residual"):
        for schedule in schedules(steps):
            yield {"step_cache": form, "step_cache_schedule": schedule}


class Runner:
    """Runs of one model, with and without a step cache."""

    def __init__(self, model: str | None, steps: int, scheduler: str | None):
        self.pipe = Pipeline.from_pretrained(model, "float32")
        self.steps, self.scheduler = steps, scheduler

    def run(self, prompt: str, seed: int, **options: Any) -> tuple[float, UInt8[Any, "F H W 3"]]:
        """Seconds of the denoising loop, and the frames."""
        how = {"num_inference_steps": self.steps, "scheduler": self.scheduler, "compiled_loop": True}
        asked = GenerationRequest(prompt, seed=seed, **how | options)
        conditioning = self.pipe.encode(asked, progress=False)
        states = self.pipe.denoise(conditioning, asked)  # compiled when this returns
        latents, seconds = timed(lambda: jax.block_until_ready(list(states)[-1].latents))
        kept = latents[:, self.pipe.programs(asked).size.extra_latents :]
        return seconds, fetch(self.pipe.decode(kept, progress=False))[0]


def measure(runner: Runner, prompts: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """A row for each setting: full steps, seconds relative to the exact run, PSNR and SSIM."""
    settings = list(settings_of(runner.steps))
    seconds: list[list[float]] = [[] for _ in settings]
    fidelity: list[list[tuple[float, float]]] = [[] for _ in settings]
    for options in settings:
        runner.run(prompts[0], 0, **options)  # compiles, and fills caches
    for prompt in prompts:
        for seed in range(seeds):
            exact = None
            for i, options in enumerate(settings):
                took, frames = runner.run(prompt, seed, **options)
                seconds[i].append(took)
                if exact is None:
                    exact = frames
                else:
                    fidelity[i].append((psnr(exact, frames), ssim(exact, frames)))
    rows = []
    for options, times, found in zip(settings, seconds, fidelity, strict=True):
        schedule, steps = options.get("step_cache_schedule"), options.get("num_inference_steps", runner.steps)
        row = {
            **options,
            "steps": steps,
            "full_steps": steps if schedule is None else int(full_steps(schedule, steps).sum()),
            "seconds": median(times),
            "relative": median(times) / median(seconds[0]),
        }
        rows.append(row | ({"psnr": mean(p for p, _ in found), "ssim": mean(s for _, s in found)} if found else {}))
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Of one row of the table."""
    form, schedule = row.get("step_cache", "exact"), ",".join(map(str, row.get("step_cache_schedule", ())))
    quality = (f"{row['psnr']:.1f}", f"{row['ssim']:.3f}") if "psnr" in row else ("", "")
    return [form, schedule, f"{row['full_steps']} of {row['steps']}", f"{row['relative']:.2f}", *quality]


def main() -> None:
    """Print a table; write JSON."""
    parser = make_parser("benchmarks.step_cache", __doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--scheduler", help="default: the release's")
    args = parser.parse_args()
    prompts = [item.clip.prompt for item in make_items(args.prompts, seed=0)]
    runner = Runner(args.model, args.steps, args.scheduler)
    settings = {"prompts": prompts, "seeds": args.seeds, "steps": args.steps, "scheduler": args.scheduler}
    columns = ("form", "schedule", "full steps", "time", "PSNR, dB", "SSIM")
    report = Report(args.json, columns, model=args.model or "embedded", **settings)
    for row in measure(runner, prompts, args.seeds):
        report.add(row, cells(row))
    print(f"exact: {report.rows[0]['seconds']:.2f} s of denoising; {report.record['machine']}")


if __name__ == "__main__":
    main()
