"""The way back: a native checkpoint in diffusers' layout, by the tables of its conversion.

The weights keep their dtype and their bits. What conversion leaves out, since no feature comes from it, is left out
here too: the last two layers of Qwen2.5-VL and its last norm, the head of SigLIP.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.checkpoint import Manifest, check_contents, read_manifest, weights_file
from cogvideox_flax.conversion.mapping import source_moves
from cogvideox_flax.conversion.write import Progress, verify
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import atomic_directory, write_json
from cogvideox_flax.io.paths import check_free_space
from cogvideox_flax.io.tensor_file import TensorFile, TensorWriter


def export(
    native_dir: str | Path,
    target: str | Path,
    *,
    components: Sequence[str] | None = None,
    progress: Progress = lambda component, done, total: None,
) -> None:
    """Write a native checkpoint, or some of its components, in diffusers' layout. It appears when it is complete.

    Args:
        target: a new or empty directory.
        components: which to write, each into a folder of its name; None for the whole checkpoint, with tokenizer,
            scheduler and model_index.json.
        progress: called as bytes are written.

    Raises:
        CheckpointError: it is damaged, or no native checkpoint.
        InputError: it lacks a component, or that is quantized; the target has contents or cannot be written.
    """
    source, target = Path(native_dir), Path(target)
    manifest = read_manifest(source)
    if components is None:
        manifest.check_complete(source)
    wanted = list(dict.fromkeys(components or manifest.model.components))
    if missing := [name for name in wanted if name not in manifest.weights]:
        raise InputError(f"{source} has no {', '.join(missing)}; it has {', '.join(manifest.weights)}")
    if kinds := {name: kind for name in wanted if (kind := manifest.quantized(name)) is not None}:
        named = ", ".join(f"{name} as {kind}" for name, kind in kinds.items())
        raise InputError(f"{source} holds {named}, rounded; export the checkpoint that it was quantized from")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not an empty directory; choose another place")
    check_contents(source, manifest, *wanted, *(["tokenizer"] if components is None else []))
    check_free_space(target, sum(weights_file(source, name).stat().st_size for name in wanted))
    with atomic_directory(target) as work:
        for name in wanted:
            _write_component(source, manifest, name, work / name, progress)
        if components is None:
            _write_rest(source, manifest, work)


def _of_transformers(manifest: Manifest, component: str) -> bool:
    """Whether transformers, not diffusers, has a component's class."""
    return manifest.model.components[component].stage == "encode"


def _write_component(source: Path, manifest: Manifest, component: str, folder: Path, progress: Progress) -> None:
    family, config = type(manifest.model), manifest.configs[component]
    name = family.components[component].class_names[0]
    of_transformers = _of_transformers(manifest, component)
    folder.mkdir()
    write_json(
        folder / "config.json",
        ({"architectures": [name]} if of_transformers else {"_class_name": name}) | config.to_hf(),
    )
    path = folder / ("model.safetensors" if of_transformers else "diffusion_pytorch_model.safetensors")
    moves, done = source_moves(family, component, config), 0
    sums: dict[tuple[str, int | None], int] = {}
    with TensorFile(weights_file(source, component)) as file:
        shapes = {name: (move.shape, file.tensors[move.target].dtype) for name, move in moves.items()}
        total = sum(info.nbytes for info in file.tensors.values())
        with TensorWriter(path, shapes, {"format": "pt"}) as writer:
            for name, move in moves.items():
                value = np.ascontiguousarray(move.back(file.read(move.target, move.slot)))
                writer.write(name, value)
                sums[name, None] = zlib.crc32(value.reshape(-1).view(np.uint8).data)
                done += value.nbytes
                progress(component, done, total)
    verify(path, sums)


def _write_rest(source: Path, manifest: Manifest, folder: Path) -> None:
    """The tokenizer, the scheduler and model_index.json."""
    for name in manifest.model.tokenizer_files:
        if (source / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    scheduler: dict[str, Any] = manifest.configs["scheduler"].to_hf()
    files = manifest.model.hf_files() | {"scheduler/scheduler_config.json": scheduler}
    libraries = {name: "transformers" if _of_transformers(manifest, name) else "diffusers" for name in manifest.weights}
    classes = {name: component.class_names[0] for name, component in manifest.model.components.items()}
    parts = {name: [library, classes[name]] for name, library in libraries.items()}
    files["model_index.json"] |= parts | {"scheduler": ["diffusers", scheduler["_class_name"]]}
    for name, contents in files.items():
        if not (folder / name).exists():  # a tokenizer's own file
            (folder / name).parent.mkdir(exist_ok=True)
            write_json(folder / name, contents)
