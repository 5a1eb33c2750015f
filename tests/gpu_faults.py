"""Rows that go wrong in every way that a row can, for a worker of `benchmarks.gpu_proof`."""

import os
import sys
import threading
import time
from contextlib import suppress

from benchmarks.gpu_proof.errors import NotTried


def fine(report, **_):
    report(first_s=0.5)
    return {"status": "ok", "seconds": 2.0, "pid": os.getpid()}


def started(report, **_):
    """What its process has imported, and whose devices are started."""
    imported = [name for name in ("jax", "torch", "imageio_ffmpeg") if name in sys.modules]
    devices = [name for name in imported if name == "jax" and sys.modules["jax._src.xla_bridge"]._backends]
    devices += [name for name in imported if name == "torch" and sys.modules["torch"].cuda.is_initialized()]
    return {"status": "ok", "imported": imported, "devices": devices}


def raises(report, **_):
    raise ValueError("a shape is off")


def crashes(report, **_):
    report(first_s=1.5)
    os.abort()


def exits(report, **_):
    print("said on the way out", flush=True)
    os._exit(7)


def hangs(report, **_):
    report(first_s=2.5, note="compiled")
    time.sleep(600)


def hangs_beside_a_thread(report, **_):
    threading.Thread(target=threading.Event().wait, args=(600,), daemon=True, name="another").start()
    time.sleep(600)


def closes_its_pipe(report, **_):
    for name in os.listdir("/proc/self/fd"):  # the pipe of the answers is among them
        if int(name) > 2:
            with suppress(OSError):
                os.close(int(name))
    time.sleep(600)


def runs_out_of_memory(report, **_):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def does_not_fit(report, **_):
    raise NotTried("does not fit: 99.0 GiB are needed")


def sees_nothing(report, **_):
    raise NotTried("sees no NVIDIA GPU: none is there")


def not_a_number(report, **_):
    return {"status": "ok", "seconds": float("nan")}
