"""Makes the videos of jobs and tells what happens: in the server's process, or in one of a cluster."""

from __future__ import annotations

import dataclasses
import logging
import time
import typing
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.serve.fields import MEDIA_FIELDS
from cogvideox_flax.serve.matching import programs_of

if typing.TYPE_CHECKING:
    from cogvideox_flax.generate.events import Event, Events
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.generate.run import Run

log = logging.getLogger(__name__)

VIDEO, PREVIEW, STAGES = "video.mp4", "preview.webp", "stages"
"""Files of a job."""

Told = tuple[str, dict[str, Any]]
"""What a maker tells: "progress", "compile" or "preview" with the event's data, and at last "made" with the facts."""

Making = Generator[Told, None, None]


class Stopped(Exception):
    """The job or the server is to stop."""


@dataclass
class Progress:
    """How far a job is, as clients see it.

    stage: "load", "encode", "denoise" or "decode".
    compiling: the program that is being compiled.
    eta_seconds: until the last step, by those that were done; None: not known yet.
    """

    stage: str = "load"
    compiling: str | None = None
    step: int = 0
    steps: int = 0
    eta_seconds: float | None = None


class _Clock:
    """The seconds of each stage, and of compiling apart from them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.monotonic()

    def stage(self, name: str) -> None:
        """Count the time since the last call as this stage's."""
        now = time.monotonic()
        self.seconds[name] += now - self._since
        self._since = now

    def compiled(self, seconds: float) -> None:
        self.seconds["compile"] += seconds
        self._since += seconds


class Maker:
    """Models that are opened when a job needs them. Each stays open while all fit into the devices' memory.

    Args:
        models: by their names.
        progress: say on stderr how far downloads and conversions are.
    """

    def __init__(self, models: Mapping[str, ModelChoice], *, progress: bool):
        self.models, self.show_progress = models, progress
        self._open: dict[str, tuple[Pipeline, bool]] = {}
        self._memory: dict[tuple[str, str], int] = {}  # by model and programs

    def pipeline(self, name: str) -> tuple[Pipeline, bool]:
        """A model, opened, and whether all of it fits at once. Others are closed where they do not fit beside it."""
        if name not in self._open:
            pipe = open_pipeline(self.models[name], progress=self.show_progress)
            fits = pipe.fits_at_once()
            if self._open and not (fits and all(others for _, others in self._open.values())):
                log.info("%s does not fit beside %s, which is closed", name, " and ".join(self._open))
                for other, _ in self._open.values():
                    other.unload()
                self._open.clear()
            self._open[name] = pipe, fits
        return self._open[name]

    def make(
        self, name: str, options: Mapping[str, Any], folder: Path, stages: Path, is_stopped: Callable[[], bool]
    ) -> Making:
        """Make a video, and tell how far it is.

        Args:
            name: of the model.
            options: fields of the request; images and clips as paths.
            folder: where its video and its preview are written.
            stages: its run directory.
            is_stopped: asked after each step.

        Raises:
            InputError: it cannot be made.
            Stopped: it is to stop.
        """
        from cogvideox_flax.generate.events import saving
        from cogvideox_flax.generate.journey import generate
        from cogvideox_flax.generate.preview import Preview
        from cogvideox_flax.generate.request import GenerationRequest
        from cogvideox_flax.generate.store import RunDirectory
        from cogvideox_flax.runtime.devices import peak_memory
        from cogvideox_flax.runtime.settings import in_own_settings

        clock = _Clock()
        pipe, fits = self.pipeline(name)
        run = pipe.resolve(GenerationRequest(**{"lora": [], **options}))
        run = run.varied(**{field: _by_id(getattr(run.request, field)) for field in MEDIA_FIELDS.values()})
        store = RunDirectory(stages, self.models[name], pipe.fingerprints())
        events, preview = generate(pipe, run, store, keep=fits), None
        if pipe.manifest.preview_matrix is not None:
            preview = folder / PREVIEW
            events = Preview(pipe.manifest, preview, overwrite=True).watch(events)
        clock.stage("load")
        with closing(in_own_settings(_until(events, is_stopped))) as own:
            saved = saving(own, run, [folder / VIDEO], timed=True)
            (recipe,), step_seconds = yield from _tell(saved, clock, preview)
        peak = peak_memory()
        yield (
            "made",
            {
                "recipe": recipe,
                "speed": [speed_key(name, run), step_seconds],
                "memory_bytes": self._memory_of(name, pipe, run, keep=fits),
                "stage_durations": {stage: round(seconds, 3) for stage, seconds in clock.seconds.items()},
                "peak_memory_mb": None if peak is None else round(peak / 2**20, 1),
            },
        )

    def _memory_of(self, name: str, pipe: Pipeline, run: Run, *, keep: bool) -> int:
        """The bytes that a run needed on each device, by its compiled programs."""
        from cogvideox_flax.generate.request import STAGES

        key = name, programs_of(run)
        if key not in self._memory:
            stages = ((stage, run.abstract(stage, pipe.mesh)) for stage in STAGES)
            self._memory[key] = pipe.memory_needed(stages, keep=keep)
        return self._memory[key]


def _until(events: Events[None], is_stopped: Callable[[], bool]) -> Events[None]:
    """The same events, up to a stop."""
    with closing(events):
        for event in events:
            if is_stopped():
                raise Stopped
            yield event


def _tell(
    saved: Generator[Event, Any, list[dict[str, Any]]], clock: _Clock, preview: Path | None
) -> Generator[Told, None, tuple[list[dict[str, Any]], float | None]]:
    """Tell of the events of one video; returns its recipe, and the seconds of a step where one was done."""
    from cogvideox_flax.generate.events import Compiling, Denoised, LoopBegan, Step

    progress, began, first, step_seconds, seen = Progress("encode"), 0.0, 0, None, 0
    while True:
        try:
            event = next(saved)
        except StopIteration as end:
            clock.stage(progress.stage)
            return end.value, step_seconds
        clock.stage(progress.stage)
        match event:
            case Compiling(program, seconds):
                progress.compiling = program if seconds is None else None
                if seconds is not None:
                    clock.compiled(seconds)
                yield "compile", {"what": program, "seconds": seconds}
            case LoopBegan(_, total, done):
                progress.stage, progress.step, progress.steps, first = "denoise", done, total, done
                began = time.monotonic()
            case Step(_, state):
                progress.step = int(state.step)
                step_seconds = (time.monotonic() - began) / (progress.step - first)
                progress.eta_seconds = round(step_seconds * (progress.steps - progress.step), 1)
            case Denoised():
                progress.stage, progress.eta_seconds = "decode", None
        yield "progress", dict(vars(progress))
        if preview is not None and isinstance(event, Step) and (now := _changed(preview)) != seen:
            seen = now
            yield "preview", {"step": progress.step}


def open_pipeline(model: ModelChoice, *, progress: bool) -> Pipeline:
    """Open a model in this process; in a group of several, all of them do.

    Raises:
        InputError: as for `Pipeline.from_pretrained`, or for `OpenModel.open_on_hosts`.
    """
    from cogvideox_flax import hub
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.runtime import libtpu

    libtpu.quiet_without_tpu()
    hub.peek(model.where, **model.which, progress=progress)
    return Pipeline.open_on_hosts(model, progress=progress)


def speed_key(model: str, run: Run) -> str:
    """What the time of a step depends on."""
    request = run.request
    return repr((model, request.height, request.width, request.num_frames, run.guided, repr(type(run.predict))))


def _by_id(media: Any) -> Any:
    """Images or clips under the ids of their uploads, as a recipe names them; their folders are the server's."""
    return media and [dataclasses.replace(each, file=Path(each.file).parent.name) for each in media]


def _changed(path: Path) -> int:
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
