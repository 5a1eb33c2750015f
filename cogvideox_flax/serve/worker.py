"""The jobs of a `JobFolder` on their way: begun, told about, finished; their videos are made in a `Home`."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import typing
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Protocol

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.jobs import MAX_STARTS, JobFolder, JobRecord
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.serve.events import EventLog
from cogvideox_flax.serve.files import locate
from cogvideox_flax.serve.maker import STAGES, Maker, Making, Progress, Stopped, speed_key
from cogvideox_flax.serve.matching import programs_of

if typing.TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.run import Run

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Seconds until the next try where the state of a job cannot be written."""

EVENT_INTERVAL_S = 0.25
"""The minimum seconds between two events of progress."""

Make = Callable[[JobRecord, Callable[[], bool]], Making]
"""What makes the video of a job; the function says whether it is to stop. As `Maker.make`."""


class Lost(Exception):
    """The process that made a video is gone."""


class Home(Protocol):
    """Where videos are made."""

    most_starts: int
    """How often a job may end the process that makes it before it is failed."""

    def open(self) -> None:
        """Take hold of it, before JAX looks for devices.

        Raises:
            InputError: it is not there.
        """

    def check(self, name: str, model: ModelChoice, manifest: Manifest) -> None:
        """Refuse a model that cannot be run there."""

    def describe(self) -> str:
        """Its devices."""

    def run(self, worker: Worker) -> None:
        """Make jobs until `worker.stopping` is set."""


class ThisProcess:
    """The server's own process, which makes one video after the other."""

    most_starts = MAX_STARTS

    def open(self) -> None:
        from cogvideox_flax.runtime import libtpu

        libtpu.quiet_without_tpu()

    def check(self, name: str, model: ModelChoice, manifest: Manifest) -> None:
        from cogvideox_flax.generate.resolve import check_model
        from cogvideox_flax.sharding import mesh_of

        check_model(manifest, name, model.dtype, mesh_of(model.mesh))

    def describe(self) -> str:
        import jax

        return f"{len(jax.local_devices())} {jax.local_devices()[0].device_kind}"

    def run(self, worker: Worker) -> None:
        maker, path = Maker(worker.models, progress=worker.show_progress), worker.jobs.path
        while not worker.stopping.is_set():
            worker.make_next(
                lambda job, is_stopped: maker.make(
                    job.model, job.options, path(job.id), path(job.id, STAGES), is_stopped
                )
            )


class Worker(threading.Thread):
    """Looks at the models, and makes jobs until `stop`.

    Args:
        models: by the names that clients call them.

    Attributes:
        manifests: name of a model -> what its configs say, when `ready` is set.
        device: what makes the videos, when `ready` is set.
        failure: what ended the thread before it was ready.
        running: job -> how far it is.
    """

    def __init__(
        self,
        jobs: JobFolder,
        models: Mapping[str, ModelChoice],
        events: EventLog,
        home: Home | None = None,
        *,
        progress: bool = True,
    ):
        super().__init__(name="worker", daemon=True)
        self.jobs, self.events, self.show_progress = jobs, events, progress
        self.home, self.gallery = home or ThisProcess(), jobs.folder.parent
        self.models = models
        self.manifests: dict[str, Manifest] = {}
        self.device: str | None = None
        self.ready, self.stopping = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.running: dict[str, Progress] = {}
        self._compiled: set[tuple[str, str]] = set()  # model and programs of what was made

    @property
    def status(self) -> str:
        """ "starting", "ready", "busy" or "failed"."""
        if self.failure is not None:
            return "failed"
        if not self.is_alive() and self.ready.is_set() and not self.stopping.is_set():
            return "failed"
        return "starting" if not self.ready.is_set() else "busy" if self.running else "ready"

    def stop(self) -> None:
        """End the thread after the current step; the jobs under way are queued again."""
        self.stopping.set()
        self.jobs.wake()

    def run(self) -> None:
        try:
            self.home.open()
            self._look()
        except BaseException as e:
            self.failure = e
            return
        finally:
            self.ready.set()
        self.home.run(self)

    def _look(self) -> None:
        """Read the configs of all models, and check that they can be run. Imports JAX."""
        from cogvideox_flax import hub

        for name, model in self.models.items():
            manifest = hub.peek(model.where, **model.which, progress=self.show_progress)
            self.home.check(name, model, manifest)
            self.manifests[name] = manifest
        self.device = self.home.describe()

    def resolve(self, model: str, options: Mapping[str, Any]) -> Run:
        """What options mean for a model; images, clips and adapters as paths in the gallery.

        Raises:
            InputError: it cannot serve them.
        """
        from cogvideox_flax.generate.request import GenerationRequest
        from cogvideox_flax.generate.resolve import resolve

        request = GenerationRequest(**{"lora": [], **locate(options, self.gallery)})
        return resolve(request, self.manifests[model], self.models[model].dtype)

    def step_seconds(self, model: str, run: Run) -> float | None:
        """The seconds of a step by the last video of this shape in the gallery; None: there is none."""
        key = speed_key(model, run)
        speeds = [record.facts.get("speed") or ["", None] for record in self.jobs.all()]
        return next((seconds for of, seconds in reversed(speeds) if of == key and seconds is not None), None)

    def memory_bytes(self, model: str, run: Run) -> int | None:
        """The bytes on each device by the last video of the same programs in the gallery; None: there is none."""
        programs = programs_of(run)
        facts = [record.facts for record in self.jobs.all() if record.model == model]
        known = (each.get("memory_bytes") for each in reversed(facts) if each.get("programs") == programs)
        return next(filter(None, known), None)

    def is_compiled(self, model: str, run: Run) -> bool:
        """Whether a video by the same programs was made since the server started."""
        return (model, programs_of(run)) in self._compiled

    def make_next(self, make: Make, **how: Any) -> None:
        """Wait for a job, and make its video, whatever goes wrong with it; how: as for `JobFolder.begin`."""
        try:
            if (job := self.jobs.begin(self.stopping, self.models, **how)) is not None:
                self._make(job, make)
        except Exception:  # such as a full disk where a job's state is written; the queue goes on
            log.exception("the queue waits for %g s", RETRY_S)
            self.stopping.wait(RETRY_S)

    def _make(self, job: JobRecord, make: Make) -> None:
        self.running[job.id] = Progress()
        job = replace(job, options=locate(job.options, self.gallery))
        began = time.monotonic()
        try:
            self.events.publish("started", job.id, stage="load")
            with closing(make(job, lambda: self.stopping.is_set() or self.jobs.is_cancelled(job.id))) as making:
                facts = self._follow(job, making)
            self.jobs.complete(job.id, **facts, inference_time_s=round(time.monotonic() - began, 3))
        except Exception as e:
            progress = self.running.pop(job.id)  # before somebody else may begin it
            if self.jobs.get(job.id) is not None:  # else it was removed, and with it the files that it needs
                self._not_made(job, progress, e)
        else:
            self.running.pop(job.id)
            self._compiled.add((job.model, job.facts.get("programs", "")))
            shutil.rmtree(self.jobs.path(job.id, STAGES), ignore_errors=True)
            self.events.publish("completed", job.id)
        self.jobs.clear_removed(job.id)

    def _follow(self, job: JobRecord, making: Making) -> dict[str, Any]:
        """Tell clients what a maker tells; returns the facts of the video."""
        stage, told, facts = "", 0.0, {}
        for kind, data in making:
            if kind == "made":
                facts = data
                continue
            if kind == "progress":
                now = self.running[job.id] = Progress(**data)
                is_last = now.stage == "denoise" and now.step == now.steps
                if not is_last and now.stage == stage and time.monotonic() - told < EVENT_INTERVAL_S:
                    continue
                stage, told = now.stage, time.monotonic()
            self.events.publish(kind, job.id, **data)
        return facts

    def _not_made(self, job: JobRecord, progress: Progress, reason: Exception) -> None:
        """Queue a job again, or fail it."""
        try:
            self._note(job, progress, reason)
        except (InputError, OSError):  # its end could not be written: it is made again
            self.jobs.interrupt(job.id)
            raise

    def _note(self, job: JobRecord, progress: Progress, reason: Exception) -> None:
        match reason:
            case Stopped() if self.jobs.is_cancelled(job.id):
                self._fail(job, "cancelled", f"cancelled in stage {progress.stage}, after step {progress.step}")
            case Stopped():
                self.jobs.interrupt(job.id)
            case Lost():
                now = self.jobs.lost(job.id, self.home.most_starts)
                self.events.publish("failed" if now.is_over else "queued", job.id)
            case InputError():
                self._fail(job, "invalid_input", self.without_paths(str(reason)))
            case _:
                log.error("%s failed", job.id, exc_info=reason)
                words = f"{type(reason).__name__}: a fault of this server, whose log says more"
                self._fail(job, "internal_error", words)

    def without_paths(self, message: str) -> str:
        """A message for clients, who see nothing of where the server keeps its files."""
        folder = self.gallery
        for text in {str(folder.resolve()), str(folder.absolute()), str(folder)}:
            message = message.replace(f"{text}/", "")
        return message

    def _fail(self, job: JobRecord, code: str, message: str) -> None:
        with suppress(KeyError):  # removed meanwhile
            self.jobs.fail(job.id, code, message)
            shutil.rmtree(self.jobs.path(job.id, STAGES), ignore_errors=True)
            self.events.publish("failed", job.id)
