"""find(where): the native checkpoint of a directory, a hub id, or the embedded model; with another transformer."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cogvideox_flax.checkpoint import (
    CONFIG_FILE,
    FORMAT_VERSION,
    Manifest,
    check_contents,
    is_native,
    read_manifest,
    weights_file,
    write_manifest,
)
from cogvideox_flax.conversion.configs import find_family, kept_beside, read_configs
from cogvideox_flax.conversion.convert import LOCK_FILE, WORK_DIR, convert
from cogvideox_flax.conversion.download import Download, download, download_model, files_read, names_of
from cogvideox_flax.conversion.progress import progress_bar
from cogvideox_flax.conversion.source import is_alone, weight_paths
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.atomic import file_lock
from cogvideox_flax.io.contents import content_hashes, fingerprint, is_as_written
from cogvideox_flax.io.paths import cache_dir, expand_user
from cogvideox_flax.io.stand_ins import refuse_stand_in
from cogvideox_flax.io.tensor_file import TensorFile
from cogvideox_flax.io.values import load_json
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.models.registry import RELEASES, component_names

log = logging.getLogger(__name__)

EMBEDDED = Path(__file__).parent.joinpath("weights", "embedded").resolve()
"""The small checkpoint that comes with the package; in a checkout, cogvideox_flax/weights/ links to it."""

EMBEDDED_IMAGE_TO_VIDEO = "embedded-image-to-video"
"""The name of the small image-to-video checkpoint that comes with it."""

TRAINING_RECORD = "finetune.json"
TRAINED_CHECKPOINT = "checkpoint"
"""In the directory of a training run: what it is made of; and the native checkpoint, once all weights were trained."""

EMBEDDED_MODELS: dict[Any, Path] = {
    None: EMBEDDED,
    "embedded": EMBEDDED,
    EMBEDDED_IMAGE_TO_VIDEO: EMBEDDED.with_name("embedded_image_to_video"),
}
"""The checkpoints that come with the package, by the names that `where` may have."""


def full_name(where: Any) -> Any:
    """The hub id of a release that is named as `doctor` and `plan` name it, such as "cogvideox-2b".

    Whatever else `where` names, a folder of that name first, is returned as it is.
    """
    if where is None or where in EMBEDDED_MODELS or os.path.exists(where) or "/" in str(where):
        return where
    release = RELEASES.get(str(where).lower())
    return where if release is None else release.hub_id


def find(
    where: str | Path | None,
    revision: str | None = None,
    transformer: str | Path | None = None,
    variant: str | None = None,
    *,
    progress: bool = True,
) -> Path:
    """The native checkpoint that `where` names.

    A native directory is returned as it is. A directory in the Hugging Face layout, or a hub id ("owner/name"),
    is converted once into the cache, with progress on stderr; weights keep their dtype. The converted checkpoint of a
    hub id belongs to one commit and does not need the downloaded files.

    Args:
        where: directory, hub id or name of a release, see `full_name`; None or "embedded" for the embedded
            checkpoint, "embedded-image-to-video" for the one that takes a first frame.
        revision: for a hub id: branch, tag or commit.
        transformer: one in place of the checkpoint's own: the directory or file of one alone, or of a model that has
            one, native or not; or a hub id. It is converted once, into a checkpoint that refers to the other's files.
        variant: of the weight files that are converted, as `save_pretrained(variant=...)` names them, such as "fp16";
            None: the plain ones, or the only ones.
        progress: progress bars on stderr.

    Raises:
        InputError: it does not exist, is not a checkpoint, or cannot be downloaded or converted; the transformer is of
            another architecture.
    """
    where = full_name(where)
    _check_variant(variant, where, transformer)
    native = _find(where, revision, variant, progress)
    return native if transformer is None else _with_transformer(native, transformer, variant, progress)


def _check_variant(variant: str | None, *named: str | Path | None) -> None:
    """Refuse a variant where nothing is converted."""
    where = [each for each in named if each is not None] or [EMBEDDED]
    if variant is not None and all(native_here(str(each)) for each in where):
        raise InputError(
            f"a variant is of weight files in the Hugging Face layout; {where[0]} is a native checkpoint, which has one"
        )


def _find(where: str | Path | None, revision: str | None, variant: str | None, progress: bool) -> Path:
    path = _local(where, revision)
    if path is not None and is_native(path):
        return path
    source = _configs(str(where), revision, progress) if path is None else Download(path, {})
    family = find_family(source.folder)
    name = _cache_name(source, family, variant)
    target = cache_dir() / f"{name}-v{FORMAT_VERSION}"
    if _is_intact(target):  # checked before locking: the cache may be read-only
        return target
    with _locked(target):
        if not _is_intact(target):  # another process may have converted it meanwhile
            if path is None:
                source = download_model(str(where), source, family, progress=progress)
            _remove_damaged(target)
            log.info("converting %s once into %s (COGVIDEOX_HOME sets the place)", source.folder, target)
            with progress_bar(progress) as report:
                convert(source.folder, target, whole=True, variant=variant, origin=source.origin, progress=report)
            if (
                _cache_name(source, family, variant) != name
            ):  # the conversion would be found under the hash of other files
                shutil.rmtree(target)
                raise CheckpointError(f"{source.folder} changed while it was converted; start again")
    return target


def _with_transformer(native: Path, where: str | Path, variant: str | None, progress: bool) -> Path:
    """A checkpoint in the cache, of this transformer and of links to the other files of a native checkpoint."""
    base = read_manifest(native)
    component, source = base.model.denoiser, _transformer_source(where, base, progress)
    config = _transformer_config(source.folder, base, native)
    if is_native(source.folder):
        made_of: Any = read_manifest(source.folder).weights[component]["sha256"]
    else:
        made_of = source.origin or content_hashes(_files_alone(source.folder))
    name = f"{native.name}+{expand_user(where).name}{_suffix(variant)}-{fingerprint(base.to_json(), made_of)[:16]}"
    target = cache_dir() / f"{name}-v{FORMAT_VERSION}"
    if _is_intact(target):
        return target
    with _locked(target):
        if not _is_intact(target):
            _remove_damaged(target)
            others = {name: record for name, record in base.weights.items() if name != component}
            manifest = replace(base, weights=others, configs=base.configs | {component: config})
            tokenizer = map(Path, base.model.tokenizer_files_in(native))
            _link([*tokenizer, *(weights_file("", name) for name in others)], native, target)
            if is_native(source.folder):
                record = read_manifest(source.folder).weights[component]
                _link([weights_file("", component)], source.folder, target)
                write_manifest(target, replace(manifest, weights=others | {component: record}))
                return target
            if source.origin:
                stem = f"{component}/*" if source.folder.name == component else "diffusion_pytorch_model*"
                wanted = (f"{stem}.safetensors", f"{stem}.safetensors.index*.json")
                download(str(where), source.origin["revision"], wanted, progress=progress)
            write_manifest(target, manifest)
            with progress_bar(progress) as report:
                how: Any = {"components": [component], "variant": variant, "origin": source.origin}
                convert(source.folder, target, **how, progress=report)
    return target


def _link(files: Iterable[Path], source: Path, target: Path) -> None:
    """Links to files of another checkpoint, in the same places."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).symlink_to((source / file).resolve())


def _transformer_source(where: str | Path, base: Manifest, progress: bool) -> Download:
    """Where a transformer lies: a native checkpoint, or the transformer's own directory or file. Of a hub id, the
    configs are downloaded."""
    path = expand_user(where)
    source = Download(path, {}) if os.path.exists(path) else download(str(where), progress=progress)
    below = source.folder / base.model.denoiser
    return source._replace(folder=below) if below.is_dir() and not is_native(source.folder) else source


def _transformer_config(folder: Path, base: Manifest, where: object) -> Any:
    """The config of a transformer that a checkpoint can have."""
    component = base.model.denoiser
    if is_native(folder):
        manifest = read_manifest(folder)
        if manifest.family != base.family or component not in manifest.weights:
            raise InputError(f"{folder} has no {component} of the family {base.family}; name one that has")
        config = manifest.configs[component]
    elif not is_alone(folder):
        raise InputError(f"{folder} holds no {component}; expected its directory with config.json and safetensors")
    else:
        config = read_configs(folder, type(base.model), [component], into=base).configs[component]
    kept_beside(base, {component: config}, where)
    return config


def _files_alone(place: Path) -> list[Path]:
    """The files that are read of a component alone."""
    return (
        [place]
        if place.is_file()
        else [p for p in sorted(place.iterdir()) if p.suffix in (".json", ".safetensors", ".gguf")]
    )


def native_here(where: str) -> Path | None:
    """The native checkpoint that `where` names, if it is one on this machine; nothing is converted."""
    path = expand_user(where)
    path = _trained(path) if os.path.exists(path) else EMBEDDED_MODELS.get(where, path)
    return path if is_native(path) else None


def _trained(path: Path) -> Path:
    """The checkpoint of a training run's directory; any other path as it is."""
    return path / TRAINED_CHECKPOINT if (path / TRAINING_RECORD).is_file() else path


def peek(
    where: str | Path | None,
    revision: str | None = None,
    transformer: str | Path | None = None,
    variant: str | None = None,
    *,
    progress: bool = True,
) -> Manifest:
    """A model's manifest from its config files alone: converts nothing, and downloads only the configs of a hub id.

    Arguments and errors as for `find`; `weights` is empty for a model that is not converted.
    """
    where = full_name(where)
    _check_variant(variant, where, transformer)
    base = _peek(where, revision, variant, progress)
    if transformer is None:
        return base
    component = base.model.denoiser
    folder = _transformer_source(transformer, base, progress).folder
    return replace(base, configs=base.configs | {component: _transformer_config(folder, base, where or EMBEDDED)})


def _peek(where: str | Path | None, revision: str | None, variant: str | None, progress: bool) -> Manifest:
    path = local = _local(where, revision)
    if path is None:
        path = _configs(str(where), revision, progress).folder
    if is_native(path):
        return read_manifest(path)
    family = find_family(path)
    names = [name for name in _components_with_config(path) if name in family.components]
    if local is not None and variant is not None:
        for name in names:
            weight_paths(path / name, variant)  # refused here, before anything is converted
    return read_configs(path, family, names)


def _configs(hub_id: str, revision: str | None, progress: bool) -> Download:
    source = download(hub_id, revision, progress=progress)
    if not _components_with_config(source.folder):
        raise _not_a_model(hub_id)
    return source


def _components_with_config(folder: Path) -> list[str]:
    return [c for c in component_names() if (folder / c / "config.json").is_file()]


def _is_model(folder: Path) -> bool:
    return is_native(folder) or bool(_components_with_config(folder))


def _local(where: str | Path | None, revision: str | None) -> Path | None:
    """The model directory that `where` names, native or in the Hugging Face layout; None: it may be a hub id."""
    embedded = None if where is not None and os.path.exists(where) else EMBEDDED_MODELS.get(where)
    if where is None or embedded is not None:
        path = embedded or EMBEDDED
        if not is_native(path):
            raise InputError(
                f"{'no model was named, and ' if where is None else ''}there is no embedded checkpoint in {path}. Name "
                "one with --model: a converted directory, one in the Hugging Face layout, or a hub id such as "
                "zai-org/CogVideoX-2b"
            )
    else:
        path = expand_user(where)
        if not os.path.exists(path):  # unlike Path.exists, does not raise for a name that is too long
            return None
    if revision is not None:
        raise InputError(f"a revision belongs to a hub id; {path} is a directory on this machine")
    try:
        if _is_model(_trained(path)):
            return _trained(path)
        if (path / TRAINING_RECORD).is_file():
            raise InputError(
                f"{path} is a training run without a checkpoint: of adapters, which --lora takes, or not at its end, "
                "which the same `cogvideox train` goes on to"
            )
        above = next((parent for parent in path.resolve().parents[:2] if _is_model(parent)), None)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    if (path / CONFIG_FILE).is_file():
        refuse_stand_in(path / CONFIG_FILE)
    alone = "; one component alone goes with a model that has the rest: see --transformer" if is_alone(path) else ""
    raise _not_a_model(path, alone + (f". Did you mean {above}?" if above else ""))


def _not_a_model(where: object, hint: str = "") -> InputError:
    folders = ", ".join(f"{name}/" for name in component_names())
    return InputError(
        f"{where} is not a model: expected a native checkpoint (config.json with format_version) or a Hugging Face "
        f"layout ({folders}, each with config.json and safetensors){hint}"
    )


def _suffix(variant: str | None) -> str:
    return "" if variant is None else f"-{variant}"


def _cache_name(source: Download, family: type[VideoModel], variant: str | None) -> str:
    """The cache name of a converted checkpoint: from the hub id's commit, or from the contents of the source files."""
    suffix = _suffix(variant)
    if source.origin:
        hub_ids = names_of(source.origin["hub_id"])
        names = [f"{hub_id.replace('/', '--')}-{source.origin['revision'][:16]}{suffix}" for hub_id in hub_ids]
        return next((name for name in names if is_native(cache_dir() / f"{name}-v{FORMAT_VERSION}")), names[0])
    folder = source.folder.resolve()
    files = sorted({p for pattern in files_read(family) for p in folder.glob(pattern) if p.is_file()})
    names = [str(p.relative_to(folder)) for p in files]
    return f"{folder.name}-{fingerprint(names, content_hashes(files))[:16]}{suffix}"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let one process at a time write `target`; the others wait."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(_unwritable(target, e.strerror)) from e
    if not os.access(target.parent, os.W_OK):
        raise InputError(_unwritable(target, "Permission denied or read-only"))
    with file_lock(target.with_name(f"{target.name}.lock"), busy=None):
        yield


def _unwritable(target: Path, reason: str | None) -> str:
    return f"cannot write to the cache {target.parent}: {reason}; set COGVIDEOX_HOME to another directory"


def _is_intact(native_dir: Path) -> bool:
    """Whether a converted checkpoint is in the cache, and its files match their hashes."""
    if not is_native(native_dir):
        return False
    try:
        if not is_as_written(load_json(native_dir / CONFIG_FILE)):
            raise CheckpointError(f"{native_dir / CONFIG_FILE} is not as it was written")
        manifest = read_manifest(native_dir)
        for component in manifest.model.components:
            TensorFile(weights_file(native_dir, component)).close()
        check_contents(native_dir, manifest)
    except CheckpointError as e:
        log.warning("the converted checkpoint is damaged and will be made again: %s", e)
        return False
    return True


def _remove_damaged(target: Path) -> None:
    """Remove a damaged checkpoint, but not the files from which a killed conversion can resume."""
    if target.is_dir() and not (target / WORK_DIR / CONFIG_FILE).exists():
        for path in target.iterdir():
            if path.name not in (WORK_DIR, LOCK_FILE):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
