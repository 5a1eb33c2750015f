"""The thread that owns the devices: it makes the jobs of a `JobFolder`, one after the other."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
import time
import typing
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import JobFolder, JobRecord
from cogvideox_flax.serve.events import EventLog
from cogvideox_flax.serve.fields import MEDIA_FIELDS

if typing.TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.events import Events
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.generate.run import Run

log = logging.getLogger(__name__)

VIDEO, PREVIEW, STAGES = "video.mp4", "preview.webp", "stages"
"""Files of a job."""

RETRY_S = 5.0
"""Seconds until the next try where the state of a job cannot be written."""

EVENT_INTERVAL_S = 0.25
"""The minimum seconds between two events of progress."""


@dataclass(frozen=True)
class ServedModel:
    """A model that a server offers.

    name: as clients call it.
    where: as `hub.find` takes it.
    """

    name: str
    where: str | None
    revision: str | None = None
    dtype: str | None = None
    mesh: str | None = None
    variant: str | None = None


class _Stopped(Exception):
    """The job or the server is to stop."""


@dataclass
class Progress:
    """How far the job under way is.

    stage: "load", "encode", "denoise" or "decode".
    compiling: the program that is being compiled.
    began: when the first step of this process began.
    """

    stage: str = "load"
    compiling: str | None = None
    step: int = 0
    steps: int = 0
    began: float | None = None
    first: int = 0

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step, by those that were done; None: not known yet."""
        began, step, first = self.began, self.step, self.first  # the worker goes on meanwhile
        if began is None or step <= first:
            return None
        return (time.monotonic() - began) / (step - first) * (self.steps - step)


class Worker(threading.Thread):
    """Opens models and makes videos. Each model stays open while all fit into the devices' memory.

    Attributes:
        manifests: name of a model -> what its configs say, when `ready` is set.
        failure: what ended the thread before it was ready.
    """

    def __init__(self, jobs: JobFolder, models: Sequence[ServedModel], events: EventLog, *, progress: bool = True):
        super().__init__(name="worker", daemon=True)
        self.jobs, self.events, self.show_progress = jobs, events, progress
        self.models = {model.name: model for model in models}
        self.manifests: dict[str, Manifest] = {}
        self.dtypes: dict[str, str] = {}
        self.ready, self._stop_now = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.current: tuple[str, Progress] | None = None
        self.step_seconds: dict[tuple[Any, ...], float] = {}  # facts of a run -> seconds of its step, as measured
        self._open: dict[str, Pipeline] = {}

    @property
    def status(self) -> str:
        """ "starting", "ready", "busy" or "failed"."""
        if self.failure is not None:
            return "failed"
        if not self.is_alive() and self.ready.is_set() and not self._stop_now.is_set():
            return "failed"
        return "starting" if not self.ready.is_set() else "ready" if self.current is None else "busy"

    def stop(self) -> None:
        """End the thread after the current step; the job under way is queued again."""
        self._stop_now.set()
        self.jobs.wake()

    def run(self) -> None:
        """Look at the models, and make jobs until `stop`."""
        try:
            self._look()
        except BaseException as e:
            self.failure = e
            return
        finally:
            self.ready.set()
        while not self._stop_now.is_set():
            try:
                if (job := self.jobs.begin(self._stop_now, self.models)) is not None:
                    self._make(job)
            except Exception:  # such as a full disk where a job's state is written; the queue goes on
                log.exception("the queue waits for %g s", RETRY_S)
                self._stop_now.wait(RETRY_S)

    def _look(self) -> None:
        """Read the configs of all models, and check that they can be run here. Imports JAX."""
        from cogvideox_flax import hub
        from cogvideox_flax.generate.resolve import check_model
        from cogvideox_flax.sharding import make_mesh, parse_mesh

        for name, model in self.models.items():
            manifest = hub.peek(model.where, model.revision, variant=model.variant, progress=self.show_progress)
            dtype = model.dtype or manifest.default_dtype
            mesh = None if model.mesh is None else make_mesh(*parse_mesh(model.mesh))
            check_model(manifest, name, dtype, mesh)
            self.manifests[name], self.dtypes[name] = manifest, dtype

    def resolve(self, model: str, options: Mapping[str, Any]) -> Run:
        """What options mean for a model.

        Raises:
            InputError: it cannot serve them.
        """
        from cogvideox_flax.generate.request import GenerationRequest
        from cogvideox_flax.generate.resolve import resolve

        request = GenerationRequest(**{"lora": [], **options})
        return resolve(request, self.manifests[model], self.dtypes[model])

    def pipeline(self, name: str) -> Pipeline:
        """A model, opened. Others are closed where they do not fit beside it."""
        from cogvideox_flax.generate.pipeline import Pipeline
        from cogvideox_flax.sharding import make_mesh, parse_mesh

        if name not in self._open:
            model = self.models[name]
            mesh = None if model.mesh is None else make_mesh(*parse_mesh(model.mesh))
            how: Any = {"revision": model.revision, "variant": model.variant, "progress": self.show_progress}
            pipe = Pipeline.from_pretrained(model.where, self.dtypes[name], mesh, **how)
            if self._open and not (pipe.fits_at_once() and all(each.fits_at_once() for each in self._open.values())):
                log.info("%s does not fit beside %s, which is closed", name, " and ".join(self._open))
                for other in self._open.values():
                    other.unload()
                self._open.clear()
            self._open[name] = pipe
        return self._open[name]

    def _make(self, job: JobRecord) -> None:
        """Make a job's video, whatever goes wrong with it."""
        progress = Progress()
        self.current = job.id, progress
        began = time.monotonic()
        try:
            self.events.publish("started", job.id, stage=progress.stage)
            facts = self._video(job, progress)
            facts["inference_time_s"] = round(time.monotonic() - began, 3)
            self.jobs.complete(job.id, **facts)
            shutil.rmtree(self.jobs.path(job.id, STAGES), ignore_errors=True)
            self.events.publish("completed", job.id)
        except Exception as e:
            if self.jobs.get(job.id) is not None:  # else it was removed, and with it the files that it needs
                self._not_made(job, progress, e)
        finally:
            self.current = None
            self.jobs.clear_removed(job.id)
            if (now := self.jobs.get(job.id)) is not None and now.status == "in_progress":
                self.jobs.interrupt(job.id)  # its end could not be written: it is made again

    def _not_made(self, job: JobRecord, progress: Progress, reason: Exception) -> None:
        """Queue a job again, or fail it."""
        match reason:
            case _Stopped() if self.jobs.is_cancelled(job.id):
                self._fail(job, "cancelled", f"cancelled in stage {progress.stage}, after step {progress.step}")
            case _Stopped():
                self.jobs.interrupt(job.id)
            case InputError():
                self._fail(job, "invalid_input", self.without_paths(str(reason)))
            case _:
                log.error("%s failed", job.id, exc_info=reason)
                words = f"{type(reason).__name__}: a fault of this server, whose log says more"
                self._fail(job, "internal_error", words)

    def without_paths(self, message: str) -> str:
        """A message for clients, who see nothing of where the server keeps its files."""
        folder = self.jobs.folder.parent
        for text in {str(folder.resolve()), str(folder.absolute()), str(folder)}:
            message = message.replace(f"{text}/", "")
        return message

    def _fail(self, job: JobRecord, code: str, message: str) -> None:
        with suppress(KeyError):  # removed meanwhile
            self.jobs.fail(job.id, code, message)
            shutil.rmtree(self.jobs.path(job.id, STAGES), ignore_errors=True)
            self.events.publish("failed", job.id)

    def _video(self, job: JobRecord, progress: Progress) -> dict[str, Any]:
        """Make the video of a job; returns facts about it."""
        from cogvideox_flax.generate.events import save_videos
        from cogvideox_flax.generate.journey import generate
        from cogvideox_flax.generate.preview import Preview
        from cogvideox_flax.generate.request import GenerationRequest
        from cogvideox_flax.generate.store import RunDirectory
        from cogvideox_flax.runtime.settings import in_own_settings

        pipe, model = self.pipeline(job.model), self.models[job.model]
        run = pipe.resolve(GenerationRequest(**{"lora": [], **job.options}))
        run = run.varied(**{name: _by_id(getattr(run.request, name)) for name in MEDIA_FIELDS.values()})
        store = RunDirectory(
            folder=self.jobs.path(job.id, STAGES),
            model_id=model.where or "embedded",
            revision=model.revision,
            variant=model.variant,
            fingerprints=pipe.fingerprints(),
        )
        events = generate(pipe, run, store, keep=pipe.fits_at_once())
        if pipe.manifest.preview_matrix is not None:
            events = Preview(pipe.manifest, self.jobs.path(job.id, PREVIEW), overwrite=True).watch(events)
        progress.stage = "encode"
        with closing(in_own_settings(events)) as own:
            watched = self._watched(own, job, progress)
            (recipe,) = save_videos(watched, run, [self.jobs.path(job.id, VIDEO)], timed=True)
        return {"recipe": recipe}

    def _watched(self, events: Events[None], job: JobRecord, progress: Progress) -> Events[None]:
        """The same events, told to clients; ends where the job or the server is to stop."""
        from cogvideox_flax.generate.events import Compiling, Denoised, LoopBegan, Step

        preview, seen, told = self.jobs.path(job.id, PREVIEW), 0, 0.0
        told_stage = ""
        for event in events:
            if self._stop_now.is_set() or self.jobs.is_cancelled(job.id):
                raise _Stopped
            match event:
                case Compiling(program, seconds):
                    progress.compiling = program if seconds is None else None
                    self.events.publish("compile", job.id, what=program, seconds=seconds)
                case LoopBegan(_, total, done):
                    progress.stage, progress.step, progress.steps, progress.first = "denoise", done, total, done
                    progress.began = time.monotonic()
                case Step(_, state):
                    progress.step = int(state.step)
                case Denoised(run):
                    progress.stage = "decode"
                    if progress.began is not None and (steps := progress.step - progress.first):
                        self.step_seconds[speed_key(job.model, run)] = (time.monotonic() - progress.began) / steps
            is_last = isinstance(event, Step) and progress.step == progress.steps
            is_new = is_last or progress.stage != told_stage
            if is_new or (not isinstance(event, Compiling) and time.monotonic() - told >= EVENT_INTERVAL_S):
                told, told_stage = time.monotonic(), progress.stage
                self.events.publish("progress", job.id, **progress_json(progress))
            if isinstance(event, Step) and (now := _changed(preview)) != seen:
                seen = now
                self.events.publish("preview", job.id, step=progress.step)
            yield event


def _by_id(media: Any) -> Any:
    """Images or clips under the ids of their uploads, as a recipe names them; their folders are the server's."""
    return media and [dataclasses.replace(each, file=Path(each.file).parent.name) for each in media]


def progress_json(progress: Progress) -> dict[str, Any]:
    """How far a job is, as clients see it."""
    eta = progress.eta_seconds
    return {
        "stage": progress.stage,
        "compiling": progress.compiling,
        "step": progress.step,
        "steps": progress.steps,
        "eta_seconds": None if eta is None else round(eta, 1),
    }


def speed_key(model: str, run: Run) -> tuple[Any, ...]:
    """What the time of a step depends on."""
    request = run.request
    return model, request.height, request.width, request.num_frames, run.guided, repr(type(run.predict))


def _changed(path: Path) -> int:
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
