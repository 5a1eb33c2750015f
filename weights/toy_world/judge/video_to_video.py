"""How far video to video follows its prompt, and how near it stays to its input, at several strengths.

    python -m weights.toy_world.judge.video_to_video [--model WHERE] [--prompts 64] [--steps 50] [--json FILE]

Each clip is generated from the true clip of another prompt of the procedural world, and judged by its own
prompt. "text" is text to video with the same noise. PSNR is of the result against its input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from benchmarks.fidelity import psnr
from benchmarks.runner import Report, make_parser
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.io.video import save_contact_sheet
from weights.toy_world.judge.claims import read_prompt
from weights.toy_world.judge.prompt_following import SHOWN, Item, make_items
from weights.toy_world.judge.score import compare, percent, rates
from weights.toy_world.judge.seeing import see

STRENGTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
ON_SHEET = 6


def generate(
    pipe: Pipeline, prompts: Sequence[str], media: Mapping[str, Sequence[Any]], batch: int, **options: Any
) -> UInt8[np.ndarray, "N F H W 3"]:
    """One video per prompt, batch by batch; the seed of a batch is its first prompt's index.

    media: field of the request -> its images or clips, one per prompt.
    """
    made = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        given: dict[str, Any] = {name: each[part] for name, each in media.items()}
        made.append(pipe(prompts[part], seed=start, progress=False, compiled_loop=True, **given, **options).frames)
    return np.concatenate(made)


def inputs_of(items: Sequence[Item]) -> list[UInt8[np.ndarray, "F H W 3"]]:
    """The clip that each video starts from: that of the next item."""
    return [items[(item.index + 1) % len(items)].clip.video for item in items]


def judge(items: Sequence[Item], videos: UInt8[np.ndarray, "N F H W 3"]) -> dict[str, Any]:
    """The percentage of clips in which all that the prompt says is right, with its 95 % interval; the mean PSNR."""
    scores = [compare(see(video), read_prompt(item.clip.prompt)) for item, video in zip(items, videos, strict=True)]
    inputs = inputs_of(items)
    return {
        "follows its prompt": dataclasses.asdict(rates(scores)["all"]),
        "psnr": float(np.mean([psnr(clip, video) for clip, video in zip(inputs, videos, strict=True)])),
    }


def main() -> None:
    """Print a table; write JSON and a contact sheet: a row for each of some clips and strengths."""
    parser = make_parser("weights.toy_world.judge.video_to_video", __doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sheet", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    pipe = Pipeline.from_pretrained(args.model, "float32")
    items = make_items(args.prompts, seed=0)
    columns = ("strength", "follows its prompt, %", "PSNR against its input, dB")
    about = {"prompts": args.prompts, "steps": args.steps, "model": args.model or "embedded"}
    report, shown = Report(args.json, columns, **about), []
    for strength in (*STRENGTHS, None):
        clips = {} if strength is None else {"video": inputs_of(items)}
        how = {"num_inference_steps": args.steps, "strength": strength}
        videos = generate(pipe, [item.clip.prompt for item in items], clips, args.batch, **how)
        row = {"strength": "text" if strength is None else f"{strength:g}"} | judge(items, videos)
        report.add(row, (row["strength"], percent(row["follows its prompt"]), f"{row['psnr']:.1f}"))
        shown.append(videos[:ON_SHEET, np.linspace(0, videos.shape[1] - 1, SHOWN).round().astype(int)])
    if args.sheet is not None:
        by_clip = np.stack(shown, 1)  # clip, strength, frame
        save_contact_sheet(args.sheet, by_clip.reshape(-1, *by_clip.shape[3:]), columns=SHOWN * len(shown))


if __name__ == "__main__":
    main()
