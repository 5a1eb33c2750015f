"""Streams one component's tensors from the source's files into the native file, and verifies them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cogvideox_flax.conversion.mapping import WeightMoves
from cogvideox_flax.conversion.source import Source
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.io.tensor_file import DTYPES, TensorFile, TensorWriter

FLOATS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}

Progress = Callable[[str, int, int], None]
"""(component, bytes done, bytes in total)"""

Targets = dict[str, tuple[tuple[int, ...], np.dtype]]
"""Parameter -> shape and dtype."""


def targets_of(source: Source, todo: WeightMoves, dtype: np.dtype | None) -> Targets:
    """Shape and dtype of every parameter; without `dtype`, the widest dtype of the tensors that fill it."""
    kinds: dict[str, np.dtype] = {}
    for name, move in todo.moves.items():
        kind = source.info(name).dtype
        if kind == DTYPES["F64"]:  # the reference computes and saves its position table in float64
            kind = FLOATS["float32"]
        if kind not in FLOATS.values():
            raise ConversionError(f"{name} is {kind}; weights must be one of {', '.join(FLOATS)}")
        kind = dtype or kind
        kinds[move.target] = np.promote_types(kind, kinds.get(move.target, kind))
    return {name: (shape, kinds[name]) for name, shape in todo.shapes.items()}


def main_dtype(targets: Targets) -> str:
    """The dtype of most parameters, counted by elements."""
    sizes: dict[str, int] = {}
    for shape, dtype in targets.values():
        sizes[dtype.name] = sizes.get(dtype.name, 0) + int(np.prod(shape))
    return max(sizes, key=lambda name: sizes[name])


def write_tensors(
    source: Source, todo: WeightMoves, targets: Targets, path: Path, component: str, progress: Progress
) -> dict[tuple[str, int | None], int]:
    """Stream every tensor into its slot.

    Returns:
        The CRC-32 of each slot's bytes.

    Raises:
        InputError: the file cannot be written, or a value exceeds the dtype's range.
    """
    try:
        writer = TensorWriter(path, targets, {"component": component})
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror}") from e
    total = sum(source.info(name).nbytes for name in todo.moves)
    sums, done = {}, 0
    with writer:
        try:
            for name, move in sorted(todo.moves.items(), key=lambda item: source.file_order(item[0])):
                value = source.read(name)
                kind = targets[move.target][1]
                if kind != value.dtype:
                    value = _cast(name, value, kind)
                value = np.ascontiguousarray(move.transform(value))
                writer.write(move.target, value, move.slot)
                sums[move.target, move.slot] = zlib.crc32(value.reshape(-1).view(np.uint8).data)
                done += source.info(name).nbytes
                progress(component, done, total)
        except OSError as e:
            raise InputError(
                f"writing {path} failed: {e.strerror}; free some space and run the same command again"
            ) from e
    return sums


def _cast(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if dtype == FLOATS["float16"] and not np.isfinite(cast).all():
        raise InputError(f"{name} holds values beyond float16's range; use --dtype bfloat16 or float32")
    return cast


def verify(path: Path, sums: dict[tuple[str, int | None], int]) -> None:
    """Read everything back and compare.

    Raises:
        ConversionError: a slot does not hold what was written.
    """
    with TensorFile(path) as file:
        for (target, slot), expected in sums.items():
            if zlib.crc32(file.read(target, slot).reshape(-1).view(np.uint8).data) != expected:
                raise ConversionError(f"{path}: {target} does not read back as written; is the disk failing?")
