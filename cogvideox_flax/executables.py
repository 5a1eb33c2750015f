"""Compiled programs as files: what is found there is neither traced nor compiled again.

JAX's own compilation cache (`compiled`) knows a program by its text, for which it must be traced and lowered first.
Here it is known by what it is made from: this package's code, the shapes of its arguments, and all that the compiler
goes by.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from cogvideox_flax.compiled import LIMIT

log = logging.getLogger(__name__)

SUFFIX = ".executable"
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NOT_OF_PROGRAMS = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_traceback")
"""Settings of JAX, by how their names begin, that change no program."""
_ONE_AT_A_TIME = threading.RLock()


class Executables:
    """A folder of them, which must be the user's own: to load one is to run what it holds.

    folder: of one kind of host, since a CPU's programs hold its instructions; made when something is first kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, what: str, args: tuple[Any, ...], mesh: Mesh | None, make: Callable[[], Any]) -> Any:
        """A program's executable: as it is kept here, or made now and kept from now on.

        Args:
            what: all that the program is made from beside its arguments, as text.
            args: arrays or shapes.
            mesh: where it runs; None for JAX's first device.
            make: compiles it.
        """
        name = name_of(what, args, mesh)
        if name is None:
            return make()
        path = self.folder / (name + SUFFIX)
        found = _load(path, args, mesh)
        if found is not None:
            return found
        with _compiled_here():
            made = make()
        self._keep(path, made)
        return made

    def _keep(self, path: Path, executable: Any) -> None:
        """Write it down, if it can be."""
        try:
            payload, _, results = serialize_executable.serialize(executable)
            data = pickle.dumps((payload, results))
        except Exception as e:  # not every compiler's can, and not every structure
            log.info("%s cannot be kept (%s: %s)", path.name, type(e).__name__, e)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(data)
            part.replace(path)
            self._trim()
        except OSError as e:
            log.info("%s is not kept: %s", path.name, e)

    def _trim(self) -> None:
        """What was not used for longest goes when all of them pass the limit; and what was never finished, in a day."""
        for part in self.folder.glob("*.part"):
            if part.stat().st_mtime < time.time() - 86400:
                part.unlink(missing_ok=True)
        found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self.folder.glob("*" + SUFFIX))
        total = sum(size for _, size, _ in found)
        for _, size, path in found[:-1]:
            if total <= LIMIT:
                return
            path.unlink(missing_ok=True)
            total -= size


def _load(path: Path, args: tuple[Any, ...], mesh: Mesh | None) -> Any | None:
    """The executable, on the devices that it was compiled for; None if none is there that works."""
    try:
        payload, results = pickle.loads(path.read_bytes())
        structure = jax.tree.structure((args, {}))
        found = serialize_executable.deserialize_and_load(payload, structure, results, execution_devices=_devices(mesh))
    except FileNotFoundError:
        return None
    except Exception as e:  # damaged, or of a kind that its name does not tell: whatever it is, compiling helps
        log.info("%s is of no use (%s: %s)", path, type(e).__name__, e)
        return None
    with suppress(OSError):  # a folder that may only be read
        os.utime(path)
    return found


@contextmanager
def _compiled_here() -> Iterator[None]:
    """Without JAX's cache on a CPU: what comes from there lacks parts of its code when it is written down again."""
    if jax.default_backend() != "cpu":
        yield
        return
    config: Any = jax.config
    with _ONE_AT_A_TIME:
        before = config.jax_enable_compilation_cache
        config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # whether there is one is asked only once
        try:
            yield
        finally:
            config.update("jax_enable_compilation_cache", before)
            compilation_cache.reset_cache()


def name_of(what: str, args: tuple[Any, ...], mesh: Mesh | None) -> str | None:
    """A name that no other program has; arguments as for `Executables.get`.

    Returns:
        None for what is known by no more than an address, and for what runs on several hosts or elsewhere than JAX's
        first device.
    """
    leaves, tree = jax.tree.flatten(args)
    kinds = [(leaf.shape, str(leaf.dtype), mesh and str(getattr(leaf, "sharding", None))) for leaf in leaves]
    text = repr((what, str(tree), kinds, _where(mesh), _surroundings()))
    config: Any = jax.config
    if " at 0x" in text or jax.process_count() > 1 or config.jax_default_device is not None:
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _devices(mesh: Mesh | None) -> list[jax.Device]:
    return [jax.devices()[0]] if mesh is None else list(mesh.devices.flat)


def _where(mesh: Mesh | None) -> str:
    shape = dict(mesh.shape) if mesh is not None else None
    return repr((shape, [(device.id, device.device_kind) for device in _devices(mesh)], len(jax.devices())))


def _surroundings() -> str:
    settings: dict[str, Any] = jax.config.values
    return repr(
        (
            _code(),
            [version(package) for package in ("jax", "jaxlib", "flax")],
            jax.devices()[0].client.platform_version,
            [os.environ.get(name) for name in _VARIABLES],
            sorted((k, repr(v)) for k, v in settings.items() if not k.startswith(_NOT_OF_PROGRAMS)),
        )
    )


@cache
def _code() -> str:
    """A fingerprint of this package's files."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted((*here.rglob("*.py"), *here.rglob("*.json"))):
        digest.update(str(path.relative_to(here)).encode() + path.read_bytes())
    return digest.hexdigest()
