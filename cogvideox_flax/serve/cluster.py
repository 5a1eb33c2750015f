"""A queue over the workers of a Ray cluster. Each worker has the model open and makes one video at a time.

Ray finds the machines, starts and watches the workers, and carries requests and videos. A video is there once its file
is: the driver writes it whole, and what a lost worker had begun is made by another one.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError, install_extra

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Seconds between two looks for machines that joined."""

CONNECT_S = 10.0
"""Seconds in which the cluster must answer."""

MAX_LOST = 3
"""Workers that a job may lose before it is refused."""


@dataclass(frozen=True)
class ClusterModel:
    """The model that each worker opens; as for `Pipeline.from_pretrained`.

    mesh: as --mesh, over the devices of one worker.
    checkpoint: what a recipe holds of it; a worker's that differs is refused.
    """

    where: str | None
    model_id: str
    revision: str | None
    transformer: str | None
    dtype: str
    mesh: str | None
    checkpoint: Any


@dataclass
class ClusterJob:
    """One video.

    name: of its run directory.
    shape: jobs of equal shape run the same compiled programs.
    options: fields of the request.
    path: where the driver writes it.
    """

    name: str
    shape: Any
    options: dict[str, Any]
    path: Path
    lost: int = 0


class Worker:
    """A process of the cluster. JAX is imported in here alone."""

    def __init__(self, model: ClusterModel):
        from cogvideox_flax.generate.pipeline import Pipeline
        from cogvideox_flax.generate.recipe import short_fingerprints
        from cogvideox_flax.sharding import make_mesh, parse_mesh

        self.model = model
        mesh = None if model.mesh is None else make_mesh(*parse_mesh(model.mesh))
        how: Any = {"revision": model.revision, "transformer": model.transformer, "progress": False}
        self.pipe = Pipeline.from_pretrained(model.where, model.dtype, mesh, **how)
        own = short_fingerprints(self.pipe.fingerprints())
        if own != model.checkpoint:
            other = " and ".join(part for part in own if own[part] != model.checkpoint.get(part))
            raise InputError(f"{model.model_id} has another {other} there than here; copy the same checkpoint to both")

    def ready(self) -> None:
        """Answer when the model is open."""

    def make(self, options: Mapping[str, Any], folder: Path, suffix: str) -> tuple[bytes, dict[str, Any]] | str:
        """Make a video.

        Args:
            folder: its run directory; on a disk that the workers share, another one goes on there.

        Returns:
            Its file and its recipe; or why it cannot be made.
        """
        from cogvideox_flax.generate.journey import generate
        from cogvideox_flax.generate.queue import save_videos
        from cogvideox_flax.generate.request import STAGES, GenerationRequest
        from cogvideox_flax.generate.store import RunDirectory, run_dir_lock
        from cogvideox_flax.runtime.settings import in_own_settings

        pipe, model, is_latents = self.pipe, self.model, suffix == ".npz"
        try:
            run = pipe.resolve(GenerationRequest(**options))
            own: Any = {"model_id": model.model_id, "revision": model.revision, "transformer": model.transformer}
            own["fingerprints"] = pipe.fingerprints()
            store, stages = RunDirectory(folder=folder, **own), STAGES[:-1] if is_latents else STAGES
            with run_dir_lock(folder, temporary=True), tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary) / f"video{suffix}"
                events = in_own_settings(generate(pipe, run, store, stages, keep=pipe.fits_at_once()))
                (recipe,) = save_videos(events, run, [path], latents=is_latents, timed=True)
                return path.read_bytes(), recipe
        except InputError as e:  # of this video, wherever it is made
            return str(e)


@dataclass
class _Slot:
    """A worker as the driver sees it. task: what it does now; job: None while it opens the model."""

    actor: Any
    task: Any
    job: ClusterJob | None = None
    shapes: set[Any] = field(default_factory=set)


def make_on_cluster(
    address: str,
    jobs: Sequence[ClusterJob],
    model: ClusterModel,
    needs: Mapping[str, float],
    folder: Path,
    made: Callable[[ClusterJob, bytes, dict[str, Any]], None],
    refused: Callable[[ClusterJob, str], None],
) -> None:
    """Make all jobs on a cluster, as many at once as it has room for; machines that join later take part.

    Args:
        address: of the cluster, as `ray.init` takes it; "local" starts one on this machine.
        needs: resource -> how much of it a worker takes; {}: see `_needs`.
        folder: of the run directories.
        made, refused: told of each job.

    Raises:
        InputError: Ray is not installed, the cluster is not reached or has no room, or the workers cannot open the
            model.
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
    try:
        _Driver(ray, jobs, model, needs, folder, made, refused).run()
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Connect to an address and port once.

    Raises:
        OSError: nobody answers there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            pass


class _Driver:
    def __init__(
        self,
        ray: Any,
        jobs: Sequence[ClusterJob],
        model: ClusterModel,
        needs: Mapping[str, float],
        folder: Path,
        made: Callable[[ClusterJob, bytes, dict[str, Any]], None],
        refused: Callable[[ClusterJob, str], None],
    ):
        self.ray, self.todo, self.model, self.folder = ray, list(jobs), model, folder
        self.needs = dict(needs) or _needs(ray)
        self.made, self.refused = made, refused
        self.slots: list[_Slot] = []
        self.looked = -LOOK_EVERY_S
        lost = ray.exceptions
        self.lost = (lost.ActorDiedError, lost.ActorUnavailableError, lost.NodeDiedError, lost.WorkerCrashedError)

    def run(self) -> None:
        """Hand out jobs until all are made or refused."""
        while self.todo or any(slot.job for slot in self.slots):
            self._start_workers()
            if not self.slots:
                raise InputError(
                    f"the cluster has no room for a worker, which takes {_text(self.needs)}; it has "
                    f"{_text(self.ray.cluster_resources())}. Say what a worker takes with --ray-worker"
                )
            tasks = {slot.task: slot for slot in self.slots if slot.task is not None}
            done, _ = self.ray.wait(list(tasks), num_returns=1, timeout=LOOK_EVERY_S)
            for task in done:
                self._finish(tasks[task], task)
            for slot in self.slots:
                if slot.task is None and self.todo:
                    self._give(slot)

    def _start_workers(self) -> None:
        """Start a worker wherever there is room for one, as long as jobs wait for it."""
        if time.monotonic() - self.looked < LOOK_EVERY_S:
            return
        self.looked = time.monotonic()
        free = self.ray.available_resources()
        room = min(int(free.get(name, 0) / needed) for name, needed in self.needs.items() if needed)
        waiting = len(self.todo) - sum(slot.job is None for slot in self.slots)
        named = {"CPU": "num_cpus", "GPU": "num_gpus"}
        how: dict[str, Any] = {named[name]: value for name, value in self.needs.items() if name in named}
        how["resources"] = {name: value for name, value in self.needs.items() if name not in named}
        for _ in range(min(room, waiting)):
            actor = self.ray.remote(Worker).options(max_restarts=0, **how).remote(self.model)
            self.slots.append(_Slot(actor, actor.ready.remote()))

    def _give(self, slot: _Slot) -> None:
        """Give a worker a job, one whose programs it has compiled where there is one."""
        job = next((job for job in self.todo if job.shape in slot.shapes), self.todo[0])
        self.todo.remove(job)
        slot.job = job
        slot.shapes.add(job.shape)
        slot.task = slot.actor.make.remote(job.options, self.folder / job.name, job.path.suffix)

    def _finish(self, slot: _Slot, task: Any) -> None:
        """Take what a worker answers; a job whose worker is lost is made by another."""
        job, slot.job, slot.task = slot.job, None, None
        try:
            result = self.ray.get(task)
        except self.lost as e:
            self.slots.remove(slot)
            self.looked = -LOOK_EVERY_S
            if job is None:
                raise InputError(f"a worker of the cluster cannot open the model: {_reason(e)}") from e
            log.warning("a worker was lost while it made %s, which another makes", job.path)
            job.lost += 1
            if job.lost > MAX_LOST:
                self.refused(job, f"it lost {job.lost} workers: {_reason(e)}")
            else:
                self.todo.insert(0, job)
        except self.ray.exceptions.RayTaskError as e:  # a fault of the program, with this job
            if job is None:
                raise
            self.refused(job, f"{type(e.cause).__name__}: {e.cause}")
        else:
            if job is None:  # the model is open
                return
            if isinstance(result, str):
                self.refused(job, result)
            else:
                self.made(job, *result)


def _needs(ray: Any) -> dict[str, float]:
    """What a worker takes where nobody says: a GPU, or all of a machine's chips, or all of its cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name in ("TPU", "GPU", "CPU"):
        counts = [node[name] for node in nodes if node.get(name)]
        if counts:
            return {name: 1.0 if name == "GPU" else min(counts)}
    return {"CPU": 1.0}


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in resources.items() if name in ("CPU", "GPU", "TPU"))


def _reason(error: Exception) -> str:
    """The last line of an error of Ray that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else type(error).__name__)
