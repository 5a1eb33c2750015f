"""What happens to jobs, as a stream that any number of clients follow, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.atomic import write_text

log = logging.getLogger(__name__)

KEPT = 1024
"""The latest events of a server, which a client that comes back is sent again."""

PENDING = 64
"""Events that wait for a slow client; of those that the next one replaces, the oldest are dropped first."""

REPLACED = ("progress", "preview")
"""Kinds of events of which only the latest matters."""

ENDS = ("completed", "failed", "deleted")
"""Kinds of events after which a job has no more."""

BLOCK = 1000
"""Numbers of events that are reserved at once, so that a restart does not use one twice."""


@dataclass(frozen=True)
class ServerEvent:
    """Something that happened to a job.

    id: rises with each event of a server, also over restarts.
    """

    id: int
    kind: str
    job: str
    data: dict[str, Any]


class Follower:
    """The events of one client that were not sent yet. It belongs to one event loop."""

    def __init__(self, job: str | None):
        self.job = job
        self._events: deque[ServerEvent] = deque()
        self._loop = asyncio.get_running_loop()
        self._new = asyncio.Event()

    def put(self, event: ServerEvent) -> None:
        """Add an event, from any thread."""
        if self.job in (None, event.job):
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: ServerEvent) -> None:
        if len(self._events) >= PENDING:
            if (dropped := next((each for each in self._events if each.kind in REPLACED), None)) is not None:
                self._events.remove(dropped)
            else:  # the client reads all anew
                self._events.clear()
                event = ServerEvent(event.id, "reset", self.job or "", {})
        self._events.append(event)
        self._new.set()

    async def next(self, timeout: float) -> ServerEvent | None:
        """The next event; None where there is none in time."""
        if not self._events:
            self._new.clear()
            try:
                await asyncio.wait_for(self._new.wait(), timeout)
            except TimeoutError:
                return None
        return self._events.popleft() if self._events else None

    def wake(self) -> None:
        """End the wait of `next`."""
        self._loop.call_soon_threadsafe(self._new.set)


class EventLog:
    """The events of a server: numbered, the latest kept, sent to all who follow.

    Args:
        path: a file that holds the first number that was not reserved.
    """

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._next = self._reserved = self._first = _read_number(path)
        self._kept: deque[ServerEvent] = deque(maxlen=KEPT)
        self._followers: set[Follower] = set()
        self._ends: dict[str, int] = {}
        self._is_over = False

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self._next - 1

    @property
    def followers(self) -> int:
        """How many clients follow."""
        return len(self._followers)

    def publish(self, kind: str, job: str, **data: Any) -> None:
        """Add an event, from any thread."""
        with self._lock:
            if self._next >= self._reserved:
                self._reserved = self._next + BLOCK
                try:
                    write_text(self._path, str(self._reserved))
                except (OSError, InputError) as e:  # then a restart uses numbers twice, and clients read anew
                    log.warning("cannot write %s: %s", self._path, e)
            event = ServerEvent(self._next, kind, job, data)
            self._next += 1
            self._kept.append(event)
            if kind in ENDS:
                self._ends[job] = event.id
            for follower in self._followers:
                follower.put(event)

    def end_of(self, job: str) -> int:
        """The number of the event that ended a job; of one that an earlier process ended, the first of this one."""
        return self._ends.get(job, self._first)

    def end(self) -> None:
        """End what `follow` yields: the server stops. May be called by a signal handler, so it waits for no lock."""
        self._is_over = True
        for follower in list(self._followers):
            follower.wake()

    async def follow(self, job: str | None, after: int | None, every: float) -> AsyncIterator[ServerEvent | None]:
        """Yield events as they happen, and None at the beginning and where there was none for `every` seconds.

        Args:
            job: of this job alone.
            after: the last event that the client knows; where those after it are not kept any more, the first event is
                a "reset".
        """
        follower = Follower(job)
        with self._lock:
            earlier = [event for event in self._kept if after is not None and event.id > after]
            first = self._kept[0].id if self._kept else self._next
            is_gap = after is not None and after + 1 < first and after < self.last
            self._followers.add(follower)
            last = self.last
        try:
            if is_gap:
                yield ServerEvent(last, "reset", job or "", {})
            else:
                for event in earlier:
                    if job in (None, event.job):
                        yield event
            yield None  # from here on nothing is missed
            while not self._is_over:
                yield await follower.next(every)
        finally:
            with self._lock:
                self._followers.discard(follower)


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 1
