"""The conversion of a checkpoint: all components are checked first, then written one by one, then moved into place.

Components are written under DST/.conversion and moved together at the end, config.json last, so the result of a killed
conversion does not load. The next attempt reuses the components that are complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cogvideox_flax.checkpoint import (
    CONFIG_FILE,
    FORMAT_VERSION,
    WEIGHTS_FILE,
    Manifest,
    is_native,
    read_manifest,
    write_manifest,
)
from cogvideox_flax.conversion.configs import check_complete, find_family, folders_of, kept_beside, read_configs
from cogvideox_flax.conversion.mapping import WeightMoves, weight_moves
from cogvideox_flax.conversion.source import (
    Source,
    check_against_hub,
    class_names,
    components_of,
    is_alone,
    is_hf_layout,
)
from cogvideox_flax.conversion.tables import get_naming
from cogvideox_flax.conversion.write import FLOATS, Progress, Targets, main_dtype, targets_of, verify, write_tensors
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.io.atomic import file_lock, write_json
from cogvideox_flax.io.contents import content_hash, content_hashes
from cogvideox_flax.io.paths import check_free_space
from cogvideox_flax.io.stand_ins import refuse_stand_in
from cogvideox_flax.io.values import load_json
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.models.registry import component_names, get_family, get_release

log = logging.getLogger(__name__)

WORK_DIR = ".conversion"
LOCK_FILE = ".conversion.lock"
RECORD_FILE = "record.json"
PARTIAL = ".partial"


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    components: Sequence[str] | None = None,
    whole: bool = False,
    dtype: str | None = None,
    release: str | None = None,
    variant: str | None = None,
    origin: dict[str, str] | None = None,
    progress: Progress = lambda component, done, total: None,
) -> None:
    """Convert a Hugging Face layout directory to a native checkpoint.

    Args:
        src: directory with any component's directory (and tokenizer/, scheduler/); or one component alone, as its own
            directory or a file.
        dst: the native checkpoint to make, or to add components to; what src lacks stays as it is there.
        components: which to convert; None for all that src has.
        whole: refuse a src that lacks a component, or a tokenizer that the model can use.
        dtype: "float32", "bfloat16" or "float16" to cast to; None keeps each tensor's own.
        release: use the configs of this release instead of src's config.json files.
        variant: of the weight files, as `save_pretrained(variant=...)` names them; None: the plain or the only one.
        origin: where src came from (hub id, revision), stored in the checkpoint.
        progress: called as bytes are read.

    Raises:
        InputError: src is not such a directory, tensors do not match, a component does not fit those in dst, dst cannot
            be written, the disk is too small, or the model overflows in the dtype. What remains in dst does not load.
    """
    src, dst = Path(src), Path(dst)
    if not src.exists():
        raise InputError(f"{src} is not a directory; expected a checkpoint in the Hugging Face layout")
    if is_native(src):
        raise InputError(f"{src} is a native checkpoint already; there is nothing to convert")
    if not is_hf_layout(src) and not is_alone(src):
        names = ", ".join(component_names())
        raise InputError(f"{src} is not a checkpoint in the Hugging Face layout: it has none of {names} with weights")
    if dtype is not None and dtype not in FLOATS:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(FLOATS)}")
    family = family_of(src, dst, release, components)
    known = get_release(release) if release else None
    if whole:
        check_complete(src, family, known)
    wanted = list(components or _components_in(src, family))
    there = _checkpoint_in(dst, family)
    manifest = read_configs(src, family, wanted, known, there)
    before = kept_beside(there, manifest.configs, dst)
    if before is not there:
        manifest = read_configs(src, family, wanted, known)
    for component in wanted:
        manifest.configs[component].check_dtype(dtype)
    tokenizer = _tokenizer_files(src, family, wanted)
    folders = folders_of(src, family)
    job = _Job(src, dst, dtype, variant, manifest, before, folders, tokenizer, origin or {}, progress)
    # all tensors are matched and the disk space is checked before the first component is written
    moves = {component: job.moves(component) for component in wanted}
    check_free_space(dst, sum(job.space(component, moves[component]) for component in wanted))
    make_writable(dst, job.work)
    busy = f"another conversion is writing to {dst}; wait for it, or choose another destination"
    with file_lock(dst / LOCK_FILE, busy=busy):
        if _checkpoint_in(dst, family) != there:
            raise InputError(f"another conversion has changed {dst} meanwhile; run the same command again")
        try:
            job.run(moves)
        except OSError as e:
            raise InputError(
                f"writing {dst} failed: {e.strerror}; free some space and run the same command again"
            ) from e


def _checkpoint_in(dst: Path, family: type[VideoModel]) -> Manifest:
    """The manifest of the checkpoint in dst, also of one that a killed attempt was moving into place."""
    place = next((place for place in (dst / WORK_DIR, dst) if is_native(place)), None)
    return Manifest(family=family.name) if place is None else read_manifest(place)


def _components_in(src: Path, family: type[VideoModel]) -> list[str]:
    """The components that src has."""
    names = list(folders_of(src, family)) if is_alone(src) else components_of(src, family.components)
    if not names and is_alone(src):
        kinds = ", ".join(sorted(class_names(src)))
        raise ConversionError(f"{src} holds a {kinds}, which is no component of a model family that this version knows")
    if not names:
        raise ConversionError(f"{src} has a model_index.json but no weights; download the component directories too")
    if len(names) > 1 and is_alone(src):
        raise ConversionError(f"{src} does not say what it is; name it with --component, one of {', '.join(names)}")
    return names


def family_of(
    src: Path, dst: Path, release: str | None = None, components: Iterable[str] | None = None
) -> type[VideoModel]:
    """The family of src, from its configs alone; arguments as for `convert`.

    Raises:
        InputError: it has no such component, or dst holds a model of another family.
    """
    there = read_manifest(dst).family if is_native(dst) else None
    family = get_family(get_release(release).family) if release else find_family(src, there)
    if there not in (None, family.name):
        raise InputError(f"{dst} holds a model of the family {there}, {src} is {family.name}; choose another place")
    if unknown := [c for c in components or () if c not in family.components]:
        raise InputError(f"unknown component {unknown[0]!r}; known are {', '.join(family.components)}")
    return family


@dataclass(frozen=True)
class _Job:
    """A conversion with checked arguments; see `convert`."""

    src: Path
    dst: Path
    dtype: str | None
    variant: str | None
    manifest: Manifest
    before: Manifest
    folders: Mapping[str, Path]
    tokenizer: Sequence[str]
    origin: dict[str, str]
    progress: Progress

    @property
    def family(self) -> type[VideoModel]:
        return type(self.manifest.model)

    @property
    def work(self) -> Path:
        return self.dst / WORK_DIR

    def open(self, component: str) -> Source:
        return Source(self.folders[component], self.variant, get_naming(self.family.name, component))

    def moves(self, component: str) -> WeightMoves:
        with self.open(component) as source:
            if source.changes:
                log.info("%s of %s: %s", component, self.folders[component], "; ".join(source.changes))
            shapes = {name: source.info(name).shape for name in source.names}
            return weight_moves(self.family, component, self.manifest.configs[component], shapes)

    def space(self, component: str, todo: WeightMoves) -> int:
        """Bytes of a component that is still to be written; 0 if it is complete."""
        done = self.work / component
        with suppress(OSError, ValueError, TypeError, KeyError):
            key = load_json(done / RECORD_FILE)["key"]
            if key == {**self.key(component, [], []), "files": key["files"]}:  # the files are hashed later
                return 0
        with self.open(component) as source:
            targets = self.targets(source, todo)
        return sum(int(np.prod(shape)) * kind.itemsize for shape, kind in targets.values())

    def targets(self, source: Source, todo: WeightMoves) -> Targets:
        return targets_of(source, todo, FLOATS[self.dtype] if self.dtype else None)

    def run(self, moves: dict[str, WeightMoves]) -> None:
        """Write all components below `work`, then move them into place."""
        if (self.work / CONFIG_FILE).exists():  # left by an earlier attempt
            _finish(self.dst)
        self.work.mkdir(exist_ok=True)  # another process may have removed it before this one had the lock
        for path in self.work.iterdir():
            if path.name not in moves:
                shutil.rmtree(path, ignore_errors=True)
        records = {component: self.convert(component, todo) for component, todo in moves.items()}
        tokenizer = self.before.tokenizer_sha256 | _copy_tokenizer(self.src, self.work, self.tokenizer)
        manifest = replace(
            self.before,
            configs=self.configs(moves),
            weights=self.before.weights | records,
            tokenizer_sha256=tokenizer,
            **self.of_denoiser(moves),
        )
        write_manifest(self.work, manifest)
        _finish(self.dst)

    def configs(self, converted: Iterable[str]) -> dict[str, Any]:
        """All configs of the checkpoint.

        The scheduler and the tokenizer are those of the denoiser's directory: other components may come from another
        release with another noise schedule.
        """
        own, kept = self.manifest.configs, self.before.configs
        shared = {name: own[name] for name in ("scheduler", "tokenizer") if name in own}
        if self.family.denoiser in converted:
            kept = {name: config for name, config in kept.items() if name in self.family.components}
        return shared | kept | {component: own[component] for component in converted}

    def of_denoiser(self, converted: Iterable[str]) -> dict[str, Any]:
        """`release_name` and `guidance_scale`: as the scheduler, those of the denoiser's directory."""

        def choose(own: Any, kept: Any) -> Any:
            return own if kept is None or self.family.denoiser in converted else kept

        names = ("release_name", "guidance_scale")
        return {name: choose(getattr(self.manifest, name), getattr(self.before, name)) for name in names}

    def convert(self, component: str, todo: WeightMoves) -> dict[str, Any]:
        """Write one component below `work`, or reuse that of an earlier attempt. Returns its record."""
        done = self.work / component
        with self.open(component) as source:
            files = [file.path for file in source.files]
            for path in files:
                check_against_hub(path)
            found = self.completed(component, files)
            if found is not None:
                return found
            partial = self.work / f"{component}{PARTIAL}"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            targets = self.targets(source, todo)
            path = partial / WEIGHTS_FILE
            pool = ThreadPoolExecutor(1)  # hashing the source runs beside the conversion
            try:
                hashing = pool.submit(content_hashes, files)
                sums = write_tensors(source, todo, targets, path, component, self.progress)
                verify(path, sums)
                hashes = hashing.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
            source.check_unchanged()
        record = {
            "dtype": self.dtype or main_dtype(targets),
            "sha256": content_hash(path),
            "source": self.source(files, hashes),
        }
        write_json(partial / RECORD_FILE, {"key": self.key(component, files, hashes), "weights": record})
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        return record

    def completed(self, component: str, files: list[Path]) -> dict[str, Any] | None:
        """The record of a component that an earlier attempt completed from the same inputs; None if there is none."""
        done = self.work / component
        if not (done / RECORD_FILE).is_file():
            return None
        hashes = content_hashes(files)
        try:
            record = load_json(done / RECORD_FILE)
            same = record["key"] == self.key(component, files, hashes)
            if not same or record["weights"]["sha256"] != content_hash(done / WEIGHTS_FILE):
                return None
            found: dict[str, Any] = record["weights"] | {"source": self.source(files, hashes)}
        except (OSError, ValueError, TypeError, KeyError) as e:
            log.warning("converting %s again: the result of an earlier attempt is damaged (%s)", component, e)
            return None
        log.info("%s was converted by an earlier attempt, which is reused", component)
        return found

    def key(self, component: str, files: list[Path], hashes: list[str]) -> dict[str, Any]:
        """Everything that determines a component's file, with JSON's types."""
        key = {
            "format_version": FORMAT_VERSION,
            "config": self.manifest.configs[component].to_dict(),
            "dtype": self.dtype,
            "files": {path.name: digest for path, digest in zip(files, hashes, strict=True)},
        }
        return json.loads(json.dumps(key))

    def source(self, files: list[Path], hashes: list[str]) -> dict[str, Any]:
        """Where a component came from."""
        named = {path.name: digest for path, digest in zip(files, hashes, strict=True)}
        return {"path": str(self.src.resolve()), **self.origin, "sha256": named}


def make_writable(dst: Path, work: Path) -> None:
    """Create the working directory.

    Raises:
        InputError: dst has other contents or cannot be written.
    """
    if dst.exists() and not dst.is_dir():
        raise InputError(f"{dst} is a file; the destination must be a directory")
    # an earlier attempt may have been killed while moving its results into place
    ours = is_native(dst) or (work / CONFIG_FILE).exists()
    if dst.is_dir() and not ours and any(p.name not in (WORK_DIR, LOCK_FILE) for p in dst.iterdir()):
        raise InputError(f"{dst} is not empty and not a native checkpoint; choose another destination or empty it")
    try:
        work.mkdir(parents=True, exist_ok=True)
        probe = work / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise InputError(f"cannot write to {dst}: {e.strerror}; choose another destination") from e


def _tokenizer_files(src: Path, family: type[VideoModel], components: Iterable[str]) -> list[str]:
    """The tokenizer's files that are to be copied: none without a component that encodes."""
    if all(family.components[component].stage != "encode" for component in components):
        return []
    if not (names := family.tokenizer_files_in(src)):
        expected = " or ".join(family.tokenizer_files)
        log.warning("%s has no tokenizer (%s): the checkpoint will encode ids but not prompts", src, expected)
    for name in names:
        refuse_stand_in(src / name)
    return names


def _copy_tokenizer(src: Path, work: Path, names: Sequence[str]) -> dict[str, str]:
    """Copy the tokenizer's files. Returns the SHA-256 of each copy."""
    hashes = {}
    for name in names:
        check_against_hub(src / name)
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(src / name, work / name)
        hashes[name] = content_hash(work / name)
    return hashes


def _finish(dst: Path) -> None:
    """Move the contents of `dst/.conversion` into place; until the end, dst has no config.json and does not load.

    Can be repeated after a kill.
    """
    work = dst / WORK_DIR
    (dst / CONFIG_FILE).unlink(missing_ok=True)
    for done in [path for path in work.iterdir() if path.is_dir() and path.suffix != PARTIAL]:
        shutil.rmtree(dst / done.name, ignore_errors=True)
        done.rename(dst / done.name)
        (dst / done.name / RECORD_FILE).unlink(missing_ok=True)
    os.replace(work / CONFIG_FILE, dst / CONFIG_FILE)
    shutil.rmtree(work)
