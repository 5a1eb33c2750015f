"""Prompts of two or three words, as people write them first: is the shape there, whole, in every frame?

    python -m weights.toy_world.judge.short_prompts [--model WHERE] [--seeds 8] [--lora FILE] [--json FILE]
        [--sheet FILE.png]

Each prompt is run with seeds 0, 1, 2, ..., as `cogvideox generate PROMPT --seed N` does. "clear" and "clean" are judged
as by `weights.toy_world.judge.prompt_following`. The image has one row per prompt: the middle frame of each seed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from benchmarks.runner import Report, make_parser
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.io.video import save_contact_sheet
from weights.toy_world import world
from weights.toy_world.judge.claims import read_prompt
from weights.toy_world.judge.score import OVERLAPS, compare, percent, wilson
from weights.toy_world.judge.seeing import see

NAMES = ("colour", "shape", "count", *OVERLAPS)
PROMPTS = (
    *(
        f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}"
        for shape in world.SHAPES
        for colour in world.COLOURS
    ),
    "red ball",
    "an orange ball",
)


def main() -> None:
    """Print a table; write JSON and an image."""
    parser = make_parser("weights.toy_world.judge.short_prompts", __doc__)
    parser.add_argument("--model", help="as for `cogvideox generate`; default: the embedded checkpoint")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance-scale", type=float, help="default: the checkpoint's")
    parser.add_argument("--lora", metavar="FILE", help="an adapter; --steps and --guidance-scale are not taken from it")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    pipe = Pipeline.from_pretrained(args.model, "float32")
    if args.lora is not None:
        pipe.load_lora(args.lora)
    report = Report(args.json, ("prompt", *NAMES), model=args.model, seeds=args.seeds, steps=args.steps)
    how = {"num_inference_steps": args.steps, "guidance_scale": args.guidance_scale, "compiled_loop": True}
    videos = np.stack(
        [pipe(PROMPTS, seed=seed, same_noise=True, progress=False, **how).frames for seed in range(args.seeds)], 1
    )
    scores = [
        [compare(see(video, outlines=True), read_prompt(prompt)) for video in of_prompt]
        for prompt, of_prompt in zip(PROMPTS, videos, strict=True)
    ]
    everything = [score for of_prompt in scores for score in of_prompt]
    for prompt, found in [*zip(PROMPTS, scores, strict=True), ("all", everything)]:
        rates = {name: dataclasses.asdict(wilson(sum(s[name] for s in found), len(found))) for name in NAMES}
        report.add({"prompt": prompt, "rates": rates}, (prompt, *map(percent, rates.values())))
    if args.sheet is not None:
        save_contact_sheet(args.sheet, videos[:, :, videos.shape[2] // 2].reshape(-1, *videos.shape[3:]), args.seeds)


if __name__ == "__main__":
    main()
