"""The step cache that extrapolates predictions: between full steps it computes nothing of the model.

A full step keeps its prediction F and the difference to that of the full step before, for each step between the two; a
cached step takes F + d * difference, d being the steps since. Source: TaylorSeer (arXiv 2503.06923) of first order, in
diffusers' lite form, which extrapolates the model's output alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from cogvideox_flax.generate.predict.plain import At, Kept
from cogvideox_flax.generate.predict.step_cache import SCOPE, StepCache
from cogvideox_flax.models.denoiser import Denoiser, Features, Tokens

WARM_UP, INTERVAL = 3, 5
"""diffusers' defaults: so many full steps at the beginning, then one in so many."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extrapolated:
    """What is kept of the last full step.

    prediction: [P*B, T, h, w, C].
    difference: of the last two full steps, for each step.
    step: its index, counted from 1; 0 before the first.
    """

    prediction: Any
    difference: Any
    step: Any


@dataclass(frozen=True)
class TaylorSeer(StepCache):
    """taylorseer."""

    is_small: ClassVar[bool] = True

    def may_begin(self, step: int, full: Bool[np.ndarray, " N"] | None) -> bool:
        assert full is not None
        return bool(full[step : step + 2].all())  # a cached step needs the difference of two full ones

    def kept(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> Extrapolated:
        return Extrapolated(prediction, prediction, jax.ShapeDtypeStruct((), jnp.int32))

    def __call__(
        self, denoiser: Denoiser, latents: Float32[Array, "B T h w C"], features: Features, at: At, kept: Kept
    ) -> tuple[Float32[Array, "B T h w C"], Kept]:
        assert at.is_full is not None

        def full_step(latents: Any, kept: Extrapolated) -> tuple[Any, Extrapolated]:
            prediction, _ = self.inner(denoiser, latents, features, at, None)
            # `step` counts from 1, so that the zeros before the first full step say that there is none
            between = jnp.maximum(at.step + 1 - kept.step, 1)
            difference = jnp.where(kept.step > 0, (prediction - kept.prediction) / between, 0.0)
            return prediction, Extrapolated(prediction, difference, jnp.int32(at.step + 1))

        def cached_step(latents: Any, kept: Extrapolated) -> tuple[Any, Extrapolated]:
            return kept.prediction + (at.step + 1 - kept.step) * kept.difference, kept

        with jax.named_scope(SCOPE):
            return jax.lax.cond(at.is_full, full_step, cached_step, latents, kept)


def full_steps(steps: int) -> Bool[np.ndarray, " N"]:
    """Which of N steps are full: those before WARM_UP, then every INTERVAL-th, so that the first comes after a cached
    step (0, 1, 2, 4, 9, 14, ...)."""
    i = np.arange(steps)
    return (i < WARM_UP) | ((i - WARM_UP - 1) % INTERVAL == 0)
