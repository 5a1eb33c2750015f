"""The processes of a worker on a Ray cluster: one, or one on each of several hosts that make a video together.

The processes of a group are one `jax.distributed`, hold the same model on one mesh and end together, as
`runtime.multihost` has it. Process 0 answers for all of them.
"""

from __future__ import annotations

import math
import os
import socket
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.multihost.rendezvous import ProcessAddress

JOIN_S = 300.0
"""Seconds that the processes of a group wait for each other at the start."""

SLICE, HOST, TOPOLOGY = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id", "ray.io/tpu-topology"
"""Labels that Ray gives to the hosts of a TPU slice."""

Place = tuple[Mapping[str, str], ...]
"""Where a worker runs: for each of its hosts the labels that it must have."""


@dataclass(frozen=True)
class WorkerSize:
    """What a worker takes.

    needs: resource -> how much of it on each host; {}: see `default_needs`.
    hosts: how many; None: those of a TPU slice, elsewhere one.
    """

    needs: Mapping[str, float] = field(default_factory=dict)
    hosts: int | None = None

    def __str__(self) -> str:
        """Such as "4 TPU on each of 2 hosts"."""
        return resources_text(self.needs) + (f" on each of {self.hosts} hosts" if (self.hosts or 1) > 1 else "")

    def on(self, ray: Any) -> WorkerSize:
        """The same with what a worker takes on this cluster where nobody says."""
        return WorkerSize(self.needs or default_needs(ray), self.hosts)


def worker_size(ray: str | None, needs: str | None, num_hosts: int | None) -> WorkerSize:
    """What --ray, --ray-worker and --hosts-per-worker say.

    Raises:
        InputError: they say nothing that can be.
    """
    if ray is None and (needs is not None or num_hosts is not None):
        raise InputError("--ray-worker and --hosts-per-worker are of --ray")
    if num_hosts is not None and num_hosts < 1:
        raise InputError(f"--hosts-per-worker is {num_hosts}; expected 1 or more")
    amounts = {}
    for part in needs.split(",") if needs else ():
        name, _, amount = part.partition("=")
        try:
            amounts[name.strip()] = float(amount)
        except ValueError:
            amounts[name.strip()] = math.nan
        if not (name.strip() and 0 < amounts[name.strip()] < 1e6):
            raise InputError(f"--ray-worker is {needs!r}; expected NAME=AMOUNT,..., such as CPU=8,GPU=1")
    return WorkerSize(amounts, num_hosts)


def default_needs(ray: Any) -> dict[str, float]:
    """What a worker takes of a host where nobody says: a GPU, or all of its TPU chips, or all of its cores."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name in ("TPU", "GPU", "CPU"):
        counts = [node[name] for node in nodes if node.get(name)]
        if counts:
            return {name: 1.0 if name == "GPU" else min(counts)}
    return {"CPU": 1.0}


def resources_text(resources: Mapping[str, float]) -> str:
    """The resources that people name, without memory and Ray's own marks of a machine."""
    own = ("memory", "object_store_memory")
    named = {name: value for name, value in resources.items() if name not in own and ":" not in name}
    return ", ".join(f"{value:g} {name}" for name, value in named.items())


# --- where


def free_places(ray: Any, size: WorkerSize, taken: Iterable[Place]) -> tuple[int, list[Place]]:
    """How many places for workers the cluster has, and those that are free now.

    What is free is summed over the hosts: a worker may find no room on one of them, and then waits in Ray.

    Args:
        taken: the places of the workers that are there.
    """
    free = places([node for node in ray.nodes() if node["Alive"]], size)
    count = len(free)
    for place in taken:
        with suppress(ValueError):  # on a host that is gone
            free.remove(place)
    room, free_now = dict(ray.available_resources()), []
    for place in free:
        needs = {name: amount * len(place) for name, amount in size.needs.items()}
        if _room_for(needs, room):
            free_now.append(place)
            room |= {name: room[name] - amount for name, amount in needs.items()}
    return count, free_now


def places(nodes: Sequence[Mapping[str, Any]], size: WorkerSize) -> list[Place]:
    """The places that these hosts are, while nobody else uses them. A TPU slice of several hosts is one."""
    slices = defaultdict[str, list[Mapping[str, Any]]](list)
    for node in nodes:
        is_of_slice = 1 < _hosts_of_slice(node) == (size.hosts or _hosts_of_slice(node))
        if is_of_slice and size.needs.get("TPU") == node["Resources"]["TPU"]:  # with fewer chips, JAX sees one host
            slices[node["Labels"][SLICE]].append(node)
    whole_slices: list[Place] = []
    for name, its in slices.items():
        ids = [str(i) for i in range(_hosts_of_slice(its[0]))]
        is_whole = sorted(ids) == sorted(node["Labels"].get(HOST) for node in its)
        if is_whole and all(_room_for(size.needs, node["Resources"]) for node in its):
            whole_slices.append(tuple({SLICE: name, HOST: i} for i in ids))  # processes are numbered as the hosts are
    in_slices = [node for its in slices.values() for node in its]
    room = [_room_for(size.needs, node["Resources"]) for node in nodes if node not in in_slices]
    one: Place = ({},) * (size.hosts or 1)
    return whole_slices + [one] * _spread(room, len(one))


def _hosts_of_slice(node: Mapping[str, Any]) -> int:
    """How many hosts the TPU slice of a host has."""
    labels, chips = node.get("Labels") or {}, node["Resources"].get("TPU")
    if not chips or SLICE not in labels or TOPOLOGY not in labels:
        return 1
    units = int(os.environ.get("RAY_TPU_RESOURCE_PER_CHIP", 1))  # Ray's own
    return math.ceil(math.prod(map(int, labels[TOPOLOGY].split("x"))) * units / chips)


def _spread(room: Sequence[int], num_hosts: int) -> int:
    """How many groups of so many different hosts there are at once.

    Args:
        room: for how many processes each host has room.
    """
    count = sum(room) // num_hosts
    while sum(min(each, count) for each in room) < count * num_hosts:
        count -= 1
    return count


def _room_for(needs: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How many processes these resources are enough for."""
    return min(math.floor(resources.get(name, 0) / needed + 1e-6) for name, needed in needs.items())


# --- the driver's side


class Group:
    """The actors of a worker.

    Args:
        needs: of each.
        process: their class. Its constructor takes `args`, and in a group what `join_group` takes.
        options: of the actors.

    Attributes:
        first: the actor that answers for all.
        others: those that follow it.
    """

    def __init__(
        self, ray: Any, place: Place, needs: Mapping[str, float], process: type, *args: Any, **options: Any
    ) -> None:
        self.ray, self.place, self.placement = ray, place, None
        options = actor_options(needs) | options
        if len(place) == 1:
            self.first, self.others = ray.remote(process).options(**options).remote(*args), []
            return
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        labels = list(map(dict, place)) if any(place) else None
        bundles = [dict(needs)] * len(place)
        self.placement = placement_group(bundles, strategy="STRICT_SPREAD", bundle_label_selector=labels)
        where = [PlacementGroupSchedulingStrategy(self.placement, i) for i in range(len(place))]
        # the processes take it as an argument, so they start when it is known
        address = ray.remote(_free_address).options(num_cpus=0, scheduling_strategy=where[0]).remote()
        self.first, *self.others = (
            ray.remote(process).options(**options, scheduling_strategy=at).remote(*args, address, len(place), i)
            for i, at in enumerate(where)
        )
        self._told = [actor.ready.remote() for actor in self.others]

    def make(self, *args: Any, **options: Any) -> Any:
        """Let all processes make a video; returns the task of process 0."""
        self._told = [actor.follow.remote(*args) for actor in self.others]
        return self.first.make.options(**options).remote(*args)

    def reason(self, error: Exception) -> str:
        """Why the worker is gone: what process 0 ended with, or another one which ended it."""
        for task in self.ray.wait(self._told, num_returns=len(self._told), timeout=0)[0] if self.others else ():
            try:
                self.ray.get(task)
            except self.ray.exceptions.RayError as e:
                return last_line(e)
        return last_line(error)

    def kill(self) -> None:
        """End the processes, and give back what they held."""
        for actor in (self.first, *self.others):
            with suppress(self.ray.exceptions.RayError):  # it is gone
                self.ray.kill(actor, no_restart=True)
        if self.placement is not None:
            with suppress(self.ray.exceptions.RayError):  # so is the cluster
                self.ray.util.remove_placement_group(self.placement)


def actor_options(needs: Mapping[str, float]) -> dict[str, Any]:
    """What a process takes in Ray's words, and no CPU that nobody named."""
    others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
    named = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
    return {**named, "resources": others, "max_restarts": 0}


def last_line(error: Exception) -> str:
    """The last line of an error of Ray that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else type(error).__name__)


# --- in the processes


def _free_address() -> str:
    """An address and port of this host, for process 0."""
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def join_group(coordinator: str = "", num_processes: int = 1, process_id: int = 0) -> None:
    """Become one of the processes of a group, if there are several.

    Raises:
        InputError: another one does not join, or is of another version.
    """
    if num_processes > 1:
        hosts.enter(ProcessAddress(coordinator, num_processes, process_id, JOIN_S))


def follow(make: Callable[[], str | None]) -> None:
    """Make a video on a process other than 0. Where that fails, end the group: the others may wait for this one.

    Args:
        make: returns why it cannot be made.
    """
    try:
        reason = make()
    except Exception:
        reason = traceback.format_exc()
    if reason is not None:
        time.sleep(hosts.GRACE_S)  # where process 0 says so itself, the driver takes its answer, and ends the group
        hosts.fail(reason)
