"""Step caches that decide in each step whether it is full, by how much a signal has changed.

The signal and the blocks that are left out:

teacache: the family's `teacache_signal`, against that of the step before. A polynomial, fitted for each release, makes
    of the relative change an estimate of the output's; the sum of these since the last full step is compared with the
    threshold. A cached step runs no block, and adds the last full step's sum of updates to its own tokens. Source:
    TeaCache (arXiv 2411.19108), its authors' code for CogVideoX, LightX2V's for HunyuanVideo-1.5.
first_block, dbcache: what the first blocks add to the video tokens, against what they added in the last full step. A
    cached step runs these blocks and adds the update of the others. Source: diffusers' `FirstBlockCache` (one block,
    threshold 0.05), cache-dit's DBCache (eight blocks, 0.08, the first eight steps full).
magcache: how much smaller the sum of all blocks' updates of the video tokens became from step to step, a ratio that is
    measured once for a model, scheduler and number of steps; the schedule is then known before a run. A cached step
    runs no block. Source: MagCache (arXiv 2506.09045), diffusers' hook.

A change is mean |x - previous| / mean |previous|, over all videos, both halves of guidance and all devices: one number,
so one decision. Decisions are recorded, and `StepInfo.is_full` takes the place of them: a run can be replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Num

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.predict.plain import Plain, StepInfo
from cogvideox_flax.generate.predict.step_cache import Ratios, StepCache
from cogvideox_flax.models.denoiser import Denoiser, Tokens
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.runtime.global_arrays import fetch

UNKNOWN, CACHED, FULL = 0, 1, 2
"""In `AdaptiveState.full`. A step not done yet, or done in an earlier process, is unknown: it begins as zeros."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptiveState:
    """The cache of an adaptive form.

    full: int8 [N], of each step `UNKNOWN`, `CACHED` or `FULL`.
    errors: [N], of each step what was compared with the threshold.
    update: the sum of the skipped blocks' updates in the last full step.
    previous_signal: what the next step is compared with.
    accumulated_error: since the last full step.
    """

    full: Any
    errors: Any
    update: Any
    previous_signal: Any
    accumulated_error: Any


@dataclass(frozen=True)
class UpdateCache(StepCache):
    """The base of the forms that keep the sum of the skipped blocks' updates, and which steps were full."""

    _: KW_ONLY
    last: int = 0

    @staticmethod
    def default_steps(timesteps: Num[np.ndarray, " N"]) -> None:
        return None

    def shapes(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> AdaptiveState:
        number, numbers = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((steps,), jnp.float32)
        return AdaptiveState(jax.ShapeDtypeStruct((steps,), jnp.int8), numbers, tokens.x, number, number)

    def keep(self, before: Any, after_first_blocks: Any, cache: AdaptiveState, signal: Any) -> AdaptiveState:
        return dataclasses.replace(cache, update=jax.tree.map(jnp.subtract, before, after_first_blocks))

    def reuse(self, cache: AdaptiveState, after_first_blocks: Any) -> Any:
        return jax.tree.map(jnp.add, after_first_blocks, cache.update)


@dataclass(frozen=True)
class AdaptiveCache(UpdateCache):
    """The base of the forms that decide themselves.

    threshold: of the error; above it a step is full.
    """

    threshold: float

    @classmethod
    def of(cls, plain: Plain, model: VideoModel, layers: int, threshold: float, ratios: Ratios) -> Self:
        return cls(plain, threshold)

    def summary(self, cache: AdaptiveState) -> str | None:
        """What a run has decided, in a line, and how to do the same again; None where that was known before."""
        full = fetch(cache.full)
        steps = np.flatnonzero(full == FULL).tolist()
        again = "" if (full == UNKNOWN).any() else f"; --step-cache-full {','.join(map(str, steps))} makes the same"
        return f"{len(steps)} of {(full != UNKNOWN).sum()} steps were full{again}"

    def signal(self, denoiser: Denoiser, tokens: Tokens, after_first_blocks: Tokens) -> Float32[Array, ...]:
        """What is compared with that of an earlier step."""
        raise NotImplementedError

    def always_full(self, step: Any, steps: int) -> Bool[Array, ""]:
        """Whether a step is full whatever the error."""
        raise NotImplementedError

    def error(self, signal: Any, cache: AdaptiveState) -> Float32[Array, ""]:
        """What is compared with the threshold."""
        raise NotImplementedError

    def shapes(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> AdaptiveState:
        previous_signal = jax.eval_shape(self.signal, denoiser, tokens, tokens)
        return dataclasses.replace(super().shapes(denoiser, tokens, prediction, steps), previous_signal=previous_signal)

    def decide(
        self, denoiser: Denoiser, info: StepInfo, tokens: Tokens, after_first_blocks: Tokens, cache: AdaptiveState
    ) -> tuple[Bool[Array, ""], AdaptiveState, Any]:
        signal, steps = self.signal(denoiser, tokens, after_first_blocks), cache.full.shape[0]
        error = self.error(signal, cache)
        # without a full step in memory there is nothing to reuse
        is_full = self.always_full(info.step, steps) | ~(cache.full == FULL).any() | (error > self.threshold)
        if info.is_full is not None:
            is_full = info.is_full
        cache = dataclasses.replace(
            cache,
            full=_recorded(cache.full, info.step, is_full),
            errors=cache.errors.at[info.step].set(error),
            accumulated_error=jnp.where(is_full, 0.0, error),
        )
        return is_full, cache, signal


@dataclass(frozen=True)
class FirstBlocks(AdaptiveCache):
    """first_block.

    first: so many blocks run in every step.
    warm_up: so many steps at the beginning are full.
    """

    _: KW_ONLY
    first: int = 1
    warm_up: int = 0

    def signal(self, denoiser: Denoiser, tokens: Tokens, after_first_blocks: Tokens) -> Float32[Array, "B n D"]:
        return after_first_blocks.video - tokens.video

    def always_full(self, step: Any, steps: int) -> Bool[Array, ""]:
        return step < self.warm_up

    def error(self, signal: Any, cache: AdaptiveState) -> Float32[Array, ""]:
        return relative_change(signal, cache.previous_signal)

    def keep(self, before: Any, after_first_blocks: Any, cache: AdaptiveState, signal: Any) -> AdaptiveState:
        return dataclasses.replace(super().keep(before, after_first_blocks, cache, signal), previous_signal=signal)


@dataclass(frozen=True)
class DBCache(FirstBlocks):
    """dbcache, with cache-dit's defaults."""

    _: KW_ONLY
    first: int = 8
    warm_up: int = 8

    @classmethod
    def of(cls, plain: Plain, model: VideoModel, layers: int, threshold: float, ratios: Ratios) -> Self:
        if layers <= cls.first:
            raise InputError(f"dbcache computes {cls.first} blocks in every step; this model has {layers} in all")
        return super().of(plain, model, layers, threshold, ratios)


@dataclass(frozen=True)
class TeaCache(AdaptiveCache):
    """teacache.

    coefficients: of the polynomial, that of the highest power first.
    """

    coefficients: tuple[float, ...]

    @classmethod
    def of(cls, plain: Plain, model: VideoModel, layers: int, threshold: float, ratios: Ratios) -> Self:
        release = "" if model.release is None else model.release.name
        if release not in model.teacache:
            known = ", ".join(model.teacache) or "none of this family"
            raise InputError(
                f"teacache needs coefficients, which were published for {known}; this model is another one"
            )
        return cls(plain, threshold, model.teacache[release])

    def signal(self, denoiser: Denoiser, tokens: Tokens, after_first_blocks: Tokens) -> Float32[Array, "B ..."]:
        return denoiser.teacache_signal(tokens)

    def always_full(self, step: Any, steps: int) -> Bool[Array, ""]:
        return (step == 0) | (step == steps - 1)

    def error(self, signal: Any, cache: AdaptiveState) -> Float32[Array, ""]:
        change = relative_change(signal, cache.previous_signal)
        return cache.accumulated_error + jnp.polyval(jnp.array(self.coefficients, jnp.float32), change)

    def decide(
        self, denoiser: Denoiser, info: StepInfo, tokens: Tokens, after_first_blocks: Tokens, cache: AdaptiveState
    ) -> tuple[Bool[Array, ""], AdaptiveState, Any]:
        is_full, cache, signal = super().decide(denoiser, info, tokens, after_first_blocks, cache)
        # each step is compared with the one before
        return is_full, dataclasses.replace(cache, previous_signal=signal), signal


@dataclass(frozen=True)
class MagCache(UpdateCache):
    """magcache.

    measures: the ratios, in a run of full steps; else the schedule is known.
    """

    _: KW_ONLY
    measures: bool = False

    @classmethod
    def of(cls, plain: Plain, model: VideoModel, layers: int, threshold: float, ratios: Ratios) -> Self:
        return cls(plain, measures=ratios is None)

    def may_begin(self, step: int, full: Bool[np.ndarray, " N"] | None) -> bool:
        return full is None or bool(full[step])  # while it measures, all steps are full

    def summary(self, cache: AdaptiveState) -> str | None:
        full, ratios = fetch(cache.full), fetch(cache.errors)
        if not self.measures:
            return None
        if (full == UNKNOWN).any():
            return "the ratios of magcache were not measured at all steps; run it again from the beginning"
        return f"measured for magcache: --step-cache-ratios {','.join(f'{ratio:.5g}' for ratio in ratios)}"

    def decide(
        self, denoiser: Denoiser, info: StepInfo, tokens: Tokens, after_first_blocks: Tokens, cache: AdaptiveState
    ) -> tuple[Bool[Array, ""], AdaptiveState, Any]:
        is_full = jnp.array(True) if info.is_full is None else info.is_full
        cache = dataclasses.replace(cache, full=_recorded(cache.full, info.step, is_full))
        return is_full, cache, (tokens, info.step)

    def keep(
        self, before: Any, after_first_blocks: Any, cache: AdaptiveState, signal: tuple[Tokens, Any]
    ) -> AdaptiveState:
        after = super().keep(before, after_first_blocks, cache, signal)
        if not self.measures:
            return after
        tokens, step = signal
        norm, previous_norm = (
            jnp.linalg.norm(dataclasses.replace(tokens, x=x).video, axis=-1)  # type: ignore[type-var]
            for x in (after.update, cache.update)
        )
        ratio = jnp.where(step == 0, 1.0, (norm / (previous_norm + 1e-8)).mean())
        return dataclasses.replace(after, errors=cache.errors.at[step].set(ratio))


MAX_SKIPS, RETENTION = 3, 0.2
"""diffusers' defaults for magcache: so many cached steps in a row; a first share of the steps is full."""


def magcache_steps(ratios: Sequence[float], steps: int, threshold: float) -> Bool[np.ndarray, " N"]:
    """Which of N steps are full with magcache.

    Args:
        ratios: measured at so many steps; for another number the nearest is taken.
    """
    places = np.round(np.arange(steps) * (len(ratios) - 1) / max(steps - 1, 1)).astype(int)
    full, ratio, error, skipped = np.ones(steps, bool), 1.0, 0.0, 0
    for i in range(int(RETENTION * steps + 0.5), steps):
        ratio *= ratios[places[i]]
        skipped += 1
        error += abs(1 - ratio)
        full[i] = i == 0 or error > threshold or skipped > MAX_SKIPS
        if full[i]:
            ratio, error, skipped = 1.0, 0.0, 0
    return full


def _recorded(full: Array, step: Any, is_full: Bool[Array, ""]) -> Array:
    return full.at[step].set(jnp.where(is_full, FULL, CACHED).astype(jnp.int8))


def relative_change(signal: Float32[Array, ...], previous: Float32[Array, ...]) -> Float32[Array, ""]:
    """mean |signal - previous| / mean |previous|; infinite where there was none."""
    return jnp.abs(signal - previous).mean() / jnp.abs(previous).mean()
