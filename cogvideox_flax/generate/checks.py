"""What a model and a mesh rule out, before any weights are converted or loaded."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import DTYPES, ResolvedRequest
from cogvideox_flax.runtime.profiling import ProfilingOptions


def check_dtype(manifest: Manifest, dtype: str, platform: str | None) -> None:
    """Refuse a dtype that a model or the devices cannot compute a run in.

    Args:
        platform: "cpu", "gpu" or "tpu"; None is JAX's default one, which is asked for only where it matters.

    Raises:
        InputError: unknown, float16 for a release that does not survive it, or float16 on TPUs.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    manifest.configs[manifest.model_family.denoiser].check_dtype(dtype)
    if dtype == "float16" and (platform or jax.default_backend()) == "tpu":
        raise InputError(
            "float16 is not served on TPUs, whose kernels compute in bfloat16 or float32; use one of these"
        )


def check_model(manifest: Manifest, where: object, dtype: str, mesh: Mesh | None) -> None:
    """Refuse a model that its configs alone rule out.

    Raises:
        InputError: not a complete text-to-video model, a dtype that it does not survive or its devices (those of the
            mesh, or JAX's own) do not serve, or a mesh that its weights do not divide over.
    """
    family, configs = manifest.model_family, manifest.configs
    manifest.check_complete(where)
    check_dtype(manifest, dtype, None if mesh is None else mesh.devices.flat[0].platform)
    try:
        family.check(configs)
    except InputError as e:
        raise InputError(f"{where} cannot be run: {e}") from e
    if mesh is None:
        return
    for name, heads in family.heads(configs).items():
        sharding.check_heads(mesh, heads, name.replace("_", " "))
    for name, component in family.components.items():
        for parameter, leaf in checkpoint.parameters(manifest.abstract(name)).items():
            sharding.parameter_sharding(mesh, component.sharding, parameter, leaf.shape)


def check_run(request: ResolvedRequest, mesh: Mesh | None, profiling: ProfilingOptions) -> None:
    """Refuse a resolved request that does not divide over a mesh, or a profile of steps that it does not have.

    Raises:
        InputError: with the numbers.
    """
    sharding.check_batch(mesh, request.batch * (2 if request.guided else 1))
    profiling.check(request.num_inference_steps - request.first_step, request.compiled_loop or request.one_program)
