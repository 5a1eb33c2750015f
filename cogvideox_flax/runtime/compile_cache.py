"""A cache of compiled programs on disk: a cached program is neither traced nor compiled again.

The cache key covers this package's code, the shapes of the arguments, and everything that the compiler depends on.
JAX's own compilation cache uses the program's text as the key, which needs tracing and lowering first: a second start
takes about one and a half times as long (docs/files.md), and it reads what others could have written.

Loading a program executes the contents of its file, so the folder must be writable by nobody but the user.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.io.paths import make_private
from cogvideox_flax.nn.cpu import instruction_set
from cogvideox_flax.version import code_fingerprint

log = logging.getLogger(__name__)

SUFFIX = ".program"
LIMIT = 4 * 2**30
"""Bytes of all programs; the least recently used are removed first."""

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_IRRELEVANT_SETTINGS = (
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_persistent_cache",
    "jax_log",
    "jax_traceback",
)
"""Prefixes of JAX settings that do not change programs."""
_CONFIG_LOCK = threading.RLock()


class CompileCache:
    """A folder of compiled programs.

    Args:
        folder: created if missing. Hosts of several kinds may share it.

    Raises:
        NotPrivateError: other users could put programs there.
        OSError: it cannot be created.
    """

    def __init__(self, folder: Path):
        make_private(folder)
        self.folder = folder

    def get(self, what: str, args: tuple[Any, ...], mesh: Mesh | None, make: Callable[[], Any]) -> Any:
        """A program's executable from the cache; a missing one is compiled and cached.

        Args:
            what: everything besides the arguments that determines the program, as text.
            args: arrays or shapes.
            mesh: where it runs; None for JAX's first device.
            make: compiles it.
        """
        found = self.find(what, args, mesh)
        if found is not None:
            return found
        name = program_name(what, args, mesh)
        if name is None:
            return make()
        with _jax_cache_disabled():
            made = make()
        if program_name(what, args, mesh) == name:  # the source did not change while it compiled
            self._save(self.folder / (name + SUFFIX), made)
        return made

    def find(self, what: str, args: tuple[Any, ...], mesh: Mesh | None) -> Any | None:
        """A program's executable; None if it is not there or cannot be used. Arguments as for `get`."""
        name = program_name(what, args, mesh)
        return None if name is None else _load(self.folder / (name + SUFFIX), args, mesh)

    def _save(self, path: Path, executable: Any) -> None:
        """Write the executable, if it can be serialized."""
        try:
            payload, _, results = serialize_executable.serialize(executable)
            body = pickle.dumps((payload, results))
        except Exception as e:  # some compilers and some result structures do not serialize
            log.info("%s cannot be kept (%s: %s)", path.name, type(e).__name__, e)
            return
        try:
            with atomic_write(path, mode=0o600) as partial:
                partial.write_bytes(body)
            self._evict()
        except (InputError, OSError) as e:
            log.info("%s is not kept: %s", path.name, e)

    def _evict(self) -> None:
        """Remove the least recently used programs above the limit."""
        found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self.folder.glob("*" + SUFFIX))
        total = sum(size for _, size, _ in found)
        for _, size, path in found[:-1]:
            if total <= LIMIT:
                return
            path.unlink(missing_ok=True)
            total -= size


def _load(path: Path, args: tuple[Any, ...], mesh: Mesh | None) -> Any | None:
    """The executable, on the devices that it was compiled for; None if it is missing or cannot be used."""
    try:
        payload, results = pickle.loads(path.read_bytes())
        structure = jax.tree.structure((args, {}))
        found = serialize_executable.deserialize_and_load(payload, structure, results, execution_devices=_devices(mesh))
    except FileNotFoundError:
        return None
    except Exception as e:  # the loader's exceptions are not documented; compiling again is always possible
        log.info("%s is of no use (%s: %s)", path, type(e).__name__, e)
        return None
    with suppress(OSError):  # a folder that may only be read
        os.utime(path)
    return found


@contextmanager
def _jax_cache_disabled() -> Iterator[None]:
    """Disable JAX's own cache on a CPU: an executable loaded from it serializes incompletely."""
    if jax.default_backend() != "cpu":
        yield
        return
    config: Any = jax.config
    with _CONFIG_LOCK:
        before = config.jax_enable_compilation_cache
        config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the setting only once
        try:
            yield
        finally:
            config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()


def program_name(what: str, args: tuple[Any, ...], mesh: Mesh | None) -> str | None:
    """A unique name for a program; arguments as for `CompileCache.get`.

    Returns:
        None if the program cannot be cached: its description contains an object's address, it runs on several hosts or
        not on JAX's default device, or this package's files have changed since they were imported.
    """
    code = code_fingerprint()
    leaves, tree = jax.tree.flatten(args)
    kinds = [(leaf.shape, str(leaf.dtype), mesh and str(getattr(leaf, "sharding", None))) for leaf in leaves]
    text = repr((what, str(tree), kinds, _device_assignment(mesh), code, _compiler_environment()))
    config: Any = jax.config
    unknown = code is None or " at 0x" in text
    if unknown or jax.process_count() > 1 or config.jax_default_device is not None:
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _devices(mesh: Mesh | None) -> list[jax.Device]:
    return [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)


def _device_assignment(mesh: Mesh | None) -> str:
    shape = dict(mesh.shape) if mesh is not None else None
    return repr((shape, [(device.id, device.device_kind) for device in _devices(mesh)], len(jax.devices())))


def _compiler_environment() -> str:
    """Everything else that a compiler depends on. Versions are those of the imported modules."""
    settings: dict[str, Any] = jax.config.values
    return repr(
        (
            sys.version,
            _name_of_instruction_set(),
            [module.__version__ for module in (jax, jaxlib, flax, np)],
            jax.devices()[0].client.platform_version,
            [_flags(os.environ.get(name)) for name in _VARIABLES],
            sorted((k, repr(v)) for k, v in settings.items() if not k.startswith(_IRRELEVANT_SETTINGS)),
        )
    )


def _flags(value: str | None) -> str | None:
    """The compiler flags in an environment variable; its value may be the name of a file with the flags."""
    if value and not value.lstrip().startswith("-"):
        with suppress(OSError, ValueError):
            return Path(value.strip()).read_text()
    return value


@cache
def _name_of_instruction_set() -> str:
    """A short name of this host's instruction set with all extensions, which a CPU's programs use."""
    extensions = " ".join(sorted(instruction_set()))
    return f"{platform.machine()}-{hashlib.sha256(extensions.encode()).hexdigest()[:12]}"
