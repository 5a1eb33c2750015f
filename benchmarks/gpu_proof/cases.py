"""The cases of attention and convolution: sizes and values. Needs neither JAX nor PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu_proof.errors import sample_indices
from benchmarks.gpu_proof.values import Values

HEAD_SCALES = (1.0, 2.0, 4.0)
"""Scales of the queries, head by head in turn: from attention that averages all keys to attention that takes a few."""

TAPS = 3
"""Of the autoencoder's convolutions, in time, height and width."""

ENOUGH_S = 12.0
"""After this many seconds of timed runs, two runs are enough."""

NATIVE_CONV3D = "native 3-D convolution"
"""A form of convolution that this library does not use on an NVIDIA GPU."""


@dataclass(frozen=True)
class Attention:
    """Attention over `tokens` queries and keys.

    kv_len: real keys of each batch element; keys past it have large values that must not be attended.
    part: the keys in two halves, merged by their log_sum_exp.
    backend: of `attend`. interpret: on a machine without a GPU.
    queries: how many are compared with the reference, in `sampled_heads`.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    dim: int = 64
    dtype: str = "bfloat16"
    backend: str = "auto"
    kv_len: tuple[int, ...] | None = None
    part: bool = False
    interpret: bool = False
    queries: int = 512
    repeat: int = 5

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of q, k and v."""
        return self.batch, self.tokens, self.heads, self.dim

    @property
    def sampled_heads(self) -> np.ndarray:
        """Heads that are compared on many queries: the first three have all of `HEAD_SCALES`."""
        found = np.unique([0, 1, 2, self.heads // 2, self.heads - 1])
        return found[found < self.heads]

    def values(self) -> dict[str, Values]:
        """Of q, before `HEAD_SCALES`, k and v: the same for all cases of a shape."""
        return {name: Values(f"{name} {self.shape}") for name in "qkv"}

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and an attended key."""
        keys = self.kv_len or (self.tokens,) * self.batch
        return self.tokens * sum(keys)

    @property
    def flops(self) -> int:
        return 4 * self.pairs * self.heads * self.dim


def attention_of(options: dict[str, Any]) -> Attention:
    """From JSON, where tuples are lists."""
    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in options.items()}
    return Attention(**fields)


@dataclass(frozen=True)
class Convolution:
    """A convolution of the decoder: valid over `frames + taps - 1` frames, zero-padded in space.

    form: "conv3d", this library's; or `NATIVE_CONV3D`, one 3-D convolution of cuDNN, to test whether it is right.
    positions: outputs that are compared, all channels of each.
    """

    name: str
    frames: int
    height: int
    width: int
    channels: int
    out_channels: int
    taps: int = TAPS
    dtype: str = "bfloat16"
    form: str = "conv3d"
    positions: int = 512
    repeat: int = 5

    @property
    def flops(self) -> int:
        pixels = self.frames * self.height * self.width
        return 2 * self.taps * TAPS**2 * pixels * self.channels * self.out_channels

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 1, self.frames + self.taps - 1, self.height, self.width, self.channels

    @property
    def output_shape(self) -> tuple[int, ...]:
        return 1, self.frames, self.height, self.width, self.out_channels

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """In the released layout, [out, in, time, height, width]."""
        return self.out_channels, self.channels, self.taps, TAPS, TAPS

    def values(self) -> tuple[Values, Values, Values]:
        """Of the input (B T H W C), the kernel (in the released layout) and the bias."""
        scale = (self.channels * self.taps * TAPS**2) ** -0.5
        return Values(f"x {self.input_shape}"), Values(f"kernel {self.kernel_shape}", scale), Values("bias", 0.2)

    def points(self) -> np.ndarray:
        """(frame, row, column) of the outputs that are compared: int [positions, 3], corners and edges among them."""
        sides = (self.frames, self.height, self.width)
        found = [sample_indices(n, min(n, self.positions), seed) for seed, n in enumerate(sides)]
        random = np.random.default_rng(0)
        columns = [random.choice(indices, self.positions) for indices in found]
        columns = [
            np.concatenate([[0, n - 1], column])[: self.positions] for n, column in zip(sides, columns, strict=True)
        ]
        return np.stack(columns, 1)
