"""Connect the processes of a run on several hosts, or name those that are missing after a timeout.

`jax.distributed.initialize` names no missing process, does not notice another number of processes, lets a second
process with the same id take the first one's place, and aborts the interpreter (exit code 134) at its timeout.
"""

from __future__ import annotations

import ipaddress
import math
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import is_count, short_repr
from cogvideox_flax.runtime.multihost.messages import Connection
from cogvideox_flax.version import __version__

JOIN_TIMEOUT_S = 60.0
"""Default seconds that the processes wait for each other at the start."""

MAX_JOIN_TIMEOUT_S = 86_400.0
MAX_PROCESSES = 10_000


@dataclass(frozen=True)
class ProcessAddress:
    """The address of process 0, and which process of how many this is.

    coordinator: ADDRESS:PORT of process 0; an IPv6 address in brackets.
    join_timeout: seconds that the processes wait for each other.
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
                f"--num-processes must be 1 or more, at most {MAX_PROCESSES}; got {short_repr(self.num_processes)}"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise InputError(f"--process-id must be 0 to {self.num_processes - 1}; got {short_repr(self.process_id)}")
        _check_timeout(self.join_timeout)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The coordinator's (host, port)."""
        return _parse_address(self.coordinator)

    def name(self, process: int) -> str:
        """The name of a process in messages."""
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
    raise InputError(
        f"--coordinator must be ADDRESS:PORT such as 10.0.0.2:9999 or [fd00::2]:9999; got {short_repr(text)}"
    )


def _check_timeout(seconds: float) -> None:
    if not 0 < seconds <= MAX_JOIN_TIMEOUT_S:
        raise InputError(f"--join-timeout must be above 0 s, at most {MAX_JOIN_TIMEOUT_S:g} s; got {seconds:g}")


def find_address(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    distributed: bool,
    join_timeout: float = JOIN_TIMEOUT_S,
) -> ProcessAddress | None:
    """Return the address that the command line's options give, or None for a single process.

    Raises:
        InputError: options that conflict or are out of range, or no cluster that JAX detects.
    """
    _check_timeout(join_timeout)
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if distributed and len(missing) < len(given):
        raise InputError(f"--distributed finds {', '.join(given)} itself; give either it or them")
    if distributed:
        return _detect_address(join_timeout)
    if len(missing) == len(given):
        return None
    if coordinator is None or num_processes is None or process_id is None:
        raise InputError(f"several hosts need {', '.join(given)} together; {' and '.join(missing)} is missing")
    return ProcessAddress(coordinator, num_processes, process_id, join_timeout)


def _detect_address(join_timeout: float) -> ProcessAddress:
    from jax._src import clusters  # no public API returns what `jax.distributed.initialize()` detects

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    found = detect(None, None, None, None, None, math.ceil(join_timeout))
    coordinator, num_processes, process_id, local_devices = found
    if coordinator is None or num_processes is None or process_id is None:
        raise InputError(
            "--distributed finds no cluster that JAX knows (TPU pods, Slurm, Open MPI and Kubernetes are known); give "
            "--coordinator, --num-processes and --process-id"
        )
    return ProcessAddress(coordinator, num_processes, process_id, join_timeout, local_devices)


def join(address: ProcessAddress) -> tuple[dict[int, Connection], int]:
    """Connect process 0 to all others, and each of them to process 0.

    Returns:
        Process -> connection, and a free port on process 0's host for JAX's own coordinator.

    Raises:
        InputError: a process does not join in time, or has another version or number of processes.
    """
    deadline = time.monotonic() + address.join_timeout
    if address.process_id != 0:
        return _connect(address, deadline)
    links = _gather(address, deadline)
    with socket.socket() as free:
        free.bind(("", 0))
        jax_port = free.getsockname()[1]
    for process, link in links.items():
        try:
            link.send({"jax_port": jax_port})
        except OSError as e:
            raise InputError(f"{address.name(process)} ended before all had joined; see what it said") from e
    return links, jax_port


def _gather(address: ProcessAddress, deadline: float) -> dict[int, Connection]:
    """On process 0: a connection to each other process."""
    links: dict[int, Connection] = {}
    with _listen(address) as listener:
        while len(links) < address.num_processes - 1:
            if (left := deadline - time.monotonic()) <= 0:
                raise InputError(_refuse_all(address, links))
            listener.settimeout(left)
            with suppress(OSError):  # the time is up, or the peer has left already
                new = Connection(listener.accept()[0])
                # a process that waits for the others sends nothing, or it has ended and may be started again
                links = {process: link for process, link in links.items() if link.is_idle()}
                _admit(address, new, links)
    return links


def _listen(address: ProcessAddress) -> socket.socket:
    port = address.host_and_port[1]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=address.num_processes)
    except OSError as e:
        raise InputError(f"cannot listen on port {port}: {e.strerror}; choose another one for --coordinator") from e


def _refuse_all(address: ProcessAddress, links: dict[int, Connection]) -> str:
    """Tell the processes that have joined which are missing; returns the message."""
    missing = [str(i) for i in range(1, address.num_processes) if i not in links]
    message = (
        f"{'process' if len(missing) == 1 else 'processes'} {', '.join(missing[:20])}{', ...' * (len(missing) > 20)} "
        f"of {address.num_processes} {'has' if len(missing) == 1 else 'have'} not joined within "
        f"{address.join_timeout:g} s; start the same command on every host, each with its own --process-id"
    )
    for link in links.values():
        with suppress(OSError):
            link.send({"refused": message})
    return message


def _admit(address: ProcessAddress, link: Connection, links: dict[int, Connection]) -> None:
    """Add a connecting process to `links`, or send it the reason for refusing."""
    hello = link.receive(timeout=1)
    if hello is None:  # not a process of this library
        return
    process = hello["process"]
    if hello["version"] != __version__:
        refused = f"it runs version {hello['version']}, process 0 runs {__version__}"
    elif hello["num_processes"] != address.num_processes:
        refused = f"it says --num-processes {hello['num_processes']}, process 0 says {address.num_processes}"
    elif process in links:
        refused = f"--process-id {process} is taken, each process needs its own"
    else:
        links[process] = link
        return
    link.send({"refused": f"process 0 does not take this process: {refused}"})


def _connect(address: ProcessAddress, deadline: float) -> tuple[dict[int, Connection], int]:
    """On the other processes: the connection to process 0, and the port of JAX's own coordinator."""
    link = _dial(address, deadline)
    with suppress(OSError):  # the answer says why
        link.send({"process": address.process_id, "num_processes": address.num_processes, "version": __version__})
    answer = link.receive(timeout=address.join_timeout + 2)  # process 0 may have begun only now
    if answer is None:
        raise InputError(
            f"{address.name(0)} accepts a connection at {address.coordinator} and does not answer within "
            f"{address.join_timeout:g} s, or ended before all had joined; see what it said, and check --coordinator"
        )
    if "refused" in answer:
        raise InputError(answer["refused"])
    return {0: link}, answer["jax_port"]


def _dial(address: ProcessAddress, deadline: float) -> Connection:
    """Connect to process 0, which may not have begun yet."""
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            return Connection(socket.create_connection(address.host_and_port, min(left, 5)))  # a host may have several
        except OSError as e:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{address.name(0)} does not answer at {address.coordinator} within {address.join_timeout:g} s "
                    f"({e}); start it there, or check the address and the firewall"
                ) from e
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
