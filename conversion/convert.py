"""The conversion itself: read one tensor, move its axes, write it where it belongs.

Components are written under DST/.conversion and moved into place together at the end, config.json last, so a killed
conversion leaves nothing that loads; components that were complete are taken over by the next attempt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from cogvideox_flax.checkpoint import (
    CONFIG_FILE,
    FORMAT_VERSION,
    SPIECE_FILE,
    WEIGHTS_FILE,
    Manifest,
    is_native,
    read_manifest,
    sha256,
)
from cogvideox_flax.config import (
    COMPONENTS,
    Release,
    SchedulerConfig,
    TextEncoderConfig,
    TokenizerConfig,
    TransformerConfig,
    VAEConfig,
    find_release,
    get_release,
)
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.tensorfile import DTYPES, TensorFile, TensorWriter
from conversion.mapping import Plan, plan
from conversion.source import Source, components_of, is_hf_layout, read_json

log = logging.getLogger(__name__)

WORK_DIR = ".conversion"
RECORD_FILE = "record.json"
FLOATS = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"], "float16": DTYPES["F16"]}

Progress = Callable[[str, int, int], None]
"""(component, bytes done, bytes in all)"""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    components: Sequence[str] | None = None,
    dtype: str | None = None,
    release: str | None = None,
    origin: dict[str, str] | None = None,
    progress: Progress = lambda component, done, total: None,
) -> None:
    """Convert a Hugging Face layout directory to a native checkpoint.

    Args:
        src: directory with any of text_encoder/, transformer/, vae/ (and tokenizer/, scheduler/).
        dst: the native checkpoint to make, or to add components to.
        components: which to convert; None for all that src has.
        dtype: "float32", "bfloat16" or "float16" to cast to; None keeps each tensor's own.
        release: take the configs from this release instead of src's config.json files.
        origin: where src came from (hub id, revision), kept in the checkpoint.
        progress: called as bytes are read.

    Raises:
        InputError: src is not such a directory, tensors do not match, dst cannot be written, the disk is too small,
            or the dtype is one that the model does not survive. Nothing that loads is left behind.
    """
    src, dst = Path(src), Path(dst)
    if not src.is_dir():
        raise InputError(f"{src} is not a directory; expected a checkpoint in the Hugging Face layout")
    if is_native(src):
        raise InputError(f"{src} is a native checkpoint already; there is nothing to convert")
    if not is_hf_layout(src):
        raise InputError(
            f"{src} is not a checkpoint in the Hugging Face layout: it has none of {', '.join(COMPONENTS)} with weights"
        )
    if dtype is not None and dtype not in FLOATS:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(FLOATS)}")
    wanted = list(components or components_of(src))
    if unknown := [c for c in wanted if c not in COMPONENTS]:
        raise InputError(f"unknown component {unknown[0]!r}; known are {', '.join(COMPONENTS)}")
    if not wanted:
        raise ConversionError(f"{src} has a model_index.json but no weights; download the component directories too")

    with _only_one(dst):
        _convert(src, dst, wanted, dtype, release, origin, progress)


@contextmanager
def _only_one(dst: Path) -> Iterator[None]:
    """Hold dst against other conversions into it."""
    name = hashlib.sha256(str(dst.resolve()).encode()).hexdigest()[:16]
    try:
        with FileLock(Path(tempfile.gettempdir()) / f"cogvideox-conversion-{name}.lock", timeout=0):
            yield
    except Timeout as e:
        raise InputError(f"another conversion is writing to {dst}; wait for it, or choose another destination") from e


def _convert(
    src: Path,
    dst: Path,
    wanted: list[str],
    dtype: str | None,
    release: str | None,
    origin: dict[str, str] | None,
    progress: Progress,
) -> None:
    configs = read_configs(src, wanted, get_release(release) if release else None)
    if configs.transformer is not None:
        configs.transformer.check_dtype(dtype)
    work = dst / WORK_DIR
    # every component is matched, and its room on the disk is there, before the first is written
    plans: dict[str, Plan] = {}
    need = 0
    for component in wanted:
        with Source(src / component) as source:
            shapes = {name: source.info(name).shape for name in source.where}
            plans[component] = plan(component, getattr(configs, component), shapes)
            if not (work / component).is_dir():
                targets = _targets(source, plans[component], FLOATS[dtype] if dtype else None)
                need += sum(int(np.prod(shape)) * kind.itemsize for shape, kind in targets.values())
    _check_space(dst, need)
    if (work / CONFIG_FILE).exists():  # an earlier attempt was killed while moving its results into place
        _finish(dst)
    make_writable(dst, work)
    for component in set(COMPONENTS) - set(wanted):
        shutil.rmtree(work / component, ignore_errors=True)
    before = read_manifest(dst) if is_native(dst) else Manifest()
    records = {}
    for component in wanted:
        records[component] = _convert_one(src, work, component, plans[component], configs, dtype, origin, progress)
    if "text_encoder" in wanted:
        _copy_tokenizer(src, work)
    manifest = replace(
        before,
        **{c: getattr(configs, c) for c in wanted},
        # other components' directories may come from another release, with another noise schedule
        scheduler=configs.scheduler if "transformer" in wanted or not before.scheduler else before.scheduler,
        tokenizer=configs.tokenizer if configs.transformer or not before.tokenizer else before.tokenizer,
        weights=before.weights | records,
    )
    _write_json(work / CONFIG_FILE, manifest.to_json())
    _finish(dst)


def read_configs(src: Path, wanted: Iterable[str], release: Release | None = None) -> Manifest:
    """The component configs of an HF-layout directory; those of `release` where it is given.

    Raises:
        ConversionError: a config file is missing or not one we can serve.
    """

    def load(component: str, kind: Any) -> Any:
        if component not in wanted:
            return None
        if release is not None:
            return getattr(release, component)
        path = src / component / "config.json"
        if not path.is_file():
            raise ConversionError(
                f"{path} is missing; it says what the weights are. Download it too, "
                "or name the model: python -m conversion SRC DST --release NAME."
            )
        return _parse(path, kind.from_hf)

    transformer = load("transformer", TransformerConfig)
    scheduler_file = src / "scheduler" / "scheduler_config.json"
    tokenizer_file = src / "tokenizer" / "tokenizer_config.json"
    known = release or (find_release(transformer) if transformer else None)
    scheduler = None
    if release is None and scheduler_file.is_file():
        scheduler = _parse(scheduler_file, SchedulerConfig.from_hf)
    elif known is not None and transformer is not None:
        scheduler = known.scheduler
    text_length = transformer.text_length if transformer else None
    tokenizer = TokenizerConfig.from_hf({}, text_length)
    if tokenizer_file.is_file():
        tokenizer = _parse(tokenizer_file, lambda raw: TokenizerConfig.from_hf(raw, text_length))
    return Manifest(
        text_encoder=load("text_encoder", TextEncoderConfig),
        transformer=transformer,
        vae=load("vae", VAEConfig),
        scheduler=scheduler,
        tokenizer=tokenizer,
    )


def _parse(path: Path, make: Callable[[dict[str, Any]], Any]) -> Any:
    raw = read_json(path)
    try:
        return make(raw)
    except InputError as e:
        raise ConversionError(f"{path}: {e}") from e
    except (TypeError, AttributeError, ValueError) as e:
        raise ConversionError(f"{path} holds a value of the wrong type: {e}") from e


def make_writable(dst: Path, work: Path) -> None:
    """Create the working directory.

    Raises:
        InputError: dst holds something else, or cannot be written.
    """
    if dst.exists() and not dst.is_dir():
        raise InputError(f"{dst} is a file; the destination must be a directory")
    if dst.is_dir() and not is_native(dst) and any(p.name != WORK_DIR for p in dst.iterdir()):
        raise InputError(f"{dst} is not empty and not a native checkpoint; choose another destination or empty it")
    try:
        work.mkdir(parents=True, exist_ok=True)
        probe = work / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise InputError(f"cannot write to {dst}: {e.strerror}; choose another destination") from e


def _convert_one(
    src: Path,
    work: Path,
    component: str,
    todo: Plan,
    configs: Manifest,
    dtype: str | None,
    origin: dict[str, str] | None,
    progress: Progress,
) -> dict[str, Any]:
    """Write one component below `work`, or take over what an earlier attempt completed. Returns its record."""
    done = work / component
    with Source(src / component) as source:
        key = {
            "format_version": FORMAT_VERSION,
            "config": getattr(configs, component).to_dict(),
            "dtype": dtype,
            "files": {f.path.name: [f.path.stat().st_size, f.path.stat().st_mtime_ns] for f in source.files},
        }
        if (done / RECORD_FILE).is_file():
            record = json.loads((done / RECORD_FILE).read_text())
            if record["key"] == json.loads(json.dumps(key)):
                log.info("%s was converted by an earlier attempt; taking it over", component)
                return record["weights"]
            shutil.rmtree(done)
        partial = work / f"{component}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        targets = _targets(source, todo, FLOATS[dtype] if dtype else None)
        path = partial / WEIGHTS_FILE
        pool = ThreadPoolExecutor(1)  # hashing the source runs beside the conversion
        try:
            hashes = {f.path.name: pool.submit(sha256, f.path) for f in source.files}
            sums = _write(source, todo, targets, path, component, progress)
            _verify(path, sums)
            record = {
                "dtype": dtype or _main_dtype(targets),
                "sha256": sha256(path),
                "source": {
                    "path": str(src.resolve()),
                    **(origin or {}),
                    "sha256": {name: found.result() for name, found in hashes.items()},
                },
            }
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    _write_json(partial / RECORD_FILE, {"key": key, "weights": record})
    partial.rename(done)
    return record


Targets = dict[str, tuple[tuple[int, ...], np.dtype]]


def _targets(source: Source, todo: Plan, dtype: np.dtype | None) -> Targets:
    """Shape and dtype of every parameter; without `dtype`, the widest of the tensors that fill it."""
    kinds: dict[str, np.dtype] = {}
    for name, move in todo.moves.items():
        kind = source.info(name).dtype
        if kind == DTYPES["F64"]:  # the reference computes its position table in float64 and saves it so
            kind = FLOATS["float32"]
        if kind not in FLOATS.values():
            raise ConversionError(f"{name} is {kind}; weights must be one of {', '.join(FLOATS)}")
        kind = dtype or kind
        kinds[move.target] = np.promote_types(kind, kinds.get(move.target, kind))
    return {name: (shape, kinds[name]) for name, shape in todo.shapes.items()}


def _main_dtype(targets: Targets) -> str:
    sizes: dict[str, int] = {}
    for shape, dtype in targets.values():
        sizes[dtype.name] = sizes.get(dtype.name, 0) + int(np.prod(shape))
    return max(sizes, key=lambda name: sizes[name])


def _check_space(dst: Path, need: int) -> None:
    disk = next(folder for folder in (dst.absolute(), *dst.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(disk).free
    if need > free:
        raise InputError(
            f"{dst} needs {need / 2**30:.2f} GiB on disk, which has {free / 2**30:.2f} GiB free; "
            "free some space or choose another place"
        )


def _write(
    source: Source, todo: Plan, targets: Targets, path: Path, component: str, progress: Progress
) -> dict[tuple[str, int | None], int]:
    """Stream every tensor into its slot. Returns the CRC-32 of each slot's bytes."""
    try:
        writer = TensorWriter(path, targets, {"component": component})
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror}") from e
    total = sum(source.info(name).nbytes for name in todo.moves)
    sums, done = {}, 0
    try:
        for name, move in sorted(todo.moves.items(), key=lambda item: _file_order(source, item[0])):
            value = source.read(name)
            kind = targets[move.target][1]
            if kind != value.dtype:
                value = _cast(name, value, kind)
            value = np.ascontiguousarray(move.transform(value))
            writer.write(move.target, value, move.slot)
            sums[move.target, move.slot] = zlib.crc32(value.reshape(-1).view(np.uint8).data)
            done += source.info(name).nbytes
            progress(component, done, total)
    except OSError as e:
        raise InputError(f"writing {path} failed: {e.strerror}; free some space and run the same command again") from e
    finally:
        writer.close()
    return sums


def _file_order(source: Source, name: str) -> tuple[int, int]:
    file = source.where[name]
    return source.files.index(file), source.info(name).offset


def _cast(name: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if dtype == FLOATS["float16"] and not np.isfinite(cast).all():
        raise InputError(f"{name} holds values beyond float16's range; use --dtype bfloat16 or float32")
    return cast


def _verify(path: Path, sums: dict[tuple[str, int | None], int]) -> None:
    """Read everything back and compare."""
    with TensorFile(path) as file:
        for (target, slot), expected in sums.items():
            if zlib.crc32(file.read(target, slot).reshape(-1).view(np.uint8).data) != expected:
                raise ConversionError(f"{path}: {target} does not read back as written; is the disk failing?")


def _copy_tokenizer(src: Path, work: Path) -> None:
    spiece = src / SPIECE_FILE
    if not spiece.is_file():
        log.warning("%s is missing: the checkpoint will encode ids but not prompts", spiece)
        return
    (work / SPIECE_FILE).parent.mkdir(exist_ok=True)
    shutil.copyfile(spiece, work / SPIECE_FILE)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _finish(dst: Path) -> None:
    """Move what `dst/.conversion` holds into place; until that is done, dst has no config.json and does not load.

    Safe to repeat after a kill.
    """
    work = dst / WORK_DIR
    (dst / CONFIG_FILE).unlink(missing_ok=True)
    for name in (*COMPONENTS, Path(SPIECE_FILE).parent.name):
        if (work / name).is_dir():
            shutil.rmtree(dst / name, ignore_errors=True)
            (work / name).rename(dst / name)
            (dst / name / RECORD_FILE).unlink(missing_ok=True)
    os.replace(work / CONFIG_FILE, dst / CONFIG_FILE)
    shutil.rmtree(work)
