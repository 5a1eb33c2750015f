"""Which steps of a run with a step cache are full; no JAX, so that the command line can read a schedule at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import is_count, shown

if TYPE_CHECKING:
    from cogvideox_flax.generate.request import ResolvedRequest

FORMS = ("deepcache", "residual")
"""What a cached step computes; see `step_cache`."""

REFERENCE = (11, 45, 4)
"""START, END and INTERVAL of the reference TPU system, for `REFERENCE_STEPS` steps."""

REFERENCE_STEPS = 50

MAX_STEPS = 1_000_000


def parse_schedule(text: str) -> list[int]:
    """'11,45,4' -> [11, 45, 4].

    Raises:
        InputError: not three whole numbers.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"step_cache_schedule must be START,END,INTERVAL such as 11,45,4; got {text!r}")
    return [int(part) for part in parts]


def default_schedule(steps: int) -> list[int]:
    """The reference's schedule with START and END scaled to a number of steps: about half of them are full."""
    start, end, interval = REFERENCE
    first = max(round(start * steps / REFERENCE_STEPS), 1)
    return [first, max(round(end * steps / REFERENCE_STEPS), first), interval]


def full_steps(schedule: Sequence[int] | None, steps: int) -> Bool[np.ndarray, " N"]:
    """Which of N steps are full: those before START, START and every INTERVAL-th after it, and those from END on.

    Args:
        schedule: START, END, INTERVAL; None: `default_schedule`.
        steps: N, the number of steps that are done.
    """
    start, end, interval = default_schedule(steps) if schedule is None else schedule
    i = np.arange(steps)
    return (i < start) | (i >= end) | ((i - start) % interval == 0)


def check_step_cache(request: ResolvedRequest) -> None:
    """Refuse an unknown form of the cache, or a schedule that the run's steps do not have.

    Raises:
        InputError: with what is expected.
    """
    form, schedule = request.step_cache, request.step_cache_schedule
    if form is not None and form not in FORMS:
        raise InputError(f"step_cache is {shown(form)}; expected {' or '.join(FORMS)}, or leave it out")
    if schedule is None:
        return
    if form is None:
        raise InputError(f"step_cache_schedule is of a step cache; give step_cache too ({' or '.join(FORMS)})")
    steps = request.num_inference_steps - request.first_step
    is_three = isinstance(schedule, tuple | list) and len(schedule) == 3
    if not is_three or not all(is_count(each, MAX_STEPS) for each in schedule):
        raise InputError(
            f"step_cache_schedule is {shown(schedule)}; expected START, END and INTERVAL, whole numbers of 1 or more: "
            "the first step must be full"
        )
    start, end, _ = schedule
    if not start <= end <= steps:
        raise InputError(
            f"step_cache_schedule has START {start} and END {end}; expected START <= END <= {steps}, the number of "
            "steps that are done"
        )
