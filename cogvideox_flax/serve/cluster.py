"""A queue over the workers of a Ray cluster. Each worker has the model open and makes one video at a time.

Ray finds the machines, starts and watches the workers, and carries requests and videos. A video is there once its file
is: the driver writes it whole, and what a lost worker had begun is made by another one.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import BusyError, InputError, install_extra
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.serve.group import Group, WorkerSize, follow, free_places, join_group, resources_text
from cogvideox_flax.serve.maker import open_pipeline
from cogvideox_flax.serve.matching import Ready, Shape, match

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Seconds between two looks for machines that joined."""

CONNECT_S = 10.0
"""Seconds in which the cluster must answer."""

MAX_LOST = 3
"""Workers that a job may lose before it is refused."""

MAX_UNOPENED = 3
"""Workers in a row that may fail to open the model before the queue ends, where none has it open."""


@dataclass
class ClusterJob:
    """One video.

    name: of its run directory.
    shape: what a worker that made one like it has ready.
    options: fields of the request.
    path: where the driver writes it.
    lost: workers that it lost.
    after: when it may be handed out, on the clock of `time.monotonic`.
    """

    name: str
    shape: Shape
    options: dict[str, Any]
    path: Path
    lost: int = 0
    after: float = 0.0


class Busy(str):
    """Why a video cannot be made yet: another run is at work in its run directory."""


class Worker:
    """A process of the cluster. JAX is imported in here alone.

    checkpoint: what a recipe holds of the model; a worker whose own differs is dropped.
    group: as `join_group` takes it.
    """

    def __init__(self, model: ModelChoice, checkpoint: Mapping[str, Any], *group: Any):
        join_group(*group)
        from cogvideox_flax.generate.recipe import short_fingerprints

        self.model = model
        self.pipe = open_pipeline(model, progress=False)
        own = short_fingerprints(self.pipe.fingerprints())
        if own != checkpoint:
            other = " and ".join(part for part in own if own[part] != checkpoint.get(part))
            raise InputError(f"{model.model_id} has another {other} there than here; copy the same checkpoint to both")

    def ready(self) -> None:
        """Answer when the model is open."""

    def make(self, options: Mapping[str, Any], folder: Path, suffix: str) -> tuple[bytes, dict[str, Any]] | str:
        """Make a video.

        Args:
            folder: its run directory; on a disk that the workers share, another one goes on there.

        Returns:
            Its file and its recipe; or why it cannot be made, or not yet.
        """
        from cogvideox_flax.generate.events import save_videos
        from cogvideox_flax.generate.journey import generate
        from cogvideox_flax.generate.request import STAGES, GenerationRequest
        from cogvideox_flax.generate.store import RunDirectory, run_dir_lock
        from cogvideox_flax.runtime.settings import in_own_settings

        pipe, is_latents = self.pipe, suffix == ".npz"
        try:
            run = pipe.resolve(GenerationRequest(**options))
            store = RunDirectory(folder, self.model, pipe.fingerprints())
            stages = STAGES[:-1] if is_latents else STAGES
            with run_dir_lock(folder, temporary=True), tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / f"video{suffix}"
                events = in_own_settings(generate(pipe, run, store, stages, keep=pipe.fits_at_once()))
                (recipe,) = save_videos(events, run, [path], latents=is_latents, timed=True)
                return path.read_bytes() if hosts.is_first() else b"", recipe
        except BusyError as e:
            return Busy(e)
        except InputError as e:  # of this video, wherever it is made
            return str(e)
        except Exception:
            hosts.end_if_another_failed()
            raise

    def follow(self, *job: Any) -> None:
        """As `make`, on a process of the group that is not the first."""

        def make() -> str | None:
            made = self.make(*job)
            return made if isinstance(made, str) else None

        follow(make)


@dataclass
class _Slot:
    """A worker as the driver sees it. task: what it does now; job: the video that it makes; opened: the model is."""

    group: Group
    task: Any
    opened: bool = False
    job: ClusterJob | None = None
    ready: Ready = field(default_factory=Ready)


def connect(address: str) -> Any:
    """Ray, connected to the cluster at an address, as `ray.init` takes it; "local" starts one on this machine.

    Raises:
        InputError: it is not installed, or the cluster is not reached.
    """
    try:
        import ray
    except ImportError as e:
        raise InputError(f"--ray needs Ray: {install_extra('ray')}") from e
    # the driver computes nothing, so it sees no device; the workers see what they would see alone
    platforms = os.environ.get("JAX_PLATFORMS", "")
    environment = {"env_vars": {"JAX_PLATFORMS": platforms}}
    try:
        _check_reachable(address)  # Ray tries for ten minutes
        with warnings.catch_warnings():  # of a cluster that is started here: a fork that only starts another program
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address, log_to_driver=False, configure_logging=False, runtime_env=environment)
    except (ConnectionError, ValueError, RuntimeError, OSError) as e:
        raise InputError(f"there is no Ray cluster at {address}: {e}; start one with `ray start --head`") from e
    return ray


def _check_reachable(address: str) -> None:
    """Connect to an address and port once.

    Raises:
        OSError: nobody answers there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            pass


@dataclass
class Driver:
    """Makes jobs on a cluster, as many at once as it has room for; machines that join later take part.

    ray: from `connect`.
    todo: the jobs that are not begun.
    model, checkpoint: as for `Worker`.
    size: what a worker takes.
    folder: of the run directories.
    made, refused: told of each job.
    looked: when free places were looked for.
    unopened, reason: workers that failed to open the model since one did, and why the last of them did.
    """

    ray: Any
    todo: list[ClusterJob]
    model: ModelChoice
    checkpoint: Mapping[str, Any]
    size: WorkerSize
    folder: Path
    made: Callable[[ClusterJob, bytes, dict[str, Any]], None]
    refused: Callable[[ClusterJob, str], None]
    slots: list[_Slot] = field(default_factory=list)
    looked: float = -math.inf
    unopened: int = 0
    reason: str = ""
    waits: bool = False

    def run(self) -> None:
        """Hand out jobs until all are made or refused.

        Raises:
            InputError: none of the machines is large enough for a worker, or no worker can open the model.
        """
        self.size = self.size.on(self.ray)
        while self.todo or any(slot.job for slot in self.slots):
            self._start_workers()
            tasks = {slot.task: slot for slot in self.slots if slot.task is not None}
            if tasks:
                done, _ = self.ray.wait(list(tasks), num_returns=1, timeout=LOOK_EVERY_S)
            else:
                time.sleep(LOOK_EVERY_S)
                done = []
            for task in done:
                self._finish(tasks[task], task)
            idle = [slot for slot in self.slots if slot.opened and slot.job is None]
            jobs = [job for job in self.todo if job.after <= time.monotonic()]
            for worker, job in match([slot.ready for slot in idle], [job.shape for job in jobs]):
                self._give(idle[worker], jobs[job])

    def _start_workers(self) -> None:
        """Start a worker wherever there is room for one, as long as jobs wait for it.

        Raises:
            InputError: none is there that makes videos, and there can be none.
        """
        # a machine on which the model cannot be opened is tried less and less often
        if time.monotonic() - self.looked < LOOK_EVERY_S * 2 ** min(self.unopened, 5):
            return
        self.looked = time.monotonic()
        count, free = free_places(self.ray, self.size, [slot.group.place for slot in self.slots])
        if not any(slot.opened for slot in self.slots):
            if not count:
                nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
                have = " and ".join(resources_text(node) or "nothing" for node in nodes)
                raise InputError(
                    f"no machine of the cluster has room for a worker, which takes {self.size}; they have {have}. Say "
                    "what a worker takes with --ray-worker and --hosts-per-worker"
                )
            if self.unopened >= MAX_UNOPENED:
                if not self.slots:
                    raise InputError(f"the workers of the cluster cannot open the model: {self.reason}")
                return  # one of those that are at it may open it
        waiting = len(self.todo) - sum(slot.job is None for slot in self.slots)
        for place in free[: max(0, waiting)]:
            group = Group(self.ray, place, self.size.needs, Worker, self.model, self.checkpoint)
            self.slots.append(_Slot(group, group.first.ready.remote()))
        if not self.slots and not self.waits:
            self.waits = True
            log.warning("the cluster has no free room for a worker, which takes %s; waiting", self.size)

    def _give(self, slot: _Slot, job: ClusterJob) -> None:
        """Let a worker make a job."""
        self.todo.remove(job)
        slot.job = job
        slot.ready.add(job.shape)
        slot.task = slot.group.make(job.options, self.folder / job.name, job.path.suffix)

    def _finish(self, slot: _Slot, task: Any) -> None:
        """Take what a worker answers; a job whose worker is lost is made by another."""
        job, slot.job, slot.task = slot.job, None, None
        errors = self.ray.exceptions
        try:
            result = self.ray.get(task)
        except errors.RayError as e:
            if job is None or not isinstance(e, errors.RayTaskError):
                self._drop(slot, job, slot.group.reason(e))
                return
            result = f"{type(e.cause).__name__}: {e.cause}"  # a fault of the program, with this job
        if job is None:
            slot.opened, self.unopened = True, 0
        elif not isinstance(result, str):
            self.made(job, *result)
            return
        elif isinstance(result, Busy) and job.lost:  # the worker that was lost may be at work there still
            job.after = time.monotonic() + LOOK_EVERY_S
            self.todo.append(job)
        else:
            self.refused(job, str(result))
        if job is not None and slot.group.others:  # they may be at work still, and wait for process 0
            self._end(slot)

    def _end(self, slot: _Slot) -> None:
        self.slots.remove(slot)
        slot.group.kill()

    def _drop(self, slot: _Slot, job: ClusterJob | None, reason: str) -> None:
        """Go on without a worker. job: what it made; None: it opened the model."""
        self._end(slot)
        if job is None:
            self.unopened, self.reason = self.unopened + 1, reason
            log.warning("a worker of the cluster cannot open the model and is left out: %s", reason)
            return
        log.warning("a worker was lost while it made %s: %s", job.path, reason)
        job.lost += 1
        if job.lost > MAX_LOST:
            self.refused(job, f"it lost {job.lost} workers: {reason}")
        else:
            self.todo.insert(0, job)
