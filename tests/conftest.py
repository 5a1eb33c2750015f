"""Tests run on the CPU, eight fake devices of it, whatever else the machine has; those marked `gpu` have a process of
their own for that."""

import os
import signal
import tempfile

import pytest
import xla_options

from cogvideox_flax.runtime import libtpu

pytest.register_assert_rewrite("commands")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
libtpu.prepare_to_compile()  # where it is installed, it is only ever a compiler here

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that runs them in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

_cache = tempfile.TemporaryDirectory(prefix="cogvideox-tests-")  # gone when the run ends
os.environ["COGVIDEOX_HOME"] = _cache.name
# all workers of a run, and their subprocesses, share what they compile; runs share it in a directory that is named here
os.environ.setdefault("COGVIDEOX_TESTS_XLA_CACHE", f"{_cache.name}/xla")  # workers inherit the first process's
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["COGVIDEOX_TESTS_XLA_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(scope="module", autouse=True)
def _compile_with_the_options_of_the_file(request):
    """A file's `XLA_OPTIONS` are those of all programs of its pipelines."""
    from cogvideox_flax.runtime import compile as compiling

    own, more = compiling.compiler_options, getattr(request.module, "XLA_OPTIONS", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compiler_options", lambda *args, **how: own(*args, **how) | more)
        yield


@pytest.fixture(scope="session", autouse=True)
def _trace_for_cpus():
    """Programs are traced for CPUs alone, but where a test says otherwise with `compiling_for`."""
    from cogvideox_flax.nn.platforms import compiling_for

    with compiling_for("cpu"):
        yield


def pytest_addoption(parser):
    parser.addoption("--optimized", action="store_true", help="the tests marked so, compiled as for users")


def pytest_configure(config):
    """`QUICK` tests compile without optimisation; the slow ones and the optimized as users do."""
    if _compiles_quickly(config):
        os.environ["XLA_FLAGS"] = f"{xla_options.QUICK_FLAGS} {os.environ['XLA_FLAGS']}"


def pytest_collection_modifyitems(config, items):
    """Slow tests have a limit of their own, and long files come first. The tests marked `optimized` are left to the run
    with --optimized, which runs no others, unless they alone are asked for."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
    marked = [item for item in items if item.get_closest_marker("optimized")]
    others = [item for item in items if not item.get_closest_marker("optimized")]
    if config.option.markexpr in QUICK and marked and others:
        wanted, left = (marked, others) if config.option.optimized else (others, marked)
        config.hook.pytest_deselected(items=left)
        items[:] = wanted
    order = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem.removeprefix("test_"), len(order)))


LONG_FILES = ("hunyuan_pipeline", "composition", "autoencoder", "hunyuan_vae", "sharding", "hosts", "media")
LONG_FILES += ("training", "tpu", "causal_conv", "attention", "pipeline", "long_clips", "step_cache")
LONG_FILES += ("hunyuan_transformer", "finetune")
"""The files that take longest: a worker takes whole files, and none should begin its longest last."""

QUICK = "not slow and not further", "further"
"""Selections of tests that compile for longer than they run: the default and the rest of it."""

SLOW_LIMIT_S = 3600
"""Seconds that a slow test may take; the limit of the others is in pyproject.toml."""


def _compiles_quickly(config):
    return config.option.markexpr in QUICK and not config.option.optimized
