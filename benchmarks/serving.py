"""What the API, events and previews cost: a video asked of `cogvideox serve` against the same one made by the library.

    python -m benchmarks.serving [--model WHERE] [--steps N] [--videos 9] [--json FILE]

Both are made in turn: by a server of its own process, whose events a client follows, from the request to the event
`completed`; and by `Pipeline` and `save` in this process. Medians of the wall time, and of the CPU time of the process
that makes the video.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.runner import Report, make_parser
from cogvideox_flax.generate.pipeline import Pipeline

PROMPT = "a large red circle moves to the left"

START_S = 60.0


@contextmanager
def serving(model: str, folder: Path) -> Any:
    """A server: its process and its address."""
    command = [sys.executable, "-m", "cogvideox_flax", "serve", "--port", "0", "--quiet", "--model", model]
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen([*command, "--dir", str(folder / "gallery")], stderr=stderr)
    try:
        end = time.monotonic() + START_S
        while "http://" not in log.read_text():
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError(f"no server: {log.read_text()}")
            time.sleep(0.05)
        yield process, "http://" + log.read_text().partition("http://")[2].split()[0]
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, **fields: Any) -> None:
    """Ask for a video, and follow its events to the end."""
    request = urllib.request.Request(f"{url}/v1/videos", json.dumps(fields).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as answer:
        video = json.load(answer)
    with urllib.request.urlopen(f"{url}/v1/videos/{video['id']}/events?after=0", timeout=600) as events:
        for line in events:
            if line.startswith(b"event: failed"):
                raise RuntimeError("the server failed to make a video")
            if line.startswith(b"event: completed"):
                return


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measured(make: Callable[[], None], process: int) -> tuple[float, float]:
    """Wall and CPU seconds of a call that a process works for."""
    start, used = time.perf_counter(), cpu_seconds(process)
    make()
    return time.perf_counter() - start, cpu_seconds(process) - used


def main() -> None:
    """Run the benchmark."""
    parser = make_parser("benchmarks.serving", __doc__)
    parser.add_argument("--model", default="embedded", metavar="WHERE")
    parser.add_argument("--steps", type=int, metavar="N", help="denoising steps; default: the release's")
    parser.add_argument("--videos", type=int, default=9, metavar="N", help="videos of each side; default: 9")
    args = parser.parse_args()
    steps = {} if args.steps is None else {"num_inference_steps": args.steps}
    times: dict[str, list[tuple[float, float]]] = {"library": [], "server": []}
    with tempfile.TemporaryDirectory() as temporary, serving(args.model, folder := Path(temporary)) as (process, url):
        pipe = Pipeline.from_pretrained(args.model)

        def by_library(seed: int) -> None:
            pipe(PROMPT, seed=seed, progress=False, **steps).save(folder / "video.mp4")

        for seed in range(args.videos + 1):
            each = {
                "library": measured(lambda: by_library(seed), os.getpid()),  # noqa: B023
                "server": measured(lambda: ask(url, prompt=PROMPT, seed=seed, **steps), process.pid),  # noqa: B023
            }
            for name in times if seed else ():  # the first one compiles
                times[name].append(each[name])
    report = Report(args.json, ["", "wall s", "CPU s"])
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    for name, (wall, cpu) in medians.items():
        report.add(
            {"name": name, "wall_s": wall, "cpu_s": cpu, "all": times[name]}, [name, f"{wall:.3f}", f"{cpu:.3f}"]
        )
    more = [100 * (server / library - 1) for library, server in zip(*medians.values(), strict=True)]
    report.add(
        {"name": "more", "wall_percent": more[0], "cpu_percent": more[1]}, ["more", *(f"{x:.1f} %" for x in more)]
    )


if __name__ == "__main__":
    main()
