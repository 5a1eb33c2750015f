"""How the processes of a run on several hosts connect, and which are missing after a timeout."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.messages import Connection
from cogvideox_flax.version import __version__

JOIN_TIMEOUT_S = 60.0
"""Default seconds that the processes wait for each other at the start."""


@dataclass(frozen=True)
class Place:
    """This process among several.

    coordinator: ADDRESS:PORT of process 0.
    local_devices: ids of this process' devices; None: all of the host.
    """

    coordinator: str
    num_processes: int
    process_id: int
    join_timeout: float = JOIN_TIMEOUT_S
    local_devices: Sequence[int] | None = None

    def __post_init__(self) -> None:
        address, _, port = self.coordinator.rpartition(":")
        if not address or not port.isdecimal() or not 1 <= int(port) < 2**16:
            raise InputError(f"--coordinator must be ADDRESS:PORT such as 10.0.0.2:9999; got {self.coordinator!r}")
        if self.num_processes < 1:
            raise InputError(f"--num-processes must be 1 or more; got {self.num_processes}")
        if not 0 <= self.process_id < self.num_processes:
            raise InputError(f"--process-id must be 0 to {self.num_processes - 1}; got {self.process_id}")
        if self.join_timeout <= 0:
            raise InputError(f"--join-timeout must be above 0 s; got {self.join_timeout:g}")

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's (host, port)."""
        address, _, port = self.coordinator.rpartition(":")
        return address.strip("[]"), int(port)

    def name(self, process: int) -> str:
        """For messages."""
        return f"process {process} of {self.num_processes}"


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
    found = detect(None, None, None, None, None, int(join_timeout))
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
    return _gather(place) if place.process_id == 0 else _connect(place)


def _gather(place: Place) -> tuple[dict[int, Connection], int]:
    """On process 0: a connection to each other process, and the port of JAX's own coordinator."""
    deadline = time.monotonic() + place.join_timeout
    links: dict[int, Connection] = {}
    port = place.address[1]
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=place.num_processes)
    except OSError as e:
        raise InputError(f"cannot listen on port {port}: {e.strerror}; choose another one for --coordinator") from e
    with listener:
        while len(links) < place.num_processes - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                link = Connection(listener.accept()[0])
            except TimeoutError:
                message = _missing(place, links)
                for link in links.values():
                    with suppress(OSError):
                        link.send({"refused": message})
                raise InputError(message) from None
            _admit(place, link, links)
    with socket.socket() as free:
        free.bind(("", 0))
        jax_port = free.getsockname()[1]
    for link in links.values():
        link.send({"jax_port": jax_port})
    return links, jax_port


def _missing(place: Place, links: dict[int, Connection]) -> str:
    missing = [str(i) for i in range(1, place.num_processes) if i not in links]
    names = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
    return (
        f"{names} of {place.num_processes} {'has' if len(missing) == 1 else 'have'} not joined within "
        f"{place.join_timeout:g} s; start the same command on every host, each with its own --process-id"
    )


def _admit(place: Place, link: Connection, links: dict[int, Connection]) -> None:
    """Accept a connecting process into the run, or send it the reason for refusing."""
    hello = link.receive(timeout=5, limit=1000)
    if not isinstance(hello, dict):
        return link.close()  # not a process of this library
    process: Any = hello.get("process")
    refused = ""
    if hello.get("version") != __version__:
        refused = f"it runs version {hello.get('version')}, process 0 runs {__version__}"
    elif hello.get("num_processes") != place.num_processes:
        refused = f"it says --num-processes {hello.get('num_processes')}, process 0 says {place.num_processes}"
    elif process in links or not isinstance(process, int) or not 0 < process < place.num_processes:
        refused = f"--process-id {process} is taken, each process needs its own"
    if refused:
        with suppress(OSError):
            link.send({"refused": f"process 0 does not take this process: {refused}"})
        return link.close()
    links[process] = link
    return None


def _connect(place: Place) -> tuple[dict[int, Connection], int]:
    """On the other processes: the connection to process 0, and the port of JAX's own coordinator."""
    deadline = time.monotonic() + place.join_timeout
    while True:
        try:
            link = Connection(socket.create_connection(place.address, max(0.1, deadline - time.monotonic())))
            break
        except OSError as e:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{place.name(0)} does not answer at {place.coordinator} within {place.join_timeout:g} s ({e}); "
                    "start it there, or check the address and the firewall"
                ) from e
            time.sleep(0.2)
    hello = {"process": place.process_id, "num_processes": place.num_processes, "version": __version__}
    with suppress(OSError):
        link.send(hello)
    answer = link.receive()
    if answer is None:
        raise InputError(f"{place.name(0)} ended before all had joined; see what it said")
    if "refused" in answer:
        raise InputError(answer["refused"])
    return {0: link}, answer["jax_port"]
