"""The step cache: some steps reuse what the blocks before the last one computed in an earlier step.

A full step computes everything and keeps something of the tokens before the last block; a cached step runs the last
block and the head alone. There are two forms:

deepcache: the tokens themselves are kept. A cached step puts them in the place of its own: of its latents it sees
    nothing, of its timestep the conditioning vector. Source: the reference TPU system; the name is that of DeepCache
    (arXiv 2312.00858), which keeps the deep features of a U-Net.
residual: the sum of the skipped blocks' updates is kept, the tokens before the last block minus the embedded ones. A
    cached step embeds its own latents and adds it.

Which steps are full is an array of the program's inputs (`step_schedule.full_steps`), so one program serves all
schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float32

from cogvideox_flax import sharding
from cogvideox_flax.models.denoiser import Denoiser, Tokens
from cogvideox_flax.runtime.global_arrays import put
from cogvideox_flax.sharding.tables import devices_of

SCOPE = "step_cache"
"""The name of the choice between a full and a cached step in the program's operations, by which `plan` finds it."""

Kept = Any
"""What a full step keeps: a pytree like `Tokens.x`, of float32 [B, S, D]; B is doubled with guidance."""


def predict_with_cache(
    form: str,
    embed: Callable[[], Tokens],
    denoiser: Denoiser,
    is_full: Bool[Array, ""],
    kept: Kept,
) -> tuple[Float32[Array, "B T h w C"], Kept]:
    """The prediction of one step, and what is kept after it.

    Args:
        form: "deepcache" or "residual".
        embed: the family's, with its arguments.
        is_full: whether this step is full; may be traced.
        kept: by the last full step; anything before the first.
    """

    tokens: Any = embed()

    def full_step(x: Any, kept: Kept) -> tuple[Any, Kept]:
        before = denoiser.run_blocks(dataclasses.replace(tokens, x=x), stop=-1).x
        new = before if form == "deepcache" else jax.tree.map(jnp.subtract, before, x)
        return before, jax.tree.map(_constrain, new)

    def cached_step(x: Any, kept: Kept) -> tuple[Any, Kept]:
        before = kept if form == "deepcache" else jax.tree.map(jnp.add, x, kept)
        return before, jax.tree.map(_constrain, kept)

    with jax.named_scope(SCOPE):
        before, kept = jax.lax.cond(is_full, full_step, cached_step, tokens.x, kept)
    last = denoiser.run_blocks(dataclasses.replace(tokens, x=before), start=-1)
    return denoiser.head(last).astype(jnp.float32), kept


def kept_shapes(streams: Any, mesh: Mesh | None) -> Any:
    """What is kept, as shapes with their shardings, for `Tokens.x` as shapes."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x.shape, mesh))

    return jax.tree.map(shape, streams)


def empty(shapes: Any) -> Kept:
    """What there is before the first full step: zeros of `kept_shapes`, already split over the devices."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def place(kept: Any, mesh: Mesh | None) -> Kept:
    """What is kept, where a program expects it."""
    return jax.tree.map(lambda x: put(x, _sharding(x.shape, mesh)), kept)


def _axes(shape: tuple[int, ...], parts: int) -> tuple[str | None, ...]:
    """Split as tokens are; a stream whose tokens do not divide, such as a short one of text, is whole."""
    return "batch", "tokens" if shape[1] % parts == 0 else None, None


def _constrain(x: Float32[Array, "B S D"]) -> Float32[Array, "B S D"]:
    return sharding.constrain(x, *_axes(x.shape, devices_of("tokens")))


def _sharding(shape: tuple[int, ...], mesh: Mesh | None) -> NamedSharding | None:
    if mesh is None:
        return None
    return sharding.named(mesh, _axes(shape, mesh.shape[sharding.RULES["tokens"]]), shape, "the step cache")
