"""A run's directory: its settings, its lock, and what lies in it.

The files, their layouts and their metadata are those of the torchax reference system for TPUs, so a run can move
between the two: `generation_config.json`, `stage1_embeddings.safetensors`, `stage2_latents.safetensors` and
`output_video.mp4`. `stage2_state.safetensors` is where a denoising loop that was stopped goes on.

On several hosts the directory is process 0's: it alone reads and writes there, and tells the others what they need.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate import stage_files
from cogvideox_flax.generate.media import MEDIA, Media, is_facts
from cogvideox_flax.generate.option import Stage
from cogvideox_flax.generate.request import GenerationRequest, ResolvedRequest, options
from cogvideox_flax.generate.values import check_fps, check_prompts
from cogvideox_flax.io.atomic import file_lock, remove_orphans
from cogvideox_flax.io.contents import is_as_written, write_record
from cogvideox_flax.io.paths import check_free_space, check_writable
from cogvideox_flax.io.values import is_finite_number, load_json
from cogvideox_flax.runtime import hosts

log = logging.getLogger(__name__)

CONFIG_FILE = "generation_config.json"
EMBEDDINGS_FILE = "stage1_embeddings.safetensors"
LATENTS_FILE = "stage2_latents.safetensors"
STATE_FILE = "stage2_state.safetensors"
VIDEO_FILE = "output_video.mp4"
LOCK_FILE = ".lock"

_THEIR_NAMES = {"num_frames": "frames"}
"""Field of the request -> its name in the settings, where the reference system calls it otherwise."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_loras(value: Any) -> bool:
    def one(record: Any) -> bool:
        return isinstance(record, dict) and _is_text(record.get("file")) and is_finite_number(record.get("scale"))

    return isinstance(value, list) and all(map(one, value))


def _are_whole(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


_VALID: dict[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "str | None": _is_text,
    "str | Sequence[str]": lambda value: isinstance(value, list),
    "int": _is_whole,
    "int | None": _is_whole,
    "float | None": is_finite_number,
    "bool | Literal['index'] | None": lambda value: isinstance(value, bool | str),
    "str | Scheduler | None": _is_text,
    "Sequence[Any] | None": _are_loras,
    "Sequence[int] | None": _are_whole,
    "Any": is_facts,
}
"""Type of a field of the request -> whether a value out of a JSON file is one. What it may be is checked by
`GenerationRequest.resolve`."""


def recorded(*stages: Stage) -> list[str]:
    """Fields of the request that the settings hold, of these stages."""
    return [name for name, option in options(*stages).items() if option.recorded]


def deciding(values: Mapping[str, Any], *stages: Stage) -> dict[str, Any]:
    """The prompts and the settings of these stages as JSON values; pictures and clips by their contents, wherever they
    lie.

    values: of `RunRecord.values` or `read_settings`.
    """
    found: dict[str, Any] = {name: values.get(name) for name in ("prompt", *recorded(*stages))}
    return found | {name: [media.sha256 for media in found[name]] for name in MEDIA if found.get(name)}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything that decides what a run computes.

    request: resolved, with its adapters.
    model_id, revision: as the user named the model.
    fingerprints: part of the checkpoint -> fingerprint of its config and contents; empty until it is open.
    """

    request: ResolvedRequest
    model_id: str
    revision: str | None
    dtype: str
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Field of the request that the settings hold -> its value."""
        return {name: getattr(self.request, name) for name in ("prompt", *recorded("encode", "denoise", "decode"))}

    def settings(self) -> dict[str, Any]:
        """The same but for the prompts, as JSON values under the names of the settings."""
        values = {name: value for name, value in self.values().items() if name != "prompt"}
        values |= {name: [each.facts() for each in values[name]] for name in MEDIA if values.get(name)}
        return {_THEIR_NAMES.get(name, name): value for name, value in values.items() if value is not None}

    def write(self, folder: Path) -> None:
        """Write `generation_config.json`; one prompt is written as the reference system does."""
        own = {"model_id": self.model_id, "revision": self.revision, "fingerprints": self.fingerprints}
        raw = {
            "prompt": self.request.prompt,
            **self.settings(),
            **own,
            "dtype": self.dtype,
        }
        prompts = {name: stage_files.one_or_all(raw[name]) for name in ("prompt", "negative_prompt")}
        write_record(folder / CONFIG_FILE, raw | prompts)

    def key(self, settings: dict[str, Any], parts: tuple[str, ...], **more: Any) -> str:
        """Everything that decides a stage's result: settings, parts of the checkpoint, and more."""
        model = {name: self.fingerprints[name] for name in parts}
        return json.dumps({**settings, "dtype": self.dtype, "model": model, **more}, ensure_ascii=False)

    def videos(self) -> list[RunRecord]:
        """One record for each seed that is asked for."""
        return [dataclasses.replace(self, request=one) for one in self.request.videos()]


def read_settings(folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says, under the names of the request: prompts and model at least.

    Returns:
        Fields of the request, `model_id`, `revision`, `dtype` and `fingerprints`, as far as the file has them: the
        reference system writes fewer fields than we do.

    Raises:
        InputError: missing, damaged or incomplete.
    """
    path = folder / CONFIG_FILE
    try:
        raw = load_json(path)
    except OSError as e:
        raise InputError(f"{path} cannot be read ({e.strerror}); run `cogvideox encode` first") from e
    except ValueError as e:
        raise InputError(f"{path} is not JSON ({e}); run `cogvideox encode` again") from e
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold a JSON object; run `cogvideox encode` again")
    if not is_as_written(raw):
        log.warning("%s was edited or damaged after it was written; it is taken as it stands", path)
    types = {field.name: str(field.type) for field in dataclasses.fields(GenerationRequest)}
    valid = {name: _VALID[types[name]] for name in ("prompt", *recorded("encode", "denoise", "decode"))}
    valid |= {"model_id": _is_text, "dtype": _is_text, "revision": lambda value: isinstance(value, str | None)}
    valid["fingerprints"] = lambda value: isinstance(value, dict)
    found = {name: raw[_THEIR_NAMES.get(name, name)] for name in valid if _THEIR_NAMES.get(name, name) in raw}
    for name in ("prompt", "negative_prompt"):
        found[name] = [raw.get(name)] if isinstance(raw.get(name), str) else raw.get(name)
    found.setdefault("model_id", None)
    wrong = [_THEIR_NAMES.get(name, name) for name, value in found.items() if not valid[name](value)]
    if wrong:
        raise InputError(f"{path} has no usable {' and no '.join(wrong)}; run `cogvideox encode` again")
    found |= {name: [Media(**facts) for facts in found[name]] for name in MEDIA if name in found}
    check_prompts(found["prompt"], found["negative_prompt"])
    check_fps(found.get("fps"))
    return found


def check_folder(folder: Path, nbytes: int = 0) -> None:
    """Refuse a run directory, there or not yet, that results could not be written to.

    Raises:
        InputError: it cannot be made or written, or the disk is too full.
    """
    check_writable(folder / CONFIG_FILE)
    check_free_space(folder, nbytes)


def space_needed(request: ResolvedRequest, manifest: Manifest) -> int:
    """Bytes of the stage files and, generously, of the videos."""
    size = manifest.model_family.resolve_size(manifest.configs, request.num_frames, request.height, request.width)
    shapes = manifest.model_family.feature_shapes(manifest.configs, request.batch).values()
    pixels = size.num_frames * size.height * size.width * 3
    return 2 * 4 * sum(math.prod(shape) for shape in shapes) + request.batch * request.num_videos * pixels


@contextmanager
def run_dir_lock(folder: Path, *, temporary: bool = False) -> Iterator[None]:
    """Make the run directory and keep other runs out of it while this one works there.

    temporary: our files are removed when all went well, and when nothing was finished.

    Raises:
        InputError: another run works there, or the directory cannot be written.
    """
    if not hosts.is_first():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"cannot write to {folder}: {e.strerror}; choose another directory") from e
    busy = f"another run is at work in {folder}; wait for it or choose another --dir or --out"
    try:
        with file_lock(folder / LOCK_FILE, busy=busy):
            try:
                yield
            except BaseException:
                if kept := finished(folder):
                    log.warning("%s in %s: kept, the same command goes on from there", " and ".join(kept), folder)
                elif temporary:
                    _remove_files(folder)
                raise
            if temporary:
                _remove_files(folder)
    finally:
        if temporary:
            with suppress(OSError):  # not ours alone
                folder.rmdir()


def video_dir(folder: Path, one: RunRecord, run: RunRecord) -> Path:
    """Where one video of a run has its own files: a directory below, where there are several of other seeds."""
    return folder if run.request.num_videos == 1 else folder / f"seed-{one.request.seed}"


def finished(folder: Path) -> list[str]:
    """The files in a run directory that a later run goes on from."""
    names = (EMBEDDINGS_FILE, STATE_FILE, LATENTS_FILE)
    return [
        str(path.relative_to(folder)) for at in _directories(folder) for name in names if (path := at / name).exists()
    ]


def _directories(folder: Path) -> list[Path]:
    return [folder, *sorted(path for path in folder.glob("seed-*") if path.is_dir())]


def _remove_files(folder: Path) -> None:
    for at in reversed(_directories(folder)):
        remove_orphans(at)
        for name in (CONFIG_FILE, EMBEDDINGS_FILE, STATE_FILE, LATENTS_FILE):
            (at / name).unlink(missing_ok=True)
        if at != folder:
            with suppress(OSError):  # somebody else's files
                at.rmdir()
