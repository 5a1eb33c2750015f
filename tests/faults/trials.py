"""The trials: each applies one fault to a command, and reports whether the outcome is acceptable."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cogvideox_flax import checkpoint
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import store
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.training.metrics import read_metrics
from tests.faults.bench import STEPS, Bench, key_of
from tests.faults.child import Ended
from tests.faults.damage import damage

IMPORTS_S = 3.0
"""Seconds that a command on a disk of its own takes to import the library, about."""
EDITED = "was edited or damaged after it was written"


@dataclass(frozen=True)
class Outcome:
    """Of a trial. bad: what went wrong; None if nothing. what: a description for the report."""

    what: str
    bad: str | None = None


Trial = Callable[[Bench, Path, random.Random], Outcome]


# --- killed processes ---


def killed(bench: Bench, folder: Path, argv: list[object], rng: random.Random) -> tuple[Ended, str]:
    seconds = bench.seconds[key_of(argv)]
    after = rng.uniform(0.05, 1.1) * seconds
    ended = bench.run(argv, folder, kill_after=after)
    return ended, f"after {after:.2f} s of about {seconds:.1f}"


def again(bench: Bench, argv: list[object], folder: Path, what: str, lost: str | None = None) -> Outcome:
    """Run the same command again: it must succeed with the right result and leave no partial files."""
    ended = bench.run(argv, folder)
    if ended.crashed or ended.code:
        return Outcome(what, f"{ended.crashed or 'refused'} when run again: {ended.err[-800:]}")
    if not bench.is_right(argv, folder):
        return Outcome(what, "wrong result when run again")
    if left := leftovers(folder):
        return Outcome(what, f"left behind: {left}")
    return Outcome(what, lost)


def leftovers(folder: Path) -> list[str]:
    """Lock files and partial files without a writer."""
    names = re.compile(r".*(partial|\.tmp).*|.*\.(lock|conversion)")
    found = (p for p in folder.rglob("*") if names.fullmatch(p.name))
    return [str(p.relative_to(folder)) for p in found]


def kill_conversion(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "native")
    _, what = killed(bench, folder, bench.convert(), rng)
    native = folder / "native"
    if checkpoint.is_native(native):
        try:
            checkpoint.verify(native)
        except InputError as e:
            return Outcome(what, f"an incomplete checkpoint loads: {e}")
    work = native / ".conversion"
    done = {p.parent.name for p in work.glob("*/record.json")} if not (work / "config.json").exists() else set()
    outcome = again(bench, bench.convert(), folder, what)
    taken = set(re.findall(r"(\w+) was converted by an earlier attempt", (folder / "stderr").read_text()))
    text = (folder / "stderr").read_text()[-800:]
    lost = f"lost: {done - taken} were complete and were converted again: {text}" if done - taken else None
    return Outcome(f"{what}, {len(taken)} reused", outcome.bad or lost)


def kill_generation(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    out = rng.choice(("latents.npz", "video.mp4"))
    argv = bench.generate(out)
    shutil.rmtree(folder / "run")
    (folder / out).unlink()
    if rng.random() < 0.5:
        step = rng.randint(1, STEPS)
        ended, what = bench.run(argv, folder, stop_at=step), f"when the state of step {step} was written"
    else:
        ended, what = killed(bench, folder, argv, rng)
    if (folder / out).exists() and not bench.is_right(argv, folder):
        return Outcome(what, "an output that is not whole")
    there = [name for name in (store.EMBEDDINGS_FILE, store.LATENTS_FILE) if (folder / "run" / name).exists()]
    state, seen = folder / "run" / store.STATE_FILE, [int(n) for n in re.findall(rf"(\d+)/{STEPS} ", ended.err)]
    done, saved = max(seen, default=0), 0
    if state.exists():
        with TensorFile(state) as file:
            file.check(required=True)
            saved = int(file.metadata["step"])
    finished = store.LATENTS_FILE in there
    outcome = again(bench, argv, folder, what)
    text = (folder / "stderr").read_text()
    lost = None
    if missed := [name for name in there if f"reusing {Path('run') / name}" not in text]:
        lost = f"lost: {missed} were there and were made again"
    elif not finished and done - saved > 1:
        lost = f"lost: {done} steps were done, {saved} were kept"
    elif not finished and saved and f"going on after step {saved}" not in text:
        lost = f"lost: step {saved} was kept and was not gone on from"
    return Outcome(f"{what}, {done} of {STEPS} steps done, {saved} kept", outcome.bad or lost)


def kill_quantizing(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    replaced = rng.random() < 0.5
    if not replaced:
        shutil.rmtree(folder / "small")
    _, what = killed(bench, folder, bench.quantize(), rng)
    small = folder / "small"
    if replaced and not checkpoint.is_native(small):
        return Outcome(what, "lost: the checkpoint that was to be replaced is gone")
    if small.exists():
        try:
            checkpoint.verify(small)
        except InputError as e:
            return Outcome(what, f"an incomplete checkpoint loads: {e}")
    return again(bench, bench.quantize(), folder, f"{what}, {'in place of another' if replaced else 'new'}")


def kill_training(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "trained")
    _, what = killed(bench, folder, bench.train(), rng)
    metrics = folder / "trained" / "training" / "metrics.jsonl"
    done = max((int(line["step"]) for line in read_metrics(metrics)), default=0) if metrics.exists() else 0
    outcome = again(bench, bench.train(), folder, what)
    found = re.search(r"resuming from step (\d+)", (folder / "stderr").read_text())
    kept = int(found[1]) if found else 0
    lost = f"lost: {done} steps were done, {kept} were kept" if done - kept > 1 else None
    return Outcome(f"{what}, {done} steps done, {kept} kept", outcome.bad or lost)


# --- a disk that fills ---


def fill(bench: Bench, folder: Path, argv: list[object], rng: random.Random) -> Outcome:
    # imports are no part of what was timed
    seconds = IMPORTS_S + 1.1 * bench.seconds[key_of(argv)]
    after, left = rng.uniform(0.5 * IMPORTS_S, seconds), rng.choice((0, 4096, 200_000, 2_000_000))
    what = f"full but for {left} bytes after {after:.2f} s"
    first, second = bench.run.on_filling_disk(argv, folder, after, left)
    for ended in (first, second):
        if ended.crashed:
            return Outcome(what, f"{ended.crashed}: {ended.err[-800:]}")
    if second.code:
        return Outcome(what, f"refused when there was room again: {second.err[-800:]}")
    if not bench.is_right(argv, folder):
        return Outcome(what, "wrong result")
    if left_behind := leftovers(folder):
        return Outcome(what, f"left behind: {left_behind}")
    return Outcome(f"{what}: {'refused, then done' if first.code else 'done'}")


def fill_conversion(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "native")
    return fill(bench, folder, bench.convert(), rng)


def fill_generation(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    out = rng.choice(("latents.npz", "video.mp4"))
    shutil.rmtree(folder / "run")
    (folder / out).unlink()
    return fill(bench, folder, bench.generate(out), rng)


def fill_quantizing(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "small")
    return fill(bench, folder, bench.quantize(), rng)


def fill_training(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "trained")
    return fill(bench, folder, bench.train(), rng)


# --- damaged files ---


def judge(bench: Bench, argv: list[object], folder: Path, what: str, *, outside: bool = False) -> Outcome:
    """A command that reads a damaged file must refuse it, give the right result, or use the file with a warning.

    outside: the file is not this library's and has no checksum: any result that follows its contents is right.
    """
    ended = bench.run(argv, folder)
    if ended.crashed:
        return Outcome(what, f"{ended.crashed}: {ended.err[-800:]}")
    if ended.code == 2:
        lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        return Outcome(f"{what}: refused, {lines[-1][:100] if lines else ''}")
    if outside:
        return Outcome(f"{what}: done")
    if bench.is_right(argv, folder):
        return Outcome(f"{what}: done, right")
    if EDITED in ended.err:
        return Outcome(f"{what}: done as the file says, with a warning")
    return Outcome(what, f"wrong result without a warning: {ended.err[-500:]}")


def damage_random_file(folder: Path, name: str, rng: random.Random, others: list[Path]) -> str:
    path = folder / name
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    chosen = rng.choice(found)
    how = damage(chosen, [p for p in others if p != chosen], rng)
    return f"{chosen.relative_to(folder)} {how}"


def _files(folder: Path, *patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in folder.glob(pattern) if p.is_file())


def damaged_checkpoint(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    out = rng.choice(("latents.npz", "video.mp4"))
    shutil.rmtree(folder / "run")
    name = rng.choice(
        ("native/config.json", *(f"native/{c}" for c in ("text_encoder", "transformer", "vae", "tokenizer")))
    )
    what = damage_random_file(folder, name, rng, _files(folder, "native/*/*", "small/*/*", "small/config.json"))
    return judge(bench, bench.generate(out), folder, what)


def damaged_download(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    hub = folder / "hub"
    shutil.copytree(bench.folder / "hub", hub, symlinks=True)
    for link in (p for p in (hub / "snapshots").rglob("*") if p.is_symlink()):
        link.unlink()
        target = bench.folder / "hub" / link.relative_to(hub)
        link.symlink_to(hub / "blobs" / target.resolve().name)
    shutil.rmtree(folder / "native")
    what = damage_random_file(folder, "hub/blobs", rng, _files(hub, "blobs/*"))
    ended = bench.run(["conversion", hub / "snapshots" / "main", "native"], folder)
    if ended.crashed:
        return Outcome(what, f"{ended.crashed}: {ended.err[-800:]}")
    if ended.code == 2:
        return Outcome(f"{what}: refused")
    right = bench.result(bench.convert(), folder) == bench.expected[key_of(bench.convert())]
    return Outcome(f"{what}: done, right") if right else Outcome(what, "a damaged download was converted")


def damaged_conversion(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    """What a killed conversion left."""
    shutil.rmtree(folder / "native")
    for _ in range(20):
        bench.run(bench.convert(), folder, kill_after=rng.uniform(0.1, 1.0) * bench.seconds[key_of(bench.convert())])
        if (folder / "native" / ".conversion").exists():
            break
        shutil.rmtree(folder / "native", ignore_errors=True)
    else:
        return Outcome("no conversion was met at work")
    files = _files(folder, "native/.conversion/**/*")
    if not files:
        return Outcome("the killed conversion had written nothing")
    what = damage_random_file(folder, "native/.conversion", rng, files)
    return judge(bench, bench.convert(), folder, what)


def damaged_stage(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    """Of a whole run, or of one that was stopped in the middle of the loop."""
    argv = bench.generate(rng.choice(("latents.npz", "video.mp4")))
    if rng.random() < 0.5:
        (folder / "run" / store.LATENTS_FILE).unlink()
        shutil.copyfile(bench.folder / "states" / store.STATE_FILE, folder / "run" / store.STATE_FILE)
    files = _files(folder, "run/stage*")
    others = [*files, *_files(bench.folder, "states/*"), *_files(folder, "native/vae/*")]
    what = damage_random_file(folder, str(rng.choice(files).relative_to(folder)), rng, others)
    return judge(bench, argv, folder, what)


def damaged_settings(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    """`generation_config.json`, read by the stages alone."""
    what = damage_random_file(
        folder, "run/generation_config.json", rng, _files(folder, "native/config.json", "trained/*.json")
    )
    stage = rng.choice((["denoise"], ["decode", "--out", "again.mp4"]))
    ended = bench.run(["cogvideox", *stage, "--dir", "run"], folder)
    if ended.crashed:
        return Outcome(what, f"{ended.crashed}: {ended.err[-800:]}")
    if ended.code == 2 or EDITED in ended.err:
        return Outcome(f"{what}: {'refused' if ended.code else 'done as the file says, with a warning'}")
    return Outcome(what, "used without a warning")


def damaged_memory(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "run")
    what = damage_random_file(folder, "home/contents", rng, _files(folder, "native/config.json"))
    return judge(bench, bench.generate(), folder, what)


def damaged_adapter(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "run")
    own = rng.random() < 0.5
    name = "trained/pytorch_lora_weights.safetensors" if own else "foreign.safetensors"
    argv = bench.generate("adapted.npz", "--lora", name)
    if not own:
        return judge(
            bench, argv, folder, damage_random_file(folder, name, rng, _files(folder, "native/vae/*")), outside=True
        )
    what = damage_random_file(folder, name, rng, _files(folder, "native/vae/*"))
    ended = bench.run(argv, folder)
    bad = ended.crashed or (None if ended.code == 2 or "foreign" in what else "a damaged adapter was used")
    return Outcome(f"{what}: refused", bad and f"{bad}: {ended.err[-500:]}")


def damaged_training(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    """Of a run that was stopped after three steps."""
    shutil.rmtree(folder / "trained")
    shutil.copytree(bench.folder / "stopped", folder / "trained")
    part = rng.choice(
        ("finetune.json", "prepared", "training/settings.json", "training/states", "training/metrics.jsonl")
    )
    others = _files(folder, "trained/prepared/**/*", "trained/training/states/**/*")
    what = damage_random_file(folder, f"trained/{part}", rng, others)
    return judge(bench, bench.train(), folder, what)


def damaged_clip(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    shutil.rmtree(folder / "trained")
    what = damage_random_file(folder, "clips", rng, _files(folder, "clips/*", "native/config.json"))
    return judge(bench, [*bench.train(), "--check"], folder, what, outside=True)


def damaged_words(bench: Bench, folder: Path, rng: random.Random) -> Outcome:
    """Files that people write: training settings and prompts."""
    if rng.random() < 0.5:
        what = damage_random_file(folder, "train.toml", rng, _files(folder, "native/config.json", "clips/*"))
        shutil.rmtree(folder / "trained")
        return judge(bench, [*bench.train(), "--check"], folder, what, outside=True)
    what = damage_random_file(folder, "prompts.txt", rng, _files(folder, "native/vae/*"))
    argv: list[object] = ["cogvideox", "encode", "--prompt-file", "prompts.txt", "--model", "native", "--dir", "words"]
    return judge(bench, argv, folder, what, outside=True)


TRIALS: dict[str, tuple[Trial, int]] = {
    "kill: conversion": (kill_conversion, 24),
    "kill: generation": (kill_generation, 36),
    "kill: quantizing": (kill_quantizing, 20),
    "kill: training": (kill_training, 14),
    "full disk: conversion": (fill_conversion, 10),
    "full disk: generation": (fill_generation, 14),
    "full disk: quantizing": (fill_quantizing, 8),
    "full disk: training": (fill_training, 6),
    "damage: checkpoint": (damaged_checkpoint, 36),
    "damage: download": (damaged_download, 24),
    "damage: conversion": (damaged_conversion, 12),
    "damage: stage files": (damaged_stage, 30),
    "damage: settings": (damaged_settings, 16),
    "damage: memory of contents": (damaged_memory, 8),
    "damage: adapters": (damaged_adapter, 16),
    "damage: training": (damaged_training, 18),
    "damage: clips": (damaged_clip, 16),
    "damage: settings and prompts by people": (damaged_words, 12),
}
"""Kind -> function of the trial, and its number of trials."""
