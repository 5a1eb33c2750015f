"""Step caches that keep attentions or predictions in place of tokens.

taylorseer: a full step keeps its prediction F and the difference to that of the full step before, for each step between
    the two. A cached step computes nothing of the model: it takes F + d * difference, d being the steps since. Source:
    TaylorSeer (arXiv 2503.06923) of first order, in diffusers' lite form, which extrapolates the model's output alone.
pab: a cached step takes what each attention returned in the last full step, and computes the rest of the blocks.
    Source: pyramid attention broadcast (arXiv 2408.12588), as diffusers' hook: every attention of the blocks, reused
    once.
fastercache: a cached step computes the half of guidance with the prompt alone. The other half is that plus the
    difference that the two had in the last full step, whose low and high frequencies are amplified in each cached step.
    Source: FasterCache (arXiv 2410.19355, equations 9 and 10), as diffusers' hook without its attentions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Num

from cogvideox_flax import sharding
from cogvideox_flax.generate.predict.plain import Cache, Latents, StepInfo
from cogvideox_flax.generate.predict.step_cache import SCOPE, StepCache, constrain_cache
from cogvideox_flax.models.denoiser import Denoiser, Features, Tokens

TAYLOR_WARM_UP, TAYLOR_EVERY = 3, 5
"""diffusers' defaults: so many full steps at the beginning, then one in so many."""

PAB_TIMESTEPS, PAB_EVERY = (100, 800), 2
"""diffusers' defaults: between these timesteps, one step in so many is full."""

HALF_TIMESTEPS, HALF_EVERY = 641, 5
"""diffusers' defaults: below this timestep, one step in so many has both halves."""
AMPLIFY = 1.1
LOW_TIMESTEPS, HIGH_TIMESTEPS = (99, 901), (-1, 301)
"""Timesteps in which a cached step multiplies the cached low and high frequencies by `AMPLIFY`: diffusers' defaults."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extrapolated:
    """The cache of taylorseer: of the last full step.

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

    @staticmethod
    def default_steps(timesteps: Num[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        i = np.arange(len(timesteps))  # full: 0, 1, 2, 4, 9, 14, ...
        return (i < TAYLOR_WARM_UP) | ((i - TAYLOR_WARM_UP - 1) % TAYLOR_EVERY == 0)

    def may_begin(self, step: int, full: Bool[np.ndarray, " N"] | None) -> bool:
        assert full is not None
        return bool(full[step : step + 2].all())  # a cached step needs the difference of two full ones

    def shapes(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> Extrapolated:
        return Extrapolated(prediction, prediction, jax.ShapeDtypeStruct((), jnp.int32))

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        assert info.is_full is not None

        def full_step(latents: Any, cache: Extrapolated) -> tuple[Any, Extrapolated]:
            prediction, _ = self.inner(denoiser, latents, features, info, None)
            # `step` counts from 1, so that the zeros before the first full step say that there is none
            between = jnp.maximum(info.step + 1 - cache.step, 1)
            difference = jnp.where(cache.step > 0, (prediction - cache.prediction) / between, 0.0)
            return prediction, Extrapolated(prediction, difference, jnp.int32(info.step + 1))

        def cached_step(latents: Any, cache: Extrapolated) -> tuple[Any, Extrapolated]:
            return cache.prediction + (info.step + 1 - cache.step) * cache.difference, cache

        with jax.named_scope(SCOPE):
            return jax.lax.cond(info.is_full, full_step, cached_step, latents, cache)


@dataclass(frozen=True)
class PyramidBroadcast(StepCache):
    """pab."""

    @staticmethod
    def default_steps(timesteps: Num[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        low, high = PAB_TIMESTEPS
        i = np.arange(len(timesteps))
        return (i % PAB_EVERY == 0) | (timesteps <= low) | (timesteps >= high)

    def shapes(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> Cache:
        return jax.eval_shape(lambda denoiser, tokens: denoiser.run_attended(tokens)[1], denoiser, tokens)

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        assert info.is_full is not None
        tokens: Any = self.inner.embed(denoiser, latents, features, info.timestep, next_timestep=info.next_timestep)

        def full_step(tokens: Any, cache: Cache) -> tuple[Any, Cache]:
            tokens, attended = denoiser.run_attended(tokens)
            return tokens, constrain_cache(attended)

        def cached_step(tokens: Any, cache: Cache) -> tuple[Any, Cache]:
            return denoiser.run_attended(tokens, cache)[0], constrain_cache(cache)

        with jax.named_scope(SCOPE):
            tokens, cache = jax.lax.cond(info.is_full, full_step, cached_step, tokens, cache)
        return denoiser.head(tokens).astype(jnp.float32), cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Difference:
    """The cache of fastercache: the low and the high frequencies of the prediction without the prompt minus that with
    it, [B, T, h, w, C]."""

    low: Any
    high: Any


@dataclass(frozen=True)
class FasterCache(StepCache):
    """fastercache. Latents and features are those of both halves, without the prompt first."""

    is_small: ClassVar[bool] = True

    @staticmethod
    def default_steps(timesteps: Num[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        i = np.arange(len(timesteps))
        return (i % HALF_EVERY == 0) | (timesteps >= HALF_TIMESTEPS)

    def shapes(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> Difference:
        half = jax.ShapeDtypeStruct((prediction.shape[0] // 2, *prediction.shape[1:]), jnp.float32)
        return Difference(half, half)

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        assert info.is_full is not None

        def full_step(latents: Any, features: Features, cache: Difference) -> tuple[Any, Difference]:
            prediction, _ = self.inner(denoiser, latents, features, info, None)
            without, with_prompt = jnp.split(prediction, 2)
            difference = without - with_prompt
            low = low_frequencies(difference)
            return prediction, Difference(low, difference - low)

        def cached_step(latents: Any, features: Features, cache: Difference) -> tuple[Any, Difference]:
            latents, features = jax.tree.map(_second_half, (latents, features))
            with_prompt, _ = self.inner(denoiser, latents, features, info, None)
            low = cache.low * _amplification(info.timestep, LOW_TIMESTEPS)
            high = cache.high * _amplification(info.timestep, HIGH_TIMESTEPS)
            return jnp.concatenate([with_prompt + low + high, with_prompt]), Difference(low, high)

        with jax.named_scope(SCOPE):
            return jax.lax.cond(info.is_full, full_step, cached_step, latents, features, cache)


def low_frequencies(x: Float32[Array, "B T h w C"]) -> Float32[Array, "B T h w C"]:
    """Those of each frame, from a constant to a fifth of the smaller side in waves a side."""
    height, width = x.shape[2:4]
    waves = [np.fft.fftfreq(n, 1 / n) for n in (height, width)]
    is_low = np.add.outer(waves[0] ** 2, waves[1] ** 2) <= (min(height, width) // 5) ** 2
    spectrum = jnp.fft.fft2(x, axes=(2, 3))
    return jnp.fft.ifft2(spectrum * is_low[:, :, None], axes=(2, 3)).real


def _amplification(timestep: Num[Array, ""], between: tuple[int, int]) -> Float32[Array, ""]:
    return jnp.where((between[0] < timestep) & (timestep < between[1]), AMPLIFY, 1.0)


def _second_half(x: Array) -> Array:
    return sharding.constrain(x.reshape(2, -1, *x.shape[1:])[1], "batch")
