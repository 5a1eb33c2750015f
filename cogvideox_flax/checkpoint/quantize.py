"""A native checkpoint with weights of 8 bits out of one without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cogvideox_flax import checkpoint
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.space import check_free_space
from cogvideox_flax.nn import quantized


def quantize_checkpoint(
    src: str | Path, dst: str | Path, components: Sequence[str] = tuple(quantized.MAPS), kind: str = "int8"
) -> None:
    """Write src again with the blocks' linear maps of these components in 8 bits; one component in memory at a time.

    Args:
        src: a native checkpoint.
        dst: a new or empty directory, or a native checkpoint, which is replaced.
        components: "transformer" and "text_encoder", or one of them. The autoencoder stays as it is.
        kind: "int8" or "float8" (e4m3).

    Raises:
        InputError: an unknown component or kind, src is dst, a component that src lacks or that is quantized already,
            dst holds something else, or the disk is too small.
        CheckpointError: a file of src is damaged.
    """
    src, dst = Path(src), Path(dst)
    manifest = checkpoint.read_manifest(src)
    if kind not in quantized.KINDS:
        raise InputError(f"there is no kind {kind!r}; known are {', '.join(quantized.KINDS)}")
    if src.resolve() == dst.resolve():
        raise InputError(f"{dst} cannot be quantized into itself; name another directory")
    for component in components:
        if component not in quantized.MAPS:
            known = ", ".join(quantized.MAPS)
            raise InputError(f"there is no quantized form of {component!r}; there is one of {known}")
        if component not in manifest.weights:
            raise InputError(f"{src} has no {component}; it holds {', '.join(manifest.weights)}")
        if manifest.quantized(component):
            raise InputError(f"the {component} of {src} is {manifest.quantized(component)} already")
    kinds = {name: kind if name in components else manifest.quantized(name) for name in manifest.weights}
    checkpoint.check_contents(src, manifest)
    check_free_space(dst, sum(_stored_bytes(manifest, name, kinds[name]) for name in kinds))
    spiece = checkpoint.file_of(src, "tokenizer")
    checkpoint.save(
        dst,
        manifest,
        _Modules(src, list(manifest.weights), dict.fromkeys(components, kind)),
        {component: record["dtype"] for component, record in manifest.weights.items()},
        {"path": str(src.absolute())},
        spiece=spiece if spiece.exists() else None,
    )


def _stored_bytes(manifest: checkpoint.Manifest, component: str, kind: str | None) -> int:
    module = checkpoint.abstract(component, getattr(manifest, component), kind)
    stored = checkpoint.cast(module, manifest.weights[component]["dtype"])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))


class _Modules(Mapping[str, Any]):
    """A checkpoint's components, each loaded when it is asked for."""

    def __init__(self, src: Path, names: list[str], kinds: Mapping[str, str]):
        self._src, self._names, self._kinds = src, names, kinds

    def __getitem__(self, name: str) -> Any:
        module = checkpoint.LOADERS[name](self._src)
        if name not in self._kinds:
            return module
        return jax.block_until_ready(quantized.quantize(name, module, self._kinds[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
