"""Rows that go wrong in every way that a row can, for a worker of `benchmarks.gpu_proof`."""

import os
import time

from benchmarks.gpu_proof.errors import NotTried


def fine(report, **_):
    report(first_s=0.5)
    return {"status": "ok", "seconds": 2.0, "pid": os.getpid()}


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


def runs_out_of_memory(report, **_):
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def does_not_fit(report, **_):
    raise NotTried("does not fit: 99.0 GiB are needed")


def sees_nothing(report, **_):
    raise NotTried("sees no NVIDIA GPU: none is there")


def not_a_number(report, **_):
    return {"status": "ok", "seconds": float("nan")}
