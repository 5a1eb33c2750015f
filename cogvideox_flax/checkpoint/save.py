"""Writes modules as a native checkpoint, atomically."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cogvideox_flax.checkpoint.load import keep_dtype, parameters
from cogvideox_flax.checkpoint.manifest import CONFIG_FILE, Manifest, is_native, weights_file, write_manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import atomic_directory, sync_file
from cogvideox_flax.io.contents import content_hash
from cogvideox_flax.io.paths import check_writable
from cogvideox_flax.io.tensor_file import TensorWriter
from cogvideox_flax.nn import quantized


def save(
    native_dir: str | Path,
    manifest: Manifest,
    modules: Mapping[str, nnx.Module],
    dtype: str | dict[str, str],
    source: dict[str, Any],
    tokenizer: Mapping[str, Path] | None = None,
    kept: str | Path | None = None,
) -> None:
    """Write modules as a native checkpoint, atomically.

    Args:
        native_dir: a new or empty directory, or a native checkpoint, which is replaced.
        manifest: the configs; its records of weights are replaced by those of `modules`.
        modules: component -> module.
        dtype: of the stored weights, for all or per component: float32, bfloat16 or float16.
        source: where the weights came from, stored with each component.
        tokenizer: name of a tokenizer file in the checkpoint -> the file to copy.
        kept: the native checkpoint of `manifest`, whose other components and tokenizer files are linked, or copied
            where the file system has no hard links.

    Raises:
        InputError: the directory has other contents, cannot be written, or the disk is too small.
    """
    target = Path(native_dir)
    check_target(target)
    with atomic_directory(target) as work:
        records: dict[str, dict[str, Any]] = {}
        for component, module in modules.items():
            kind = dtype if isinstance(dtype, str) else dtype[component]
            path = weights_file(work, component)
            path.parent.mkdir()
            _write(path, component, module, np.dtype(jnp.dtype(kind)))
            records[component] = {"dtype": kind, "sha256": content_hash(path), "source": source}
            if found := {quantized.kind_of(leaf.dtype) for leaf in jax.tree.leaves(module)} - {None}:
                records[component]["quantized"] = found.pop()
            del module  # frees it before the next one is loaded
        files = dict(tokenizer or {})
        if kept is not None:
            for component in manifest.weights.keys() - modules.keys():
                weights_file(work, component).parent.mkdir()
                _link(weights_file(kept, component), weights_file(work, component))
                records[component] = manifest.weights[component]
            files = {name: Path(kept) / name for name in manifest.model.tokenizer_files_in(Path(kept))} | files
        for name, file in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, work / name)
        hashes = {name: content_hash(work / name) for name in files}
        write_manifest(work, dataclasses.replace(manifest, weights=records, tokenizer_sha256=hashes))


def _link(source: Path, target: Path) -> None:
    """A hard link; a copy where the file system has none."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)


def check_target(target: Path) -> None:
    """Refuse a directory that has other contents, or that cannot be written."""
    check_writable(target / CONFIG_FILE)
    if target.exists() and not is_native(target) and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not a native checkpoint; choose another place")


def _write(path: Path, component: str, module: nnx.Module, dtype: np.dtype) -> None:
    arrays = parameters(module)
    unchanged = keep_dtype(arrays)
    kinds = {name: np.dtype(x.dtype) if name in unchanged else dtype for name, x in arrays.items()}
    shapes = {name: (x.shape, kinds[name]) for name, x in arrays.items()}
    with TensorWriter(path, shapes, {"component": component}) as writer:
        for name, x in arrays.items():
            writer.write(name, np.asarray(x).astype(kinds[name]))
