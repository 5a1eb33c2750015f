"""A durable queue in a folder: each job is one video, with what was asked for, how far it came, and its results.

No JAX, so that a server answers at once. A job's folder holds `job.json`, the video, a preview, and while it is under
way its run directory, from which it continues after a restart.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import file_lock, write_json
from cogvideox_flax.io.values import load_json

log = logging.getLogger(__name__)

Status = Literal["queued", "in_progress", "completed", "failed"]

MAX_STARTS = 2
"""How often a job may end its process before it is failed."""

_RECORD, _LOCK = "job.json", ".lock"


@dataclass(frozen=True)
class JobRecord:
    """One video of a durable queue. All values are JSON.

    id: of the job, the name of its folder.
    order: its place in the order of arrival, from 1.
    model: the name of the model that makes it.
    options: field of the request -> its value, as files hold it.
    facts: what the request means for the model: width, height, num_frames, fps, num_inference_steps, seed, ...
    created, started, ended: seconds since 1970.
    starts: how many processes began it and did not end it.
    is_cancelled: it is to stop, or did.
    error: code and message of a job that failed.
    client: what the front end keeps with it.
    """

    id: str
    order: int
    model: str
    options: dict[str, Any]
    facts: dict[str, Any]
    created: float
    status: Status = "queued"
    started: float | None = None
    ended: float | None = None
    starts: int = 0
    is_cancelled: bool = False
    error: dict[str, str] | None = None
    client: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")


def new_id(kind: str) -> str:
    """A random name: "video_" and 26 characters, such as a job's."""
    return f"{kind}_{base64.b32encode(secrets.token_bytes(16)).decode().rstrip('=').lower()}"


class JobFolder:
    """The jobs of a folder, in the order of their arrival. One process at a time has it; its threads share it.

    Args:
        folder: made where it is missing.

    Raises:
        InputError: another process has it, or it cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._changed = threading.Condition(threading.RLock())
        self._records: dict[str, JobRecord] = {}
        self._last = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"cannot write to {self.folder}: {e.strerror}; choose another folder") from e
        busy = f"another server has {self.folder}; stop it, or choose another folder"
        self._stack.enter_context(file_lock(self.folder / _LOCK, busy=busy))
        records = filter(None, map(_read, self.folder.glob(f"*/{_RECORD}")))
        self._records = {record.id: record for record in sorted(records, key=lambda record: record.order)}
        self._last = max((record.order for record in self._records.values()), default=0)
        for record in list(self._records.values()):
            if record.status == "in_progress":
                self.lost(record.id, MAX_STARTS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lost(self, job_id: str, most: int) -> JobRecord:
        """Queue a job whose process ended, or fail it where it ended its process too often.

        Raises:
            KeyError: it was removed.
        """
        with self._changed:
            record = self._records[job_id]
            if record.is_cancelled:
                return self.fail(job_id, "cancelled", "cancelled while it was made")
            if record.starts < most:
                self._changed.notify_all()
                return self.update(job_id, status="queued")
            message = f"this job ended the process that made it {record.starts} times, so it is not begun again"
            log.warning("%s: %s", job_id, message)
            return self.fail(job_id, "process_ended", message)

    def path(self, job_id: str, name: str = "") -> Path:
        """A file of a job, or its folder."""
        return self.folder / job_id / name

    def get(self, job_id: str) -> JobRecord | None:
        with self._changed:
            return self._records.get(job_id)

    def all(self) -> list[JobRecord]:
        """All jobs, those that arrived first before the others."""
        with self._changed:
            return list(self._records.values())

    def position(self, job_id: str) -> int | None:
        """How many jobs are made before this one; None for one that is over."""
        with self._changed:
            waiting = [record.id for record in self._records.values() if not record.is_over]
        return waiting.index(job_id) if job_id in waiting else None

    def add(self, model: str, options: Mapping[str, Any], facts: Mapping[str, Any], **client: Any) -> JobRecord:
        """Queue a job.

        Raises:
            OSError: it cannot be written.
        """
        with self._changed:
            self._last += 1
            record = JobRecord(
                new_id("video"), self._last, model, dict(options), dict(facts), time.time(), client=client
            )
            self.path(record.id).mkdir()
            try:
                self._write(record)
            except BaseException:
                self.remove(record.id)
                raise
            self._changed.notify_all()
            return record

    def update(self, job_id: str, **changes: Any) -> JobRecord:
        """Change what is known of a job.

        Raises:
            KeyError: it was removed.
        """
        with self._changed:
            record = dataclasses.replace(self._records[job_id], **changes)
            self._write(record)
            return record

    def _update_here(self, job_id: str, **changes: Any) -> None:
        """Change what is known of a job, also where it cannot be written: the disk is full."""
        record = self._records[job_id] = dataclasses.replace(self._records[job_id], **changes)
        try:
            self._write(record)
        except (InputError, OSError) as e:
            log.warning("%s: its state cannot be written: %s", job_id, e)

    def _write(self, record: JobRecord) -> None:
        write_json(self.path(record.id, _RECORD), dataclasses.asdict(record))
        self._records[record.id] = record

    def begin(
        self,
        stop: threading.Event,
        models: Container[str] | None = None,
        choose: Callable[[Sequence[JobRecord]], JobRecord | None] = lambda waiting: next(iter(waiting), None),
    ) -> JobRecord | None:
        """Wait for the next job, and mark it as begun; None when `stop` is set (`wake` then ends the wait).

        Args:
            models: those whose jobs are begun; the others wait for a process that has theirs.
            choose: one of the jobs that wait, if there are any, or None, which leaves them to other threads; asked
                each time something changes.
        """
        with self._changed:
            while not stop.is_set():
                waiting = [record for record in self._records.values() if record.status == "queued"]
                waiting = [record for record in waiting if models is None or record.model in models]
                if (record := choose(waiting)) is not None:
                    now = {"status": "in_progress", "started": time.time(), "starts": record.starts + 1}
                    return self.update(record.id, **now)
                self._changed.wait()
        return None

    def wake(self) -> None:
        """End the wait of `begin`."""
        with self._changed:
            self._changed.notify_all()

    def interrupt(self, job_id: str) -> None:
        """Queue a job again that this process leaves in order."""
        with self._changed:
            if record := self._records.get(job_id):
                self._update_here(job_id, status="queued", starts=record.starts - 1)
                self._changed.notify_all()

    def complete(self, job_id: str, **facts: Any) -> JobRecord:
        """Mark a job as done, with more facts about it."""
        with self._changed:
            record = self._records[job_id]
            changes = {"status": "completed", "ended": time.time(), "starts": 0, "facts": record.facts | facts}
            return self.update(job_id, **changes)

    def fail(self, job_id: str, code: str, message: str) -> JobRecord:
        """Mark a job as failed."""
        error = {"code": code, "message": message}
        return self.update(job_id, status="failed", ended=time.time(), starts=0, error=error)

    def cancel(self, job_id: str) -> JobRecord | None:
        """Cancel a job: at once where it waits, after its current step where it is under way; None: there is none."""
        with self._changed:
            record = self._records.get(job_id)
            if record is not None and record.status == "queued":
                return self.fail(job_id, "cancelled", "cancelled before it began")
            if record is not None and record.status == "in_progress":
                self._update_here(job_id, is_cancelled=True)
            return self._records.get(job_id)

    def is_cancelled(self, job_id: str) -> bool:
        """Whether a job under way should stop."""
        with self._changed:
            record = self._records.get(job_id)
            return record is None or record.is_cancelled

    def remove(self, job_id: str) -> None:
        """Remove a job and its files; one that is under way stops after its current step."""
        with self._changed:
            self._records.pop(job_id, None)
        shutil.rmtree(self.path(job_id), ignore_errors=True)

    def clear_removed(self, job_id: str) -> None:
        """Remove what was written to the folder of a job since it was removed."""
        if self.get(job_id) is None:
            shutil.rmtree(self.path(job_id), ignore_errors=True)


def _read(path: Path) -> JobRecord | None:
    """A job's record; None where its process ended before it was written whole."""
    try:
        values = load_json(path)
        names = [field.name for field in dataclasses.fields(JobRecord) if field.name in values]
        return JobRecord(**{name: values[name] for name in names})
    except (OSError, ValueError, TypeError) as e:
        log.warning("%s cannot be read and is left out: %s", path, e)
        return None
