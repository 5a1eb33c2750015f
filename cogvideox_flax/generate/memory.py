"""Whether a run fits into the devices' memory, known before any weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from cogvideox_flax.models.cogvideox.sizes import Size
from cogvideox_flax.plan import Request, bytes_per_device, placed, program_of
from cogvideox_flax.runtime.execution import Programs, memory_limit

ADVICE = {
    "encode": "Split its weights over more devices (--mesh 1,1,N or DP,SP,TP,fsdp), or take int8 ones.",
    "denoise": "Take fewer frames or pixels, more devices (`cogvideox plan` compares meshes), or int8 weights.",
    "decode": "Take fewer frames or pixels, more devices (--mesh), or decode in tiles (--tiling).",
}
"""Stage -> what to do when it does not fit."""


def checked_stages(*, denoise: bool, decode: bool) -> list[str]:
    """The stages that `check_fits` is to look at."""
    return ["encode", *(["denoise"] if denoise else []), *(["decode"] if decode else [])]


def check_fits(
    request: Request,
    size: Size,
    programs: Programs,
    mesh: Mesh | None,
    stages: Sequence[str],
    *,
    keep: bool,
    progress: bool,
) -> None:
    """Compile the stages of a run, and refuse what the devices cannot hold; see `CogVideoXPipeline.check_memory`.

    Args:
        programs: where what was compiled stays, to run it.
        keep: the weights of a stage stay when the next one runs.
        progress: say on stderr what is compiled.

    Raises:
        InputError: with the numbers and what to change.
    """
    limit = memory_limit(mesh)
    if limit is None:
        return
    held = 0
    for stage in stages:
        recipe, args, _ = program_of(stage, request, size)
        program = programs.get(recipe)
        weights, *rest = placed(args, mesh)
        program.check_memory(weights, *rest, limit=limit, held=held, advice=ADVICE[stage], announce=progress)
        held += bytes_per_device(weights) if keep else 0
