"""Several processes, usually one per host, that run one command together.

JAX connects their devices. All other messages go over one TCP connection between process 0 and each other process: the
start, values that process 0 broadcasts, the failure of a process, and the end. A killed process closes its connection,
so the others are notified at once, also while they wait in a collective. JAX's coordination service cannot report
this: if a process is lost or does not join, it aborts the others (exit code 134) before Python sees an error.

Process 0 alone reads, decides, writes and prints, and broadcasts what it read or decided; but each process writes its
shards of a training state where they share a disk. Outside of `joined` there is one process, and every function here is
a plain call.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.interrupts import loaded
from cogvideox_flax.io.values import printable
from cogvideox_flax.runtime.multihost.messages import Connection
from cogvideox_flax.runtime.multihost.rendezvous import ProcessAddress, join

if TYPE_CHECKING:  # imported late: the command line uses this module before it needs JAX
    from jax.sharding import Mesh

T = TypeVar("T")
P = ParamSpec("P")

GRACE_S = 3.0
"""Seconds that a process has to end by itself after another has failed, or after Ctrl-C, before it is killed."""

_CAUSE_WAIT_S = 2.0
"""Seconds that a process waits after an error in a collective for the message that another process failed first."""


@dataclass(frozen=True)
class Failure:
    """The first process that failed: its exit code and its message."""

    process: int
    code: int
    message: str


class _Group:
    """One process' connections to the run: process 0 is connected to all others, each of them to process 0."""

    def __init__(self, address: ProcessAddress, links: dict[int, Connection]):
        self.address, self.links = address, links
        self.is_first = address.process_id == 0
        self.failure: Failure | None = None
        self.stop_requested = False
        self.handles_interrupt = False  # the command itself stops at the next Ctrl-C
        self.is_making = False  # process 0 is in `broadcast`
        self.values: queue.SimpleQueue[Any] = queue.SimpleQueue()  # from process 0; on process 0, from the others
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._finished = False
        self._failed = threading.Event()
        self._failing, self._exiting = threading.Lock(), threading.Lock()
        self._listeners = [threading.Thread(target=self._listen, args=link, daemon=True) for link in links.items()]
        for listener in self._listeners:
            listener.start()

    def send(self, kind: str, content: Any = None) -> None:
        """Send to all connected processes; a lost connection is handled by its listener."""
        for link in self.links.values():
            with suppress(OSError):
                link.send([kind, content])

    def _listen(self, peer: int, link: Connection) -> None:
        """Handle messages until the connection is closed."""
        while (message := link.receive()) is not None:
            kind, content = message
            if kind == "value":
                self.values.put(content)
            elif kind == "failure":
                self._on_failure(Failure(*content), GRACE_S)
            elif kind == "stop":
                self.stop_requested = True
            elif kind == "done":
                self._finished = not self.is_first  # process 0 says it when all are done
                self._done.put(peer)
        if not self._finished:
            lost = Failure(peer, 1, "ended without a message: it was killed, or its host cannot be reached")
            self._on_failure(lost, 0 if peer == 0 else GRACE_S)  # without process 0, JAX aborts this one

    def _on_failure(self, failure: Failure, grace: float) -> None:
        """Handle another process' failure: forward it, and end this process if it does not end by itself."""
        if self._set_failure(failure):
            threading.Timer(grace, self._exit).start()

    def _set_failure(self, failure: Failure) -> bool:
        """Store and forward the first failure; False if there is one already."""
        with self._failing:
            if self.failure is not None:
                return False
            self.failure = failure
        if self.is_first or failure.process == self.address.process_id:
            self.send("failure", [failure.process, failure.code, failure.message])
        self._failed.set()
        return True

    def finish(self) -> None:
        """Wait until all processes are done, so that none exits while another may still fail."""
        if not self.is_first:
            self.send("done")
        for _ in self.links:
            self._done.get()
        self._finished = True
        if self.is_first:
            self.send("done")

    def fail(self, code: int, message: str) -> None:
        """End all processes with this one's failure, or with the failure of another process that caused it."""
        own = Failure(self.address.process_id, code, message)
        if code == 1:
            self.end_if_another_failed()
        self._set_failure(own)
        self._exit(own)

    def end_if_another_failed(self) -> None:
        """End this process if another one has failed, or does so in a moment."""
        if self._failed.wait(_CAUSE_WAIT_S):
            self._exit()

    def _exit(self, failure: Failure | None = None) -> None:
        """End this process with a failure; default: the first one. Process 0 ends last, since JAX aborts the others
        when they lose it."""
        with self._exiting:
            failure = failure or self.failure
            assert failure is not None
            said = failure.message
            if failure.process != self.address.process_id:
                said = f"{self.address.name(failure.process)}: {failure.message.strip()}"
            try:
                print(printable(said), file=sys.stderr, flush=True)
                sys.stdout.flush()
                deadline = time.monotonic() + GRACE_S + 1
                for listener in self._listeners if self.is_first else ():
                    listener.join(max(0.0, deadline - time.monotonic()))
            finally:  # also after another Ctrl-C or a closed stderr
                os._exit(failure.code)  # collectives, and JAX at the interpreter's end, would wait for the others

    def watch_interrupts(self) -> None:
        """End the processes after Ctrl-C even if the main thread is in a collective, which blocks the signal."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)

        def watch() -> None:
            while True:
                if reader.recv(1) == bytes([signal.SIGINT]):
                    if not self.handles_interrupt:
                        break
                    self.handles_interrupt = False
            time.sleep(GRACE_S)
            self.fail(130, "stopped; the same command goes on from what was finished")

        threading.Thread(target=watch, daemon=True).start()


_group: _Group | None = None


def is_first() -> bool:
    """Whether this is process 0, the only one that writes and prints."""
    return _group is None or _group.is_first


@contextmanager
def joined(
    address: ProcessAddress | None, same: dict[str, Any], outcome: Callable[[BaseException], tuple[int, str | None]]
) -> Iterator[bool]:
    """Run a command as one of several processes that begin and end together. Enter before any device is used.

    All but process 0 discard their standard output. An error inside ends all processes.

    Args:
        address: None for a single process: nothing is done.
        same: options by name, as JSON values, that must be equal on all processes.
        outcome: error -> exit code and message; the message None stands for the traceback.

    Yields:
        Whether this is process 0.

    Raises:
        InputError: a process does not join in time, or has another version, number of processes or other options.
    """
    try:
        if address is not None and address.num_processes > 1:
            loaded()
            enter(address, is_command=True)
        check_equal("the options", broadcast(lambda: same), same)
        yield is_first()
        if _group is not None:
            _group.finish()
    except BaseException as e:
        if _group is not None:
            code, message = outcome(e)
            _group.fail(code, traceback.format_exc().rstrip() if message is None else message)
        raise


def enter(address: ProcessAddress, *, is_command: bool = False) -> None:
    """Make this process one of several from now on; they end together. Call it before any device is used.

    Args:
        is_command: also handle Ctrl-C, and discard the standard output of all processes but 0.

    Raises:
        InputError: a process does not join in time, or has another version or number of processes.
    """
    global _group
    import jax

    from cogvideox_flax.sharding.devices import find_devices

    links, jax_port = join(address)
    _group = _Group(address, links)
    if is_command:
        _group.watch_interrupts()
        _redirect_stdout(address)
    # its SIGTERM handler would keep a process alive that is told to end
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        f"{address.coordinator.rpartition(':')[0]}:{jax_port}",
        address.num_processes,
        address.process_id,
        local_device_ids=address.local_devices,
        shutdown_timeout_seconds=30,
    )
    find_devices()  # found by all processes together, so before process 0 asks for them alone


def end_if_another_failed() -> None:
    """After an error, which may come of a collective: end this process if another one has failed."""
    if _group is not None:
        _group.end_if_another_failed()


def fail(message: str, code: int = 1) -> None:
    """End all processes with this message and exit code, where there are several."""
    if _group is not None:
        _group.fail(code, message)


def _redirect_stdout(address: ProcessAddress) -> None:
    """Keep `sys.stdout` for process 0 only, and send what C++ libraries such as Gloo print to stderr."""
    sys.stdout.flush()
    results = os.dup(1) if address.process_id == 0 else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = open(results, "w", encoding="utf-8")  # noqa: SIM115  (open as long as the process lives)


def broadcast(make: Callable[[], T], send: Callable[[T], Any] | None = None) -> T:
    """Broadcast the result of `make()` on process 0 to all processes, which must call this in the same order.

    Args:
        make: called on process 0 only, where calls of `broadcast` in it are plain calls; returns JSON values and numpy
            arrays, in lists and dictionaries.
        send: makes these of the result of `make` where it is something else; the other processes get them.

    Raises:
        InputError: as `make` raised it on process 0.
    """
    if _group is None or _group.is_making:
        return make()
    if not _group.is_first:
        error, value = _group.values.get()  # never, if a process fails: then this one is ended
        if error is not None:
            raise InputError(f"{_group.address.name(0)}: {error}")
        return value
    _group.is_making = True
    try:
        value = make()
    except InputError as e:
        _group.send("value", [str(e), None])
        raise
    finally:
        _group.is_making = False
    _group.send("value", [None, value if send is None else send(value)])
    return value


def send_to_first(value: Any) -> None:
    """Send JSON values and numpy arrays to process 0, from another process. A lost connection ends this process."""
    assert _group is not None
    _group.send("value", value)


def receive_on_first() -> Any:
    """The next value that another process sent with `send_to_first`, in any order of the processes."""
    assert _group is not None
    return _group.values.get()  # never, if a process fails: then this one is ended


def broadcast_result(read: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that reads process 0's files: all processes call it, process 0 runs it and broadcasts."""
    return wraps(read)(lambda *args, **kwargs: broadcast(partial(read, *args, **kwargs)))


def on_process_0(write: Callable[P, None]) -> Callable[P, None]:
    """Decorate a function that writes files: all processes call it, process 0 runs it."""
    return wraps(write)(lambda *args, **kwargs: write(*args, **kwargs) if is_first() else None)


def process_0_then_others(make: Callable[[], T], what: str, values: Callable[[T], dict[str, Any]]) -> T:
    """Return `make()`, which process 0 calls before the others: these find its files if they share its disk.

    Args:
        make: does not use `broadcast`.
        what: name of the results in the message, in the plural.
        values: result -> JSON values that must be equal on all processes.

    Raises:
        InputError: as `make` raised it on process 0, or as for `check_equal`.
    """
    first: Any = broadcast(make, values)
    if is_first():
        return first
    own = make()
    check_equal(what, first, values(own))
    return own


def check_equal(what: str, theirs: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise InputError if JSON values of this process differ from `theirs`, those of process 0."""
    differing = [
        f"{name} is {theirs.get(name)!r} there, {value!r} here"
        for name, value in values.items()
        if theirs.get(name) != value
    ]
    if differing:
        raise InputError(f"{what} of process 0 and of this process differ: {'; '.join(differing)}")


def check_mesh(mesh: Mesh | None) -> None:
    """Raise InputError if the mesh leaves out a process."""
    if _group is None:
        return
    import jax

    used = {device.process_index for device in mesh.devices.flat} if mesh is not None else set()
    count = _group.address.num_processes
    if len(used) < count:
        raise InputError(
            f"the mesh must span all {count} processes, which have {jax.device_count()} devices together; give "
            "a --mesh DP,SP,TP of that many"
        )


@contextmanager
def handled_interrupt() -> Iterator[None]:
    """Let the command stop by itself at the first Ctrl-C, which then does not end the processes."""
    if _group is not None:
        _group.handles_interrupt = True
    try:
        yield
    finally:
        if _group is not None:
            _group.handles_interrupt = False


def stop_requested(here: bool) -> bool:
    """Whether any process is to stop; `here`: whether this one is, of which process 0 may hear one call later.

    The answer is equal on all processes, which must call this in the same order.
    """
    if _group is not None and here and not _group.is_first:
        _group.send("stop")
    return broadcast(lambda: here or (_group is not None and _group.stop_requested))
