"""Safetensors files, read and written tensor by tensor.

The safetensors library writes complete dictionaries. Conversion fills one layer of a stacked parameter at a time and
keeps peak memory near one tensor, so the format (8 bytes of header length, a JSON header, raw little-endian data) is
read and written here at offsets. Small files (`write_tensors`) are written by the library, with a checksum in their
metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from cogvideox_flax.errors import CheckpointError
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.io.paths import open_descriptor
from cogvideox_flax.io.stand_ins import HEAD_BYTES, describe_stand_in

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit
_ALIGN = 64  # XLA uses host memory without a copy at this alignment
_CHECKSUM = "checksum"  # in the metadata: SHA-256 over all else


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class PickledError(CheckpointError):
    """A file that looks like pickled PyTorch weights."""


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # from the start of the file

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised host memory that XLA:CPU can use without a copy."""
    nbytes = _nbytes(shape, dtype)
    raw = np.empty(nbytes + _ALIGN, np.uint8)
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class TensorFile:
    """A safetensors file open for reading. The header is checked against the file's size before anything is read.

    Raises:
        CheckpointError: the file is not safetensors, its header is corrupt, or it is truncated.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        try:
            self._fd = open_descriptor(self.path)
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path}: {e.strerror}") from e
        try:
            self._facts = _facts(os.fstat(self._fd))
            self.tensors, self.metadata = self._read_header()
        except CheckpointError:
            self.close()
            raise
        except OSError as e:
            self.close()
            raise CheckpointError(f"cannot read {self.path}: {e.strerror}") from e

    def _read_header(self) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        size = os.fstat(self._fd).st_size

        def corrupt(why: str) -> CheckpointError:
            return CheckpointError(f"{self.path} is not a valid safetensors file: {why}. Download or copy it again.")

        prefix = os.pread(self._fd, 8, 0)
        if len(prefix) < 8:
            raise corrupt(f"it has {size} bytes, a header needs at least 8")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _MAX_HEADER):
            if (found := describe_stand_in(os.pread(self._fd, HEAD_BYTES, 0))) is not None:
                raise CheckpointError(f"{self.path} is not a safetensors file: {found}")
            if prefix[:2] == b"PK" or prefix[:1] == b"\x80":
                why = "it looks like pickled PyTorch weights, which are never read; use the safetensors files"
                raise PickledError(str(corrupt(why)))
            raise corrupt(f"its header claims {length} bytes in a file of {size}")
        try:
            header = json.loads(os.pread(self._fd, length, 8), object_pairs_hook=_without_repetition)
            metadata = header.pop("__metadata__", {})
            if not all(type(value) is str for value in metadata.values()):
                raise ValueError("its metadata are not texts")
            infos = []
            for name, entry in header.items():
                lo, hi = map(_count, entry["data_offsets"])
                infos.append((lo, hi, name, tuple(map(_count, entry["shape"])), DTYPES[entry["dtype"]]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise corrupt(f"its header does not parse ({type(e).__name__}: {e})") from e
        start, end = 8 + length, 0
        tensors = {}
        for lo, hi, name, shape, dtype in sorted(infos, key=lambda info: info[:2]):
            if lo != end or hi - lo != _nbytes(shape, dtype):
                raise corrupt(f"{name} has shape {shape} {dtype} but bytes {lo} to {hi}")
            tensors[name] = TensorInfo(shape, dtype, start + lo)
            end = hi
        if start + end > size:
            raise CheckpointError(
                f"{self.path} is cut short: its header describes {start + end:,} bytes, the file has {size:,}. "
                "Download or copy it again."
            )
        return tensors, metadata

    def is_unchanged(self) -> bool:
        """Whether the file at this path is still the one that was opened, and has not changed since."""
        try:
            return _facts(os.stat(self.path)) == self._facts
        except OSError:
            return False

    def check(self, *, required: bool = False) -> None:
        """Compare the file's contents with its checksum.

        Args:
            required: refuse a file without a checksum, since `write_tensors` writes one.

        Raises:
            CheckpointError: they differ.
        """
        if required or _CHECKSUM in self.metadata:
            tensors = {name: self.read(name) for name in self.tensors}
            if _checksum(tensors, self.metadata) != self.metadata.get(_CHECKSUM):
                raise CheckpointError(f"{self.path} is damaged: its checksum does not match its contents.")

    def read(self, name: str, slot: int | None = None) -> np.ndarray:
        """One tensor, or with `slot` one row of its leading axis, as a fresh 64-byte aligned array."""
        info = self.tensors[name]
        shape, offset = info.shape, info.offset
        if slot is not None:
            shape = shape[1:]
            offset += slot * math.prod(shape) * info.dtype.itemsize
        out = aligned_empty(shape, info.dtype)
        self._read_into(out.reshape(-1).view(np.uint8), offset)
        return out

    def mapped(self, name: str) -> np.ndarray | None:
        """One tensor as memory-mapped pages of the file, read from disk on first access; None where XLA:CPU would have
        to copy it.

        It stays valid after `close` and after the file is removed or replaced. Changing it does not change the file.
        """
        info = self.tensors[name]
        if info.offset % _ALIGN or not info.nbytes:
            return None
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        flat = np.frombuffer(self._map, info.dtype, math.prod(info.shape), info.offset)
        return flat.reshape(info.shape)

    def _read_into(self, out: np.ndarray, offset: int) -> None:
        view, done = out.data, 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done : done + (1 << 30)]], offset + done)
            if got <= 0:
                raise CheckpointError(f"{self.path} ended early while being read")
            done += got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a file with a checksum for `TensorFile.check`.

    Raises:
        InputError: it cannot be written.
    """
    whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    with atomic_write(path) as partial:
        save_file(whole, partial, {**metadata, _CHECKSUM: _checksum(whole, metadata)})


def _checksum(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    texts = sorted((name, value) for name, value in metadata.items() if name != _CHECKSUM)
    kinds = [(name, str(value.dtype), value.shape) for name, value in sorted(tensors.items())]
    digest.update(json.dumps([texts, kinds]).encode())
    for _, value in sorted(tensors.items()):
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _facts(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("it names a tensor twice")
    return result


class TensorWriter:
    """Writes a safetensors file whose tensors arrive in any order and in slices of their leading axis.

    tensors: name -> (shape, dtype). The file is allocated at once, so a full disk is an error before work is done.
    Tensors of odd sizes come last, so that all others are aligned for `TensorFile.mapped`. A context manager: leaving
    it flushes to disk, and the file is complete.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], metadata: Mapping[str, str]
    ):
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._places, end = dict[str, tuple[int, np.dtype]](), 0
        for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: _nbytes(*item[1]) % _ALIGN != 0):
            self._places[name], begin = (end, dtype), end
            end += _nbytes(shape, dtype)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self._start = 8 + len(text)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._write(struct.pack("<Q", len(text)) + text, 0)
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(self._fd, 0, self._start + end)
            else:
                os.ftruncate(self._fd, self._start + end)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, name: str, value: np.ndarray, slot: int | None = None) -> None:
        """Fill one tensor, or one row of its leading axis. The caller has checked the shape."""
        begin, dtype = self._places[name]
        offset = self._start + begin + (slot or 0) * value.nbytes
        self._write(np.ascontiguousarray(value, dtype).reshape(-1).view(np.uint8).data, offset)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done : done + (1 << 30)], offset + done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
