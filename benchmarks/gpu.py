"""Correctness, speed and memory on an NVIDIA GPU, in one command of at most ten minutes. Nothing is downloaded.

    python -m benchmarks.gpu [--json gpu.json] [--budget 560] [--parts tests kernels]

`tests` is `pytest -m gpu`: kernels and convolutions at the released sizes against float32 and float64, small models of
both families and the embedded model against PyTorch and the CPU. The other parts are `python -m benchmarks.vs_diffusers
--device gpu` at the released sizes, beside PyTorch and diffusers in the same minute; their outputs must agree.

Parts run in processes of their own, in this order; one that crashes or takes too long loses what it had not finished.
The JSON file is rewritten after every part; a part's own file beside it (gpu-tests.json, ...) has what that part
finished so far. docs/gpu.md explains both.

Exit status: 0 all that was tried holds; 1 something does not; 2 nothing could be tried, as where there is no NVIDIA
GPU, or options are wrong; 130 stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner import Report, make_parser

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 560.0
LIMIT_S = 150.0
"""Of one part of measurements."""
END_S = 15.0
"""Seconds that a killed process may take to end."""
LEAST_S = 20.0
"""A part with less time left is not started."""

EXACT_BAR, BF16_BAR = 1e-4, 0.1
"""Largest difference in float32, and largest root mean square difference in bfloat16, of two sides' outputs, in
standard deviations. The second finds gross faults: unrelated outputs differ by 1.4, rounding by a few hundredths."""

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("flax", "torch", "triton", "diffusers", "transformers"),
)
SMI = ("name", "driver_version", "compute_cap", "memory.total", "memory.used", "clocks.max.sm", "power.limit")
RESULTS = "COGVIDEOX_GPU_RESULTS"
"""Environment variable: the file to which `pytest -p benchmarks.gpu` appends a line of JSON for each test."""

SEES = """
import json
from tests.support.gpu_models import seen_by_jax
print(json.dumps(seen_by_jax()))
"""


@dataclass(frozen=True)
class Part:
    """needs: modules beside this library's own; command: the arguments of Python."""

    needs: tuple[str, ...]
    command: tuple[str, ...]
    limit_s: float = LIMIT_S


def _speed(*options: str) -> Part:
    command = ("-m", "benchmarks.vs_diffusers", "--device", "gpu", *options)
    return Part(("torch", "diffusers", "transformers"), command)


FIVE = ("--height", "480", "--width", "720")
ONE_FIVE = ("--release", "cogvideox1.5-5b", "--height", "768", "--width", "1360", "--latent-frames", "21")
HUNYUAN = ("--release", "hunyuanvideo1.5-480p-t2v", "--height", "480", "--width", "848")
BF16 = ("--dtype", "bfloat16")
PARTS = {
    "tests": Part(
        ("pytest",),
        ("-m", "pytest", "-o", "addopts=", "-m", "gpu", "-p", "benchmarks.gpu", "-q", "tests/gpu/test_on_gpu.py"),
        limit_s=450,
    ),
    "kernels": _speed("--parts", "attention", "convolution", *FIVE, "--latent-frames", "13", *BF16, "--repeat", "5"),
    "float32": _speed("--parts", "transformer", *FIVE, "--repeat", "1"),
    "5b step": _speed(
        "--parts", "transformer", *FIVE, "--latent-frames", "13", "--layers", "4", *BF16, "--torch-compile"
    ),
    "5b decode": _speed("--parts", "decode", *FIVE, *BF16),
    "1.5-5b step": _speed("--parts", "transformer", *ONE_FIVE, "--layers", "4", *BF16, "--torch-compile"),
    "hunyuan step": _speed(
        "--parts", "transformer", *HUNYUAN, "--latent-frames", "31", "--layers", "4", *BF16, "--torch-compile"
    ),
    "hunyuan decode": _speed("--parts", "decode", *HUNYUAN, "--latent-frames", "9", *BF16),
    "float32 decode": _speed("--parts", "decode", "--repeat", "1"),
    "encoders": _speed("--parts", "text_encoder", "encode", *FIVE, "--layers", "4", *BF16),
    "1.5-5b kernels": _speed("--parts", "attention", *ONE_FIVE, *BF16, "--repeat", "5"),
    "5b step, eager": _speed("--parts", "transformer", *FIVE, "--latent-frames", "13", "--layers", "4", *BF16),
    "5b decode, compiled": _speed("--parts", "decode", *FIVE, *BF16, "--torch-compile"),
    "5b decode, all frames": _speed("--parts", "decode", *FIVE, "--latent-frames", "13", *BF16, "--repeat", "1"),
}
"""What matters most first."""


def pytest_runtest_logreport(report: Any) -> None:
    """Called by pytest for each phase of each test: keep the result of a test as soon as it is known."""
    if report.when == "call" or report.outcome != "passed":
        why = str(report.longrepr)[-2000:] if report.outcome != "passed" else ""
        found = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "why": why}
        if path := os.environ.get(RESULTS):
            with Path(path).open("a") as file:
                file.write(json.dumps(found | {"measured": dict(report.user_properties)}, default=str) + "\n")


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = make_parser("benchmarks.gpu", __doc__)
    parser.set_defaults(json=Path("gpu.json"))
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args(argv)
    if args.budget <= 0:
        parser.error(f"--budget must be above 0; got {args.budget}")
    seen = what_jax_sees()
    if seen["fault"]:
        print(f"no NVIDIA GPU that can be used here: {seen['fault']}", file=sys.stderr)
        return 2
    print(", ".join(f"{name} {value}" for name, value in seen.items() if value), flush=True)
    columns = ("part", "result", "seconds", "tests or rows", "what does not hold, or why it was not tried")
    report = Report(args.json, columns, PACKAGES, budget_s=args.budget, gpu=seen, nvidia_smi=nvidia_smi())
    for name in args.parts:
        results = args.json.with_name(f"{args.json.stem}-{name.replace(' ', '-').replace(',', '')}.json")
        row = run(PARTS[name], results.absolute(), args.budget - (time.monotonic() - started))
        says = "; ".join(row["faults"])[:600] or row.get("why", "")
        report.add({"part": name} | row, (name, row["status"], row["seconds"], len(row.get("done", ())), says))
        if row["status"] == "stopped":
            print(f"stopped; what is known is in {args.json}", file=sys.stderr)
            return 130
    return exit_status(report.rows)


def exit_status(rows: list[dict[str, Any]]) -> int:
    """2 if nothing was tried, 1 if something does not hold, else 0; the end of the budget is no fault."""
    tried = {row["status"] for row in rows} - {"not tried"}
    if not tried:
        return 2
    return 1 if tried - {"ok", "budget ended"} or any(row["faults"] for row in rows) else 0


def what_jax_sees() -> dict[str, Any]:
    """The GPU as JAX sees it; "fault" says why it cannot be used."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", SEES], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return {"fault": "JAX did not find one within 120 s"}
    if asked.returncode:
        return {"fault": (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1][:600]}
    return json.loads(asked.stdout.splitlines()[-1])


def nvidia_smi() -> dict[str, str] | str:
    """What `nvidia-smi` says of the GPU that is used, memory in MiB; or why it says nothing."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = ["nvidia-smi", "-i", first, f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"nvidia-smi: {e}"
    values = [value.strip() for value in asked.stdout.partition("\n")[0].split(",")]
    return dict(zip(SMI, values, strict=True)) if len(values) == len(SMI) else (asked.stderr or asked.stdout)[:200]


def environment(**more: str) -> dict[str, str]:
    """Of the parts."""
    env = dict(os.environ, JAX_PLATFORMS="cuda,cpu", XLA_PYTHON_CLIENT_PREALLOCATE="false", HF_HUB_OFFLINE="1", **more)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi counts
    path = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return env | {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"}  # seconds of compiling are of compiling


def run(part: Part, results: Path, left_s: float) -> dict[str, Any]:
    """One part's row: status, seconds, faults, and the tests or rows that it finished, which it writes to `results`."""
    lacking = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if lacking or left_s < LEAST_S:
        why = f"without {', '.join(lacking)}" if lacking else f"{max(left_s, 0):.0f} s of the budget are left"
        return {"status": "not tried", "seconds": 0, "faults": [], "why": why}
    results.unlink(missing_ok=True)
    of_tests = "pytest" in part.needs
    command = [sys.executable, *part.command, *([] if of_tests else ["--json", str(results)])]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        env = environment(TMPDIR=folder, **{RESULTS: str(results)})
        process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
        try:
            code = process.wait(min(left_s, part.limit_s))
            status = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            status = "timed out" if left_s > part.limit_s else "budget ended"
        except KeyboardInterrupt:
            status = "stopped"
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
        with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver must not block this process
            process.wait(END_S)
    found = read_tests(results) if of_tests else read_rows(results)
    if status == "ok" and not found["done"]:
        found["faults"].append("it finished without a result")
    return {"status": status, "seconds": round(time.monotonic() - start, 1)} | found


def read_tests(path: Path) -> dict[str, Any]:
    """The tests that finished, and which of them failed."""
    tests = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {"done": tests, "faults": [t["test"].rpartition("::")[2] for t in tests if t["outcome"] == "failed"]}


def read_rows(path: Path) -> dict[str, Any]:
    """The rows that were measured, and faults: outputs that differ by more than rounding, our side stopped."""
    found = json.loads(path.read_text()) if path.exists() else {"rows": [], "stopped": []}
    faults = [
        f"{row['part']}: {row['why']}" for row in found["stopped"] if not row["why"].startswith("diffusers stopped")
    ]
    for row in found["rows"]:
        exact = row["dtype"] == "float32"
        apart, bar = (row["difference"], EXACT_BAR) if exact else (row["rms_difference"], BF16_BAR)
        faults += [] if apart <= bar else [f"{row['part']}: outputs differ by {apart:.1e}, beyond {bar:g}"]
    return {"done": found["rows"], "stopped": found["stopped"], "faults": faults}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its parts end with it
    sys.exit(main())
