"""resolve(where): from what a user names (a directory, a hub id, nothing) to a native checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from filelock import FileLock

from cogvideox_flax.checkpoint import Manifest, is_native, read_manifest
from cogvideox_flax.config import COMPONENTS
from cogvideox_flax.errors import InputError
from conversion.convert import convert, read_configs
from conversion.download import Download, download
from conversion.progress import progress_bar
from conversion.source import is_hf_layout

log = logging.getLogger(__name__)

EMBEDDED = Path(__file__).resolve().parents[1] / "weights" / "embedded"
"""The small checkpoint that comes with the source tree."""


def cache_dir() -> Path:
    """Where converted checkpoints are kept: $COGVIDEOX_HOME, or cogvideox-flax in $XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("COGVIDEOX_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cogvideox-flax"


def resolve(where: str | Path | None, revision: str | None = None) -> Path:
    """The native checkpoint that `where` stands for.

    A native directory is returned as it is. A directory in the Hugging Face layout, or a hub id ("owner/name"),
    is converted once into the cache, with progress on stderr, keeping the dtype of its weights.

    Args:
        where: directory or hub id; None for the embedded checkpoint.
        revision: for a hub id: branch, tag or commit.

    Raises:
        InputError: nothing there, not a checkpoint, or it cannot be downloaded or converted.
    """
    if where is None:
        if not is_native(EMBEDDED):
            raise InputError(
                f"no model was named, and there is no embedded checkpoint in {EMBEDDED}. Name one with --model: a "
                "converted directory, one in the Hugging Face layout, or a hub id such as zai-org/CogVideoX-2b"
            )
        return EMBEDDED
    path = Path(where)
    if not path.exists():
        return _convert_once(_download(where, revision, COMPONENTS))
    if is_native(path):
        return path
    if not path.is_dir() or not is_hf_layout(path):
        raise _not_a_model(path)
    return _convert_once(Download(path, {}))


def peek(where: str | Path | None, revision: str | None = None) -> Manifest:
    """What a model is, from its config files alone: nothing is converted, and of a hub id only configs are downloaded.

    Arguments and errors as for `resolve`; `weights` is empty for a model that is not converted.
    """
    path = resolve(None) if where is None else Path(where)
    if is_native(path):
        return read_manifest(path)
    if not path.exists():
        path = _download(where, revision, ()).folder
    elif not path.is_dir() or not is_hf_layout(path):
        raise _not_a_model(path)
    return read_configs(path, [c for c in COMPONENTS if (path / c / "config.json").is_file()])


def _download(where: str | Path | None, revision: str | None, components: tuple[str, ...]) -> Download:
    if str(where).count("/") != 1 or str(where).startswith((".", "/", "~")):
        raise InputError(f"{where} does not exist")
    return download(str(where), revision, components)


def _not_a_model(path: Path) -> InputError:
    return InputError(
        f"{path} is not a model: expected a native checkpoint (config.json with format_version) or a Hugging Face "
        "layout (text_encoder/, transformer/, vae/ with safetensors)"
    )


def _convert_once(source: Download) -> Path:
    """Convert into the cache, unless the very same files were converted before."""
    files = sorted(p for p in source.folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    state = [(str(p.relative_to(source.folder)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    key = hashlib.sha256(json.dumps([str(source.folder.resolve()), state]).encode()).hexdigest()[:16]
    name = source.origin.get("hub_id", source.folder.resolve().name).replace("/", "--")
    target = cache_dir() / f"{name}-{key}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not is_native(target):
                log.info("converting %s once into %s", source.folder, target)
                with progress_bar() as progress:
                    convert(source.folder, target, origin=source.origin, progress=progress)
    except OSError as e:
        raise InputError(f"cannot write to the cache {target.parent}: {e}; set COGVIDEOX_HOME to another place") from e
    return target
