"""Decoding: latents to frames; a whole clip at once, or a long one in chunks, so that memory does not grow with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, UInt8

from cogvideox_flax import sharding
from cogvideox_flax.io.video import to_uint8
from cogvideox_flax.models.codec import Codec
from cogvideox_flax.runtime.compile import Program

Frames = UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"]


@dataclass(frozen=True)
class Decode(Program):
    """Normalized latents to frames, and whether all of it is finite.

    as_float: give float32 in [0, 1], not uint8.
    """

    codec: Codec
    as_float: bool
    tiling: bool

    name = "VAE decoder"
    fast_compile = True

    def __call__(self, model: Any, latents: Float32[Array, "B T h w C"]) -> tuple[Frames, Bool[Array, ""]]:
        return _to_frames(self.codec.decode(model, latents, self.tiling), self.as_float)

    def mesh_for(self, mesh: Mesh | None, *args: Any) -> Mesh | None:
        return mesh if mesh is None or self.tiling else sharding.image_mesh(mesh, args[1].shape)


@dataclass(frozen=True)
class DecodeChunk(Program):
    """A chunk of a clip, and the cache of the chunk before (None for the first), to frames, finite, and the cache."""

    codec: Codec
    as_float: bool

    name = "VAE decoder"
    donate = ("cache",)
    fast_compile = True

    def __call__(
        self, model: Any, latents: Float32[Array, "B t h w C"], cache: Any
    ) -> tuple[Frames, Bool[Array, ""], Any]:
        video, cache = self.codec.decode_chunk(model, latents, cache)
        return *_to_frames(video, self.as_float), cache

    def mesh_for(self, mesh: Mesh | None, *args: Any) -> Mesh | None:
        return mesh if mesh is None else sharding.image_mesh(mesh, args[1].shape)


def _to_frames(video: Float32[Array, "B F H W 3"], as_float: bool) -> tuple[Frames, Bool[Array, ""]]:
    """A video in about [-1, 1] as frames, and whether all of it is finite."""
    frames = jnp.clip(video / 2 + 0.5, 0, 1) if as_float else to_uint8(video)
    return frames, jnp.isfinite(video).all()
