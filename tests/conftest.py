"""Tests run on the CPU, eight fake devices of it, whatever else the machine has; those marked `gpu` have a process of
their own for that."""

import hashlib
import os
import platform
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from cogvideox_flax.io.paths import NotPrivateError, make_private
from cogvideox_flax.runtime import libtpu
from tests.support import xla_options

pytest.register_assert_rewrite("tests.support.commands")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of PyTorch wait for each other by spinning on a busy core
libtpu.prepare_to_compile()  # where it is installed, it is only ever a compiler here

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that runs them in the background has it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

_home = tempfile.TemporaryDirectory(prefix="cogvideox-tests-")  # gone when the run ends
os.environ["COGVIDEOX_HOME"] = _home.name

CACHE_LIMIT = 2 * 2**30
"""Bytes of compiled programs; those used longest ago are removed first."""


def _cpu():
    """The kinds of CPU of this machine: their instructions, as Linux names them."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return platform.uname().version, platform.processor()


def _compiled_programs():
    """The folder that runs share, with their workers and subprocesses; where none can be made, this run's alone."""
    # JAX's key is the program with all options and versions, but not what the CPU can run
    name = hashlib.sha256(repr(_cpu()).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("COGVIDEOX_TESTS_CACHE") or Path.home() / ".cache" / "cogvideox-tests").absolute()
    try:
        make_private(folder / "xla" / name)
    except (NotPrivateError, OSError):
        folder = Path(_home.name) / "cache"
        make_private(folder / "xla" / name)
    os.environ["COGVIDEOX_TESTS_CACHE"] = str(folder)  # workers inherit it
    return folder / "xla" / name


XLA_CACHE = _compiled_programs()
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(XLA_CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.01"
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


def pytest_report_header():
    return f"compiled programs: {XLA_CACHE}"


def pytest_sessionstart(session):
    """The first process makes room in the cache."""
    if hasattr(session.config, "workerinput"):
        return
    used, total = [(max(s.st_atime, s.st_mtime), s.st_size, path) for path, s in _files(XLA_CACHE.parent)], 0
    for _, size, path in sorted(used, reverse=True):
        total += size
        if total > CACHE_LIMIT:
            path.unlink(missing_ok=True)


def _files(folder):
    """The files below a folder, with their facts, also while other runs remove some."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat()


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
