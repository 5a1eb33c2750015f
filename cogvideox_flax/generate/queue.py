"""Many prompts: a file of them becomes jobs of one video each."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import resolve as resolving
from cogvideox_flax.generate.media import MEDIA
from cogvideox_flax.generate.request import (
    AdapterRecord,
    GenerationRequest,
    ResolvedRequest,
    json_type,
    option_names,
)
from cogvideox_flax.generate.run_files import request_json
from cogvideox_flax.io.values import shown, typed

MAX_SLUG = 40
"""Characters of the prompt in a file's name."""

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
    request: of one prompt and one seed.
    """

    line: int
    request: ResolvedRequest


def path_of(out: Path, line: int, request: ResolvedRequest) -> Path:
    """Where a job's video goes: `out` with the line, the first words of the prompt and the seed in its name.

    Without a suffix, `out` is the folder of the videos, which are mp4s.
    """
    slug = "-".join(re.findall(r"\w+", request.prompt[0].lower()))
    if len(slug) > MAX_SLUG:
        slug = slug[: MAX_SLUG + 1].rpartition("-")[0] or slug[:MAX_SLUG]
    parts = [f"{line:04}", *([slug] if slug else []), f"seed{request.seed}"]
    return out.with_stem("-".join([out.stem, *parts])) if out.suffix else out / ("-".join(parts) + ".mp4")


def folder_of(out: Path) -> Path:
    """The folder of the videos and of their page."""
    return (out.parent if out.suffix else out).absolute()


def read_lines(path: Path) -> dict[int, str]:
    """The lines of a file of prompts that are not blank, by their numbers from 1.

    Raises:
        InputError: it cannot be read, is not UTF-8, or holds none.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read prompts from {path}: {e}; expected UTF-8 text") from e
    found = {number: line for number, line in enumerate(lines, 1) if line.strip()}
    if not found:
        raise InputError(f"{path} holds no prompt; expected one per line")
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
            faults.append(f"there is no option {shown(key)}; {hint}")
            continue
        try:
            fields[name] = typed(_TYPES.get(name) or json_type(name), value)
        except ValueError as e:
            faults.append(f"{key} is {shown(value)}; expected {e}")
    if "prompt" not in raw:
        faults.append('it has no "prompt"')
    if faults:
        raise InputError("; ".join(faults))
    return fields


def jobs_of(
    lines: Mapping[int, str], options: Mapping[str, Any], manifest: Manifest
) -> tuple[list[Job], dict[int, InputError]]:
    """A job for each video of each line, and what is wrong with the others.

    Args:
        options: fields of the request for all lines; a line's own come first.
    """
    jobs, faults = [], {}
    with _warnings_once():
        for number, line in lines.items():
            try:
                request = resolving.resolve(GenerationRequest(**{**options, **fields_of(line)}), manifest)
                jobs += [Job(number, one) for one in request.videos()]
            except InputError as e:
                faults[number] = InputError("; ".join(str(e).splitlines()))
    return jobs, faults


@contextmanager
def _warnings_once() -> Iterator[None]:
    """What is said of each line is said for all at once, where it is the same."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        is_known = (text := record.getMessage()) in seen
        seen.add(text)
        return not is_known

    resolving.log.addFilter(is_new)
    try:
        yield
    finally:
        resolving.log.removeFilter(is_new)


def batches(jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Jobs that can be made at once, up to `most` of them: all but their prompts is equal."""
    found: list[list[Job]] = []
    open_batches: dict[str, list[Job]] = {}
    for job in jobs:
        fields = request_json(job.request)
        key = repr({name: value for name, value in fields.items() if name not in ("prompt", "negative_prompt")})
        batch = open_batches.get(key, [])
        if not batch or len(batch) == most:
            found.append(batch := [])
            open_batches[key] = batch
        batch.append(job)
    return found


def request_of(batch: Sequence[Job]) -> ResolvedRequest:
    """The request of a batch: each of its videos has the noise that it has alone."""
    first = batch[0].request
    prompts = {name: [getattr(job.request, name)[0] for job in batch] for name in ("prompt", "negative_prompt")}
    return first if len(batch) == 1 else first.varied(**prompts, same_noise=True)


def items_of(request: ResolvedRequest, items: Sequence[int]) -> ResolvedRequest:
    """The request of some of a batch's videos."""
    prompts = {name: [getattr(request, name)[i] for i in items] for name in ("prompt", "negative_prompt")}
    return request.varied(**prompts, same_noise=len(items) > 1)
