"""GGUF files, through the `gguf` package (the extra of this name): read as `TensorFile` reads safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.errors import ConversionError, install_extra
from cogvideox_flax.io.tensor_file import DTYPES, TensorInfo

_FLOATS = {"F64": DTYPES["F64"], "F32": DTYPES["F32"], "F16": DTYPES["F16"], "BF16": DTYPES["BF16"]}
_SHAPE = "comfy.gguf.orig_shape."  # of a tensor with more axes than GGUF has


class GGUFFile:
    """A GGUF file open for reading; quantized tensors are dequantized.

    quantized: the names of the forms of its quantized tensors.

    Raises:
        ConversionError: the package is not installed, or the file is damaged.
    """

    def __init__(self, path: Path):
        try:
            import gguf
        except ImportError as e:
            raise ConversionError(
                f"{path} is a GGUF file, which takes the gguf package to read: {install_extra('gguf')}"
            ) from e
        self.path, self._facts = path, _facts(path)
        try:
            reader = gguf.GGUFReader(path)
        except Exception as e:  # of damaged files it raises whatever its parts do
            raise ConversionError(f"{path} is not a valid GGUF file: {e}. Download or copy it again.") from e
        self._dequantize = gguf.quants.dequantize
        self._entries: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.quantized = sorted({t.tensor_type.name for t in reader.tensors} - _FLOATS.keys())
        self.tensors: dict[str, TensorInfo] = {}
        for name, tensor in self._entries.items():
            stated = reader.get_field(_SHAPE + name)
            shape = reversed(tensor.shape) if stated is None else stated.contents()
            # what is quantized is at most as precise as bfloat16
            dtype = _FLOATS.get(tensor.tensor_type.name, DTYPES["BF16"])
            self.tensors[name] = TensorInfo(tuple(map(int, shape)), dtype, int(tensor.data_offset))

    def read(self, name: str) -> np.ndarray:
        """A tensor in its own dtype; in float32 if it is quantized or bfloat16."""
        tensor = self._entries[name]
        data = np.asarray(tensor.data)
        value = data if data.dtype.kind == "f" else self._dequantize(data, tensor.tensor_type)
        return np.array(value).reshape(self.tensors[name].shape)

    def is_unchanged(self) -> bool:
        """Whether the file at this path has not changed since it was opened."""
        return _facts(self.path) == self._facts

    def close(self) -> None:
        """Let go of the mapped file."""
        self._entries = {}


def _facts(path: Path) -> tuple[int, ...]:
    stat = os.stat(path)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
