"""The step cache: some steps reuse what the blocks before the last one computed in an earlier step.

A full step computes everything and keeps something of the tokens before the last block; a cached step runs the last
block and the head alone. There are two forms:

deepcache: the tokens themselves are kept. A cached step puts them in the place of its own: of its latents it sees
    nothing, of its timestep the conditioning vector. Source: the reference TPU system; the name is that of DeepCache
    (arXiv 2312.00858), which keeps the deep features of a U-Net.
residual: the sum of the skipped blocks' updates is kept, the tokens before the last block minus the embedded ones. A
    cached step embeds its own latents and adds it.

Which steps are full is an array of the program's inputs (`full_steps`), so one program serves all
schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float32

from cogvideox_flax import sharding
from cogvideox_flax.generate.predict.plain import At, Kept, Plain
from cogvideox_flax.models.denoiser import Denoiser, Features
from cogvideox_flax.runtime.global_arrays import put
from cogvideox_flax.sharding.tables import devices_of

REFERENCE = (11, 45, 4)
"""START, END and INTERVAL of the reference TPU system, for `REFERENCE_STEPS` steps."""

REFERENCE_STEPS = 50

SCOPE = "step_cache"
"""The name of the choice between a full and a cached step in the program's operations, by which `plan` finds it."""


@dataclass(frozen=True)
class StepCache:
    """The base of the forms: which of the tokens a full step keeps, and what a cached step makes of them.

    What is kept is a pytree like `Tokens.x`, of float32 [P*B, S, D], P being `Guidance.passes`.
    """

    inner: Plain

    def keep(self, before: Any, embedded: Any) -> Kept:
        """What a full step keeps, of the tokens before the last block and the embedded ones."""
        raise NotImplementedError

    def reuse(self, kept: Kept, embedded: Any) -> Any:
        """The tokens before the last block of a cached step."""
        raise NotImplementedError

    def __call__(
        self, denoiser: Denoiser, latents: Float32[Array, "B T h w C"], features: Features, at: At, kept: Kept
    ) -> tuple[Float32[Array, "B T h w C"], Kept]:
        assert at.is_full is not None
        tokens: Any = self.inner.embed(denoiser, latents, features, at.timestep, next_timestep=at.next_timestep)

        def full_step(x: Any, kept: Kept) -> tuple[Any, Kept]:
            before = denoiser.run_blocks(dataclasses.replace(tokens, x=x), stop=-1).x
            return before, jax.tree.map(_constrain, self.keep(before, x))

        def cached_step(x: Any, kept: Kept) -> tuple[Any, Kept]:
            return self.reuse(kept, x), jax.tree.map(_constrain, kept)

        with jax.named_scope(SCOPE):
            before, kept = jax.lax.cond(at.is_full, full_step, cached_step, tokens.x, kept)
        last = denoiser.run_blocks(dataclasses.replace(tokens, x=before), start=-1)
        return denoiser.head(last).astype(jnp.float32), kept

    def noise(self, key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        return self.inner.noise(key, shape)


@dataclass(frozen=True)
class DeepCache(StepCache):
    """The tokens themselves."""

    def keep(self, before: Any, embedded: Any) -> Kept:
        return before

    def reuse(self, kept: Kept, embedded: Any) -> Any:
        return kept


@dataclass(frozen=True)
class ResidualCache(StepCache):
    """The sum of the skipped blocks' updates."""

    def keep(self, before: Any, embedded: Any) -> Kept:
        return jax.tree.map(jnp.subtract, before, embedded)

    def reuse(self, kept: Kept, embedded: Any) -> Any:
        return jax.tree.map(jnp.add, embedded, kept)


FORMS: dict[str, type[StepCache]] = {"deepcache": DeepCache, "residual": ResidualCache}
"""By the names in `request.STEP_CACHES`."""


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


def default_schedule(steps: int) -> list[int]:
    """The reference's schedule with START and END scaled to a number of steps: about half of them are full."""
    start, end, interval = REFERENCE
    first = max(round(start * steps / REFERENCE_STEPS), 1)
    return [first, max(round(end * steps / REFERENCE_STEPS), first), interval]


def full_steps(schedule: Sequence[int] | None, steps: int) -> Bool[np.ndarray, " N"]:
    """Which of N steps are full: those before START, START and every INTERVAL-th after it, and those from END on.

    Args:
        schedule: START, END, INTERVAL; None: `default_schedule`.
        steps: N, the number of steps that are done.
    """
    start, end, interval = default_schedule(steps) if schedule is None else schedule
    i = np.arange(steps)
    return (i < start) | (i >= end) | ((i - start) % interval == 0)
