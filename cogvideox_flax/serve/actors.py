"""`serve --ray ADDRESS`: the jobs of a server, made by the workers of a Ray cluster.

The server keeps the queue and writes all files of the gallery but the run directories. Each worker is a process that
makes one video at a time and sends what it tells, previews and the video.
"""

from __future__ import annotations

import logging
import math
import secrets
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import BusyError, InputError
from cogvideox_flax.generate.jobs import JobRecord
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.serve.cluster import LOOK_EVERY_S, MAX_LOST, connect
from cogvideox_flax.serve.fields import MEDIA_FIELDS
from cogvideox_flax.serve.group import Group, WorkerSize, follow, free_places, join_group
from cogvideox_flax.serve.maker import PREVIEW, STAGES, VIDEO, Maker, Making, Stopped
from cogvideox_flax.serve.matching import Ready, Shape, adapters_text, match
from cogvideox_flax.serve.worker import Lost, Worker

if typing.TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two looks whether a job is to stop."""

STOP_S = 30.0
"""Seconds in which the workers end their steps when the server stops."""


FILES = {"preview": PREVIEW, "made": VIDEO}
"""What is told -> the file that comes with it."""


class Actor:
    """A process of the cluster. JAX is imported in here alone.

    group: as `join_group` takes it.
    """

    def __init__(self, models: Mapping[str, ModelChoice], *group: Any):
        join_group(*group)
        self.maker = Maker(models, progress=False)
        self.maker.pipeline(next(iter(models)))
        self._stopping = ""

    def ready(self) -> None:
        """Answer when the first model is open."""

    def stop(self, call: str) -> None:
        """End a call of `make` after its current step."""
        self._stopping = call

    def make(self, call: str, model: str, options: dict[str, Any], media: Mapping[str, bytes], stages: Path) -> Making:
        """As `Maker.make`; previews and the video come with their bytes. An error is told as "refused" or "busy".

        Args:
            call: a name of its own, for `stop`.
            media: option -> the image or clip that stands in place of the server's file.
            stages: its run directory; on a disk that the workers share, another one goes on there.
        """
        from cogvideox_flax.generate.store import run_dir_lock

        try:
            with run_dir_lock(stages, temporary=True), tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                for name, content in media.items():
                    path = folder / Path(options[name]).parent.name / "data"  # recipes name the folder
                    path.parent.mkdir()
                    path.write_bytes(content)
                    options[name] = str(path)
                for kind, data in self.maker.make(model, options, folder, stages, partial(self._is_stopped, call)):
                    has_file = kind in FILES and hosts.is_first()
                    yield kind, data | ({"content": (folder / FILES[kind]).read_bytes()} if has_file else {})
        except Stopped:
            yield "stopped", {}
        except BusyError as e:  # a worker that was lost may be at work there still
            yield "busy", {"reason": str(e)}
        except InputError as e:
            yield "refused", {"reason": str(e)}
        except Exception:
            hosts.end_if_another_failed()
            raise

    def _is_stopped(self, call: str) -> bool:
        return hosts.stop_requested(self._stopping == call)

    def follow(self, *job: Any) -> None:
        """As `make`, on a process of the group that is not the first."""

        def make() -> str | None:
            for kind, data in self.make(*job):
                if kind == "refused":
                    return data["reason"]
            return None

        follow(make)


class Cluster:
    """The workers of a Ray cluster: as many as it has room for and jobs wait for. They stay; others join late.

    Args:
        address: as `ray.init` takes it; "local" starts a cluster on this machine.
        size: what a worker takes.
    """

    most_starts = MAX_LOST + 1

    def __init__(self, address: str, size: WorkerSize):
        self.address, self.size = address, size
        self.threads: dict[threading.Thread, _Slot] = {}
        self._idle: list[_Slot] = []  # those that wait for a job
        self._unopened = 0  # workers that failed to start since one did
        self._looked, self._waits = -math.inf, False

    def open(self) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # the devices are the workers'
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)  # it warns that SIGTERM is the server's
        self.ray = connect(self.address)
        self.size = self.size.on(self.ray)

    def check(self, name: str, model: ModelChoice, manifest: Manifest) -> None:
        pass  # the workers' devices are not known here

    def describe(self) -> str:
        return f"Ray cluster at {self.address}, {self.size} for each worker"

    def run(self, worker: Worker) -> None:
        try:
            while not worker.stopping.is_set():
                self.threads = {thread: slot for thread, slot in self.threads.items() if thread.is_alive()}
                self._start(worker)
                worker.stopping.wait(LOOK_EVERY_S)
            end = time.monotonic() + STOP_S
            for thread in self.threads:
                thread.join(max(0.0, end - time.monotonic()))
        finally:
            self.ray.shutdown()

    def _start(self, worker: Worker) -> None:
        """Start a worker wherever there is room for one, as long as jobs wait for it."""
        # a machine on which the model cannot be opened is tried less and less often
        if time.monotonic() - self._looked < LOOK_EVERY_S * 2 ** min(self._unopened, 5):
            return
        self._looked = time.monotonic()
        waiting = sum(not job.is_over and job.model in worker.models for job in worker.jobs.all()) - len(self.threads)
        if waiting <= 0:
            return
        _, free = free_places(self.ray, self.size, [slot.group.place for slot in self.threads.values()])
        if not free and not self.threads and not self._waits:
            self._waits = True
            log.warning("the cluster has no free room for a worker, which takes %s", self.size)
        for place in free[:waiting]:
            more = {"max_concurrency": 2}  # `stop` comes in beside `make`
            group = Group(self.ray, place, self.size.needs, Actor, worker.models, **more)
            slot = _Slot(self.ray, group, worker)
            thread = threading.Thread(target=self._use, args=[slot, worker], daemon=True)
            self.threads[thread] = slot
            thread.start()

    def _use(self, slot: _Slot, worker: Worker) -> None:
        """Make jobs on one worker for as long as it lives."""
        try:
            if slot.wait_until_ready():
                self._unopened = 0
            while slot.is_alive and not worker.stopping.is_set():
                worker.make_next(slot.make, choose=partial(self._choose, slot))
        except self.ray.exceptions.RayError as e:
            self._unopened += 1
            log.warning("a worker of the cluster cannot open the model and is left out: %s", slot.group.reason(e))
        finally:
            slot.group.kill()

    def _choose(self, slot: _Slot, waiting: Sequence[JobRecord]) -> JobRecord | None:
        """The job that a worker is to make, of those that wait: the first ones go to the workers that are idle.

        Called by one thread at a time, as `JobFolder.begin` has it.
        """
        if slot not in self._idle:
            self._idle.append(slot)
        jobs = waiting[: len(self._idle)]
        pairs = match([each.ready for each in self._idle], list(map(_shape, jobs)))
        job = next((jobs[job] for worker, job in pairs if self._idle[worker] is slot), None)
        if job is not None:
            self._idle.remove(slot)
            slot.ready.add(_shape(job))
        return job


def _shape(job: JobRecord) -> Shape:
    programs = repr((job.model, job.facts.get("programs")))
    return Shape(programs, adapters_text(job.options.get("lora", [])))


class _Slot:
    """A worker as the server sees it."""

    def __init__(self, ray: Any, group: Group, worker: Worker):
        self.ray, self.group, self.worker = ray, group, worker
        self.is_alive, self.ready = True, Ready()

    def wait_until_ready(self) -> bool:
        """Wait until the model is open; False: the server stops."""
        task = self.group.first.ready.remote()
        while not self.worker.stopping.is_set():
            if self.ray.wait([task], timeout=POLL_S)[0]:
                self.ray.get(task)
                return True
        return False

    def make(self, job: JobRecord, is_stopped: Callable[[], bool]) -> Making:
        """As `Maker.make`, there.

        Raises:
            Lost: the worker is gone.
        """
        media = {name: _read(job.options[name]) for name in MEDIA_FIELDS.values() & job.options.keys()}
        try:
            self.ray.get(self.group.first.ready.remote())
        except self.ray.exceptions.RayError as e:  # it was lost while it had nothing to do
            self.is_alive = False
            raise Stopped from e
        path, call = partial(self.worker.jobs.path, job.id), secrets.token_hex(8)
        told = self.group.make(call, job.model, job.options, media, path(STAGES), num_returns="streaming")
        try:
            for kind, data in self._messages(job, told, call, is_stopped):
                if kind in FILES:
                    with atomic_write(path(FILES[kind]), sync=kind == "made") as partial_file:
                        partial_file.write_bytes(data.pop("content"))
                yield kind, data
        finally:  # also where a file cannot be written here
            self.group.first.stop.remote(call)

    def _messages(self, job: JobRecord, told: Any, call: str, is_stopped: Callable[[], bool]) -> Making:
        """What a worker sends of a job; raises what was no success."""
        errors = self.ray.exceptions
        while True:
            if is_stopped():
                self.group.first.stop.remote(call)
            try:
                if not self.ray.wait([told], timeout=POLL_S)[0]:
                    continue
                kind, data = self.ray.get(next(told))
            except StopIteration:
                return
            except errors.RayError as e:
                is_fault = isinstance(e, errors.RayTaskError)  # of the program, with this job
                self.is_alive = is_fault and not self.group.others
                if is_fault:
                    raise e.cause from e
                log.warning("a worker was lost while it made %s: %s", job.id, self.group.reason(e))
                raise Lost from e
            if kind in ("busy", "refused"):  # other processes may be at work still, and wait for process 0
                self.is_alive = not self.group.others
            match kind:
                case "stopped":
                    raise Stopped
                case "busy":
                    self.worker.stopping.wait(LOOK_EVERY_S)
                    raise Stopped
                case "refused":
                    raise InputError(data["reason"])
            yield kind, data


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}; upload it again") from e
