"""Latents to frames: a whole clip by one program, or a long clip in pieces, so that memory does not grow with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float32, UInt8

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.generate.abstract import abstract_weights, shape_on
from cogvideox_flax.io.video import to_uint8
from cogvideox_flax.runtime.compile import Program

Frames = UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"]
Function = Callable[..., Any]

Programs = list[tuple[Program, tuple[Any, ...], int]]
"""For each: the program; its arguments as shapes, with their shardings; how often it runs."""


@dataclass(frozen=True)
class Decode(Program):
    """Scaled latents to frames, and whether all of it is finite.

    decode: of the family.
    as_float: give float32 in [0, 1], not uint8.
    """

    decode: Function
    as_float: bool
    tiled: bool

    name = "VAE decoder"
    fast_compile = True

    def __call__(self, model: Any, latents: Float32[Array, "B T h w C"]) -> tuple[Frames, Bool[Array, ""]]:
        return _to_frames(self.decode(model, latents, self.tiled), self.as_float)


@dataclass(frozen=True)
class DecodePiece(Program):
    """A piece of a clip, and the cache of the piece before (None for the first), to frames, finite, and the cache.

    decode: the family's `decode_piece`.
    """

    decode: Function
    as_float: bool

    name = "VAE decoder"
    donate = ("cache",)
    fast_compile = True

    def __call__(
        self, model: Any, latents: Float32[Array, "B t h w C"], cache: Any
    ) -> tuple[Frames, Bool[Array, ""], Any]:
        video, cache = self.decode(model, latents, cache)
        return *_to_frames(video, self.as_float), cache


def _to_frames(video: Float32[Array, "B F H W 3"], as_float: bool) -> tuple[Frames, Bool[Array, ""]]:
    """A video in about [-1, 1] as frames, and whether all of it is finite."""
    frames = jnp.clip(video / 2 + 0.5, 0, 1) if as_float else to_uint8(video)
    return frames, jnp.isfinite(video).all()


def decode_programs(
    manifest: Manifest, dtype: str, shape: tuple[int, ...], mesh: Mesh | None, how: tuple[bool, bool], pieces: bool
) -> Programs:
    """The programs that decode scaled latents of a shape [B, T, h, w, C].

    how: `Decode.as_float` and `tiled`. pieces: clip by clip, piece by piece.
    """
    family = manifest.model_family
    model = abstract_weights(manifest, family.decoder, dtype, mesh)
    if not pieces:
        return [(Decode(family.decode, *how), (model, shape_on(jax.ShapeDtypeStruct(shape, jnp.float32), mesh)), 1)]
    assert family.decode_piece is not None
    program = DecodePiece(family.decode_piece, how[0])
    sizes = family.decoder_pieces(shape[1])
    runs = Counter((size, i > 0) for i, size in enumerate(sizes))
    found: Programs = []
    cache = None
    for (size, _), count in runs.items():
        latents = shape_on(jax.ShapeDtypeStruct((1, size, *shape[2:]), jnp.float32), mesh)
        found.append((program, (model, latents, cache), shape[0] * count))
        if cache is None:
            *_, cache = jax.eval_shape(program, model, latents, None)
            cache = jax.tree.map(partial(_cache_on, mesh=mesh, latents=latents.shape), cache)
    return found


def _cache_on(x: jax.ShapeDtypeStruct, mesh: Mesh | None, latents: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    if mesh is None:
        return x
    where = NamedSharding(mesh, sharding.spatial_layout(mesh, latents, x.ndim))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
