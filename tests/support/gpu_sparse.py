"""Checks of block-sparse attention, against its definition in float32 for some tiles and heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from benchmarks.vs_diffusers.cases import PROMPT_TOKENS, RELEASED, Case
from cogvideox_flax.attention import SparseTiles, triton
from cogvideox_flax.attention.sparse_tiles import Grid, attend_to_listed, choose, list_tiles
from cogvideox_flax.models.hunyuan_video15.model import sparse_tiles
from tests.support.gpu_attention import HEAD_SCALES, backend_of, definition
from tests.support.gpu_errors import compiled, error, fault, sample_indices, why_no_memory

HEADS = 3
"""That are compared with the reference: those of `HEAD_SCALES`."""

NEEDED_GIB = 8.0
"""At the released sizes, about."""


@dataclass(frozen=True)
class Sparse:
    """Attention of a video's tokens, already in the order of tiles, and of a prompt's keys after them.

    lengths: how many of the prompt's keys each batch element has; keys past them have large values that must not be
    attended. tiles: how many are compared with the reference. interpret: on a machine without a GPU.
    """

    name: str
    sparse: SparseTiles
    grid: Grid
    text: int
    lengths: tuple[int, ...]
    heads: int
    dim: int
    tiles: int = 6
    interpret: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def video(self) -> int:
        """Tokens of the video with its padding."""
        return math.prod(self.sparse.counts(self.grid)) * self.sparse.size


def cases(*, small: bool = False, interpret: bool = False) -> list[Sparse]:
    """HunyuanVideo-1.5's two forms at the size that it was made for; small: to try the checks, interpret: without a
    GPU."""
    at = Case("transformer", *RELEASED[-1], None, "bfloat16", "gpu", False)
    config, grid = at.configs["transformer"], (at.latent_frames, at.height // 16, at.width // 16)

    def case(name: str, *, selective: bool) -> Sparse:
        sparse, text = sparse_tiles(at.latent_frames, selective=selective), at.tokens - math.prod(grid)
        if not small:
            return Sparse(name, sparse, grid, text, (PROMPT_TOKENS, 23), config.heads, config.head_dim)
        sparse = replace(sparse, tile=(2, 8, 8), window=(1, 3, 3), selected=min(sparse.selected, 1))
        return Sparse(name, sparse, (4, 8, 24), 150, (140, 23), HEADS, 64, tiles=3, interpret=interpret)

    return [case("sliding", selective=False), case("selective", selective=True)]


def inputs(case: Sparse) -> tuple[Array, Array, Array]:
    """q of the video; k and v of video and prompt; to be jitted."""
    shapes = [(len(case.lengths), case.video + text, case.heads, case.dim) for text in (0, case.text, case.text)]
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    past = (jnp.arange(k.shape[1]) >= case.video + jnp.asarray(case.lengths)[:, None])[..., None, None]
    k, v = jnp.where(past, jnp.asarray(30, k.dtype), k), jnp.where(past, jnp.asarray(1e4, v.dtype), v)
    return q * jnp.resize(jnp.asarray(HEAD_SCALES, q.dtype), (case.heads,))[:, None], k, v


def program(case: Sparse, q: Array, k: Array, v: Array, lengths: Int[Array, " B"]) -> Float[Array, "B Q N K"]:
    """Chooses the tiles and attends to them; to be jitted."""
    sparse = case.sparse
    chosen = choose(sparse, case.grid, q, k[:, : case.video])
    lists = list_tiles(chosen, sparse.most(case.grid), -(-case.text // sparse.size))
    if case.interpret:
        return triton.attend_to_listed((sparse.size, True), q, k, v, lists, lengths)
    return attend_to_listed(q, k, v, lists, lengths, size=sparse.size)


@partial(jax.jit, static_argnums=0)
def reference(
    case: Sparse, q: Array, k: Array, v: Array, chosen: Bool[Array, "B N n n"], tiles: Array
) -> tuple[Float32[Array, "B t q N K"], Float32[Array, "B t q N K"]]:
    """`definition` of these tiles, all keys with a mask. q, k, v: of the heads that are compared."""
    size = case.sparse.size

    def one(at: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        batch, head, tile = at
        here = jax.lax.dynamic_slice_in_dim(q[batch, :, head], tile * size, size)
        text = jnp.arange(case.text) < jnp.asarray(case.lengths)[batch]
        seen = jnp.concatenate([chosen[batch, head, tile].repeat(size), text])
        return definition(here, k[batch, :, head], v[batch, :, head], seen, q.dtype)

    shape = len(case.lengths), q.shape[2], len(tiles)
    batch, head, tile = (jnp.asarray(x).ravel() for x in np.indices(shape))
    outs = jax.lax.map(one, (batch, head, tiles[tile]))
    exactly, rounded = (x.reshape(*shape, size, case.dim).transpose(0, 2, 3, 1, 4) for x in outs)
    return exactly, rounded


def check(case: Sparse) -> dict[str, Any]:
    """Errors and seconds; "fault" says what is wrong, "skip" why it cannot be tried here."""
    if why := why_no_memory(NEEDED_GIB):
        return {"skip": why}
    q, k, v = jax.jit(partial(inputs, case))()
    lengths = case.video + jnp.asarray(case.lengths, jnp.int32)
    out, text, times = compiled(partial(program, case), q, k, v, lengths)
    tiles = sample_indices(case.video // case.sparse.size, case.tiles, 2)
    chosen = jax.jit(partial(choose, case.sparse, case.grid))(q, k[:, : case.video])
    few = [x[:, :, :HEADS] for x in (q, k, v)]
    exact, rounded = reference(case, *few, chosen, jnp.asarray(tiles))
    seen = out.reshape(len(out), -1, case.sparse.size, *out.shape[2:])[:, tiles, :, :HEADS]
    errors, rounding = (error(x, exact, (0, 1, 2, 4)) for x in (seen.astype(jnp.float32), rounded))
    faults = [] if bool(jnp.isfinite(out).all()) else ["not all outputs are finite"]
    if why := fault(errors, rounding):
        faults.append(why)
    found: dict[str, Any] = {
        "backend": backend_of(text, case.interpret),
        "share of tiles": float(chosen.mean()),
        **times,
    }
    return found | {"error": errors, "rounding": rounding, "fault": "; ".join(faults)}
