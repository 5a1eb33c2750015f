"""What a prediction is, and the plain one: all blocks, the whole clip at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Num

from cogvideox_flax.models.denoiser import Denoiser, Features, Tokens

Embed = Callable[..., Tokens]
"""A family's `embed`, or one of its `positions`."""

Latents = Float32[Array, "B T h w C"]

Cache = Any
"""What a way of predicting keeps from step to step: a pytree of arrays; None if it keeps nothing."""


class StepInfo(NamedTuple):
    """Where in the run a step is.

    timestep, next_timestep: of the scheduler's tables.
    is_full: whether all blocks run, with a step cache whose schedule is known; else None.
    step: its index.
    """

    timestep: Num[Array, ""]
    next_timestep: Num[Array, ""]
    is_full: Bool[Array, ""] | None = None
    step: Any = 0


class Predict(Protocol):
    """What a denoising step asks of a way of predicting: a frozen dataclass, a part of the compiled program."""

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        """The prediction, and the cache for the next step.

        latents, features: of both halves of guidance, where it is on.
        """

    def noise(self, key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        """Standard normal noise for latents of this shape."""


@dataclass(frozen=True)
class Plain:
    """All blocks, the whole clip at once."""

    embed: Embed

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        tokens = self.embed(denoiser, latents, features, info.timestep, next_timestep=info.next_timestep)
        return denoiser.head(denoiser.run_blocks(tokens)).astype(jnp.float32), cache

    def noise(self, key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        return standard_normal(key, shape)


def standard_normal(key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
    """Standard normal whose row b depends on the key and b alone, not on the size of the batch."""
    keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(shape[0]))
    return jax.vmap(lambda key: jax.random.normal(key, shape[1:], jnp.float32))(keys)
