"""The step cache: some steps reuse what most blocks computed in an earlier step.

A full step computes everything and keeps something of the tokens; a cached step leaves out most blocks. The forms of
this module keep what comes before the last block, which a cached step runs, and the head:

deepcache: the tokens themselves are kept. A cached step puts them in the place of its own: of its latents it sees
    nothing, of its timestep the conditioning vector. Source: the reference TPU system; the name is that of DeepCache
    (arXiv 2312.00858), which keeps the deep features of a U-Net.
residual: the sum of the skipped blocks' updates is kept, the tokens before the last block minus the embedded ones. A
    cached step embeds its own latents and adds it.

Which steps are full is an array of the program's inputs (`Run.full_steps`), so one program serves all schedules. Forms
that decide in each step themselves are in `adaptive`; those that keep attentions or predictions, in `parts`. All have a
row in `request.STEP_CACHES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float32, Num

from cogvideox_flax import sharding
from cogvideox_flax.generate.predict.plain import Cache, Latents, Plain, StepInfo
from cogvideox_flax.generate.request import STEP_CACHES
from cogvideox_flax.models.denoiser import Denoiser, Features, Tokens
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.runtime.global_arrays import put
from cogvideox_flax.sharding.tables import devices_of

REFERENCE = (11, 45, 4)
"""START, END and INTERVAL of the reference TPU system, for `REFERENCE_STEPS` steps."""

REFERENCE_STEPS = 50

Ratios = Sequence[float] | None
"""Those that magcache measured in an earlier run."""

SCOPE = "step_cache"
"""The name of the choice between a full and a cached step in the program's operations, by which `plan` finds it."""


@dataclass(frozen=True)
class StepCache:
    """The base of the forms: which blocks always run, which of the tokens a full step keeps, and what a cached step
    makes of them.

    first, last: so many blocks at the beginning and the end run in every step; those between, in full ones.

    Attributes:
        is_small: whether the cache is about as large as the latents, so that files of a stopped run hold it.
    """

    is_small: ClassVar[bool] = False

    inner: Plain

    _: KW_ONLY
    first: int = 0
    last: int = 1

    @classmethod
    def of(cls, plain: Plain, model: VideoModel, layers: int, threshold: float, ratios: Ratios) -> Self:
        """Return the form for a model.

        Args:
            layers: the model's number of blocks.
            threshold, ratios: of the form, if it has them.

        Raises:
            InputError: the form is not for this model.
        """
        return cls(plain)

    @staticmethod
    def default_steps(timesteps: Num[np.ndarray, " N"]) -> Bool[np.ndarray, " N"] | None:
        """Return which steps are full where the request does not say it; None if the form decides itself."""
        return scheduled_steps(None, len(timesteps))

    def shapes(self, denoiser: Denoiser, tokens: Tokens, prediction: jax.ShapeDtypeStruct, steps: int) -> Cache:
        """The cache as shapes: a pytree.

        Args:
            denoiser: as shapes.
            tokens: embedded, as shapes.
            prediction: [P*B, T, h, w, C], P being `Guidance.passes`.
            steps: N, the number of steps that are done.
        """
        return tokens.x

    def decide(
        self, denoiser: Denoiser, info: StepInfo, tokens: Tokens, after_first_blocks: Tokens, cache: Cache
    ) -> tuple[Bool[Array, ""], Cache, Any]:
        """Whether this step is full; the cache then, full or not; and the signal that decided, for `keep`.

        Args:
            tokens: embedded.
            after_first_blocks: after the first blocks.
        """
        assert info.is_full is not None
        return info.is_full, cache, None

    def may_begin(self, step: int, full: Bool[np.ndarray, " N"] | None) -> bool:
        """Whether a loop that begins at this step, with an empty cache, computes what a whole run computes from there.

        Args:
            step: above 0.
            full: which of the steps are full; None if the form decides itself.
        """
        return full is not None and bool(full[step])

    def summary(self, cache: Cache) -> str | None:
        """What there is to say after a run."""
        return None

    def keep(self, before: Any, after_first_blocks: Any, cache: Cache, signal: Any) -> Cache:
        """What a full step keeps, of the tokens before the last blocks and those after the first."""
        raise NotImplementedError

    def reuse(self, cache: Cache, after_first_blocks: Any) -> Any:
        """The tokens before the last blocks of a cached step."""
        raise NotImplementedError

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, cache: Cache
    ) -> tuple[Latents, Cache]:
        tokens: Any = self.inner.embed(denoiser, latents, features, info.timestep, next_timestep=info.next_timestep)
        after_first_blocks = denoiser.run_blocks(tokens, stop=self.first) if self.first else tokens
        is_full, cache, signal = self.decide(denoiser, info, tokens, after_first_blocks, cache)
        stop = -self.last if self.last else None

        def full_step(x: Any, cache: Cache) -> tuple[Any, Cache]:
            before = denoiser.run_blocks(dataclasses.replace(after_first_blocks, x=x), start=self.first, stop=stop).x
            return before, constrain_cache(self.keep(before, x, cache, signal))

        def cached_step(x: Any, cache: Cache) -> tuple[Any, Cache]:
            return self.reuse(cache, x), constrain_cache(cache)

        with jax.named_scope(SCOPE):
            before, cache = jax.lax.cond(is_full, full_step, cached_step, after_first_blocks.x, cache)
        tokens = dataclasses.replace(after_first_blocks, x=before)
        if self.last:
            tokens = denoiser.run_blocks(tokens, start=-self.last)
        return denoiser.head(tokens).astype(jnp.float32), cache

    def noise(self, key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        return self.inner.noise(key, shape)


@dataclass(frozen=True)
class DeepCache(StepCache):
    """The tokens themselves."""

    def keep(self, before: Any, after_first_blocks: Any, cache: Cache, signal: Any) -> Cache:
        return before

    def reuse(self, cache: Cache, after_first_blocks: Any) -> Any:
        return cache


@dataclass(frozen=True)
class ResidualCache(StepCache):
    """The sum of the skipped blocks' updates."""

    def keep(self, before: Any, after_first_blocks: Any, cache: Cache, signal: Any) -> Cache:
        return jax.tree.map(jnp.subtract, before, after_first_blocks)

    def reuse(self, cache: Cache, after_first_blocks: Any) -> Any:
        return jax.tree.map(jnp.add, after_first_blocks, cache)


def class_of(name: str) -> type[StepCache]:
    """Return the class of a form."""
    form: type[StepCache] = resolve_name(f"{__package__}.{STEP_CACHES[name].path}")
    return form


def with_shardings(shapes: Any, mesh: Mesh | None) -> Any:
    """The shapes of a cache, with their shardings."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x.shape, mesh))

    return jax.tree.map(shape, shapes)


def empty(shapes: Any) -> Cache:
    """The cache before the first full step: zeros of `with_shardings`, already split over the devices."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def place(cache: Any, mesh: Mesh | None) -> Cache:
    """The cache where a program expects it."""
    return jax.tree.map(lambda x: put(x, _sharding(x.shape, mesh)), cache)


def _axes(shape: tuple[int, ...], parts: int) -> tuple[str | None, ...]:
    """Tokens [B, S, D], also of each layer, [layers, B, S, D], are split as in the blocks; a stream of them that does
    not divide, such as a short one of text, and what is not tokens, are whole."""
    if len(shape) not in (3, 4):
        return (None,) * len(shape)
    tokens = "batch", "tokens" if shape[-2] % parts == 0 else None, None
    return tokens if len(shape) == 3 else (None, *tokens)


def constrain_cache(cache: Cache) -> Cache:
    """The cache, split over the devices as in `with_shardings`."""

    def constrain(x: Array) -> Array:
        return sharding.constrain(x, *_axes(x.shape, devices_of("tokens"))) if x.ndim in (3, 4) else x

    return jax.tree.map(constrain, cache)


def _sharding(shape: tuple[int, ...], mesh: Mesh | None) -> NamedSharding | None:
    if mesh is None:
        return None
    return sharding.named(mesh, _axes(shape, mesh.shape[sharding.RULES["tokens"]]), shape, "the step cache")


def default_schedule(steps: int) -> list[int]:
    """The reference's schedule with START and END scaled to a number of steps: about half of them are full."""
    start, end, interval = REFERENCE
    first = max(round(start * steps / REFERENCE_STEPS), 1)
    return [first, max(round(end * steps / REFERENCE_STEPS), first), interval]


def scheduled_steps(schedule: Sequence[int] | None, steps: int) -> Bool[np.ndarray, " N"]:
    """Which of N steps are full: those before START, START and every INTERVAL-th after it, and those from END on.

    Args:
        schedule: START, END, INTERVAL; None: `default_schedule`.
        steps: N, the number of steps that are done.
    """
    start, end, interval = default_schedule(steps) if schedule is None else schedule
    i = np.arange(steps)
    return (i < start) | (i >= end) | ((i - start) % interval == 0)
