"""The forms of the step cache by name, and which steps of a run are full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Num

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.predict import parts, step_cache, taylor
from cogvideox_flax.generate.predict.adaptive import FirstBlocks, MagCache, TeaCache, magcache_steps
from cogvideox_flax.generate.predict.parts import AttentionCache, SkippedHalf
from cogvideox_flax.generate.predict.plain import Plain
from cogvideox_flax.generate.predict.step_cache import DeepCache, ResidualCache, StepCache
from cogvideox_flax.generate.predict.taylor import TaylorSeer
from cogvideox_flax.generate.request import THRESHOLDS, FilledRequest
from cogvideox_flax.models.model import VideoModel

DB_BLOCKS = DB_WARM_UP = 8
"""cache-dit's defaults."""


def cache_of(
    form: str,
    plain: Plain,
    model: VideoModel,
    layers: int,
    threshold: float | None = None,
    ratios: Sequence[float] | None = None,
) -> StepCache:
    """A form of the step cache for a model.

    Raises:
        InputError: the model has too few blocks, or there are no coefficients for it.
    """
    limit = THRESHOLDS.get(form, 0.0) if threshold is None else threshold
    match form:
        case "deepcache":
            return DeepCache(plain)
        case "residual":
            return ResidualCache(plain)
        case "taylorseer":
            return TaylorSeer(plain)
        case "pab":
            return AttentionCache(plain)
        case "fastercache":
            return SkippedHalf(plain)
        case "first_block":
            return FirstBlocks(plain, limit)
        case "magcache":
            return MagCache(plain, measures=ratios is None)
        case "dbcache":
            if layers <= DB_BLOCKS:
                raise InputError(f"dbcache computes {DB_BLOCKS} blocks in every step; this model has {layers} in all")
            return FirstBlocks(plain, limit, first=DB_BLOCKS, warm_up=DB_WARM_UP)
    release = "" if model.release is None else model.release.name
    if release not in model.teacache:
        known = ", ".join(model.teacache) or "none of this family"
        raise InputError(f"teacache needs coefficients, which were published for {known}; this model is another one")
    return TeaCache(plain, limit, model.teacache[release])


def is_adaptive(form: str | None) -> bool:
    """Whether a form decides itself which steps are full, by a threshold."""
    return form in THRESHOLDS


def full_steps(request: FilledRequest, timesteps: Num[np.ndarray, " N"]) -> Bool[np.ndarray, " N"] | None:
    """Which of the steps that are done are full; None without a step cache, or if it decides itself."""
    form, steps = request.step_cache, len(timesteps)
    if form is None:
        return None
    if request.step_cache_full is not None:
        return np.isin(np.arange(steps), request.step_cache_full)
    if form == "magcache" and request.step_cache_ratios is not None:
        threshold = request.step_cache_threshold
        return magcache_steps(request.step_cache_ratios, steps, THRESHOLDS[form] if threshold is None else threshold)
    if is_adaptive(form):
        return None
    if request.step_cache_schedule is None:
        match form:
            case "taylorseer":
                return taylor.full_steps(steps)
            case "pab":
                return parts.pab_steps(timesteps)
            case "fastercache":
                return parts.half_steps(timesteps)
    return step_cache.full_steps(request.step_cache_schedule, steps)
