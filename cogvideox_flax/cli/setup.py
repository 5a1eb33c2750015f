"""From options to a pipeline: what a run is to do is checked as a whole before anything is converted or loaded."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.paths import expand_user
from cogvideox_flax.runtime import hosts

if TYPE_CHECKING:  # imported where needed, as by the commands
    from jax.sharding import Mesh

    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.generate.request import ResolvedRequest
    from cogvideox_flax.generate.run_dir import RunRecord
    from cogvideox_flax.runtime.profiling import ProfilingOptions

log = logging.getLogger("cogvideox_flax")

EMBEDDED = "embedded"
"""The name under which a run remembers that it used the embedded checkpoint."""


def read_prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt)
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"cannot read prompts from {args.prompt_file}: {e}; expected UTF-8 text") from e
        if not any(line.strip() for line in lines):
            raise InputError(f"{args.prompt_file} holds no prompt; expected one per line")
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise InputError('no prompt was given; write one in quotes ("" is one too) or name a --prompt-file')
    return prompts


def check_output(paths: Sequence[Path], latents_only: bool = False) -> None:
    """Refuse names that could not be written at the end of the run."""
    from cogvideox_flax.io.paths import check_writable
    from cogvideox_flax.io.video import check_output_path

    for path in paths:
        if not latents_only:
            check_output_path(path)
            continue
        check_writable(path)
        if path.is_dir():
            raise InputError(f"{path} is a directory; give the name of a file to write")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that its configs allow; nothing is converted or loaded yet."""

    record: RunRecord
    manifest: Manifest
    mesh: Mesh | None


def check_run(args: argparse.Namespace, folder: Path, before: Mapping[str, Any]) -> Run:
    """Check a run as far as is possible before anything is converted or loaded.

    before: fields of the request, which the options override, and what else `read_settings` finds.
    """
    from cogvideox_flax.generate import checks, run_dir
    from cogvideox_flax.generate.request import GenerationRequest
    from cogvideox_flax.io.paths import check_writable

    manifest = peek(args)
    dtype = args.dtype or before.get("dtype", manifest.default_dtype)
    model = EMBEDDED if args.model is None else args.model
    given = {"lora": [], **before, **given_options(args)}
    for name in ("dtype", "fingerprints"):
        given.pop(name, None)
    mesh = None if args.mesh in (None, "auto") else explicit_mesh(args.mesh)
    checks.check_model(manifest, model, dtype, mesh)
    request = GenerationRequest(**given).resolve(manifest)
    if mesh is None and (mesh := automatic_mesh(args, manifest, request, dtype)) is not None:
        checks.check_model(manifest, model, dtype, mesh)
    hosts.check_mesh(mesh)
    path = expand_user(model)
    model_id = os.path.abspath(path) if args.model is not None and os.path.exists(path) else model
    record = run_dir.RunRecord(request=request, model_id=model_id, revision=args.revision, dtype=dtype)
    same = {name: value for name, value in record.settings().items() if name != "lora"}
    hosts.check_same("the settings", {"prompt": request.prompt, "dtype": dtype, **same})

    def check_places() -> None:
        run_dir.check_folder(folder, run_dir.space_needed(request, manifest))
        if getattr(args, "profile", None) is not None:
            check_writable(args.profile / "trace")

    hosts.from_first(check_places)
    checks.check_run(request, mesh, profiling_options(args))
    return Run(record, manifest, mesh)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the request that were given as options."""
    from cogvideox_flax.generate.request import options

    names = options("encode", "denoise", "decode", "generate")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def peek(args: argparse.Namespace) -> Manifest:
    from cogvideox_flax.checkpoint import hub

    if args.model is None and getattr(args, "image", None):
        args.model = hub.EMBEDDED_IMAGE_TO_VIDEO
    return hosts.first_host_first(lambda: hub.peek(args.model, args.revision, progress=not args.quiet))


def explicit_mesh(text: str) -> Mesh:
    from cogvideox_flax.sharding import make_mesh, parse_mesh

    return make_mesh(*parse_mesh(text))


def automatic_mesh(
    args: argparse.Namespace, manifest: Manifest, request: ResolvedRequest | None, dtype: str
) -> Mesh | None:
    """The mesh over all devices that suits the command, a run's by the planner; None for one device, and on CPUs unless
    it was asked for."""
    import jax

    from cogvideox_flax.sharding import describe_mesh, make_mesh

    devices = jax.devices()
    n = len(devices)
    if n == 1 or (args.mesh is None and devices[0].platform == "cpu"):
        return None
    if args.command == "decode":  # pictures go over all axes, and most easily over two of them
        return make_mesh(2, n // 2, 1) if n % 2 == 0 else make_mesh(1, n, 1)
    if args.command == "encode":
        parts = math.gcd(n, *manifest.model_family.heads(manifest.configs).values())
        return make_mesh(1, n // parts, parts)
    from cogvideox_flax.generate.programs import RunPrograms
    from cogvideox_flax.plan import chip_of_device, choose_mesh

    assert request is not None
    found = choose_mesh(RunPrograms(manifest, request, dtype), n, chip_of_device(devices[0]))
    log.info("mesh %s (dp, sp, tp), as the planner says", describe_mesh(found.mesh))
    return make_mesh(*found.mesh)


def open_run(args: argparse.Namespace, run: Run) -> tuple[Pipeline, RunRecord]:
    pipe = load(args, run.record.dtype, run.mesh)
    adapters = run.record.request.lora
    assert adapters is not None
    pipe.use_loras(adapters)
    hosts.check_same("the adapters", {"lora": [[record["sha256"], record["scale"]] for record in adapters]})
    return pipe, dataclasses.replace(run.record, fingerprints=pipe.fingerprints())


def load(args: argparse.Namespace, dtype: str, mesh: Mesh | None) -> Pipeline:
    """Open a model that was checked, converting it if that was not done yet."""
    from cogvideox_flax.checkpoint import hub
    from cogvideox_flax.generate.pipeline import Pipeline

    native = hosts.first_host_first(lambda: hub.resolve(args.model, args.revision, progress=not args.quiet))
    pipe = Pipeline(native, dtype, mesh)
    hosts.check_same("the checkpoints", pipe.fingerprints())
    pipe.profiling = profiling_options(args)
    keep_programs(pipe)
    return pipe


def keep_programs(pipe: Pipeline) -> None:
    """Keep compiled programs, unless the user has chosen a cache of JAX for them, or none."""
    import jax

    from cogvideox_flax.io.paths import NotPrivateError, private_cache_dir

    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or hosts.count() > 1:
        return
    try:
        pipe.keep_programs(private_cache_dir("programs"))
    except (NotPrivateError, InputError, OSError) as e:
        log.warning("compiled programs are not kept, so every start compiles anew: %s", e)


def profiling_options(args: argparse.Namespace) -> ProfilingOptions:
    from cogvideox_flax.runtime.profiling import ProfilingOptions

    profile = (args.profile, args.profile_steps) if "profile" in args and hosts.is_first() else ()
    return ProfilingOptions(not args.no_jit, args.memory, *profile)


def resume(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the stage before left; its model becomes this command's, unless another is named."""
    from cogvideox_flax.generate.run_dir import read_settings

    before = hosts.from_first(lambda: read_settings(args.dir))
    model, revision = before.pop("model_id"), before.pop("revision", None)
    if args.model is None:
        args.model = None if model == EMBEDDED else model
        args.revision = args.revision or revision
    return before
