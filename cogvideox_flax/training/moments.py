"""Adam's moments in 8 bit: in blocks, each with a scale, rounded at random.

After arXiv 2110.02861, with another code: levels are evenly spaced in the logarithm, over 16 octaves below a block's
largest value. The second moment is stored as its square root. Rounded to the nearest level, an average that changes by
less than half a level in a step would never move, and rounded up it would never fall; rounded at random, it moves as it
should on average. The random numbers are a function of the step's number, so that a resumed run gives the same bits.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32, Key, Num

from cogvideox_flax.runtime.settings import random_key

_BLOCK = 256
_MIN_BLOCK = 8
_MIN_SIZE = 4096
"""Parameters of fewer values keep moments of float32."""
_OCTAVES = 16


class Adam8BitState(NamedTuple):
    """Each moment as codes, of the shape of the parameter, and a scale per block. `root_nu` is the square root of the
    second moment."""

    steps: Int32[Array, ""]
    mu: Any
    mu_scale: Any
    root_nu: Any
    root_nu_scale: Any


def scale_by_adam_8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments in 8 bit."""
    adam = optax.scale_by_adam(b1, b2, eps)

    def encode(state: Any) -> Adam8BitState:
        keys = jax.random.split(jax.random.fold_in(random_key(0), state.count))
        root_nu = jax.tree.map(jnp.sqrt, state.nu)
        scales = [jax.tree.map(_scale, moment) for moment in (state.mu, root_nu)]
        mu = jax.tree.map(partial(_code, key=keys[0], dtype=jnp.int8), state.mu, scales[0])
        root_nu = jax.tree.map(partial(_code, key=keys[1], dtype=jnp.uint8), root_nu, scales[1])
        return Adam8BitState(state.count, mu, scales[0], root_nu, scales[1])

    def decode(state: Adam8BitState) -> optax.ScaleByAdamState:
        mu = jax.tree.map(_value, state.mu, state.mu_scale)
        root_nu = jax.tree.map(_value, state.root_nu, state.root_nu_scale)
        return optax.ScaleByAdamState(state.steps, mu, jax.tree.map(jnp.square, root_nu))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Adam8BitState]:
        updates, after = adam.update(updates, decode(state), params)
        return updates, encode(after)

    return optax.GradientTransformation(lambda params: encode(adam.init(params)), update)


def _block(shape: tuple[int, ...]) -> int | None:
    """The size of a block; None: the moments stay float32."""
    if math.prod(shape) < _MIN_SIZE:
        return None
    block = max(size for size in range(1, _BLOCK + 1) if shape[-1] % size == 0)
    return block if block >= _MIN_BLOCK else None


def _blocks(x: Array, block: int) -> Array:
    """[..., n] -> [..., block, n / block].

    The values of a block are not neighbours: where the last axis is split over devices, each has a part of every block,
    and only their largest values are exchanged.
    """
    return x.reshape(*x.shape[:-1], block, -1)


def _scale(x: Float32[Array, "*shape n"]) -> Float32[Array, "*shape blocks"]:
    block = _block(x.shape)
    return jnp.zeros(1) if block is None else jnp.abs(_blocks(x, block)).max(-2)


def _code(
    x: Float32[Array, "*shape"], scale: Float32[Array, "*blocks"], *, key: Key[Array, ""], dtype: Any
) -> Num[Array, "*shape"]:
    """0 for 0; else the sign times the level, 1 to the largest number of the dtype, which is the scale itself."""
    block = _block(x.shape)
    if block is None:
        return x
    top, parts = jnp.iinfo(dtype).max, _blocks(x, block)
    level = top + (top - 1) / _OCTAVES * jnp.log2(jnp.abs(parts) / scale[..., None, :])
    level = jnp.clip(jnp.floor(level + jax.random.uniform(key, level.shape)), 1, top)
    return (jnp.sign(parts) * jnp.where(parts == 0, 0, level)).astype(dtype).reshape(x.shape)


def _value(code: Num[Array, "*shape"], scale: Float32[Array, "*blocks"]) -> Float32[Array, "*shape"]:
    """The inverse of `_code`, but for the rounding."""
    block = _block(code.shape)
    if block is None:
        return code
    top, parts = jnp.iinfo(code.dtype).max, _blocks(code, block).astype(jnp.float32)
    size = jnp.exp2((jnp.abs(parts) - top) * (_OCTAVES / (top - 1))) * scale[..., None, :]
    return (jnp.sign(parts) * size).reshape(code.shape)
