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
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from cogvideox_flax.compiled import LIMIT

log = logging.getLogger(__name__)

SUFFIX = ".executable"
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NOT_OF_PROGRAMS = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_traceback")
"""Settings of JAX, by how their names begin, that change no program."""


class Executables:
    """A folder of them, which must be the user's own: to load one is to run what it holds.

    folder: of one kind of host, since a CPU's programs hold its instructions; made when something is first kept.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self, name: str, args: tuple[Any, ...], mesh: Mesh | None = None) -> Any | None:
        """The executable kept under this name, on the devices that it was compiled for; None if none there works.

        args: of the structure that it will be called with.
        """
        path = self.folder / (name + SUFFIX)
        try:
            payload, results = pickle.loads(path.read_bytes())
            structure = jax.tree.structure((args, {}))
            found = serialize_executable.deserialize_and_load(
                payload, structure, results, execution_devices=_devices(mesh)
            )
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as e:  # damaged, or of a kind that its name does not tell: whatever it is, compiling helps
            log.info("%s is of no use (%s: %s)", path, type(e).__name__, e)
            return None
        return found

    def keep(self, name: str, executable: Any) -> None:
        """Write it down, if it can be; what was not used for longest goes when all of them pass the limit."""
        try:
            payload, _, results = serialize_executable.serialize(executable)
            data = pickle.dumps((payload, results))
        except Exception as e:  # not every compiler's can, and not every structure
            log.info("%s cannot be kept (%s: %s)", name, type(e).__name__, e)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, self.folder / (name + SUFFIX))
            self._trim()
        except OSError as e:
            log.info("%s is not kept: %s", name, e)

    def _trim(self) -> None:
        found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self.folder.glob("*" + SUFFIX))
        total = sum(size for _, size, _ in found)
        for _, size, path in found[:-1]:
            if total <= LIMIT:
                return
            path.unlink(missing_ok=True)
            total -= size


def name_of(what: str, args: tuple[Any, ...], mesh: Mesh | None) -> str | None:
    """A name that no other program has.

    Args:
        what: all that the program is made from beside its arguments, as text.
        args: arrays or shapes.

    Returns:
        None for what is known by no more than an address, and for what runs on several hosts or elsewhere than JAX's
        first device.
    """
    leaves, tree = jax.tree.flatten(args)
    text = repr((what, str(tree), [(leaf.shape, str(leaf.dtype)) for leaf in leaves], _where(mesh), _surroundings()))
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
