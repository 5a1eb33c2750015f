"""Reading npz files of strangers: what a member declares is checked before it is read, and nothing is unpickled."""

from __future__ import annotations

import ast
import math
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import MAX_ARRAY_BYTES
from cogvideox_flax.io.paths import open_file

_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
"""Of an array, as in numpy."""


def read_npz(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Arrays of numbers or text in an npz file, those of these names that it holds.

    Raises:
        InputError: it cannot be read, or one of them is damaged, encrypted, pickled, or above `MAX_ARRAY_BYTES`.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            known = set(archive.namelist())
            return {name: _read_member(archive, member) for name in names if (member := f"{name}.npy") in known}
    # RuntimeError: encrypted, or compressed in a way that is not implemented
    except (OSError, EOFError, ValueError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error) as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise InputError(f"{path} is damaged, or is no npz of latents: {reason}") from e


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    size = archive.getinfo(name).file_size
    if size > MAX_ARRAY_BYTES:
        raise ValueError(f"{name} is {size / 2**30:.1f} GiB; at most {MAX_ARRAY_BYTES / 2**30:g} GiB are read")
    with archive.open(name) as file:
        dtype, shape, is_fortran = _read_header(file)
        nbytes = dtype.itemsize * math.prod(shape)
        # zipfile reads no more than the archive states, so that a bomb ends there
        data = file.read(nbytes + 1) if nbytes <= size else b""
    if len(data) != nbytes:
        raise ValueError(f"{name} is not as long as its shape {list(shape)} says")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _read_header(file: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], bool]:
    """The dtype and shape of an npy, and whether it is in Fortran order; `numpy.lib.format` describes the header."""
    magic = file.read(8)
    if magic[:6] != _MAGIC or magic[6:] not in (b"\1\0", b"\2\0", b"\3\0"):
        raise ValueError("it holds something else than an array")
    length = int.from_bytes(file.read(2 if magic[6] == 1 else 4), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"the header of an array has {length:,} bytes")
    text = file.read(length).decode("utf-8" if magic[6] == 3 else "latin-1")
    try:
        header = ast.literal_eval(text.strip())
        descr, is_fortran, shape = (header[key] for key in ("descr", "fortran_order", "shape"))
        dtype = np.dtype(descr) if isinstance(descr, str) else np.dtype(object)
    except (LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as e:
        raise ValueError("the header of an array is damaged") from e
    if dtype.kind not in "biufU":
        raise ValueError("it holds an array of something else than numbers or text")
    if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the header of an array is damaged")
    return dtype, shape, is_fortran is True
