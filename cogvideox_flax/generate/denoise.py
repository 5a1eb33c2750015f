"""Denoising: one step and the loop as programs, and the loop as a generator of its states."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from cogvideox_flax import sharding
from cogvideox_flax.errors import NonFiniteError
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.generate.guidance import Guidance, GuidanceInputs, SkipLayer, Unguided
from cogvideox_flax.generate.predict import step_cache
from cogvideox_flax.generate.predict.plain import Predict, StepInfo
from cogvideox_flax.runtime.compile import CompiledProgram, Program
from cogvideox_flax.runtime.global_arrays import fetch, replicate
from cogvideox_flax.runtime.profiling import ProfilingOptions
from cogvideox_flax.runtime.settings import random_key
from cogvideox_flax.schedulers import Scheduler, StepTable

MIN_ROWS = 64
"""Of the tables of a step; longer ones have a power of two."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseInputs:
    """What does not change from step to step.

    conditioning: None where the program makes its own.
    steps: the scheduler's tables.
    guidance: its scale at each step.
    noise_source: a key from which each step's noise is drawn, or the noise of all steps [N, B, T, h, w, C].
    full_steps: which steps are full, with a step cache that does not decide itself; else None.
    guided_steps: which steps have guidance, where not all have; else None.
    skip_layer_steps: which have skip-layer guidance, where there is any; else None.
    """

    conditioning: Conditioning | None
    steps: StepTable
    guidance: Float32[Any, " N"]
    noise_source: Any
    full_steps: Bool[Any, " N"] | None = None
    guided_steps: Bool[Any, " N"] | None = None
    skip_layer_steps: Bool[Any, " N"] | None = None

    def padded(self) -> DenoiseInputs:
        """The same with tables of one of a few lengths, so that one compiled step serves every number of steps."""
        missing = max(MIN_ROWS, 1 << (len(self.steps) - 1).bit_length()) - len(self.steps)

        def pad(table: np.ndarray) -> np.ndarray:
            return np.pad(table, [(0, missing), *[(0, 0)] * (table.ndim - 1)], "edge")

        names = "steps", "guidance", "full_steps", "guided_steps", "skip_layer_steps"
        return replace(self, **{name: jax.tree.map(pad, getattr(self, name)) for name in names})

    def info(self, i: Int32[Array, ""]) -> StepInfo:
        """Where step i is, which may be traced."""
        is_full = None if self.full_steps is None else self.full_steps[i]
        return StepInfo(self.steps.timesteps[i], self.steps.next_timesteps[i], is_full, i)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseState:
    """Where the denoising loop is, between two steps.

    step: how many are done.
    latents: after them; scaled, with the extra latent frames.
    scheduler_state: the scheduler's own state, from `Scheduler.step`: a pytree of arrays.
    cache: what `predict` keeps from step to step.
    extra_latents: latent frames at the start that are not decoded.
    scheduler: the kind of the one that made it.
    """

    step: Int32[Any, ""]
    latents: Float32[Any, "B T h w C"]
    scheduler_state: Any
    cache: Any = None
    extra_latents: int = field(default=0, metadata={"static": True})
    scheduler: str = field(default="", metadata={"static": True})

    @property
    def video_latents(self) -> Float32[Any, "B T-extra h w C"]:
        """The latents as the decoder takes them: without the extra latent frames."""
        return self.latents[:, self.extra_latents :]

    def __repr__(self) -> str:
        return f"<DenoiseState after step {self.step}: latents {list(self.latents.shape)}>"


@dataclass(frozen=True)
class DenoiseStep(Program):
    """One evaluation of the denoiser, guidance, and the scheduler's step."""

    predict: Predict
    guidance: Guidance
    scheduler: Scheduler
    same_noise: bool = False
    skip_layer: SkipLayer | None = None

    name = "denoising step"

    def __call__(self, model: Any, inputs: DenoiseInputs, state: DenoiseState) -> tuple[DenoiseState, Bool[Array, ""]]:
        """The next state, and whether its latents are finite."""
        i, x = state.step, state.latents
        if inputs.guided_steps is None:
            prediction, cache = self._guided(self.guidance, model, inputs, state)
        else:
            forms = self.guidance, Unguided()
            each = [partial(self._guided, form) for form in forms]
            prediction, cache = jax.lax.cond(inputs.guided_steps[i], *each, model, inputs, state)
        noise = self._noise(inputs.noise_source, i, x.shape) if self.scheduler.needs_noise else None
        x, scheduler_state = self.scheduler.step(inputs.steps, i, prediction, x, state.scheduler_state, noise)
        x, scheduler_state = jax.tree.map(sharding.constrain, (x, scheduler_state))
        after = replace(state, step=i + 1, latents=x, scheduler_state=scheduler_state, cache=cache)
        return after, jnp.isfinite(x).all()

    def _guided(
        self, guidance: Guidance, model: Any, inputs: DenoiseInputs, state: DenoiseState
    ) -> tuple[Float32[Array, "B T h w C"], Any]:
        """The prediction for each video, and the cache for the next step."""
        assert inputs.conditioning is not None
        i, x = state.step, state.latents
        batch, features = guidance.batch(x), guidance.features(inputs.conditioning)
        prediction, cache = self.predict(model, batch, features, inputs.info(i), state.cache)
        shift: Any = 0.0
        if self.skip_layer is not None:
            assert inputs.skip_layer_steps is not None
            args = model, x, Unguided().features(inputs.conditioning), inputs.info(i), prediction[-len(x) :]
            nothing = partial(lambda x, *_: jnp.zeros_like(x), x)
            shift = jax.lax.cond(inputs.skip_layer_steps[i], self.skip_layer, nothing, *args)
        return guidance(prediction, GuidanceInputs(inputs.guidance[i], x, inputs.steps.row(i), shift)), cache

    def _noise(self, source: Array, i: Int32[Array, ""], shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
        is_key = jnp.issubdtype(source.dtype, jax.dtypes.prng_key)
        return _noise(self.predict, jax.random.fold_in(source, i), shape, self.same_noise) if is_key else source[i]


@dataclass(frozen=True)
class DenoiseLoop(Program):
    """All steps; returns the last state, and for each step whether its latents are finite."""

    step: DenoiseStep

    name = "denoising loop"
    donate = ("state",)

    def __call__(
        self, model: Any, inputs: DenoiseInputs, state: DenoiseState
    ) -> tuple[DenoiseState, Bool[Array, " N"]]:
        return jax.lax.scan(lambda state, _: self.step(model, inputs, state), state, length=len(inputs.steps))


@dataclass(frozen=True)
class InitialNoise(Program):
    """A seed to the initial latents of a shape [B, T, h, w, C], and the key of the scheduler's noise."""

    predict: Predict
    shape: tuple[int, ...]
    same_noise: bool = False

    name = "initial noise"

    def __call__(self, seed: UInt32[Array, ""]) -> tuple[Float32[Array, "B T h w C"], Array]:
        latent_key, noise_key = jax.random.split(random_key(seed))
        return _noise(self.predict, latent_key, self.shape, self.same_noise), noise_key


def _noise(predict: Predict, key: Array, shape: tuple[int, ...], same: bool) -> Float32[Array, "B T h w C"]:
    """Standard normal noise; `same`: the first row for all of the batch."""
    return jnp.broadcast_to(predict.noise(key, (1, *shape[1:])), shape) if same else predict.noise(key, shape)


def noise_key(seed: int) -> Array:
    """The key of the scheduler's noise, for a run whose initial latents were given."""
    return jax.random.split(random_key(seed))[1]


def encoder_noise_key(seed: int, index: int) -> Array:
    """The key of the posterior noise of one of the images and clips; 0 and 1 are those of `InitialNoise`' split."""
    return jax.random.fold_in(random_key(seed), 2 + index)


def run_loop(
    program: CompiledProgram,
    model: Any,
    inputs: DenoiseInputs,
    state: DenoiseState,
    steps: int,
    profiling: ProfilingOptions,
    hint: str = "",
) -> Generator[DenoiseState, DenoiseState | None]:
    """Denoise; yields the state after each step, or after the last alone with a `DenoiseLoop`, when it is really there.

    A state that is sent takes the place of the one that was yielded, and is yielded in return.

    Args:
        program: a `DenoiseStep` or a `DenoiseLoop`, prepared for these arguments.
        model: as the program takes it.
        inputs: on the devices.
        state: where to start.
        steps: number of steps.
        hint: what to do about NaN, for the error.

    Raises:
        NonFiniteError: NaN or infinity in the latents, naming the step.
    """
    if isinstance(program.program, DenoiseLoop):
        state, finite = program(model, inputs, state, jit=profiling.jit)
        check_finite(fetch(finite), inputs, steps, hint)
        yield state
        return
    with profiling.steps() as around:
        for i in range(int(state.step), steps):
            with around(i):
                state, finite = program(model, inputs, place_state(state, program.mesh), jit=profiling.jit)
                check_finite(np.asarray([bool(finite)]), inputs, steps, hint, first=i)
            while (changed := (yield state)) is not None:
                state = changed


def place_state(state: DenoiseState, mesh: Mesh | None) -> DenoiseState:
    """A state where a program expects it: whole on every device; the step cache is split as tokens are."""
    whole = replicate(replace(state, cache=None), mesh)
    return replace(whole, cache=step_cache.place(state.cache, mesh))


def check_finite(finite: np.ndarray, inputs: DenoiseInputs, steps: int, hint: str = "", *, first: int = 0) -> None:
    """Refuse to go on from NaN or infinity, with a NonFiniteError that names the first bad step.

    Args:
        finite: of steps in a row, the first of them being `first`.
        steps: number of steps of the run.
    """
    if not finite.all():
        step = first + int(np.argmin(finite))
        raise NonFiniteError(step, fetch(inputs.steps.timesteps)[step].item(), steps, hint)
