"""How the processes of a run on several hosts connect, and which are missing after a timeout.

JAX's coordination service names no process that is missing, does not notice another number of processes, and lets a
second process with the same number take the first one's place.
"""

from __future__ import annotations

import ipaddress
import math
import re
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.messages import Connection
from cogvideox_flax.io.values import is_count, shown
from cogvideox_flax.version import __version__

JOIN_TIMEOUT_S = 60.0
"""Default seconds that the processes wait for each other at the start."""

MAX_JOIN_TIMEOUT_S = 86_400.0
MAX_PROCESSES = 10_000

_CONNECT_S = 5.0
"""Seconds for each address of process 0's host, of which one may not answer."""
_HELLO_S = 1.0
"""Seconds that a peer may take from the first byte of its first message to the last one."""
_NAMED = 20
"""Processes that a message names."""
_LATE_S = 2.0
"""Seconds that process 0's answer may come after its own deadline."""
_HELLO_BYTES, _ANSWER_BYTES = 1000, 2**20
"""Longest messages while joining: the peer may be any program."""


@dataclass(frozen=True)
class Place:
    """This process among several.

    coordinator: ADDRESS:PORT of process 0; an IPv6 address in brackets.
    join_timeout: seconds.
    local_devices: ids of this process' devices; None: all of the host.
    """

    coordinator: str
    num_processes: int
    process_id: int
    join_timeout: float = JOIN_TIMEOUT_S
    local_devices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _parse_address(self.coordinator)
        if not is_count(self.num_processes, MAX_PROCESSES):
            raise InputError(
                f"--num-processes must be 1 or more, at most {MAX_PROCESSES}; got {shown(self.num_processes)}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise InputError(f"--process-id must be 0 to {self.num_processes - 1}; got {shown(self.process_id)}")
        _check_timeout(self.join_timeout)

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's (host, port)."""
        return _parse_address(self.coordinator)

    def name(self, process: int) -> str:
        """For messages."""
        return f"process {process} of {self.num_processes}"


def _parse_address(text: str) -> tuple[str, int]:
    """The host and port of ADDRESS:PORT."""
    found = re.fullmatch(r"(\[.+\]|[^:\[\]]+):(\d{1,5})", text, re.ASCII)
    with suppress(ValueError):
        if found and 0 < int(found[2]) < 2**16:
            host = found[1].strip("[]")
            # the resolver takes labels of 1 to 63 characters
            _ = ipaddress.IPv6Address(host) if found[1].startswith("[") else host.encode("idna")
            return host, int(found[2])
    raise InputError(f"--coordinator must be ADDRESS:PORT such as 10.0.0.2:9999 or [fd00::2]:9999; got {shown(text)}")


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds <= MAX_JOIN_TIMEOUT_S:
        raise InputError(f"--join-timeout must be above 0 s, at most {MAX_JOIN_TIMEOUT_S:g} s; got {seconds:g}")


def find_place(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    distributed: bool,
    join_timeout: float = JOIN_TIMEOUT_S,
) -> Place | None:
    """The place given by the command line's options; None: a single process.

    Raises:
        InputError: options that conflict or are out of range, or no cluster that JAX detects.
    """
    _check_timeout(join_timeout)
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if distributed and len(missing) < len(given):
        raise InputError(f"--distributed finds {', '.join(given)} itself; give either it or them")
    if distributed:
        return _detect_place(join_timeout)
    if len(missing) == len(given):
        return None
    if coordinator is None or num_processes is None or process_id is None:
        raise InputError(f"several hosts need {', '.join(given)} together; {' and '.join(missing)} is missing")
    return Place(coordinator, num_processes, process_id, join_timeout)


def _detect_place(join_timeout: float) -> Place:
    from jax._src import clusters  # no public API returns what `jax.distributed.initialize()` detects

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    found = detect(None, None, None, None, None, math.ceil(join_timeout))
    coordinator, num_processes, process_id, local_devices = found
    if coordinator is None or num_processes is None or process_id is None:
        raise InputError(
            "--distributed finds no cluster that JAX knows (TPU pods, Slurm, Open MPI and Kubernetes are known); give "
            "--coordinator, --num-processes and --process-id"
        )
    return Place(coordinator, num_processes, process_id, join_timeout, local_devices)


def join(place: Place) -> tuple[dict[int, Connection], int]:
    """Connect the processes: process 0 to all others, each of them to process 0.

    Returns:
        Process -> connection, and a free port on process 0's host for JAX's own coordinator.

    Raises:
        InputError: a process does not join in time, or does not belong to this run.
    """
    deadline = time.monotonic() + place.join_timeout
    if place.process_id != 0:
        return _connect(place, deadline)
    links = _gather(place, deadline)
    with socket.socket() as free:
        free.bind(("", 0))
        jax_port = free.getsockname()[1]
    for process, link in links.items():
        try:
            link.send({"jax_port": jax_port})
        except OSError as e:
            raise InputError(f"{place.name(process)} ended before all had joined; see what it said") from e
    return links, jax_port


def _gather(place: Place, deadline: float) -> dict[int, Connection]:
    """On process 0: a connection to each other process."""
    links: dict[int, Connection] = {}
    with _listen(place) as listener, selectors.DefaultSelector() as peers:
        peers.register(listener, selectors.EVENT_READ)
        while len(links) < place.num_processes - 1:
            if (left := deadline - time.monotonic()) <= 0:
                raise InputError(_refuse_all(place, links))
            for key, _ in peers.select(left):
                link: Any = key.fileobj
                if link is listener:
                    with suppress(OSError):  # the peer has left already
                        peers.register(Connection(listener.accept()[0]), selectors.EVENT_READ)
                elif link in links.values() or not _admit(place, link, links, deadline):
                    # a process that waits for the others says nothing: it has ended
                    links = {process: other for process, other in links.items() if other is not link}
                    peers.unregister(link)
                    link.close()
        strays: set[Any] = {key.fileobj for key in peers.get_map().values()} - {listener, *links.values()}
        for link in strays:
            link.close()
    return links


def _listen(place: Place) -> socket.socket:
    port = place.address[1]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=place.num_processes)
    except OSError as e:
        raise InputError(f"cannot listen on port {port}: {e.strerror}; choose another one for --coordinator") from e
    listener.setblocking(False)
    return listener


def _refuse_all(place: Place, links: dict[int, Connection]) -> str:
    """Tell the processes that have joined which are missing; returns the message."""
    missing = [str(i) for i in range(1, place.num_processes) if i not in links]
    named = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
    message = (
        f"{'process' if len(missing) == 1 else 'processes'} {named} of {place.num_processes} "
        f"{'has' if len(missing) == 1 else 'have'} not joined within {place.join_timeout:g} s; start the same command "
        "on every host, each with its own --process-id"
    )
    for link in links.values():
        with suppress(OSError):
            link.send({"refused": message})
    return message


def _admit(place: Place, link: Connection, links: dict[int, Connection], deadline: float) -> bool:
    """Accept a connecting process into the run, or send it the reason for refusing. Returns whether it was accepted."""
    hello = link.receive(deadline=min(deadline, time.monotonic() + _HELLO_S), limit=_HELLO_BYTES)
    if not isinstance(hello, dict):
        return False  # not a process of this library
    process: Any = hello.get("process")
    if hello.get("version") != __version__:
        refused = f"it runs version {hello.get('version')}, process 0 runs {__version__}"
    elif hello.get("num_processes") != place.num_processes:
        refused = f"it says --num-processes {hello.get('num_processes')}, process 0 says {place.num_processes}"
    elif not isinstance(process, int) or process in links or not 0 < process < place.num_processes:
        refused = f"--process-id {process} is taken, each process needs its own"
    else:
        links[process] = link
        return True
    with suppress(OSError):  # it has ended
        link.send({"refused": f"process 0 does not take this process: {refused}"})
    return False


def _connect(place: Place, deadline: float) -> tuple[dict[int, Connection], int]:
    """On the other processes: the connection to process 0, and the port of JAX's own coordinator."""
    link = _dial(place, deadline)
    with suppress(OSError):  # the answer says why
        link.send({"process": place.process_id, "num_processes": place.num_processes, "version": __version__})
    deadline = time.monotonic() + place.join_timeout + _LATE_S  # process 0 may have begun only now
    answer = link.receive(deadline=deadline, limit=_ANSWER_BYTES)
    if isinstance(answer, dict) and isinstance(answer.get("jax_port"), int):
        return {0: link}, answer["jax_port"]
    if isinstance(answer, dict) and isinstance(answer.get("refused"), str):
        raise InputError(answer["refused"])
    if answer is not None:
        raise InputError(f"{place.coordinator} is not process 0 of this run; check --coordinator")
    if time.monotonic() >= deadline:
        raise InputError(
            f"{place.name(0)} accepts a connection at {place.coordinator} and does not answer within "
            f"{place.join_timeout:g} s; check that it is process 0 of this run"
        )
    raise InputError(f"{place.name(0)} ended before all had joined; see what it said")


def _dial(place: Place, deadline: float) -> Connection:
    """Connect to process 0, which may not have begun yet."""
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            return Connection(socket.create_connection(place.address, min(left, _CONNECT_S)))
        except OSError as e:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{place.name(0)} does not answer at {place.coordinator} within {place.join_timeout:g} s ({e}); "
                    "start it there, or check the address and the firewall"
                ) from e
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
