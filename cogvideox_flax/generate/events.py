"""What happens in a run, as events, and their readers: one shows them on a terminal, one saves the videos."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxtyping import Float32

from cogvideox_flax.generate.denoise import DenoiseState
from cogvideox_flax.generate.recipe import item_of
from cogvideox_flax.generate.request import FilledRequest
from cogvideox_flax.generate.result import GenerationResult, logging_replaced, save_latents
from cogvideox_flax.generate.run import Run
from cogvideox_flax.runtime.settings import in_own_settings
from cogvideox_flax.runtime.terminal import Progress, duration_text, reliable_interrupts, say

T = TypeVar("T")


@dataclass(frozen=True)
class Compiling:
    """A program is compiled: before it begins, and with its seconds when it is done."""

    program: str
    seconds: float | None = None


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run of one seed."""

    run: Run

    @property
    def request(self) -> FilledRequest:
        return self.run.request


@dataclass(frozen=True)
class LoopBegan(RunEvent):
    """The denoising loop is compiled and loaded; `done` of its `total` steps were done by an earlier run."""

    total: int
    done: int


@dataclass(frozen=True)
class Step(RunEvent):
    """A denoising step is done. A state that is sent takes the place of `state`: the loop goes on from it.

    state: after it.
    timestep: of it, as the scheduler has it: int or float.
    """

    state: DenoiseState
    timestep: float


@dataclass(frozen=True)
class Denoised(RunEvent):
    """The denoising of a run is done, in this run or in an earlier one.

    latents: as the decoder takes them, scaled, without the extra latent frames.
    metadata: as of a `GenerationResult`.
    """

    latents: Float32[Any, "B T h w C"]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Finished(RunEvent):
    """The videos of a run are there."""

    result: GenerationResult


Event = Compiling | LoopBegan | Step | Denoised | Finished
Events = Generator[Event, DenoiseState | None, T]
"""A generator of events that returns a T."""


def show(events: Events[T], progress: bool = True, *, bar: bool = True) -> Events[T]:
    """The same events, shown on stderr as they pass: what is compiled, and a bar of the denoising steps.

    A Ctrl-C is not lost, and closing this closes `events`.

    progress: whether anything is shown; else what is compiled is logged.
    bar: whether the steps are.
    """
    steps, start, compiling, events = None, time.monotonic(), 0.0, in_own_settings(events)
    with reliable_interrupts():
        try:
            while True:
                try:
                    event = next(events)
                except StopIteration as end:
                    return end.value
                match event:
                    case Compiling(program, None):
                        say(f"compiling the {program} ...", progress, "compiling", program=program)
                    case Compiling(program, float() as seconds):
                        say(f"compiled the {program} in {seconds:.1f} s", progress, "compiled", program=program)
                        compiling += seconds
                    case LoopBegan(_, total, done):
                        steps = Progress("denoising", total, done, shown=progress and bar)
                    case Step(_, state) if steps is not None:
                        steps.advance_to(int(state.step))
                    case Finished() if progress:
                        part = f", {duration_text(compiling)} of it compiling" if compiling >= 1 else ""
                        seconds = round(time.monotonic() - start, 3)
                        say(f"made in {duration_text(seconds)}{part}", progress, "made", seconds=seconds)
                        start, compiling = time.monotonic(), 0.0
                while (sent := (yield event)) is not None:
                    event = events.send(sent)
        finally:
            if steps is not None:
                steps.close()
            events.close()


def result_of(events: Events[T], progress: bool = False) -> T:
    """What a generator of events returns, after all of them."""
    with closing(show(events, progress)) as shown:
        return _returned(shown)


def _returned(events: Events[T]) -> T:
    while True:
        try:
            next(events)
        except StopIteration as end:
            return end.value


def last_of(events: Events[Any], progress: bool = False, *, bar: bool = True) -> Any:
    """The last event; the others, which may hold arrays on the devices, are let go."""
    with closing(show(events, progress, bar=bar)) as shown:
        return deque(shown, maxlen=1)[0]


def save_videos(events: Events[None], run: Run, paths: Sequence[Path], **options: bool) -> list[dict[str, Any]]:
    """Read a run's events to the end, and write its videos as they are finished; arguments and result of `saving`."""
    return _returned(saving(events, run, paths, **options))


def saving(
    events: Events[None],
    run: Run,
    paths: Sequence[Path],
    *,
    latents: bool = False,
    timed: bool = False,
    bare: bool = False,
) -> Events[list[dict[str, Any]]]:
    """Yield a run's events, each when its videos are written.

    Args:
        paths: of the videos, those of one seed after those of the one before.
        latents: write npz files of latents in place of videos. One path for each seed holds all prompts.
        timed: say in each video how many seconds it took.
        bare: leave out of videos how they were made.

    Returns:
        What is stored with the video of each path.
    """
    start, stored = time.monotonic(), list[dict[str, Any]]()
    count = len(paths) // run.request.num_videos
    for event in events:
        if not isinstance(event, Denoised if latents else Finished):
            yield event
            continue
        metadata = event.metadata if isinstance(event, Denoised) else event.result.metadata
        if timed:
            metadata = metadata | {"seconds": float(f"{(time.monotonic() - start) / len(paths):.3g}")}
        first = (event.request.seed - run.request.seed) * count
        files = paths[first : first + count]
        with logging_replaced(files):
            if isinstance(event, Finished):
                replace(event.result, metadata={} if bare else metadata).save_items(files)
            elif count == 1:
                save_latents(files[0], event.latents, metadata)
            else:
                for i, path in enumerate(files):
                    save_latents(path, event.latents[i : i + 1], item_of(metadata, i))
        stored += [item_of(metadata, i) for i in range(count)]
        yield event
    return stored
