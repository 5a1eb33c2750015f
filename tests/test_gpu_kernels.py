"""Kernels and convolutions on an NVIDIA GPU: the checks of `benchmarks.gpu_proof`, in small. The process of the tests
has the CPU; the GPU is another one's, so that a kernel that crashes or hangs costs its own test."""

from __future__ import annotations

import pytest

from benchmarks.gpu_proof import machine
from benchmarks.gpu_proof.process import Died, Worker
from benchmarks.gpu_proof.rows import ON_A_GPU, kernel_rows
from benchmarks.gpu_proof.run import environment

pytestmark = pytest.mark.gpu


class Gpu:
    """A worker on the GPU, and another one after it died."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {name: value for name, value in environment(folder, dry_run=False).items() if name != "XLA_FLAGS"}
        self.worker = None

    def ask(self, function, options, timeout=120):
        self.worker = self.worker or Worker("ours", self.env)
        try:
            return self.worker.ask(function, options | {"folder": str(self.folder)}, timeout, lambda found: None)
        except Died as e:
            self.close()
            return {"status": e.status, "reason": str(e)}

    def close(self):
        if self.worker is not None:
            self.worker.kill()
        self.worker = None


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory):
    if why := machine.no_gpu():
        pytest.skip(f"needs an NVIDIA GPU: {why}")
    found = Gpu(tmp_path_factory.mktemp("gpu"))
    try:
        sees = found.ask("benchmarks.gpu_proof.machine:jax_sees", {}, 300)
        if sees["status"] != "ok":
            pytest.skip(f"needs an NVIDIA GPU: {sees['reason']}")
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("row", kernel_rows(ON_A_GPU), ids=lambda row: row.key)
def test_on_a_gpu(row, on_a_gpu):
    found = on_a_gpu.ask(row.function, row.options)
    if found["status"] == "not tried":
        pytest.skip(found["reason"])
    assert found["status"] == "ok", found
    backend = row.side.removeprefix("ours").strip()
    if row.options.get("dtype") != "float32" and backend in ("auto", "cudnn"):
        assert found["backend"] == "cudnn"
    elif backend in ("triton", "xla"):
        assert found["backend"] == backend
