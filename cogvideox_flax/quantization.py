"""A native checkpoint with int8 weights out of one without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from cogvideox_flax import checkpoint
from cogvideox_flax.errors import InputError
from cogvideox_flax.models import int8


def quantize_checkpoint(src: str | Path, dst: str | Path, components: Sequence[str] = tuple(int8.MAPS)) -> None:
    """Write src again with the blocks' linear maps of these components in int8; one component in memory at a time.

    Args:
        src: a native checkpoint.
        dst: a new or empty directory, or a native checkpoint, which is replaced.
        components: "transformer" and "text_encoder", or one of them. The autoencoder stays as it is.

    Raises:
        InputError: an unknown component, src is dst, a component that src lacks or that is int8 already, or dst holds
            something else.
    """
    src, dst = Path(src), Path(dst)
    manifest = checkpoint.read_manifest(src)
    if src.resolve() == dst.resolve():
        raise InputError(f"{dst} cannot be quantized into itself; name another directory")
    for component in components:
        if component not in int8.MAPS:
            raise InputError(f"there is no int8 form of {component!r}; there is one of {', '.join(int8.MAPS)}")
        if component not in manifest.weights:
            raise InputError(f"{src} has no {component}; it holds {', '.join(manifest.weights)}")
        if manifest.quantized(component):
            raise InputError(f"the {component} of {src} is {manifest.quantized(component)} already")
    spiece = src / checkpoint.SPIECE_FILE
    checkpoint.save(
        dst,
        manifest,
        _Modules(src, list(manifest.weights), set(components)),
        {component: record["dtype"] for component, record in manifest.weights.items()},
        {"path": str(src.absolute())},
        spiece=spiece if spiece.exists() else None,
    )


class _Modules(Mapping[str, Any]):
    """A checkpoint's components, each loaded when it is asked for."""

    def __init__(self, src: Path, names: list[str], quantized: set[str]):
        self._src, self._names, self._quantized = src, names, quantized

    def __getitem__(self, name: str) -> Any:
        module = checkpoint.LOADERS[name](self._src)
        if name not in self._quantized:
            return module
        return jax.block_until_ready(int8.quantize(name, module))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
