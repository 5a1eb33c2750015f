"""Quantizes a native checkpoint to 8-bit weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cogvideox_flax import checkpoint
from cogvideox_flax.checkpoint.save import check_target
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import check_free_space
from cogvideox_flax.nn import quantized


def quantize_checkpoint(
    src: str | Path, dst: str | Path, components: Sequence[str] | None = None, kind: str = "int8"
) -> None:
    """Write a copy of src with the blocks' linear maps of these components in 8 bits, one component at a time.

    Args:
        src: a native checkpoint.
        dst: a new or empty directory, or a native checkpoint, which is replaced.
        components: those to quantize; None for all components of src for which the family lists quantizable maps.
        kind: "int8" or "float8" (e4m3).

    Raises:
        InputError: an unknown component or kind, src is dst, a component that src lacks or that is quantized already,
            dst has other contents, or the disk is too small.
        CheckpointError: a file of src is damaged.
    """
    src, dst = Path(src), Path(dst)
    manifest = checkpoint.read_manifest(src)
    check_target(dst)
    if kind not in quantized.KINDS:
        raise InputError(f"there is no kind {kind!r}; known are {', '.join(quantized.KINDS)}")
    if src.resolve() == dst.resolve():
        raise InputError(f"{dst} cannot be quantized into itself; name another directory")
    quantizable = [name for name, component in manifest.model.components.items() if component.linear_maps]
    components = [name for name in manifest.weights if name in quantizable] if components is None else components
    if not components:
        raise InputError(f"{src} has no component that can be quantized; it holds {', '.join(manifest.weights)}")
    for component in components:
        if component not in quantizable:
            known = ", ".join(quantizable)
            raise InputError(f"there is no quantized form of {component!r}; there is one of {known}")
        if component not in manifest.weights:
            raise InputError(f"{src} has no {component}; it holds {', '.join(manifest.weights)}")
        if manifest.quantized(component):
            raise InputError(f"the {component} of {src} is {manifest.quantized(component)} already")
    kinds = {name: kind if name in components else manifest.quantized(name) for name in manifest.weights}
    checkpoint.check_contents(src, manifest)
    check_free_space(dst, sum(_stored_bytes(manifest, name, kinds[name]) for name in kinds))
    checkpoint.save(
        dst,
        manifest,
        _Modules(src, manifest, dict.fromkeys(components, kind)),
        {component: record["dtype"] for component, record in manifest.weights.items()},
        {"path": str(src.absolute())},
        tokenizer={name: src / name for name in manifest.model.tokenizer_files_in(src)},
    )


def _stored_bytes(manifest: checkpoint.Manifest, component: str, kind: str | None) -> int:
    module = manifest.model.components[component].abstract(manifest.configs[component], kind)
    stored = checkpoint.cast(module, manifest.weights[component]["dtype"])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))


class _Modules(Mapping[str, Any]):
    """A checkpoint's components, loaded and quantized on access."""

    def __init__(self, src: Path, manifest: checkpoint.Manifest, kinds: Mapping[str, str]):
        self._src, self._manifest, self._kinds = src, manifest, kinds

    def __getitem__(self, name: str) -> Any:
        module = checkpoint.load_component(name, self._src)
        if name not in self._kinds:
            return module
        maps = self._manifest.model.components[name].linear_maps
        return jax.block_until_ready(quantized.quantize(module, maps, self._kinds[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.weights)

    def __len__(self) -> int:
        return len(self._manifest.weights)
