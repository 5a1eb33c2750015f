"""Reading npz files of strangers: what a member declares is checked before it is read, and nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.limits import MAX_ARRAY_BYTES
from cogvideox_flax.io.paths import open_file


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
    """The dtype and shape of an npy, and whether it is in Fortran order."""
    try:
        version = npy.read_magic(file)
    except ValueError as e:
        raise ValueError("it holds something else than an array") from e
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(file)
    except Exception as e:  # numpy's parser is Python's, with all of its exceptions
        raise ValueError("the header of an array is damaged") from e
    if dtype.kind not in "biufU":
        raise ValueError("it holds an array of something else than numbers or text")
    if min(shape, default=0) < 0:
        raise ValueError("the header of an array is damaged")
    return dtype, shape, is_fortran
