"""Correctness, speed and memory on an NVIDIA GPU, in one command. Nothing is downloaded.

    python -m benchmarks.gpu_proof                       # under eight minutes: writes gpu_proof.json, prints a table
    python -m benchmarks.gpu_proof --budget 1500         # all rows, if they take what --list guesses
    python -m benchmarks.gpu_proof --resume gpu_proof.json --json more.json     # what that run did not reach
    python -m benchmarks.gpu_proof --dry-run             # every row in small on the CPU, to try the code

Attention (cuDNN's and this library's kernels) and the autoencoder's convolutions at the released shapes against float32
and float64; a denoising step of CogVideoX-5b and 1.5-5B, a decoded chunk and the text encoder at released sizes, with
seconds and memory; each beside PyTorch and diffusers, the steps with `torch.compile`, on the same random weights.

Rows run in processes of their own, in order of what matters most (--list): a crash, a hang or an end of memory costs
one row. The default budget of 450 s reaches, by the guesses, the first kernels, the steps of both models, the decoded
chunk of 5b and the float32 comparison of two transformer layers. The JSON file is rewritten after every row. Rows that
would pass the budget, do not fit the GPU or lack a package are listed with the reason. docs/gpu.md explains the table.

Exit status: 0 all that was tried of this library holds; 1 something does not; 2 nothing of it could be tried, as where
there is no NVIDIA GPU, or options are wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof import machine
from benchmarks.gpu_proof.record import HEAD, Record
from benchmarks.gpu_proof.rows import RELEASED, SMALL, Row, rows
from benchmarks.gpu_proof.run import Runner, Setting, environment

BUDGET_S = 450.0


def main(argv: list[str] | None = None) -> int:
    """Parse, run, report."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, default=Path("gpu_proof.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="rows whose names match, as in '5b*' 'attention*'")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="an earlier record, of the same machine: its rows are kept"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and run none")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU")
    args = parser.parse_args(argv)
    if args.budget <= 0:
        parser.error(f"--budget must be above 0; got {args.budget}")
    todo = rows(SMALL if args.dry_run else RELEASED)
    if args.only:
        todo = [
            row for row in todo if row.required or row.always or any(fnmatch.fnmatch(row.name, p) for p in args.only)
        ]
    if args.list:
        print("\n".join(f"{row.expected_s:5.0f} s  {row.needs_gib:5.1f} GiB  {row.key}" for row in todo))
        return 0
    earlier = _read(args.resume) if args.resume else None
    before = signal.signal(signal.SIGTERM, _stop)
    folder = Path(tempfile.mkdtemp(prefix="gpu-proof-"))
    try:
        return prove(todo, earlier, folder, args, started)
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _read(path: Path) -> dict[str, Any]:
    """An earlier record."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found["rows"], list) and isinstance(found["machine"], dict):
            return found
        raise ValueError("its rows are no list, or its machine is no object")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise SystemExit(f"--resume: {path} is no record of this command ({e})") from e


def known_rows(
    earlier: dict[str, Any], todo: list[Row], facts: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Key -> row of an earlier record that this run can reuse; and why other rows are not reused.

    Rows are reused for the same GPU, package versions and options, if they have a result.
    """
    differences = []
    for what, of in (("GPU", _gpu_name), ("package versions", lambda about: about.get("packages"))):
        a, b = of(earlier["machine"]), of(facts)
        if a != b:
            differences.append(f"another {what}: {a}, here {b}" if what == "GPU" else f"other {what}: {_changed(a, b)}")
    if differences:
        return {}, [f"no row: {'; '.join(differences)}"]
    known, refused, others = {}, [], 0
    options = {row.key: json.loads(json.dumps(row.options)) for row in todo}
    for row in earlier["rows"]:
        key = f"{row['row']} | {row['side']}"
        if row["status"] not in ("ok", "wrong", "out of memory"):
            continue
        if key not in options:
            others += 1
        elif row.get("options") != options[key]:
            refused.append(f"{key}: other options")
        else:
            known[key] = row
    if others:
        refused.append(f"{others} rows that this run does not have")
    return known, refused


def _gpu_name(facts: dict[str, Any]) -> str | None:
    smi = facts.get("nvidia_smi")
    return smi.get("name") if isinstance(smi, dict) else None


def _changed(before: Any, now: Any) -> str:
    """Packages whose versions differ."""
    before, now = before or {}, now or {}
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)}, here {now.get(name)}" for name in names)


def prove(
    todo: list[Row], earlier: dict[str, Any] | None, folder: Path, args: argparse.Namespace, started: float
) -> int:
    """Run the rows and report. Returns the exit status."""
    facts = machine.facts()
    about = {
        "command": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "budget_s": args.budget,
        "machine": facts,
    }
    record = Record(args.json, about)
    _print_machine(facts)
    why = None if args.dry_run else machine.no_gpu()
    if why:
        record.expect((row.key, row.about()) for row in todo)
        for row in todo:
            record.set(row.key, status="not tried", reason=why)
        _print_rest(record)
        print(f"\nno NVIDIA GPU here: {why}\n--dry-run tries every row in small on the CPU", file=sys.stderr)
        return 2
    known, refused = known_rows(earlier, todo, facts) if earlier else ({}, [])
    if refused:
        print(f"not taken from {args.resume}: " + "; ".join(refused), flush=True)
    free_gib = None if args.dry_run else machine.free_gib()
    env = environment(folder, args.dry_run)
    setting = Setting(folder, args.budget, env, free_gib, frozenset(facts["missing"]), known, started)
    used_mib = (lambda: None) if args.dry_run else machine.used_mib
    runner = Runner(todo, record, setting, say=lambda text: print(text, flush=True), used_mib=used_mib)
    print(f"\n{HEAD}\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    try:
        runner.run()
    except KeyboardInterrupt:
        _print_rest(record)
        print(f"\nstopped; what is known is in {args.json}", file=sys.stderr)
        return 130
    _print_rest(record)
    return _exit_status(record)


def _exit_status(record: Record) -> int:
    """2 if nothing of this library was tried, 1 if a row or comparison failed, else 0."""
    mine = [row for row in record.rows.values() if row["side"].startswith("ours")]
    if all(row["status"] == "not tried" for row in mine):
        return 2
    return 1 if record.differences() or any(row in mine for row in record.faults()) else 0


def _print_machine(facts: dict[str, Any]) -> None:
    smi = facts["nvidia_smi"]
    print("GPU: " + (", ".join(f"{name} {value}" for name, value in smi.items()) if isinstance(smi, dict) else smi))
    print(f"host: {facts['cpu']}, {facts['cores']} cores, {facts['host_gib']} GiB, Python {facts['python']}")
    print("packages: " + ", ".join(f"{name} {v}" for name, v in facts["packages"].items() if v))
    print("not installed: " + (", ".join(facts["missing"]) or "none"), flush=True)


def _print_rest(record: Record) -> None:
    """Prints the rows that were not tried, the faults, and the counts."""
    if record.not_tried():
        print("\nnot tried:")
        for names, why in record.not_tried():
            print(f"* {names}: {why}")
    for row in record.faults():
        print(f"\n{row['row']} ({row['side']}): {row['status']}: {row.get('reason', 'beyond its bar')}")
    for found in record.differences():
        print(f"\n{found['row']} ({found['side']}): further apart than rounding explains")
    counts = ", ".join(f"{n} {status}" for status, n in record.summary().items())
    print(f"\n{counts}; " + (f"all of it in {record.path}" if record.path else "kept nowhere"), flush=True)


if __name__ == "__main__":
    sys.exit(main())
