"""A fault campaign against the command line, on a small model on this machine's CPU.

    python -m tests.faults [--trials 344] [--seconds 3600] [--seed 0] [--kinds kill] [--json FILE]

Processes are killed (SIGKILL) at random moments of conversion, generation, quantizing and training; the disk fills
while they work; files of every kind that is read are damaged: bits flipped, cut, zeroed, emptied, replaced by garbage
or by another file. After each, the same command is run again. A trial is bad if the result is wrong without a warning,
if a command is stuck, crashes or ends without a message, or if work is lost: a finished component, a finished stage or
more than one step. Files that this library writes, and downloads in the hub's cache, have hashes. Other files (clips,
settings, prompts, adapters of other programs) have none: any result that follows their contents is right, and so is a
refusal.

The state of the denoising loop is written after every step here, as in a run whose steps take a second or more.
Exit code 1 if any trial was bad.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports JAX

from benchmarks.runner import machine
from cogvideox_flax.io.atomic import write_json
from tests.faults.bench import STEPS, Bench
from tests.faults.child import Runner, can_mount
from tests.faults.trials import TRIALS, Outcome


def main(argv: list[str] | None = None) -> int:
    whole = sum(count for _, count in TRIALS.values())
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=whole, help=f"about how many in all; default: {whole}")
    parser.add_argument("--seconds", type=float, default=3600, help="no trial is begun after that; default: 3600")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="trials side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[""], metavar="WORDS", help="only kinds that begin so")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    kinds = [kind for kind in TRIALS if kind.startswith(tuple(args.kinds))]
    if not kinds:
        parser.error(f"there are no such kinds; known are {', '.join(TRIALS)}")
    mounts = can_mount()
    if not mounts:
        kinds = [kind for kind in kinds if not kind.startswith("full disk")]
        print("no disk can be made here (unshare, mount): full disks are not tried", flush=True)
    share = args.trials / sum(TRIALS[kind][1] for kind in kinds)
    todo = [(kind, n) for kind in kinds for n in range(max(1, round(share * TRIALS[kind][1])))]
    random.Random(args.seed).shuffle(todo)  # so that a campaign that is cut short has some of each kind
    folder = Path(tempfile.mkdtemp(prefix="cogvideox-faults-"))
    try:
        return campaign(todo, folder, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def campaign(todo: list[tuple[str, int]], folder: Path, args: argparse.Namespace) -> int:
    """All trials, several in parallel; results are printed and written as they come."""
    start = time.monotonic()
    bench = prepare(folder)
    print(f"prepared in {time.monotonic() - start:.0f} s; {len(todo)} trials", flush=True)
    rows: list[dict[str, Any]] = []
    record = {"machine": machine(), "seed": args.seed, "rows": rows}

    def run(kind: str, n: int) -> Outcome | None:
        if time.monotonic() - start > args.seconds:
            return None
        rng = random.Random(f"{args.seed} {kind} {n}")
        place = bench.trial_folder(f"{kind.replace(': ', '-').replace(' ', '-')}-{n}")
        try:
            outcome = TRIALS[kind][0](bench, place, rng)
        except Exception as e:
            outcome = Outcome("the trial itself failed", f"{type(e).__name__}: {e}")
        shutil.rmtree(place, ignore_errors=True)
        return outcome

    with ThreadPoolExecutor(args.workers) as pool:
        futures = {pool.submit(run, kind, n): (kind, n) for kind, n in todo}
        for future in as_completed(futures):
            kind, n = futures[future]
            outcome = future.result()
            if outcome is None:
                continue
            rows.append({"kind": kind, "trial": n, "what": outcome.what, "bad": outcome.bad})
            if outcome.bad:
                print(f"BAD {kind} {n}: {outcome.what}\n    {outcome.bad}", flush=True)
            if args.json:
                write_json(args.json, record)
    print(table(rows, len(todo)) + f"\n{time.monotonic() - start:.0f} s, {args.workers} at a time")
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    return 1 if any(row["bad"] for row in rows) else 0


def prepare(folder: Path) -> Bench:
    """The fixtures, and runs that were stopped half way."""
    bench = Bench.make(folder, Runner())
    stopped = bench.trial_folder("stopping", without=("run", "trained", "latents.npz"))
    for argv, step, made, target in (
        (bench.generate(), STEPS // 2, "run", "states"),
        (bench.train(), 3, "trained", "stopped"),
    ):
        bench.run(argv, stopped, stop_at=step)
        shutil.copytree(stopped / made, folder / target)
    shutil.rmtree(stopped)
    return bench


def table(rows: list[dict[str, Any]], wanted: int) -> str:
    """Kind, trials, how they ended, and what was bad."""
    lines = ["| kind | trials | refused | warned | done | bad |", "|---|---|---|---|---|---|"]
    for kind in TRIALS:
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            ends = Counter(_end(row) for row in mine)
            counts = (ends[name] for name in ("refused", "warned", "done", "bad"))
            lines.append(f"| {kind} | {len(mine)} | {' | '.join(map(str, counts))} |")
    bad = sum(bool(row["bad"]) for row in rows)
    lines.append(f"| all | {len(rows)} of {wanted} | | | | {bad} |")
    return "\n".join(lines)


def _end(row: dict[str, Any]) -> str:
    if row["bad"]:
        return "bad"
    return "refused" if ": refused" in row["what"] else "warned" if "warning" in row["what"] else "done"


if __name__ == "__main__":
    sys.exit(main())
