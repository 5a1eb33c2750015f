"""From options to a pipeline: what a run is to do is checked as a whole before anything is converted or loaded."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.home import expand_user
from cogvideox_flax.runtime import hosts

if TYPE_CHECKING:  # imported where needed, as by the commands
    from jax.sharding import Mesh

    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.pipeline import CogVideoXPipeline
    from cogvideox_flax.generate.stages import Settings
    from cogvideox_flax.runtime.execution import Watch

log = logging.getLogger("cogvideox_flax")

EMBEDDED = "embedded"
"""The name under which a run remembers that it used the embedded checkpoint."""

SAME_NAMES = ("height", "width", "num_inference_steps", "guidance_scale", "scheduler", "seed", "lora")
"""Options that are called the same on the command line and in the settings."""

DYNAMIC_CFG: dict[str, Any] = {"off": False, "timestep": True, "index": "index"}


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


def check_output(out: Path, count: int, latents_only: bool) -> None:
    """Refuse names that could not be written at the end of the run."""
    from cogvideox_flax.io.paths import check_writable, item_paths
    from cogvideox_flax.io.video import check_output_path

    if not latents_only:
        for path in item_paths(out, count):
            check_output_path(path)
        return
    check_writable(out)
    if out.is_dir():
        raise InputError(f"{out} is a directory; give the name of a file to write")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that its configs allow; nothing is converted or loaded yet."""

    settings: Settings
    manifest: Manifest
    mesh: Mesh | None


def check_run(args: argparse.Namespace, folder: Path, **settings: Any) -> Run:
    """Check a run as far as is possible before anything is converted or loaded."""
    from cogvideox_flax.generate import stages
    from cogvideox_flax.io.paths import check_writable

    manifest = peek(args)
    given = {
        "dtype": args.dtype,
        "frames": getattr(args, "num_frames", None),
        "fps": getattr(args, "fps", None),
        "use_dynamic_cfg": DYNAMIC_CFG.get(getattr(args, "dynamic_cfg", None) or ""),
    }
    given |= {name: getattr(args, name, None) for name in SAME_NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    mesh = mesh_of(args, manifest, settings | given)
    model = EMBEDDED if args.model is None else args.model
    path = expand_user(model)
    resolved = stages.Settings.for_model(
        manifest,
        mesh,
        **{"dtype": manifest.default_dtype}
        | settings
        | {name: value for name, value in given.items() if value is not None},
        model_id=os.path.abspath(path) if args.model is not None and os.path.exists(path) else model,
        revision=args.revision,
    )
    same = ("prompt", "negative_prompt", "dtype", *SAME_NAMES[:-1], "frames", "use_dynamic_cfg")
    hosts.check_same("the settings", {name: getattr(resolved, name) for name in same})

    def check_places() -> None:
        stages.check_folder(folder, stages.space_needed(resolved, manifest))
        if getattr(args, "profile", None) is not None:
            check_writable(args.profile / "trace")

    hosts.from_first(check_places)
    if hasattr(args, "compiled_loop"):
        make_watch(args).check(resolved.num_inference_steps, args.compiled_loop)
    return Run(resolved, manifest, mesh)


def peek(args: argparse.Namespace) -> Manifest:
    from cogvideox_flax.checkpoint import hub
    from cogvideox_flax.generate.checks import check_tiling

    manifest = hosts.first_host_first(lambda: hub.peek(args.model, args.revision, progress=not args.quiet))
    if getattr(args, "tiling", False) and manifest.vae is not None:
        check_tiling(manifest.vae)
    return manifest


def mesh_of(args: argparse.Namespace, manifest: Manifest, settings: Mapping[str, Any]) -> Mesh | None:
    """The mesh that was asked for, or that the planner takes for a run of these settings; None for one device."""
    mesh = _mesh_of(args, manifest, settings)
    hosts.check_mesh(mesh)
    return mesh


def _mesh_of(args: argparse.Namespace, manifest: Manifest, settings: Mapping[str, Any]) -> Mesh | None:
    import jax

    from cogvideox_flax.sharding import describe_mesh, make_mesh, parse_mesh

    if args.mesh not in (None, "auto"):
        return make_mesh(*parse_mesh(args.mesh))
    devices = jax.devices()
    if len(devices) == 1 or (args.mesh is None and devices[0].platform == "cpu"):
        return None
    from cogvideox_flax.models.cogvideox.sizes import resolve_size
    from cogvideox_flax.plan import chip_of_device, choose_mesh

    if manifest.transformer is None or manifest.vae is None or manifest.text_encoder is None:
        return None  # no model for a run, as will be said
    n = len(devices)
    if args.command == "decode":  # pictures go over all axes, and most easily over two of them
        return make_mesh(2, n // 2, 1) if n % 2 == 0 else make_mesh(1, n, 1)
    if args.command == "encode":
        parts = math.gcd(n, math.gcd(manifest.text_encoder.heads, manifest.transformer.heads))
        return make_mesh(1, n // parts, parts)
    sides = {"num_frames": settings.get("frames")} | {name: settings.get(name) for name in ("height", "width")}
    size = resolve_size(manifest.transformer, manifest.vae, manifest.release, **sides)
    guidance = settings.get("guidance_scale", manifest.default_guidance)
    batch = len(settings["prompt"]) * (2 if guidance > 1 else 1)
    dtype = settings.get("dtype", manifest.default_dtype)
    found = choose_mesh(manifest, size, batch, n, chip_of_device(devices[0]), dtype)
    log.info("mesh %s (dp, sp, tp), as the planner says", describe_mesh(found.mesh))
    return make_mesh(*found.mesh)


def open_run(args: argparse.Namespace, run: Run) -> tuple[CogVideoXPipeline, Settings]:
    pipe = load(args, run.settings.dtype, run.mesh)
    for record in run.settings.lora:
        pipe.load_lora(record["file"], record["scale"])
    hosts.check_same("the adapters", {"lora": [[record["sha256"], record["scale"]] for record in pipe.loras]})
    return pipe, dataclasses.replace(run.settings, fingerprints=pipe.fingerprints())


def load(args: argparse.Namespace, dtype: str, mesh: Mesh | None) -> CogVideoXPipeline:
    """Open a model that was checked, converting it if that was not done yet."""
    from cogvideox_flax.checkpoint import hub
    from cogvideox_flax.generate.pipeline import CogVideoXPipeline

    native = hosts.first_host_first(lambda: hub.resolve(args.model, args.revision, progress=not args.quiet))
    pipe = CogVideoXPipeline(native, dtype, mesh)
    hosts.check_same("the checkpoints", pipe.fingerprints())
    pipe.watch = make_watch(args)
    keep_programs(pipe)
    return pipe


def keep_programs(pipe: CogVideoXPipeline) -> None:
    """Keep compiled programs, unless the user has chosen a cache of JAX for them, or none."""
    import jax

    from cogvideox_flax.io.home import private_cache_dir
    from cogvideox_flax.io.private import NotPrivateError

    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or hosts.count() > 1:
        return
    try:
        pipe.keep_programs(private_cache_dir("programs"))
    except (NotPrivateError, InputError, OSError) as e:
        log.warning("compiled programs are not kept, so every start compiles anew: %s", e)


def make_watch(args: argparse.Namespace) -> Watch:
    from cogvideox_flax.runtime.execution import Watch

    profile = (args.profile, args.profile_steps) if "profile" in args and hosts.is_first() else ()
    return Watch(not args.no_jit, args.memory, *profile)


def take_over(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the stage before left; its model becomes this command's, unless another is named."""
    from cogvideox_flax.generate.stages import read_settings

    before = hosts.from_first(lambda: read_settings(args.dir))
    model, revision = before.pop("model_id"), before.pop("revision", None)
    if args.model is None:
        args.model = None if model == EMBEDDED else model
        args.revision = args.revision or revision
    return before
