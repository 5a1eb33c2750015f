"""Whether a run fits into the devices' memory, known before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.runtime.compile import Program, Programs
from cogvideox_flax.runtime.devices import GIB, bytes_needed, bytes_per_device, memory_limit

ADVICE = {
    "encode": "Split its weights over more devices (--mesh 1,1,N or DP,SP,TP,fsdp), or take int8 ones.",
    "denoise": "Take fewer frames or pixels, more devices (`cogvideox plan` compares meshes), or int8 weights.",
    "decode": "Take fewer frames or pixels, more devices (--mesh), or decode in tiles (--tiling).",
    "run": "Run it in stages, which hold one component at a time.",
}
"""Stage -> what to do when it does not fit."""


Compiled = tuple[Program, tuple[Any, ...], int]
"""A program, its arguments as shapes (weights first), and how often it runs."""


def check_memory(
    stages: Iterable[tuple[str, Sequence[Compiled]]], programs: Programs, *, keep: bool = True, progress: bool = True
) -> None:
    """Compile programs before anything is loaded, and refuse what the devices cannot hold.

    What is compiled is what then runs, so this costs no time of its own. Devices that do not say what they have (CPUs)
    are taken to have enough.

    Args:
        stages: each stage and its programs, in the order in which they run; asked for only where devices say what they
            have.
        programs: where what was compiled stays, to run it.
        keep: the weights of a stage stay when the next one runs; those of its own programs do in any case.
        progress: say on stderr what is compiled.

    Raises:
        InputError: with the numbers and what to change.
    """
    limit = memory_limit(programs.mesh)
    if limit is None:
        return
    held = 0
    for stage, compiled in stages:
        before = held
        for program, (weights, *others), _ in compiled:
            memory = programs.get(program).prepare(weights, *others, announce=progress).memory_analysis()
            if memory is not None and (needed := bytes_needed(memory)) + held > limit:
                beside = f" beside {held / GIB:.2f} GiB of other weights" if held else ""
                raise InputError(
                    f"the {program.name} needs {needed / GIB:.2f} GiB on each device{beside}, which has "
                    f"{limit / GIB:.2f} GiB. {ADVICE[stage]}"
                )
            held += bytes_per_device(weights)
        held = held if keep else before
