"""A checkpoint in the Hugging Face layout: configs, an index or single files, safetensors only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np

from cogvideox_flax.conversion.gguf_file import GGUFFile
from cogvideox_flax.conversion.renamed import NO_NAMING, Naming, Part, parts_of
from cogvideox_flax.conversion.wrapped import FLOAT8, dequantized, scales_of, unwrapped
from cogvideox_flax.errors import ConversionError, InputError
from cogvideox_flax.io.contents import content_hash
from cogvideox_flax.io.tensor_file import DTYPES, TensorFile, TensorInfo
from cogvideox_flax.io.values import load_json
from cogvideox_flax.models.registry import component_names

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GGUF = ".gguf"
WEIGHTS = (".safetensors", GGUF, *PICKLED)
"""Suffixes of files of weights, whether they are read or refused."""


def is_hf_layout(where: Path) -> bool:
    """Whether the directory holds at least one component of any family in the Hugging Face layout."""
    return (where / "model_index.json").is_file() or bool(components_of(where, component_names()))


def is_alone(where: Path) -> bool:
    """Whether it is one component without the rest of a model: what its own `save_pretrained` wrote, or a file."""
    if where.is_file():
        return where.suffix in WEIGHTS
    return not is_hf_layout(where) and bool(class_names(where) or _weight_files(where))


def class_names(folder: Path) -> set[str]:
    """The class names in a component's config.json; none if it cannot be read, which is reported later."""
    try:
        raw = load_json(folder / "config.json")
        return {raw["_class_name"]} if "_class_name" in raw else set(raw.get("architectures") or ())
    except (OSError, ValueError, TypeError, AttributeError):
        return set()


def components_of(where: Path, names: Iterable[str]) -> list[str]:
    """The components among `names` that have a directory with weight files, readable or not."""
    return [name for name in names if (where / name).is_dir() and _weight_files(where / name)]


def contents_of(folder: Path) -> str:
    """The first names in a folder, for a message."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "it is empty"


def _weight_files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if p.suffix in WEIGHTS or _is_index(p)]


def _is_index(path: Path) -> bool:
    return re.fullmatch(r".*\.safetensors\.index(\.\w+)?\.json", path.name) is not None


_VARIANT = re.compile(
    r"(?:diffusion_pytorch_model|model)(?:\.(?P<single>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<shard>\w+))?\.safetensors"
    r"(?:\.index(?:\.(?P<index>\w+))?\.json)?"
)
"""The names that `save_pretrained(variant=...)` of diffusers and transformers gives, of now and of earlier."""


def _variant_of(path: Path) -> str:
    """The variant in a file's name, such as "fp16"; "" for the plain one."""
    found = _VARIANT.fullmatch(path.name)
    return next(filter(None, found.groups()), "") if found else ""


def _of_variant(folder: Path, files: list[Path], variant: str | None) -> list[Path]:
    """The files of this variant; None: of the plain one, or of the only one."""
    known = {_variant_of(path) for path in files if path.suffix not in PICKLED} or {""}
    if variant is None and "" not in known and len(known) > 1:
        raise ConversionError(f"{folder} holds the variants {', '.join(sorted(known))}; name one with --variant")
    if variant is not None and variant not in known:
        there = ", ".join(sorted(name or "the plain one" for name in known))
        raise ConversionError(f"{folder} has no variant {variant}; it holds {there}")
    chosen = variant if variant is not None else "" if "" in known else known.pop()
    return [path for path in files if path.suffix in PICKLED or _variant_of(path) == chosen]


def check_against_hub(path: Path) -> None:
    """Compare a file in the hub's cache with the hash in its name: SHA-256 for a large file, git's for a small one.

    Raises:
        ConversionError: the hash differs. Files outside the hub's cache are not checked.
    """
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return
    if re.fullmatch("[0-9a-f]{64}", blob.name):
        found = content_hash(blob)
    elif re.fullmatch("[0-9a-f]{40}", blob.name):
        contents = blob.read_bytes()
        found = hashlib.sha1(f"blob {len(contents)}\0".encode() + contents, usedforsecurity=False).hexdigest()
    else:
        return
    if found != blob.name:
        raise ConversionError(
            f"{path} is damaged: its hash is not the hub's. Remove {blob} and run the same command again"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk.

    Raises:
        ConversionError: missing, unreadable, damaged, or not a JSON object.
    """
    check_against_hub(path)
    try:
        raw = load_json(path)
    except OSError as e:
        raise ConversionError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConversionError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ConversionError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def weight_paths(folder: Path, variant: str | None = None) -> list[Path]:
    """The safetensors files of one component: those in the index, or without an index all of them; or this one file.

    Args:
        variant: as it was saved with `save_pretrained(variant=...)`; None: the plain one, or the only one.

    Raises:
        ConversionError: none, only pickled ones, several, or an index that names a file outside the directory or a
            missing one, or is older than a file beside it that holds everything.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ConversionError(f"{folder} does not exist; expected a component's directory with safetensors weights")
    files = _of_variant(folder, _weight_files(folder), variant)
    indexes = [p for p in files if _is_index(p)]
    if len(indexes) > 1:
        raise ConversionError(f"{folder} has several indexes ({', '.join(p.name for p in indexes)}); keep one variant")
    if indexes:
        names = read_json(indexes[0]).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise ConversionError(f"{indexes[0]} has no weight_map of tensor names to file names")
        shards = sorted(set(names.values()))
        # names in an index are not trusted: plain file names only
        outside = [n for n in shards if n != Path(n).name or "\\" in n or not n.endswith(".safetensors")]
        if outside:
            raise ConversionError(
                f"{indexes[0]} names files outside its directory or not safetensors: {outside[:3]}. "
                "Do not trust this checkpoint; download it again from its author."
            )
        absent = [n for n in shards if not (folder / n).is_file()]
        single = folder / re.sub(r"\.safetensors\.index(\.\w+)?\.json", r"\1.safetensors", indexes[0].name)
        # in the hub's cache, whose files are links, times say when they were downloaded
        is_newer = not single.is_symlink() and single.is_file() and _time_of(single) > _time_of(indexes[0])
        if single.is_file() and (absent or is_newer):
            raise ConversionError(
                f"{folder} holds {single.name} beside {indexes[0].name}, which is older or lacks its shards: one "
                "of them is left from an earlier save. Remove the index with its shards, or the file"
            )
        if absent:
            raise ConversionError(f"{folder} lacks {len(absent)} of {len(shards)} shards: {', '.join(absent)}")
        return [folder / n for n in shards]
    found = [p for p in files if p.suffix == ".safetensors"]
    quantized = [p for p in files if p.suffix == GGUF]
    if not found and len(quantized) > 1:
        raise ConversionError(f"{folder} holds {', '.join(p.name for p in quantized)}; name one of these files")
    if not found and quantized:
        return quantized
    if len(found) > 1:
        raise ConversionError(
            f"{folder} has {len(found)} safetensors files and no index: {', '.join(p.name for p in found)}. "
            "Keep one file, or add the *.safetensors.index.json that belongs to the shards."
        )
    if not found:
        pickled = [p.name for p in files if p.suffix in PICKLED]
        if pickled:
            raise ConversionError(
                f"{folder} holds only pickled weights ({', '.join(pickled)}), which can run code when opened and are "
                "never read. Download the .safetensors files, or save them with the model's own library: "
                "save_pretrained(..., safe_serialization=True)."
            )
        raise ConversionError(f"{folder} holds no safetensors weights ({contents_of(folder)}); download them too")
    return found


def _time_of(path: Path) -> float:
    return path.stat().st_mtime


class Source:
    """All tensors of one component, from all its files, by diffusers' names; weights in float8 are dequantized.

    naming: the names of other layouts that are read.
    changes: what is stripped, left out, renamed or dequantized, a phrase each.
    """

    def __init__(self, folder: Path, variant: str | None = None, naming: Naming = NO_NAMING):
        self.files: list[TensorFile | GGUFFile] = []
        self.where: dict[str, TensorFile | GGUFFile] = {}
        self.infos: dict[str, TensorInfo] = {}
        self._stored: dict[str, str] = {}  # name -> as it is in the file
        try:
            for path in weight_paths(folder, variant):
                self.files.append((GGUFFile if path.suffix == GGUF else TensorFile)(path))
            self._find_tensors(folder, naming)
        except InputError:
            self.close()
            raise

    def _find_tensors(self, folder: Path, naming: Naming) -> None:
        names, self.changes = unwrapped({name for file in self.files for name in file.tensors})
        faults = []
        for file in self.files:
            for stored, name in ((stored, names[stored]) for stored in file.tensors if stored in names):
                if name in self.where:
                    faults.append(f"  twice    {name} (in {self.where[name].path.name} and {file.path.name})")
                self.where[name], self._stored[name], self.infos[name] = file, stored, file.tensors[stored]
        scales = scales_of(self.infos)
        self._scales = {weight: name for name, weight in scales.items() if weight is not None}
        weights = {name: info.shape for name, info in self.infos.items() if name not in scales}
        self._parts: dict[str, Part] = {}
        for name, parts in parts_of(weights, naming).items():
            self._parts[name] = parts[0]
            faults += [f"  twice    {name} ({parts[0].stored} and {part.stored})" for part in parts[1:]]
        if faults:
            raise ConversionError(f"{folder} holds tensors twice:\n" + "\n".join(faults))
        if renamed := len({part.stored for name, part in self._parts.items() if name != part.stored}):
            self.changes.append(f"{renamed} tensors with the names of another layout are given diffusers'")
        if narrow := [name for name in weights if self.infos[name].dtype in FLOAT8]:
            self.changes.append(f"{len(narrow)} weights in float8 are dequantized")
        if kinds := [kind for file in self.files if isinstance(file, GGUFFile) for kind in file.quantized]:
            self.changes.append(f"weights in {', '.join(kinds)} are dequantized")

    @property
    def names(self) -> list[str]:
        """Of the component's tensors."""
        return list(self._parts)

    def info(self, name: str) -> TensorInfo:
        """What a tensor is when it is read; a dequantized one is at most as precise as bfloat16."""
        part = self._parts[name]
        info = self.infos[part.stored]
        info = info._replace(shape=part.shape(info.shape))
        return info._replace(dtype=DTYPES["BF16"]) if info.dtype in FLOAT8 else info

    def file_order(self, name: str) -> tuple[int, int]:
        """The place of a tensor among the files."""
        stored = self._parts[name].stored
        return self.files.index(self.where[stored]), self.infos[stored].offset

    def read(self, name: str) -> np.ndarray:
        part = self._parts[name]
        return part.of(self._read(part.stored))

    def _read(self, stored: str) -> np.ndarray:
        value = self.where[stored].read(self._stored[stored])
        if value.dtype not in FLOAT8:
            return value
        return dequantized(value, self._read(self._scales[stored]) if stored in self._scales else None)

    def check_unchanged(self) -> None:
        """Raise if a file has changed, or was replaced, since it was opened."""
        if changed := [file.path.name for file in self.files if not file.is_unchanged()]:
            raise ConversionError(f"{', '.join(changed)} changed while being read; run the same command again")

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
