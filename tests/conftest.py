"""Tests run on the CPU, eight fake devices of it, whatever else the machine has."""

import os
import signal
import tempfile

import pytest

pytest.register_assert_rewrite("commands")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# libtpu, where it is installed, is only ever a compiler here: keep it quiet and unlocked
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v6e-8",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_LOG_DIR="disabled",
    HF_HUB_DISABLE_TELEMETRY="1",
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that runs them in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

_cache = tempfile.TemporaryDirectory(prefix="cogvideox-tests-")  # gone when the run ends
os.environ["COGVIDEOX_HOME"] = _cache.name


def pytest_configure(config):
    """Tests compile for longer than they run, so without optimisation; the slow ones as users do."""
    if config.option.markexpr == "not slow":
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ['XLA_FLAGS']}"
