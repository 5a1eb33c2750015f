"""Image to video on the procedural world: is the object kept, and does it move as the prompt says?

    python -m weights.toy_world.judge.image_to_video [--model WHERE] [--prompts 96] [--steps 50] [--guidance-scale G]
        [--json FILE] [--sheet FILE.png]

The images are first frames of clips, half of them of combinations that training never shows. Modes:

    same    the prompt describes the clip that the frame is from
    other   one object; the prompt says another motion, one that the object can make from where it is
    silent  as "same", with an image of the background alone: what the prompt alone gives (one object)

"kept" is colour, shape, size, number and background of the frame in the video, "moves" direction and speed of the
prompt, "all" both; "clear" and "clean" are as for `prompt_following`. PSNR is of the video's first frame against the
image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from benchmarks.fidelity import psnr
from benchmarks.runner import Report, make_parser
from cogvideox_flax import hub
from cogvideox_flax.generate.pipeline import Pipeline
from cogvideox_flax.io.video import save_contact_sheet
from weights.toy_world import world
from weights.toy_world.judge.claims import Claims, ThingClaims
from weights.toy_world.judge.prompt_following import FIRST_SEED, SHOWN
from weights.toy_world.judge.score import OVERLAPS, Rate, compare, percent, wilson
from weights.toy_world.judge.seeing import see
from weights.toy_world.judge.video_to_video import generate

KEPT, MOVES = ("colour", "shape", "size", "count", "background"), ("direction", "speed")
ON_SHEET = 12


@dataclasses.dataclass(frozen=True)
class Item:
    """An image, a prompt, and the scene that both describe."""

    image: UInt8[np.ndarray, "H W 3"]
    prompt: str
    scene: world.Scene


def make_items(count: int, mode: str, seed: int = 0) -> list[Item]:
    """The first half of trained combinations, the second half held out."""
    items: list[Item] = []
    index = 0
    while len(items) < count:
        split: world.Split = "train" if len(items) < count - count // 2 else "held_out"
        rng = np.random.default_rng([FIRST_SEED + seed, index, 1])
        scene, tracks = world.tracks_of_clip(FIRST_SEED + seed, index, split)
        index += 1
        image = world.render(scene, tracks, 1)[0]
        if mode != "same" and len(scene.things) > 1:
            continue
        if mode == "silent":
            image = np.broadcast_to(np.array(world.BACKGROUNDS[scene.background], np.uint8), image.shape)
        if mode == "other":
            (thing,), (track,) = scene.things, tracks
            motions = [(m, s) for m in world.MOTIONS if m != "still" for s in world.SPEEDS] + [("still", None)]
            others = [dataclasses.replace(thing, motion=m, speed=s) for m, s in motions if m != thing.motion]
            others = [other for other in others if world.stays_inside(other, track.start)]
            if not others:
                continue
            scene = world.Scene((others[rng.integers(len(others))],), scene.background)
        items.append(Item(image, world.describe(scene, rng), scene))
    return items


def judge(items: Sequence[Item], videos: UInt8[np.ndarray, "N F H W 3"]) -> dict[str, Any]:
    """The rates of each attribute, of what is kept, of the motion, and of all; the mean PSNR of the first frames."""
    scores = []
    for item, video in zip(items, videos, strict=True):
        things = tuple(ThingClaims(**dataclasses.asdict(thing)) for thing in item.scene.things)
        found = compare(see(video, outlines=True), Claims(things, item.scene.background))
        found = {name: value for name, value in found.items() if name != "all"}
        kept, moves = (all(found[name] for name in names if name in found) for names in (KEPT, MOVES))
        scores.append(found | {"kept": kept, "moves": moves, "all": kept and moves})
    names = (*KEPT, *MOVES, "kept", "moves", "all", *OVERLAPS)
    values = {name: [score[name] for score in scores if name in score] for name in names}
    rates: dict[str, Rate] = {name: wilson(sum(found), len(found)) for name, found in values.items()}
    first = [psnr(item.image[None], video[:1]) for item, video in zip(items, videos, strict=True)]
    return {"rates": {name: dataclasses.asdict(rate) for name, rate in rates.items()}, "psnr": float(np.mean(first))}


def main() -> None:
    """Print a table; write JSON and a contact sheet: image and frames of the first items of each mode."""
    parser = make_parser("weights.toy_world.judge.image_to_video", __doc__)
    parser.add_argument("--model", default=hub.EMBEDDED_IMAGE_TO_VIDEO)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance-scale", type=float, help="default: the checkpoint's")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sheet", type=Path, metavar="FILE.png")
    args = parser.parse_args()
    pipe = Pipeline.from_pretrained(args.model, "float32")
    columns = ("prompt", *KEPT, *MOVES, "kept", "moves", "all", *OVERLAPS, "PSNR, dB")
    about = {name: getattr(args, name) for name in ("prompts", "steps", "guidance_scale")} | {"model": str(args.model)}
    report, shown = Report(args.json, columns, **about), []
    for mode in ("same", "other", "silent"):
        items = make_items(args.prompts, mode)
        how = {"num_inference_steps": args.steps, "guidance_scale": args.guidance_scale}
        prompts, images = [item.prompt for item in items], [item.image for item in items]
        videos = generate(pipe, prompts, {"image": images}, args.batch, **how)
        row = {"mode": mode} | judge(items, videos)
        report.add(row, (mode, *map(percent, row["rates"].values()), f"{row['psnr']:.1f}"))
        some = videos[:ON_SHEET, np.linspace(0, videos.shape[1] - 1, SHOWN).round().astype(int)]
        shown += [np.stack([item.image, *video]) for item, video in zip(items[:ON_SHEET], some, strict=False)]
    if args.sheet is not None:
        save_contact_sheet(args.sheet, np.concatenate(shown), columns=2 * (SHOWN + 1))


if __name__ == "__main__":
    main()
