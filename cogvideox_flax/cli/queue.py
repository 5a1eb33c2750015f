"""`generate` with a file of prompts: one video after the other, each written when it is done."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cogvideox_flax.cli.setup import check_output, given_options, open_runs, preview_of, stages_folder
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import STAGES
from cogvideox_flax.io.interrupts import loaded
from cogvideox_flax.runtime import hosts

if TYPE_CHECKING:  # imported where needed, as by the commands
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.page import Shown
    from cogvideox_flax.generate.pipeline import Pipeline
    from cogvideox_flax.generate.queue import Job
    from cogvideox_flax.generate.run import Run
    from cogvideox_flax.generate.store import RunDirectory

log = logging.getLogger("cogvideox_flax")


class _Queue:
    """The lines of a --prompt-file: what they ask for, what of it is there, and what could not be made.

    Attributes:
        folder: of the run in the middle; below --dir, so that the files of other runs there stay.
        groups: the jobs that are made at once.
        faults: number of a line -> why it was left out.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.out = args, args.out
        self.folder: Path = (args.dir or stages_folder(args.out)) / "queue"
        self.groups: list[list[Job]] = []
        self.faults: dict[int, str] = {}
        self._lines: dict[int, str] = {}
        self._entries: dict[tuple[int, int], Shown] = {}  # by line and seed

    def refuse(self, number: int, error: InputError) -> None:
        """Leave a line out."""
        self.faults[number] = "; ".join(str(error).splitlines())
        log.warning("line %d is left out: %s", number, self.faults[number])

    def failed(self) -> InputError:
        """The lines that were left out, in one message."""
        each = [f"line {number}: {self.faults[number]}" for number in sorted(self.faults)]
        first = f"of {len(self._lines)} prompts in {self.args.prompt_file}, these were not made:"
        return InputError("\n".join([first, *each]))

    def read(self) -> dict[str, Any]:
        """Read the file; for `open_runs`."""
        from cogvideox_flax.checkpoint import hub
        from cogvideox_flax.generate.page import check_page
        from cogvideox_flax.generate.queue import all_have_images, folder_of, read_lines
        from cogvideox_flax.generate.store import check_folder

        args = self.args
        if args.like is not None:
            raise InputError("--like makes one video again; leave it out with a --prompt-file")
        if args.prompt:
            raise InputError("prompts were given beside --prompt-file; write them all into the file, or leave it out")
        self._lines = read_lines(args.prompt_file)
        check_page(folder_of(self.out))
        check_folder(self.folder)
        if args.model is None and all_have_images(self._lines.values()):
            args.model = hub.EMBEDDED_IMAGE_TO_VIDEO
        return {}

    def requests(self, manifest: Manifest, _: object, dtype: str) -> list[Run]:
        """What the lines ask for, each request a group; for `open_runs`."""
        from cogvideox_flax.generate.queue import batches, jobs_of, path_of, run_of

        jobs, wrong = jobs_of(self._lines, {"lora": [], **given_options(self.args)}, manifest, dtype)
        for job in jobs:
            try:
                path = path_of(self.out, job.line, job.run.request)
                check_output([path], _latents_only(self.args), overwrite=True, preview=self.args.preview)
            except InputError as e:
                wrong[job.line] = e
        self.groups = batches([job for job in jobs if job.line not in wrong], self.args.batch or 1)
        if not self.groups:
            self.faults = {number: str(error) for number, error in wrong.items()}
            raise self.failed()
        for number, error in wrong.items():
            self.refuse(number, error)
        return [run_of(batch) for batch in self.groups]

    @hosts.first_reads
    def left(self, pipe: Pipeline) -> list[list[tuple[int, int, str]]]:
        """Of each group, the items that are still to be made: their places, lines and paths.

        A video that is there is a line's by what it was made of, whatever its name. No other file is replaced.
        """
        from cogvideox_flax.generate.page import Shown
        from cogvideox_flax.generate.queue import find_made, free_path, path_of

        jobs = [job for batch in self.groups for job in batch]
        wanted = [(path_of(self.out, job.line, job.run.request), pipe.recipe(job.run)) for job in jobs]
        found, taken = find_made(self.out, wanted), set[Path]()
        paths: dict[tuple[int, int], str] = {}
        for job, made, (path, _) in zip(jobs, found, wanted, strict=True):
            key = job.line, job.run.request.seed
            self._entries[key] = Shown(job.line, job.run.request.prompt[0], *(made or (None, None)))
            if made is None:
                taken.add(path := free_path(path, taken))
                paths[key] = str(path)
        if there := len(jobs) - len(paths):
            log.info("%d of %d videos are there already", there, len(jobs))
        return [
            [
                (i, job.line, paths[key])
                for i, job in enumerate(batch)
                if (key := (job.line, job.run.request.seed)) in paths
            ]
            for batch in self.groups
        ]

    def made(self, line: int, seed: int, path: Path, metadata: dict[str, Any]) -> None:
        """A video that is there now."""
        from cogvideox_flax.generate.page import Shown

        self._entries[line, seed] = Shown(line, metadata["prompt"], path, metadata)
        print(path, flush=True)

    @hosts.first_writes
    def show_page(self) -> None:
        """Write the page of what is there, what failed, and what is still to be made."""
        from cogvideox_flax.generate.page import Shown, write_page
        from cogvideox_flax.generate.queue import folder_of

        wrong = [Shown(number, self._lines[number], fault=fault) for number, fault in self.faults.items()]
        rest = [each for each in self._entries.values() if each.path is not None or each.line not in self.faults]
        write_page(folder_of(self.out), self.out.name, sorted([*rest, *wrong], key=lambda each: each.line))


def generate_queue(args: argparse.Namespace) -> None:
    """A video for each line of --prompt-file; those that are there already, made of the same, stay.

    Raises:
        InputError: at the end, of the lines that could not be made.
    """
    import jax

    from cogvideox_flax.generate.queue import items_of
    from cogvideox_flax.generate.store import check_folder, remove_files, run_dir_lock, space_needed
    from cogvideox_flax.io.paths import check_name
    from cogvideox_flax.runtime.terminal import duration_text, say

    loaded()
    if args.out is None:
        args.out = Path("video.mp4")
    check_name(args.out)
    queue = _Queue(args)
    pipe, runs, store = open_runs(args, queue.folder, queue.read, queue.requests)
    keep = pipe.fits_at_once()
    todo = [(run, items) for run, items in zip(runs, queue.left(pipe), strict=True) if items]
    count, total, started = 0, sum(len(items) for _, items in todo), time.monotonic()
    queue.show_page()
    with run_dir_lock(queue.folder, temporary=True):
        for batch, items in todo:
            run = items_of(batch, [i for i, *_ in items])
            rest = (time.monotonic() - started) / count * (total - count) if count else 0
            later = f", about {duration_text(rest)} left" if count else ""
            say(f"video {count + 1} of {total}{later}: {', '.join(map(repr, run.request.prompt))}", not args.quiet)
            paths = [Path(path) for *_, path in items]
            try:
                check_folder(queue.folder, space_needed(run))
                stored = _make(args, pipe, run, store, paths, keep)
            except InputError as e:
                if jax.process_count() > 1:
                    raise
                for _, line, _ in items:
                    queue.refuse(line, e)
            else:
                for (_, line, _), path, metadata in zip(items, paths, stored, strict=True):
                    queue.made(line, run.request.seed, path, metadata)
                remove_files(queue.folder)
            count += len(items)
            queue.show_page()
    if args.dir is None and hosts.is_first():
        with suppress(OSError):  # a run in the middle is there, too
            stages_folder(args.out).rmdir()
    if queue.faults:
        raise queue.failed()


def _latents_only(args: argparse.Namespace) -> bool:
    return args.out.suffix.lower() == ".npz"


def _make(
    args: argparse.Namespace,
    pipe: Pipeline,
    run: Run,
    store: RunDirectory,
    paths: Sequence[Path],
    keep: bool,
) -> list[dict[str, Any]]:
    """Make a batch and write its videos; returns the metadata of each."""
    from cogvideox_flax.generate.events import Denoised, Finished, show
    from cogvideox_flax.generate.journey import generate
    from cogvideox_flax.generate.recipe import item_of
    from cogvideox_flax.generate.result import save_latents

    start, stored = time.monotonic(), {}

    def described(metadata: dict[str, Any]) -> dict[str, Any]:
        seconds = float(f"{(time.monotonic() - start) / len(paths):.3g}")
        return metadata | {"seconds": seconds}

    stages = STAGES[:-1] if _latents_only(args) else STAGES
    events = generate(pipe, run, store, stages, keep=keep)
    if (preview := preview_of(args, pipe.manifest)) is not None:
        events = preview.watch(events)
    with closing(show(events, not args.quiet)) as shown:
        for event in shown:
            match event:
                case Denoised(_, latents, metadata) if _latents_only(args):
                    stored = described(metadata)
                    for i, path in enumerate(paths):
                        save_latents(path, latents[i : i + 1], item_of(stored, i))
                case Finished(_, result):
                    stored = described(result.metadata)
                    replace(result, metadata=stored).save_items(paths)
    return [item_of(stored, i) for i in range(len(paths))]
