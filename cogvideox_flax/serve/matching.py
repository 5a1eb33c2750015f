"""Which of the idle workers of a cluster makes which job."""

from __future__ import annotations

import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if typing.TYPE_CHECKING:
    from cogvideox_flax.generate.run import Run


@dataclass(frozen=True)
class Shape:
    """What a worker has ready for a job if it made one like it.

    programs: names what is compiled; see `programs_of`.
    adapters: those in the denoiser, as JSON.
    """

    programs: str
    adapters: str = "[]"


@dataclass
class Ready:
    """What a worker has ready: the programs of all that it made, and the adapters of the last."""

    programs: set[str] = field(default_factory=set)
    adapters: str = "[]"

    def add(self, shape: Shape) -> None:
        """Note that the worker makes a job of this shape."""
        self.programs.add(shape.programs)
        self.adapters = shape.adapters

    def fit(self, shape: Shape) -> int:
        """How much of a job is ready, from 0 to 3: compiling costs more than adding adapters."""
        return 2 * (shape.programs in self.programs) + (shape.adapters == self.adapters)


def match(idle: Sequence[Ready], jobs: Sequence[Shape]) -> list[tuple[int, int]]:
    """Give each idle worker a job for as long as there are any; pairs of a worker and a job, by their places.

    The pairs that fit best come first; of those, the jobs and the workers that come first.
    """
    workers, left, pairs = list(range(len(idle))), list(range(len(jobs))), []
    for fit in (3, 2, 1, 0):
        for job in list(left):
            worker = next((worker for worker in workers if idle[worker].fit(jobs[job]) == fit), None)
            if worker is not None:
                pairs.append((worker, job))
                workers.remove(worker)
                left.remove(job)
    return pairs


def programs_of(run: Run) -> str:
    """The same text for runs of one model that run the same compiled programs."""
    from cogvideox_flax.runtime.compile import stable_name

    name = stable_name(run.denoise) or repr(run.denoise)  # of a user's own code, within this process
    return repr((run.size, name, run.request.tiling, run.request.output_type))


def adapters_text(records: Sequence[Any]) -> str:
    """Adapters with their weights, as `Shape` has them."""
    return json.dumps(list(records), sort_keys=True, default=str)
