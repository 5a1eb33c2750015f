"""A process that runs rows, one after the other: it reads rows and writes their results, as lines of JSON.

A row that raises reports its reason; a row that crashes or hangs ends only this process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

from benchmarks.gpu_proof.errors import NotTried

IMPORTS = {
    "ours": ("benchmarks.gpu_proof.attention", "benchmarks.gpu_proof.convolution", "benchmarks.gpu_proof.models"),
    "diffusers": ("benchmarks.gpu_proof.peers", "benchmarks.gpu_proof.peer_models"),
}
"""Side -> modules that take seconds to import and start no device: imported while another row runs."""

MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "OutOfMemory")


def main() -> None:
    """Serve the parent until it closes the line or dies."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes where errors go
    # asked before this process is killed for hanging; the signal comes to the main thread, which runs the rows
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    with suppress(OSError, AttributeError):  # Linux: end with the parent, whatever ends it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def say(event: str, **values: Any) -> None:
        print(json.dumps({"event": event} | _plain(values)), file=answers, flush=True)

    start = time.perf_counter()
    for name in IMPORTS.get(sys.argv[1], ()):
        try:
            importlib.import_module(name)
        except Exception:  # a row that needs it will say so
            traceback.print_exc()
    say("ready", imports_s=time.perf_counter() - start)
    for line in sys.stdin:
        row = json.loads(line)
        say("result", **run(row["function"], row["options"], lambda **values: say("partial", **values)))


def run(function: str, options: dict[str, Any], report: Any) -> dict[str, Any]:
    """The row's result, or the reason why there is none. alive: this process can run further rows."""
    module, name = function.split(":")
    try:
        call = getattr(importlib.import_module(module), name)
    except Exception as e:  # of another library's, whatever it raises
        traceback.print_exc()
        status = "not tried" if "peer" in module else "failed"
        return {"status": status, "reason": f"{module} cannot be imported: {type(e).__name__}: {e}", "alive": True}
    try:
        return call(report, **options)
    except NotTried as e:
        return {"status": "not tried", "reason": str(e)}
    except Exception as e:
        traceback.print_exc()
        why = f"{type(e).__name__}: {e}"
        status = "out of memory" if isinstance(e, MemoryError) or any(word in why for word in MEMORY) else "failed"
        return {"status": status, "reason": " ".join(why.split())[:600]}


def _plain(value: Any) -> Any:
    """As JSON: NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if hasattr(value, "__float__") else str(value)


if __name__ == "__main__":
    main()
