"""Positions of tokens: rotary tables (5b, 1.5) and additive sine-cosine tables (2b).

Both factor over the three axes: per-axis tables are computed on the host, in the reference's precision, and broadcast
to full tables inside the compiled program, which then has no large constants.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

THETA = 10000.0
Rotary = tuple[Float32[Array, "S half"], Float32[Array, "S half"]]


def _crop(grid: tuple[int, int], base: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The centred region of the training grid with the aspect ratio of `grid`: ((top, left), (bottom, right)).

    Source: diffusers `get_resize_crop_region_for_grid`; rounding is Python's (half to even).
    """
    (h, w), (base_h, base_w) = grid, base
    if h / w > base_h / base_w:
        height, width = base_h, round(base_h / h * w)
    else:
        height, width = round(base_w / w * h), base_w
    top, left = round((base_h - height) / 2), round((base_w - width) / 2)
    return (top, left), (top + height, left + width)


def axis_positions(
    grid: tuple[int, int, int], base: tuple[int, int] | None
) -> tuple[Float32[np.ndarray, " T"], Float32[np.ndarray, " h"], Float32[np.ndarray, " w"]]:
    """Token positions along time, height and width.

    Args:
        grid: (T, h, w) tokens.
        base: the training grid (h, w) whose coordinates the tokens are resized to (1.0 releases); None counts tokens
            (1.5 releases).
    """
    frames, h, w = grid
    time = np.arange(frames, dtype=np.float32)
    if base is None:
        return time, np.arange(h, dtype=np.float32), np.arange(w, dtype=np.float32)
    start, stop = _crop((h, w), base)
    # the reference ends at stop * (n - 1) / n, with `stop` not relative to `start`: a crop that does not start at 0 has
    # a step slightly different from 1
    rows, columns = (
        np.linspace(a, b * (n - 1) / n, n, dtype=np.float32) for a, b, n in zip(start, stop, (h, w), strict=True)
    )
    return time, rows, columns


def riflex(frequencies: Float32[np.ndarray, " k"], trained: int, length: int) -> Float32[np.ndarray, " k"]:
    """Frequencies along time for clips longer than those of the training: RIFLEx.

    A video repeats itself after the period of one frequency, the first whose period is longer than the training's
    clips. That one is lowered, so that the new length is 0.9 of its period; the others stay.
    Source: RIFLEx (arXiv 2502.15894), section 4.

    Args:
        frequencies: radians per position, falling.
        trained, length: positions along time, in training and now.
    """
    slow = np.flatnonzero(2 * np.pi / frequencies > trained)
    if not len(slow):
        return frequencies
    lowered = frequencies.copy()
    lowered[slow[0]] = min(frequencies[slow[0]], np.float32(0.9 * 2 * np.pi / length))
    return lowered


def rotary(
    grid: tuple[int, int, int], head_dim: int, base: tuple[int, int] | None, riflex_from: int | None = None
) -> Rotary:
    """cos and sin of each video token's rotation, one per pair of channels, tokens in order t, h, w.

    The head is split 2:3:3 between time, height and width. float32 [T*h*w, head_dim / 2] each.
    Source: diffusers `get_3d_rotary_pos_embed`.

    Args:
        riflex_from: positions along time in training, to lower a frequency by `riflex`; None: as trained.
    """
    dims = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    return rotary_of(axis_positions(grid, base), dims, riflex_from=riflex_from)


def rotary_of(
    axes: Sequence[Float32[np.ndarray, " n"]],
    dims: Sequence[int],
    theta: float = THETA,
    riflex_from: int | None = None,
) -> Rotary:
    """cos and sin of the rotations of a grid of tokens, the last axis fastest.

    Args:
        axes: positions along each axis, such as time, height and width.
        dims: channels of a head that each axis rotates.
        theta: of the frequencies theta^(-2 i / dim).
        riflex_from: as for `rotary`.
    """
    grid, head_dim, parts = tuple(map(len, axes)), sum(dims), []
    for axis, (positions, dim) in enumerate(zip(axes, dims, strict=True)):
        frequency = (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(np.float32)
        if axis == 0 and riflex_from is not None:
            frequency = riflex(frequency, riflex_from, grid[0])
        angle = np.outer(positions, frequency)
        shape = [*[1] * len(axes), dim // 2]
        shape[axis] = len(positions)
        parts.append([jnp.broadcast_to(f(angle).reshape(shape), (*grid, dim // 2)) for f in (np.cos, np.sin)])
    cos, sin = (jnp.concatenate(part, -1).reshape(-1, head_dim // 2) for part in zip(*parts, strict=True))
    return cos, sin


def pad_rotary(table: Rotary, before: int, after: int) -> Rotary:
    """The table with rows that rotate by zero, for text tokens before and padding after the video tokens."""
    cos, sin = table
    rows = ((before, after), (0, 0))
    return jnp.pad(cos, rows, constant_values=1.0), jnp.pad(sin, rows)


def rotate(x: Float[Array, "B S N K"], table: Rotary) -> Float[Array, "B S N K"]:
    """Rotate the channel pairs (i, i + K / 2) of each token by its row of the table.

    Computed in float32, returned in x's dtype. Source: RoFormer (arXiv 2104.09864).
    """
    return _rotate(x.reshape(*x.shape[:-1], 2, -1), table, -2).reshape(x.shape)


def rotate_interleaved(x: Float[Array, "B S N K"], table: Rotary) -> Float[Array, "B S N K"]:
    """As `rotate`, the channel pairs (2 i, 2 i + 1), as in diffusers."""
    return _rotate(x.reshape(*x.shape[:-1], -1, 2), table, -1).reshape(x.shape)


def _rotate(pairs: Float[Array, "B S N i j"], table: Rotary, axis: int) -> Float[Array, "B S N i j"]:
    """axis: of the two channels of a pair."""
    cos, sin = (jnp.expand_dims(part, (1, axis)) for part in table)
    y = pairs.astype(jnp.float32)
    # a TPU fuses a flip of the halves; split and concatenate would write them to memory
    return (y * cos + jnp.flip(y, axis) * jnp.concatenate([-sin, sin], axis)).astype(pairs.dtype)


def _sincos_1d(positions: np.ndarray, dim: int) -> np.ndarray:
    """[sin | cos] at dim / 2 frequencies, float64 on the host."""
    omega = THETA ** -(np.arange(dim // 2, dtype=np.float64) / (dim / 2))
    angle = np.outer(positions, omega)
    return np.concatenate([np.sin(angle), np.cos(angle)], -1)


def sincos(
    grid: tuple[int, int, int], width: int, spatial_scale: float, temporal_scale: float
) -> Float32[Array, "S D"]:
    """Additive positions of the video tokens, order t, h, w; channels [time D/4 | width 3D/8 | height 3D/8].

    Positions are divided by the interpolation scales. float32 [T*h*w, width].
    Source: diffusers `get_3d_sincos_pos_embed`.
    """
    frames, h, w = grid
    time = _sincos_1d(np.arange(frames) / temporal_scale, width // 4)
    rows, columns = (_sincos_1d(np.arange(n) / spatial_scale, width * 3 // 8) for n in (h, w))
    parts = (time[:, None, None], columns[None, None, :], rows[None, :, None])
    parts32 = [jnp.broadcast_to(p.astype(np.float32), (*grid, p.shape[-1])) for p in parts]
    return jnp.concatenate(parts32, -1).reshape(-1, width)
