"""Many prompts: a file of them becomes jobs of one video each, which are made one batch after the other."""

from __future__ import annotations

import glob
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.page import PageRow, check_page, write_page
from cogvideox_flax.generate.recipe import read_recipe, with_names
from cogvideox_flax.generate.request import (
    AdapterRecord,
    GenerationRequest,
    json_type,
    option_names,
)
from cogvideox_flax.generate.resolve import resolve
from cogvideox_flax.generate.result import FIELD, fill, is_template, slug_of
from cogvideox_flax.generate.run import Run
from cogvideox_flax.generate.store import request_json
from cogvideox_flax.io.values import short_repr, text_lines, typed
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)

MAX_WARNED = 5
"""Lines whose words a warning names."""

_TYPES: dict[str, Any] = {
    "prompt": str,
    "negative_prompt": str,
    "lora": str | list[str | AdapterRecord],
    **dict.fromkeys(MEDIA, str | list[str]),
}
"""Types of a line's values where a line says less, or more, than the settings of a run."""


@dataclass(frozen=True)
class Job:
    """One video to make.

    line: its number in the file, from 1.
    run: of one prompt and one seed.
    """

    line: int
    run: Run


def path_of(out: Path, line: int, request: GenerationRequest) -> Path:
    """Where a job's video goes: `out` with its fields filled, or with the line, the first words of the prompt and the
    seed in its name.

    Without a suffix, `out` is the folder of the videos, which are mp4s, or the name of one.
    """
    prompt, seed = request.prompt[0], request.seed
    if is_template(out):
        path = fill(out, prompt, seed, line)
        return path if out.suffix else path.with_name(f"{path.name}.mp4")
    parts = [f"{line:04}", *([slug] if (slug := slug_of(prompt)) else []), f"seed{seed}"]
    return out.with_stem("-".join([out.stem, *parts])) if out.suffix else out / ("-".join(parts) + ".mp4")


def folder_of(out: Path) -> Path:
    """The folder of the videos and of their page."""
    return (out.parent if out.suffix or is_template(out) else out).absolute()


def read_lines(path: Path) -> dict[int, str]:
    """The lines of a file of prompts that are neither blank nor comments (#), by their numbers from 1; of "-", those of
    standard input.

    Raises:
        InputError: it cannot be read, is not UTF-8, or holds none.
    """
    is_stdin = str(path) == "-"
    try:
        text = (sys.stdin.buffer.read() if is_stdin else path.read_bytes()).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read prompts from {path}: {e}; expected UTF-8 text") from e
    lines = dict(enumerate(text_lines(text), 1))
    found = {number: line for number, line in lines.items() if line.strip() and not line.lstrip().startswith("#")}
    if not found:
        raise InputError(f"{'standard input' if is_stdin else path} holds no prompt; expected one per line")
    return found


def fields_of(line: str) -> dict[str, Any]:
    """Fields of the request, of a line: a prompt, or a JSON object with "prompt" and any options of the command line.

    Raises:
        InputError: an object that is not JSON, or lacks the prompt; unknown options; values of another type.
    """
    if not line.lstrip().startswith("{"):
        return {"prompt": line}
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as e:
        raise InputError(f"it is not JSON: {e.msg} at character {e.pos + 1}") from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"it is not JSON: {e}") from e
    known = {"prompt": "prompt", **option_names()}
    faults, fields = [], {}
    for key, value in raw.items():
        if (name := known.get(key.replace("-", "_"))) is None:
            close = get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else "known are prompt and the options of `cogvideox generate`"
            faults.append(f"there is no option {short_repr(key)}; {hint}")
            continue
        try:
            fields[name] = typed(_TYPES.get(name) or json_type(name), value)
        except ValueError as e:
            faults.append(f"{key} is {short_repr(value)}; expected {e}")
    if "prompt" not in raw:
        faults.append('it has no "prompt"')
    if faults:
        raise InputError("; ".join(faults))
    return fields


def all_have_images(lines: Iterable[str]) -> bool:
    """Whether all lines that can be read, one at least, give a first frame."""
    found = []
    for line in lines:
        with suppress(InputError):  # said of the line by `jobs_of`
            found.append("image" in fields_of(line))
    return bool(found) and all(found)


def jobs_of(
    lines: Mapping[int, str], options: Mapping[str, Any], manifest: Manifest, dtype: str | None = None
) -> tuple[list[Job], dict[int, InputError]]:
    """A job for each video of each line, and what is wrong with the others.

    Args:
        options: fields of the request for all lines; a line's own come first.
    """
    jobs, faults, said = [], {}, dict[str, list[int]]()
    for number, line in lines.items():
        try:
            warnings: list[str] = []
            run = resolve(GenerationRequest(**{**options, **fields_of(line)}), manifest, dtype, warnings.extend)
            jobs += [Job(number, one) for one in run.seeds()]
            for warning in warnings:
                said.setdefault(warning, []).append(number)
        except (OSError, ValueError) as e:  # the line's own, whatever it is, so that the others are made
            faults[number] = InputError("; ".join(str(e).splitlines()))
    _warn_of_lines(said, "" if manifest.domain is None else manifest.domain.summary)
    return jobs, faults


def _warn_of_lines(said: Mapping[str, Sequence[int]], summary: str) -> None:
    """Log warnings with the numbers of their lines; those that end with the summary as one."""
    sentences, outside = list[str](), list[str]()
    for warning, numbers in said.items():
        lines = f"line {numbers[0]}" + (f" and {len(numbers) - 1} more" if len(numbers) > 1 else "")
        is_outside = summary and warning.endswith(summary)
        (outside if is_outside else sentences).append(f"{lines}: {warning.removesuffix(summary)}")
    if outside:
        more = f"; {len(outside) - MAX_WARNED} more such lines" if len(outside) > MAX_WARNED else ""
        sentences.append("; ".join(outside[:MAX_WARNED]) + more + summary)
    for sentence in sentences:
        log.warning(sentence)


def find_made(out: Path, wanted: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[tuple[Path, dict[str, Any]] | None]:
    """The videos that are there already, by what they were made of.

    Args:
        out: as for `path_of`.
        wanted: of each job its path and its recipe.

    Returns:
        Of each job the path and the metadata of its video; None if there is none. No video is two jobs'.
    """
    keys = [_key(recipe) for _, recipe in wanted]
    made = [_made(path) for path, _ in wanted]
    videos = [(path, own) if _key(own) == key else None for (path, _), own, key in zip(wanted, made, keys, strict=True)]
    if None not in videos:
        return videos
    stem = FIELD.sub("*", glob.escape(out.stem)) if is_template(out) else f"{glob.escape(out.stem)}-"
    pattern = re.sub(r"\*\*+", "*", f"{stem}*{glob.escape(out.suffix)}") if out.suffix else "*.mp4"
    pattern = re.sub(r"^\*", "[!.]*", pattern)  # the partial file of a killed process may be whole, and is removed
    others = sorted({*folder_of(out).glob(pattern)} - {path.absolute() for path, _ in filter(None, videos)})
    free: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path in others:
        if metadata := _made(path):
            free.setdefault(_key(metadata), []).append((path, metadata))
    return [each or (free[key].pop(0) if free.get(key) else None) for each, key in zip(videos, keys, strict=True)]


def _made(path: Path) -> dict[str, Any]:
    """The metadata of a video that this library wrote; {} of anything else."""
    try:
        return read_recipe(path) if path.exists() else {}
    except InputError:  # damaged, or somebody else's
        return {}


def _key(recipe: Mapping[str, Any]) -> str:
    """A recipe as text, but for the time that it took."""
    values = {name: value for name, value in recipe.items() if name != "seconds"}
    settings = values.get("settings")
    if isinstance(settings, Mapping):  # earlier versions recorded paths
        with suppress(LookupError, TypeError):
            values["settings"] = with_names(settings)
    return json.dumps(values, sort_keys=True)


def free_path(path: Path, taken: Collection[Path]) -> Path:
    """The path, or the first of NAME-2, NAME-3, ... that is neither there nor taken."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{i}") for i in itertools.count(2)))
    return next(name for name in names if name not in taken and not os.path.lexists(name))


def batches(jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Jobs that can be made at once, up to `most` of them: all but their prompts is equal.

    A job whose step cache decides by what the videos are stays alone, since a batch has one decision for all.
    """
    groups: list[list[Job]] = []
    open_groups: dict[str, list[Job]] = {}
    for job in jobs:
        if not job.run.batch_is_alone:
            groups.append([job])
            continue
        fields = request_json(job.run.request)
        key = repr({name: value for name, value in fields.items() if name not in ("prompt", "negative_prompt")})
        group = open_groups.get(key, [])
        if not group or len(group) == most:
            groups.append(group := [])
            open_groups[key] = group
        group.append(job)
    return groups


def run_of(batch: Sequence[Job]) -> Run:
    """The run of a batch: each of its videos has the noise that it has alone."""
    first = batch[0].run
    prompts = {name: [getattr(job.run.request, name)[0] for job in batch] for name in ("prompt", "negative_prompt")}
    return first if len(batch) == 1 else first.varied(**prompts, same_noise=True)


def items_of(run: Run, items: Sequence[int]) -> Run:
    """The run of some of a batch's videos."""
    prompts = {name: [getattr(run.request, name)[i] for i in items] for name in ("prompt", "negative_prompt")}
    return run.varied(**prompts, same_noise=len(items) > 1)


@dataclass(frozen=True)
class Todo:
    """A video of a batch that is still to be made: its place in the batch, its line, and where it goes."""

    item: int
    line: int
    path: str


class Queue:
    """The lines of a file of prompts: what they ask for, which videos are there, and what could not be made.

    On several hosts process 0 alone reads the file; `todo` tells the others.

    Args:
        file: of prompts.
        out: as for `path_of`.

    Attributes:
        groups: the jobs that are made at once.
        faults: number of a line -> why it was left out.
    """

    def __init__(self, file: Path, out: Path):
        self.file, self.out = file, out
        self.lines: dict[int, str] = {}
        self.groups: list[list[Job]] = []
        self.faults: dict[int, str] = {}
        self._rows: dict[tuple[int, int], PageRow] = {}  # by line and seed

    def read(self) -> None:
        """Read the file, and check that the page can be written.

        Raises:
            InputError: they cannot.
        """
        self.lines = read_lines(self.file)
        check_page(folder_of(self.out))

    def resolve(
        self,
        options: Mapping[str, Any],
        manifest: Manifest,
        dtype: str | None,
        batch: int,
        check: Callable[[Path], None],
    ) -> list[Run]:
        """Return the runs that the lines ask for.

        Args:
            options: fields of the request for all lines; a line's own come first.
            batch: lines with equal options to make at once.
            check: refuses a path of a video, by an InputError.

        Raises:
            InputError: no line can be made.
        """
        jobs, wrong = jobs_of(self.lines, options, manifest, dtype)
        for job in jobs:
            try:
                check(path_of(self.out, job.line, job.run.request))
            except InputError as e:
                wrong[job.line] = e
        self.groups = batches([job for job in jobs if job.line not in wrong], batch)
        if not self.groups:
            self.faults = {number: str(error) for number, error in wrong.items()}
            raise self.failed()
        for number, error in wrong.items():
            self.refuse(number, error)
        return [run_of(group) for group in self.groups]

    def todo(self, model: OpenModel) -> list[list[Todo]]:
        """Return the videos that are still to be made, for each run of `resolve`.

        A video that is there is a line's by what it was made of, whatever its name. No other file is replaced.
        """
        return [[Todo(**item) for item in batch] for batch in self._todo(model)]

    @hosts.broadcast_result
    def _todo(self, model: OpenModel) -> list[list[dict[str, Any]]]:
        jobs = [job for group in self.groups for job in group]
        wanted = [(path_of(self.out, job.line, job.run.request), model.recipe(job.run)) for job in jobs]
        taken, paths = set[Path](), dict[tuple[int, int], str]()
        for job, made, (path, _) in zip(jobs, find_made(self.out, wanted), wanted, strict=True):
            request = job.run.request
            self._rows[job.line, request.seed] = PageRow(job.line, request.prompt[0], *(made or (None, None)))
            if made is None:
                taken.add(path := free_path(path, taken))
                paths[job.line, request.seed] = str(path)
        if there := len(jobs) - len(paths):
            log.info("%d of %d videos are there already", there, len(jobs))
        keys = [[(job.line, job.run.request.seed) for job in group] for group in self.groups]
        return [
            [{"item": i, "line": key[0], "path": paths[key]} for i, key in enumerate(group) if key in paths]
            for group in keys
        ]

    def refuse(self, line: int, error: InputError) -> None:
        """Leave a line out."""
        self.faults[line] = "; ".join(str(error).splitlines())
        log.warning("line %d is left out: %s", line, self.faults[line])

    def made(self, line: int, seed: int, path: Path, metadata: dict[str, Any]) -> None:
        """Note a video that is there now."""
        self._rows[line, seed] = PageRow(line, metadata["prompt"], path, metadata)

    def failed(self) -> InputError:
        """The lines that were left out, in one message."""
        each = [f"line {number}: {self.faults[number]}" for number in sorted(self.faults)]
        first = f"of {len(self.lines)} prompts in {self.file}, these were not made:"
        return InputError("\n".join([first, *each]))

    @hosts.on_process_0
    def write_page(self, model: str | None = None) -> None:
        """Write the page of what is there, what failed, and what is still to be made; `model` is that of --model."""
        wrong = [PageRow(number, self.lines[number], fault=fault) for number, fault in self.faults.items()]
        others = [row for row in self._rows.values() if row.path is not None or row.line not in self.faults]
        write_page(folder_of(self.out), self.out.name, sorted([*others, *wrong], key=lambda row: row.line), model)
