"""Block-sparse attention of a video's tokens: each tile of queries attends to a list of tiles of keys, and to all text.

Which tiles: those around it (sliding tile attention, arXiv 2502.04507), and the most important ones for it (the
selective part of HunyuanVideo 1.5's attention, arXiv 2511.18870; Tencent's `ssta_attention.py`). A tile is a box of
frames, rows and columns, so tokens are brought into the order of tiles first. A grid that tiles do not divide is padded
with zeros, which are attended, as there.

Within its list attention is exact. Queries of the text attend to everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from cogvideox_flax.attention import splash, triton, xla
from cogvideox_flax.attention.tile_lists import TileLists
from cogvideox_flax.nn.platforms import by_platform
from cogvideox_flax.nn.tpu import LANES

Attend = Callable[..., Float[Array, "B Q N K"]]

Grid = tuple[int, int, int]
"""Frames, rows, columns."""


@dataclass(frozen=True)
class SparseTiles:
    """Which tiles of a video attend to which.

    tile: frames, rows and columns of a tile.
    window: how many tiles around each are attended along each axis, itself included; odd. At the edges of the video
        the window does not move out of it.
    selected: how many of the most important tiles, for each tile and head, beside those; some may be in the window.
    similarity: its share in the importance; the rest is how little a tile resembles the others.
    """

    tile: Grid = (6, 8, 8)
    window: Grid = (3, 3, 3)
    selected: int = 0
    similarity: float = 0.7

    @property
    def size(self) -> int:
        """Tokens of a tile."""
        return math.prod(self.tile)

    def counts(self, grid: Grid) -> Grid:
        """Tiles along each axis."""
        frames, rows, columns = (-(-n // size) for n, size in zip(grid, self.tile, strict=True))
        return frames, rows, columns

    def most(self, grid: Grid) -> int:
        """The largest number of video tiles that one attends to."""
        counts = self.counts(grid)
        around = math.prod(map(min, counts, self.window))
        return min(around + self.selected, math.prod(counts))


def attend_in_tiles(
    attend: Attend,
    sparse: SparseTiles,
    grid: Grid,
    queries: int,
    few: int,
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    lengths: Int[Array, " B"] | None,
) -> Float[Array, "B Q N K"]:
    """Attention of video and text in one sequence: sparse for the queries of the video, exact for those of the text.

    Args:
        attend: attend(q, k, v, lengths), exact, for the text.
        grid: of the video's tokens, which come first.
        queries: where the text's queries begin; those between are padding, whose results are zeros.
        few: how many they are. Their keys come after the video's, and then padding that `lengths` masks.
        lengths: how many keys are attended, at least the video's; None: all.
    """
    size = math.prod(grid)
    of_text = q[:, queries : queries + few]
    q, *video = (to_tiles(x[:, :size], grid, sparse.tile) for x in (q, k, v))
    added = q.shape[1] - size
    keys, values = (jnp.concatenate([x, y[:, size:]], 1) for x, y in zip(video, (k, v), strict=True))
    lengths = jnp.full(len(q), k.shape[1]) if lengths is None else lengths
    lengths = (lengths + added).astype(jnp.int32)
    chosen = choose(sparse, grid, q, video[0])
    lists = list_tiles(chosen, sparse.most(grid), -(-(keys.shape[1] - q.shape[1]) // sparse.size))
    out = from_tiles(attend_to_listed(q, keys, values, lists, lengths, size=sparse.size), grid, sparse.tile)
    after = jnp.zeros((*out.shape[:1], queries - size, *out.shape[2:]), out.dtype)
    return jnp.concatenate([out, after, attend(of_text, keys, values, lengths)], 1)


def to_tiles(x: Float[Array, "B S N K"], grid: Grid, tile: Grid) -> Float[Array, "B P N K"]:
    """Tokens in the order of tiles, then of frames, rows and columns in a tile, with zeros where tiles reach out."""
    batch, _, heads, dim = x.shape
    x = x.reshape(batch, *grid, heads, dim)
    x = jnp.pad(x, ((0, 0), *((0, -n % t) for n, t in zip(grid, tile, strict=True)), (0, 0), (0, 0)))
    parts = [n for size, t in zip(x.shape[1:4], tile, strict=True) for n in (size // t, t)]
    return x.reshape(batch, *parts, heads, dim).transpose(0, 1, 3, 5, 2, 4, 6, 7, 8).reshape(batch, -1, heads, dim)


def from_tiles(x: Float[Array, "B P N K"], grid: Grid, tile: Grid) -> Float[Array, "B S N K"]:
    """The inverse of `to_tiles`."""
    batch, _, heads, dim = x.shape
    counts = [-(-n // t) for n, t in zip(grid, tile, strict=True)]
    x = x.reshape(batch, *counts, *tile, heads, dim).transpose(0, 1, 4, 2, 5, 3, 6, 7, 8)
    x = x.reshape(batch, *(n * t for n, t in zip(counts, tile, strict=True)), heads, dim)
    frames, rows, columns = grid
    return x[:, :frames, :rows, :columns].reshape(batch, -1, heads, dim)


def sliding(counts: Grid, window: Grid) -> Bool[np.ndarray, "n n"]:
    """Whether each tile attends to each other: if that lies in the window around it, moved into the video."""
    at = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), 1)  # n 3
    half = np.array(window) // 2
    middle = np.minimum(np.maximum(at, half), np.array(counts) - 1 - half)
    return (abs(middle[:, None] - at[None]) <= half).all(-1)


def choose(
    sparse: SparseTiles, grid: Grid, q: Float[Array, "B P N K"], k: Float[Array, "B P N K"]
) -> Bool[Array, "B N n n"]:
    """Whether each tile attends to each other. q, k: in the order of tiles.

    Source: Tencent's `create_sta_3d_mask` and `importance_sampling`.
    """
    around = jnp.asarray(sliding(sparse.counts(grid), sparse.window))
    batch, tokens, heads, dim = q.shape
    n = tokens // sparse.size
    around = jnp.broadcast_to(around, (batch, heads, n, n))
    if sparse.selected == 0:
        return around

    def direction(x: Float[Array, "B P N K"]) -> Float[Array, "B N n K"]:
        mean = x.reshape(batch, n, sparse.size, heads, dim).mean(2, dtype=jnp.float32).swapaxes(1, 2)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def alike(x: Float[Array, "B N n K"], y: Float[Array, "B N n K"]) -> Float[Array, "B N n n"]:
        return (jnp.einsum("bnik,bnjk->bnij", x, y, precision="highest") + 1) / 2

    queries, keys = direction(q), direction(k)
    others = (alike(keys, keys) * (1 - jnp.eye(n))).sum(2, keepdims=True) / max(n - 1, 1)
    importance = sparse.similarity * alike(queries, keys) - (1 - sparse.similarity) * others
    _, best = jax.lax.top_k(importance, min(sparse.selected, n))
    return around | (best[..., None] == jnp.arange(n)).any(-2)


def list_tiles(chosen: Bool[Array, "B N q n"], most: int, text: int) -> TileLists:
    """The chosen tiles, at most so many, and so many tiles of text after them."""
    n, count = chosen.shape[-1], chosen.sum(-1, dtype=jnp.int32)
    place = jnp.arange(most + text)
    # the place of a chosen tile is the number of those before it
    is_here = chosen[..., None] & (chosen.cumsum(-1)[..., None] - 1 == place)
    ordered = (is_here * jnp.arange(n)[:, None]).sum(-2)
    of_text = jnp.minimum(n + place - count[..., None], n + text - 1)
    return TileLists(jnp.where(place < count[..., None], ordered, of_text), count + text)


def attend_to_listed(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    lists: TileLists,
    kv_len: Int32[Array, " B"],
    *,
    size: int,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v, where each tile of queries attends to the tiles of keys in its list.

    Args:
        q: a whole number of tiles.
        kv_len: keys past it are not attended; at least one in each list is.
        size: tokens of a tile.
    """
    kernels = {}
    if splash.why_not(q) is None and size % LANES == 0:
        kernels["tpu"] = partial(splash.attend_to_listed, (size, False))
    if triton.is_fast(q) and size % triton.LISTED == 0:
        kernels["cuda"] = partial(triton.attend_to_listed, (size, False))
    return by_platform(q, k, v, lists, kv_len, **kernels, default=partial(xla.attend_to_listed, size))
