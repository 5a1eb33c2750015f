"""The denoising loop, a generator of its states; and what the owner of a loop may want around it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from cogvideox_flax.errors import NonFiniteError
from cogvideox_flax.generate import step_cache
from cogvideox_flax.generate.functions import DenoiseInputs, DenoiseState
from cogvideox_flax.runtime.compile import Program
from cogvideox_flax.runtime.global_arrays import fetch, replicate
from cogvideox_flax.runtime.profiling import ProfilingOptions
from cogvideox_flax.runtime.terminal import reliable_interrupts


def denoise_steps(
    program: Program,
    model: Any,
    inputs: DenoiseInputs,
    state: DenoiseState,
    profiling: ProfilingOptions,
    hint: str = "",
) -> Generator[DenoiseState]:
    """Run a program of one step until all are done; yields the state after each, when it is really there.

    Args:
        program: of `RunPrograms.denoise`, prepared for these arguments.
        model: as the program takes it.
        inputs: on the devices.
        state: where to start.
        hint: what to do about NaN, for the error.

    Raises:
        NonFiniteError: NaN or infinity in the latents, naming the step.
    """
    start = int(state.step)
    with profiling.steps() as around:
        for i in range(start, len(inputs.steps)):
            with around(i):
                state, finite = program(
                    model, inputs, place_state(state, program.mesh), announce=False, jit=profiling.jit
                )
                check_finite(np.asarray([bool(finite)]), inputs, hint, first=i)
            yield state


def denoise_at_once(
    program: Program,
    model: Any,
    inputs: DenoiseInputs,
    state: DenoiseState,
    profiling: ProfilingOptions,
    hint: str = "",
) -> Generator[DenoiseState]:
    """The same for a program of all steps; yields the last state alone."""
    state, finite = program(model, inputs, state, announce=False, jit=profiling.jit)
    check_finite(fetch(finite), inputs, hint)
    yield state


def place_state(state: DenoiseState, mesh: Mesh | None) -> DenoiseState:
    """A state where a program expects it: whole on every device; the step cache is split as tokens are."""
    whole = replicate(replace(state, cache=None), mesh)
    return replace(whole, cache=step_cache.place(state.cache, mesh))


def check_finite(finite: np.ndarray, inputs: DenoiseInputs, hint: str = "", *, first: int = 0) -> None:
    """Refuse to go on from NaN or infinity.

    Args:
        finite: of steps in a row, the first of them being `first`.

    Raises:
        NonFiniteError: naming the first bad step.
    """
    if not finite.all():
        step = first + int(np.argmin(finite))
        raise NonFiniteError(step, fetch(inputs.steps.timesteps)[step].item(), len(inputs.steps), hint)


@contextmanager
def with_progress(
    states: Generator[DenoiseState], total: int, *, done: int = 0, progress: bool = True
) -> Iterator[Iterator[DenoiseState]]:
    """The states of a loop with a progress bar, and with a Ctrl-C that is not lost.

    Compiling is over before the first state is asked for, so the bar's rate and time left are those of steps that wait
    for their result.

    Args:
        total: steps of the loop.
        done: those of an earlier process.
        progress: show the bar, on stderr.
    """
    bar = tqdm(total=total, initial=done, desc="denoising", unit="step", disable=not progress)
    with reliable_interrupts(), bar:

        def each() -> Iterator[DenoiseState]:
            for state in states:
                bar.update(int(state.step) - bar.n)
                yield state

        try:
            yield each()
        finally:
            states.close()  # ends a profile, also where the caller has stopped the loop
