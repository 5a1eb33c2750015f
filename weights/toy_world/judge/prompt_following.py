"""How well a model follows its prompt: clips of the procedural world, judged attribute by attribute.

    python -m weights.toy_world.judge.prompt_following [--model WHERE] [--prompts 256] [--steps 50] [--json FILE]
    python -m weights.toy_world.judge.prompt_following --lora embedded-four-steps --steps 4
        --guidance-scale 1 --modes default

Half of the prompts name combinations that training shows, in scenes that it does not; half name combinations that it
never shows. Modes:

    default         generated with guidance
    unguided        generated with guidance 1
    shuffled        the clips of `default`, each judged by the prompt of another clip: the score by chance
    reconstruction  the true clips, encoded and decoded by the autoencoder; with PSNR (dB) and SSIM
    truth           the true clips: the accuracy of the judge

Prints a table of percentages with 95 % intervals. With --json, finished clips are kept in FILE.jsonl as they come, and
a run with the same settings goes on from there.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import io
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from benchmarks.fidelity import psnr, ssim
from benchmarks.runner import machine, make_parser
from cogvideox_flax.errors import InputError
from cogvideox_flax.version import __version__
from weights.toy_world.judge.claims import read_prompt
from weights.toy_world.judge.score import ATTRIBUTES, OVERLAPS, compare, drawn, rates
from weights.toy_world.judge.seeing import Seen, SeenThing, see
from weights.toy_world.world import FRAMES, UNIT, Clip, Split, sample_clip

MODES = ("default", "unguided", "shuffled", "reconstruction", "truth")
NEEDS_MODEL = {"default", "unguided", "reconstruction"}
FIRST_SEED = 4_000_000_000
"""Of the true clips; training and validation use seeds far below."""
NOISE_STRIDE = 100_003  # noise seeds of runs with neighbouring --seed do not meet

ON_SHEET = 24
SHOWN = 5  # frames of each clip
TILE = 128  # pixels
RIGHT, WRONG = (0, 120, 50), (200, 0, 0)

Videos = UInt8[np.ndarray, "B F H W 3"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A prompt with the clip that it describes."""

    index: int
    split: Split
    clip: Clip


def make_items(prompts: int, seed: int, frames: int = FRAMES, size: int = int(UNIT)) -> list[Item]:
    """The first half trained combinations, the second half held out."""
    half = prompts - prompts // 2

    def make(i: int) -> Item:
        split: Split = "train" if i < half else "held_out"
        return Item(i, split, sample_clip(FIRST_SEED + seed, i, split, frames, size))

    return [make(i) for i in range(prompts)]


class Records:
    """What is known of each (mode, index); in a file of JSON lines, if there is one, as soon as it is known.

    Raises:
        InputError: the file was made with other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path = path
        self.found: dict[tuple[str, int], Record] = {}
        if path is None:
            return
        settings = json.loads(json.dumps(settings))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings) + "\n")
            return
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]  # a run killed while writing leaves part of a line
        before = json.loads(whole[0]) if whole else {}
        if other := sorted(k for k in before | settings if before.get(k) != settings.get(k)):
            raise InputError(
                f"{path} holds clips made with another {', '.join(other)}. Use those settings, give another --json, or "
                "delete it"
            )
        path.write_text("".join(whole))
        self.found = {(r["mode"], r["index"]): r for r in map(json.loads, whole[1:])}

    def add(self, records: Sequence[Record]) -> None:
        self.found |= {(r["mode"], r["index"]): r for r in records}
        if self.path is not None:
            with self.path.open("a") as file:
                file.write("".join(json.dumps(r) + "\n" for r in records))

    def of(self, mode: str, items: Iterable[Item]) -> list[Record]:
        return [self.found[mode, item.index] for item in items]


def run(mode: str, items: Sequence[Item], make: Callable[[list[Item]], Videos], batch: int, records: Records) -> None:
    """Make and judge what is missing, batch by batch; the items of a batch share a seed, so it is made whole."""
    shown = _on_sheet(items)
    for start in range(0, len(items), batch):
        part = list(items[start : start + batch])
        if all((mode, item.index) in records.found for item in part):
            continue
        videos = make(part + part[-1:] * (batch - len(part)))  # always of one size: one program
        records.add([judge(mode, item, video, item.index in shown) for item, video in zip(part, videos, strict=False)])
        print(f"{mode}: {start + len(part)} of {len(items)}", file=sys.stderr, flush=True)


def judge(mode: str, item: Item, video: UInt8[np.ndarray, "F H W 3"], keep_frames: bool) -> Record:
    """The record of one clip."""
    seen, claims = see(video, outlines=True), read_prompt(item.clip.prompt)
    record = {
        "mode": mode,
        "index": item.index,
        "split": item.split,
        "things": len(item.clip.scene.things),
        "prompt": item.clip.prompt,
        "score": compare(seen, claims),
        "frames_drawn": _shares(drawn(seen, claims)),
        "seen": {"background": seen.background, "things": [dataclasses.asdict(thing) for thing in seen.things]},
    }
    if mode == "reconstruction":
        record |= {"psnr": psnr(item.clip.video, video), "ssim": ssim(item.clip.video, video)}
    if keep_frames:
        some = video[np.linspace(0, len(video) - 1, SHOWN).round().astype(int)]
        file = io.BytesIO()
        Image.fromarray(np.concatenate(list(some), 1)).save(file, "png")
        record["frames"] = base64.b64encode(file.getvalue()).decode()
    return record


def shuffled(records: Sequence[Record]) -> list[Record]:
    """Every clip judged by the prompt of the next clip in its split."""
    result = []
    for split in ("train", "held_out"):
        own = [r for r in records if r["split"] == split]
        for judged, made in zip(own, own[1:] + own[:1], strict=True):
            things = tuple(SeenThing(**thing) for thing in made["seen"]["things"])
            seen, claims = Seen(made["seen"]["background"], things, outlined=True), read_prompt(judged["prompt"])
            result.append(
                judged
                | {key: made[key] for key in ("seen", "frames") if key in made}
                | {"mode": "shuffled", "generated_from": made["prompt"]}
                | {"score": compare(seen, claims), "frames_drawn": _shares(drawn(seen, claims))}
            )
    return result


def _shares(frames: dict[str, list[bool]]) -> dict[str, float]:
    """The share of a clip's frames that are clear, and that are clean."""
    return {name: float(np.mean(found)) if found else 0.0 for name, found in frames.items()}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Rates of each group of clips, and the percentage of their frames that are clear and clean; for reconstructions
    PSNR and SSIM too (means over clips)."""
    groups: dict[str, Callable[[Record], bool]] = {
        "all": lambda r: True,
        "trained": lambda r: r["split"] == "train",
        "held out": lambda r: r["split"] == "held_out",
        "one object": lambda r: r["things"] == 1,
        "two objects": lambda r: r["things"] == 2,
    }
    result: dict[str, Any] = {}
    for name, belongs in groups.items():
        if not (own := [r for r in records if belongs(r)]):
            continue
        scores = rates(r["score"] for r in own)
        result[name] = {"clips": len(own), "rates": {k: dataclasses.asdict(rate) for k, rate in scores.items()}}
        result[name]["frames"] = {k: 100 * float(np.mean([r["frames_drawn"][k] for r in own])) for k in OVERLAPS}
        for measure in ("psnr", "ssim"):
            if measure in own[0]:
                result[name][measure] = float(np.mean([r[measure] for r in own]))
    return result


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """The result as a Markdown table."""
    measures = [
        m for m in ("psnr", "ssim") if any(m in row for groups in summaries.values() for row in groups.values())
    ]
    columns = ["mode", "prompts", "n", *ATTRIBUTES, *(f"{name} frames" for name in OVERLAPS), *measures]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for mode, groups in summaries.items():
        for name, row in groups.items():
            cells = [mode, name, str(row["clips"])]
            for attribute in ATTRIBUTES:
                rate = row["rates"].get(attribute)
                cells.append(f"{rate['percent']:.1f} ({rate['low']:.0f}–{rate['high']:.0f})" if rate else "")
            cells += [f"{row['frames'][name]:.1f}" for name in OVERLAPS]
            cells += [f"{row[m]:.{2 if m == 'psnr' else 4}f}" if m in row else "" for m in measures]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _on_sheet(items: Sequence[Item]) -> set[int]:
    """The first of each split."""
    return {
        item.index
        for split in ("train", "held_out")
        for item in [item for item in items if item.split == split][: ON_SHEET // 2]
    }


def draw_sheet(path: Path, records: Sequence[Record]) -> None:
    """One image of the clips whose frames were kept: prompt, frames, and what is right or wrong. Two columns."""
    kept = [r for r in records if "frames" in r]
    width, height = SHOWN * TILE + 16, TILE + 60
    rows = -(-len(kept) // 2)
    sheet = Image.new("RGB", (2 * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for i, record in enumerate(kept):
        left, top = i // rows * width + 8, i % rows * height + 4
        text = f"{record['split']}: {record['prompt']}"
        if "generated_from" in record:
            text += f" (made from: {record['generated_from']})"
        draw.text((left, top), textwrap.fill(text, 100), fill="black")
        with Image.open(io.BytesIO(base64.b64decode(record["frames"])), formats=("PNG",)) as frames:
            sheet.paste(frames.resize((SHOWN * TILE, TILE), Image.Resampling.NEAREST), (left, top + 30))
        for edge in range(left + TILE, left + SHOWN * TILE, TILE):
            draw.line((edge, top + 30, edge, top + 29 + TILE), "silver", 2)
        x = float(left)
        for name, right in record["score"].items():
            mark = f"{name}: {'right' if right else 'WRONG'}   "
            draw.text((x, top + 34 + TILE), mark, fill=RIGHT if right else WRONG)
            x += draw.textlength(mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def makers(pipe: Any, items: Sequence[Item], args: argparse.Namespace) -> dict[str, Callable[[list[Item]], Videos]]:
    """Mode -> function that makes its clips; without a model only `truth`."""
    made: dict[str, Callable[[list[Item]], Videos]] = {"truth": lambda part: np.stack([i.clip.video for i in part])}
    if pipe is None:
        return made
    import jax

    from cogvideox_flax.io.video import from_uint8, to_uint8

    def generate(guidance_scale: float) -> Callable[[list[Item]], Videos]:
        def make(part: list[Item]) -> Videos:
            video = pipe(
                [item.clip.prompt for item in part],
                num_inference_steps=args.steps,
                guidance_scale=guidance_scale,
                seed=args.seed * NOISE_STRIDE + part[0].index,
                progress=False,
                compiled_loop=True,
            )
            return cast(Videos, video.frames)

        return make

    through = jax.jit(lambda vae, video: to_uint8(vae.decode(vae.encode(video, slicing=True)[0], slicing=True)))

    def reconstruct(part: list[Item]) -> Videos:
        return np.asarray(through(pipe.vae, from_uint8(np.stack([item.clip.video for item in part]))))

    return made | {
        "default": generate(args.guidance_scale),
        "unguided": generate(1.0),
        "reconstruction": reconstruct,
    }


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := set(modes) - set(MODES):
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; known are {', '.join(MODES)}")
    return modes


def _count(text: str) -> int:
    if (n := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{n} is less than 1")
    return n


def main() -> None:
    """Make, judge, print a table, write JSON and a contact sheet."""
    parser = make_parser("weights.toy_world.judge.prompt_following", __doc__)
    parser.add_argument(
        "--model", metavar="WHERE", help="as for `cogvideox generate`; default: the embedded checkpoint"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=_count, default=256)
    parser.add_argument("--steps", type=_count, default=50)
    parser.add_argument("--guidance-scale", type=float, help="default: the checkpoint's")
    parser.add_argument("--lora", metavar="FILE", help="an adapter; --steps and --guidance-scale are not taken from it")
    parser.add_argument("--batch", type=_count, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and noise, 0 to 9999")
    parser.add_argument("--modes", type=_modes, default=list(MODES), help=f"some of {','.join(MODES)}; default: all")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="contact sheet of the first mode")
    args = parser.parse_args()
    if not 0 <= args.seed < 10_000:
        parser.error("--seed must be 0 to 9999")
    try:
        measure(args)
    except InputError as e:
        parser.error(str(e))


def measure(args: argparse.Namespace) -> None:
    if "shuffled" in args.modes and args.prompts < 4:
        raise InputError("to shuffle takes at least 4 prompts, two of each split")
    pipe, frames, side, model = None, FRAMES, int(UNIT), {}
    wanted = ["default" if mode == "shuffled" else mode for mode in args.modes]
    if NEEDS_MODEL & set(wanted):
        import jax

        from cogvideox_flax.generate.pipeline import CogVideoXPipeline
        from cogvideox_flax.generate.request import GenerationRequest

        pipe = CogVideoXPipeline.from_pretrained(args.model, args.dtype)
        if args.lora is not None:
            pipe.load_lora(args.lora)
        if args.guidance_scale is None:
            args.guidance_scale = pipe.resolve(GenerationRequest("")).request.guidance_scale
        size = pipe.resolve(GenerationRequest("")).size
        if size.height != size.width:
            raise InputError(f"the world is square; this model makes {size.height}x{size.width} (height x width)")
        frames, side = size.num_frames, size.height
        model = {
            "model": pipe.fingerprints(),
            "dtype": args.dtype,
            "scheduler": pipe.scheduler.config.kind,
            "backend": jax.default_backend(),
        }
    names = ("prompts", "steps", "guidance_scale", "batch", "seed", "lora")
    settings = {name: getattr(args, name) for name in names} | model
    settings |= {"frames": frames, "side": side, "world_seed": FIRST_SEED + args.seed, "version": __version__}
    items = make_items(args.prompts, args.seed, frames, side)
    records = Records(args.json and args.json.with_name(f"{args.json.name}l"), settings)
    make = makers(pipe, items, args)
    for mode in dict.fromkeys(wanted):
        run(mode, items, make[mode], args.batch, records)

    results = {
        m: shuffled(records.of("default", items)) if m == "shuffled" else records.of(m, items) for m in args.modes
    }
    summaries = {mode: summary(found) for mode, found in results.items()}
    print(table(summaries))
    if args.sheet:
        draw_sheet(args.sheet, results[args.modes[0]])
    if args.json:
        clips = [{k: v for k, v in r.items() if k != "frames"} for found in results.values() for r in found]
        result = {"settings": settings, "machine": machine(), "summary": summaries, "clips": clips}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
