"""Random values that JAX and PyTorch compute identically on their devices: a hash of a name and of an index.

Either library fills billions of weights in well under a second, without communication. The sum of a hash's four bytes
is close to a normal distribution and an exact integer, so that both libraries round the same number.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

STD = math.sqrt((256**2 - 1) / 3)
"""Standard deviation of the sum of four bytes."""

AT_ONCE = 2**26
"""Values that PyTorch computes at a time: it needs several integers for each."""


CACHED = 2**17
"""Values that NumPy makes at a time."""


@dataclass(frozen=True)
class Values:
    """Values of one array: mean + scale * (about standard normal)."""

    name: str
    scale: float = 1.0
    mean: float = 0.0

    @property
    def seed(self) -> int:
        """An int32."""
        return _signed(zlib.crc32(self.name.encode()))

    @property
    def factor(self) -> float:
        """Of the sum of bytes."""
        return self.scale / STD


def of_weight(name: str, shape: tuple[int, ...]) -> Values:
    """A weight of this name and shape in the released layout: activations stay near unit size, and no gate is zero, no
    scale one and no bias empty. T5's queries are smaller by the root of its head size, as its own start is."""
    if len(shape) > 1:
        scale = math.prod(shape[1:]) ** -0.5
        return Values(name, scale / 8 if name.endswith("SelfAttention.q.weight") else scale)
    return Values(name, 0.2, 1.0 if name.endswith("weight") else 0.0)


def bytes_of(index: Any, seed: Any) -> Any:
    """int32 -510 to 510 for each index; both are int32, arrays of NumPy, JAX or PyTorch. Past 2^31 an index is the
    int32 with its last 32 bits."""
    x = index * _signed(0x9E3779B1) + seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ _right(x, shift)) * _signed(factor)
    x = x ^ _right(x, 16)
    return (x & 255) + (_right(x, 8) & 255) + (_right(x, 16) & 255) + (_right(x, 24) & 255) - 510


def _signed(n: int) -> int:
    """The int32 with the last 32 bits of n."""
    return (n + 2**31) % 2**32 - 2**31


def _right(x: Any, by: int) -> Any:
    """Logical right shift of int32."""
    return (x >> by) & (2 ** (32 - by) - 1)


def in_jax(values: Values, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The array, to be jitted."""
    return traced(values.seed, values.factor, values.mean, shape, dtype)


def traced(seed: Any, factor: Any, mean: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`in_jax` with values that are known only when it runs, so that one program makes many arrays."""
    import jax
    import jax.numpy as jnp

    strides = [_signed(math.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    index = sum((jax.lax.broadcasted_iota(jnp.int32, shape, i) * n for i, n in enumerate(strides)), jnp.int32(0))
    total = bytes_of(index, seed).astype(jnp.float32)
    return (total * jnp.float32(factor) + jnp.float32(mean)).astype(dtype)


def in_numpy(values: Values, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array, in pieces that stay in a CPU's cache."""
    out = np.empty(math.prod(shape), dtype)
    for start in range(0, out.size, CACHED):
        index = np.arange(start, min(start + CACHED, out.size)).astype(np.int32)
        total = bytes_of(index, np.int32(values.seed)).astype(np.float32)
        out[start : start + len(index)] = total * np.float32(values.factor) + np.float32(values.mean)
    return out.reshape(shape)


def in_torch(values: Values, out: Any) -> Any:
    """The tensor `out`, which is contiguous, filled."""
    import torch

    flat = out.view(-1)
    for start in range(0, flat.numel(), AT_ONCE):
        end = min(start + AT_ONCE, flat.numel())
        total = bytes_of(torch.arange(start, end, device=out.device).to(torch.int32), values.seed)
        flat[start:end] = (total.float() * values.factor + values.mean).to(out.dtype)
    return out
