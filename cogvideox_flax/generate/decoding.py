"""Latents to frames: a whole clip by one program, or a long clip in pieces, so that memory does not grow with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float32

from cogvideox_flax import sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.generate.abstract import abstract_weights, shape_on
from cogvideox_flax.generate.functions import Frames, Function, make_decode, to_frames
from cogvideox_flax.models.family import ModelFamily
from cogvideox_flax.runtime.compile import ProgramSpec

Programs = list[tuple[ProgramSpec, tuple[Any, ...], int]]
"""For each: the spec; its arguments as shapes, with their shardings; how often it runs."""


def decoding(family: ModelFamily, output_type: str, tiled: bool) -> ProgramSpec:
    """(decoder, scaled latents) -> (frames, finite). output_type: "float" gives float32 in [0, 1], else uint8."""
    given = family.decode, "float" if output_type == "float" else "uint8", tiled
    return ProgramSpec("VAE decoder", make_decode, given, fast_compile=True)


def decoding_piece(family: ModelFamily, output_type: str) -> ProgramSpec:
    """(decoder, a piece of scaled latents, cache of the piece before) -> (frames, finite, cache)."""
    assert family.decode_piece is not None
    given = family.decode_piece, "float" if output_type == "float" else "uint8"
    return ProgramSpec("VAE decoder", make_decode_piece, given, donate=("cache",), fast_compile=True)


def make_decode_piece(decode: Function, output_type: str) -> Callable[..., tuple[Frames, Bool[Array, ""], Any]]:
    """As `make_decode`, for a piece of a clip and the cache of the piece before; None for the first."""

    def decode_piece(
        model: Any, latents: Float32[Array, "B t h w C"], cache: Any
    ) -> tuple[Frames, Bool[Array, ""], Any]:
        video, cache = decode(model, latents, cache)
        return *to_frames(video, output_type), cache

    return decode_piece


def decode_programs(
    manifest: Manifest, dtype: str, shape: tuple[int, ...], mesh: Mesh | None, how: tuple[str, bool], pieces: bool
) -> Programs:
    """The programs that decode scaled latents of a shape [B, T, h, w, C].

    how: output type, and whether in tiles. pieces: clip by clip, piece by piece.
    """
    family = manifest.model_family
    model = abstract_weights(manifest, family.decoder, dtype, mesh)
    if not pieces:
        return [(decoding(family, *how), (model, shape_on(jax.ShapeDtypeStruct(shape, jnp.float32), mesh)), 1)]
    spec = decoding_piece(family, how[0])
    sizes = family.decoder_pieces(shape[1])
    runs = Counter((size, i > 0) for i, size in enumerate(sizes))
    found: Programs = []
    cache = None
    for (size, _), count in runs.items():
        latents = shape_on(jax.ShapeDtypeStruct((1, size, *shape[2:]), jnp.float32), mesh)
        found.append((spec, (model, latents, cache), shape[0] * count))
        if cache is None:
            *_, cache = jax.eval_shape(spec.function(), model, latents, None)
            cache = jax.tree.map(partial(_cache_on, mesh=mesh, latents=latents.shape), cache)
    return found


def _cache_on(x: jax.ShapeDtypeStruct, mesh: Mesh | None, latents: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    if mesh is None:
        return x
    where = NamedSharding(mesh, sharding.spatial_layout(mesh, latents, x.ndim))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
