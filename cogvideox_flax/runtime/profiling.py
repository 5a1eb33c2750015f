"""Profiling and debugging of a run: eager operations, memory after each stage, a trace of some steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from cogvideox_flax.errors import InputError
from cogvideox_flax.runtime.devices import describe_memory
from cogvideox_flax.runtime.terminal import say

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfilingOptions:
    """The options of what is recorded while a pipeline runs; nothing by default.

    jit: False runs operation by operation (`jax.disable_jit`): slow, but prints and debuggers see values.
    memory: after each stage, print the devices' memory in use and, where they report it, their peak.
    profile: a directory for a profiler trace of some denoising steps, for TensorBoard or Perfetto.
    profile_steps: the first and the last traced step, from 0. A jitted program compiles before the first step.
    """

    jit: bool = True
    memory: bool = False
    profile: Path | None = None
    profile_steps: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        first, last = self.profile_steps
        if not 0 <= first <= last:
            raise InputError(f"profile_steps must be the first and the last step, 0 or more; got {first} and {last}")

    def check(self, steps: int, one_program: bool) -> None:
        """Refuse a profile of steps that a run does not have, or runs in one program."""
        if self.profile is not None and one_program:
            raise InputError("steps can be profiled one by one only; leave compiled_loop and one_program off")
        if self.profile is not None and self.profile_steps[1] >= steps:
            first, last = self.profile_steps
            raise InputError(f"steps {first} to {last} are to be profiled, but the run has {steps}, counted from 0")

    @contextmanager
    def steps(self) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """A context for the loop, which yields a context for each step. A started trace is always written."""
        first, last = self.profile_steps
        with ExitStack() as trace:

            @contextmanager
            def step(i: int) -> Iterator[None]:
                if self.profile is None or not first <= i <= last:
                    yield
                    return
                if i == first:
                    jax.profiler.start_trace(str(self.profile))
                    trace.callback(jax.profiler.stop_trace)
                with jax.profiler.StepTraceAnnotation("denoise", step_num=i):
                    yield
                if i == last:
                    trace.close()
                    log.info("steps %d to %d are in %s", first, last, self.profile)

            yield step

    def after_stage(self, name: str) -> None:
        """Report the memory, if `memory` is set."""
        if self.memory:
            say(f"after the {name}: {describe_memory()}", True)
