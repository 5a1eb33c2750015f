"""`generate --prompt-file FILE --ray ADDRESS`: the lines of a queue, made by the workers of a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.queue import Queue, Todo, fields_of
from cogvideox_flax.generate.recipe import short_fingerprints
from cogvideox_flax.generate.request import parse_lora
from cogvideox_flax.generate.result import is_latents
from cogvideox_flax.generate.run import Run
from cogvideox_flax.io.atomic import atomic_write
from cogvideox_flax.runtime.terminal import say
from cogvideox_flax.serve import cluster
from cogvideox_flax.serve.group import worker_size
from cogvideox_flax.serve.matching import Shape, adapters_text, programs_of

ONE_FILE = (".mp4", ".webm", ".gif", ".webp", ".npz")
"""Suffixes of videos that are one file, which a worker sends."""


def check_ray(args: argparse.Namespace, out: Path) -> None:
    """Refuse what a cluster does not do: options of one process, or an output of several files."""
    alone = ("batch", "preview", "profile", "coordinator", "num_processes")
    if given := [f"--{name.replace('_', '-')}" for name in alone if getattr(args, name, None) is not None]:
        raise InputError(f"{' and '.join(given)} cannot be given with --ray; leave one of them out")
    if args.distributed:
        raise InputError("--distributed joins hosts to one run, --ray gives each worker runs of its own; choose one")
    if out.suffix and out.suffix.lower() not in ONE_FILE:
        raise InputError(f"workers of a cluster send a video as one file; expected one of {', '.join(ONE_FILE)}")


def make_on_cluster(
    args: argparse.Namespace,
    pipe: OpenModel,
    model: ModelChoice,
    queue: Queue,
    missing: Sequence[tuple[Run, Todo]],
    options: Mapping[str, Any],
    folder: Path,
) -> None:
    """Make the videos of a queue that are missing; what cannot be made is refused in the queue.

    Args:
        options: fields of the request for all lines.
        folder: of the run directories.
    """
    if not missing:
        return
    lines, seeds = dict[str, int](), dict[str, int]()
    jobs = []
    for run, todo in missing:
        name = f"line-{todo.line}-seed-{run.request.seed}"
        lines[name], seeds[name] = todo.line, run.request.seed
        fields = {**options, **fields_of(queue.lines[todo.line]), "seed": run.request.seed, "num_videos": 1}
        shape = Shape(programs_of(run), adapters_text(run.request.lora or []))
        jobs.append(cluster.ClusterJob(name, shape, _absolute(fields), Path(todo.path)))
    checkpoint = short_fingerprints(pipe.fingerprints())
    model = replace(model, where=None if model.where is None else _path(model.where), mesh=args.mesh)
    count = 0

    def tell(job: cluster.ClusterJob, said: str) -> None:
        nonlocal count
        count += 1
        say(f"video {count} of {len(jobs)}: {job.path}{said}", not args.quiet)
        queue.write_page()

    def made(job: cluster.ClusterJob, video: bytes, recipe: dict[str, Any]) -> None:
        with atomic_write(job.path) as partial:
            partial.write_bytes(video)
        if not is_latents(job.path):
            queue.made(lines[job.name], seeds[job.name], job.path, recipe)
        print(job.path, file=results, flush=True)
        tell(job, "")

    def refused(job: cluster.ClusterJob, reason: str) -> None:
        queue.refuse(lines[job.name], InputError(reason))
        tell(job, " cannot be made")

    size, results = worker_size(args.ray, args.ray_worker, args.hosts_per_worker), sys.stdout
    with redirect_stdout(sys.stderr):  # Ray prints there what it has to say of lost workers
        ray = cluster.connect(args.ray)
        try:
            cluster.Driver(ray, [*jobs], model, checkpoint, size, folder.absolute(), made, refused).run()
        finally:
            ray.shutdown()


def _absolute(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with absolute paths, since workers run in other folders. Hub ids stay."""
    values = dict(fields)
    for name in MEDIA:
        if (given := values.get(name)) is not None:
            values[name] = [_path(each) for each in ([given] if isinstance(given, str) else given)]
    given = values.get("lora") or []
    adapters = [given] if isinstance(given, str) else given
    records = [parse_lora(each) if isinstance(each, str) else each for each in adapters]
    return values | {"lora": [{**record, "file": _path(record["file"])} for record in records]}


def _path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text)) if os.path.exists(os.path.expanduser(text)) else text
