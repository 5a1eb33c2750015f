"""The native checkpoint: a directory that loads straight into place.

config.json                         format version, component configs, where the weights came from, hashes of all files
tokenizer/spiece.model
text_encoder/model.safetensors      keys are NNX paths; one stacked array for all layers of a block type
transformer/model.safetensors
vae/model.safetensors
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from cogvideox_flax import sharding
from cogvideox_flax.config import (
    COMPONENTS,
    CONFIG_TYPES,
    Release,
    SchedulerConfig,
    TextEncoderConfig,
    TokenizerConfig,
    TransformerConfig,
    VAEConfig,
    find_release,
)
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.atomic import atomic_directory, sync_file
from cogvideox_flax.io.contents import content_hash, content_hashes, fingerprint, is_as_written, write_record
from cogvideox_flax.io.tensor_file import TensorFile, TensorWriter, aligned_empty
from cogvideox_flax.io.text import load_json
from cogvideox_flax.io.values import is_finite_number, shown
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.family import COGVIDEOX
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.family import ModelFamily
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.nn import quantized
from cogvideox_flax.tokenizer import SPIECE_FILE
from cogvideox_flax.version import RESULTS

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

READERS = 8
"""Layers of a parameter that are read and cast side by side."""

MODELS: dict[str, Callable[..., nnx.Module]] = {
    "text_encoder": TextEncoder,
    "transformer": Transformer,
    "vae": Autoencoder,
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a native checkpoint's config.json says. A component that is absent has config None."""

    text_encoder: TextEncoderConfig | None = None
    transformer: TransformerConfig | None = None
    vae: VAEConfig | None = None
    scheduler: SchedulerConfig | None = None
    tokenizer: TokenizerConfig | None = None
    guidance_scale: float | None = None  # what suits this model best, where its authors say so here
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)  # component -> dtype, sha256, source, quantized
    spiece_sha256: str | None = None  # of the tokenizer's file; checkpoints of older versions do not say

    @property
    def family(self) -> ModelFamily:
        return COGVIDEOX

    @property
    def configs(self) -> dict[str, Any]:
        """Component, "tokenizer" or "scheduler" -> its config, where there is one."""
        return {name: config for name in CONFIG_TYPES if (config := getattr(self, name)) is not None}

    @property
    def release(self) -> Release | None:
        """The release that the transformer's architecture belongs to."""
        return find_release(self.transformer) if self.transformer else None

    @property
    def default_dtype(self) -> str:
        """What a run computes in unless told otherwise: bfloat16 for a release, float32 for a model of another size.

        The 2b release was trained in float16, the others in bfloat16; what is none of them is small.
        """
        return "float32" if self.release is None else "bfloat16"

    @property
    def default_guidance(self) -> float:
        """The guidance scale of a run unless told otherwise: the checkpoint's own, else the release's, else 6."""
        if self.guidance_scale is not None:
            return self.guidance_scale
        return self.release.guidance_scale if self.release else 6.0

    def quantized(self, component: str) -> str | None:
        """How a component's weights are quantized: "int8" or "float8"; None if they are not."""
        kind = self.weights.get(component, {}).get("quantized")
        if kind not in (None, *quantized.KINDS):
            raise CheckpointError(f"the {component} is stored as {kind!r}, which this version does not know; update it")
        return kind

    def abstract(self, component: str) -> Any:
        """A component's module with shapes in place of arrays, as it is stored."""
        return abstract(component, getattr(self, component), self.quantized(component))

    @classmethod
    def of_release(cls, release: Release) -> Manifest:
        """What a checkpoint of this release says, before there is one."""
        return cls(**{name: getattr(release, name) for name in CONFIG_TYPES})

    def to_json(self) -> dict[str, Any]:
        configs = {name: getattr(self, name) for name in CONFIG_TYPES}
        return {
            "format_version": FORMAT_VERSION,
            "release": self.release.name if self.release else None,
            **{name: config.to_dict() for name, config in configs.items() if config is not None},
            **({"guidance_scale": self.guidance_scale} if self.guidance_scale is not None else {}),
            **({"spiece_sha256": self.spiece_sha256} if self.spiece_sha256 is not None else {}),
            "weights": self.weights,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Manifest:
        """What `to_json` wrote.

        Raises:
            CheckpointError, KeyError, TypeError, AttributeError, ValueError: it is damaged.
        """
        configs = {name: kind.from_dict(raw[name]) for name, kind in CONFIG_TYPES.items() if name in raw}
        if not isinstance(records := raw["weights"], dict):
            raise TypeError("weights is not an object")
        weights = {n: {**records[n], "sha256": _text(records[n]["sha256"])} for n in COMPONENTS if n in records}
        guidance, spiece = raw.get("guidance_scale"), raw.get("spiece_sha256")
        if guidance is not None and not is_finite_number(guidance):
            raise ValueError(f"guidance_scale is {shown(guidance)}; expected a finite number")
        return cls(
            **configs,  # type: ignore[arg-type]
            guidance_scale=None if guidance is None else float(guidance),
            weights=weights,
            spiece_sha256=None if spiece is None else _text(spiece),
        )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def is_native(where: Path) -> bool:
    """Whether the directory holds a native checkpoint (its config.json has our format version)."""
    try:
        raw = load_json(where / CONFIG_FILE)
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and "format_version" in raw


def read_manifest(native_dir: str | Path) -> Manifest:
    """Read config.json of a native checkpoint.

    Raises:
        CheckpointError: not a native checkpoint, or of a format this version does not know.
    """
    path = Path(native_dir) / CONFIG_FILE
    try:
        raw = load_json(path)
    except OSError as e:
        raise CheckpointError(
            f"{native_dir} is not a native checkpoint: no readable {CONFIG_FILE} ({e.strerror}). "
            "Convert a Hugging Face checkpoint with `python -m conversion SRC DST`."
        ) from e
    except ValueError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}, this version reads {FORMAT_VERSION}. "
            + ("Convert the checkpoint again." if version else "Convert it with `python -m conversion SRC DST`.")
        )
    if not is_as_written(raw):
        log.warning("%s was edited or damaged after it was written; it is taken as it stands", path)
    try:
        return Manifest.from_json(raw)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        if isinstance(e, CheckpointError):
            raise CheckpointError(f"{path}: {e}") from e
        raise CheckpointError(f"{path} is damaged ({type(e).__name__}: {e}); convert the checkpoint again") from e


def abstract(component: str, config: Any, kind: str | None = None) -> nnx.Module:
    """The component's module with shapes in place of arrays; costs no memory. kind: of quantized weights."""

    def make() -> nnx.Module:
        module = MODELS[component](config, rngs=nnx.Rngs(0))
        return quantized.quantize(component, module, kind) if kind else module

    return jax.eval_shape(make)


def parameters(module: nnx.Module) -> dict[str, Any]:
    """Parameter name -> array (or shape, for an abstract module)."""
    leaves = jax.tree_util.tree_leaves_with_path(module)
    return {sharding.parameter_name(path): leaf for path, leaf in leaves}


def cast(module: Any, dtype: str) -> Any:
    """An abstract module as it is when it is loaded in this dtype."""

    def one(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        kept = _keeps_its_dtype(sharding.parameter_name(path), leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if kept else jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(one, module)


def check_weights(native_dir: str | Path, component: str) -> None:
    """Compare the weight file's header with the config: names, shapes, length. Reads no weights.

    Raises:
        CheckpointError: with every fault found.
    """
    manifest = read_manifest(native_dir)
    with _open(native_dir, component, manifest) as file:
        _match(file, manifest.abstract(component))


def check_contents(native_dir: str | Path, manifest: Manifest, *names: str, remembered: bool = True) -> None:
    """Compare files with the hashes in config.json. A file is read only if it may have changed since it last was.

    Args:
        manifest: of this directory.
        names: components, or "tokenizer"; default: all that the manifest has hashes of.
        remembered: False reads every file in any case.

    Raises:
        CheckpointError: a file is missing, or is not the one that was written.
    """
    expected = {name: record["sha256"] for name, record in manifest.weights.items()}
    expected |= {} if manifest.spiece_sha256 is None else {"tokenizer": manifest.spiece_sha256}
    expected = {name: digest for name, digest in expected.items() if name in names or not names}
    files = {name: file_of(native_dir, name) for name in expected}
    found_hashes = content_hashes(list(files.values()), remembered=remembered)
    for name, found in zip(files, found_hashes, strict=True):
        if found != expected[name] and content_hash(files[name], remembered=False) != expected[name]:
            raise CheckpointError(
                f"{files[name]} is not the file that {CONFIG_FILE} describes (its SHA-256 differs): it was damaged or "
                "changed. Copy or convert the checkpoint again."
            )


def verify(native_dir: str | Path) -> None:
    """Read every file that config.json has a hash of, and compare.

    Raises:
        CheckpointError: a file differs from what was converted.
    """
    check_contents(native_dir, read_manifest(native_dir), remembered=False)


def file_of(native_dir: str | Path, name: str) -> Path:
    """The file of a component's weights, or of the "tokenizer"."""
    return Path(native_dir) / (SPIECE_FILE if name == "tokenizer" else f"{name}/{WEIGHTS_FILE}")


def fingerprints(native_dir: str | Path, manifest: Manifest) -> dict[str, str]:
    """Fingerprint of each part's config and contents: equal for equal ones.

    Args:
        manifest: of this directory, whose contents were checked.

    Returns:
        Component, "tokenizer" or "scheduler" -> fingerprint.
    """
    contents: dict[str, Any] = {name: [record["sha256"]] for name, record in manifest.weights.items()}
    if (spiece := file_of(native_dir, "tokenizer")).exists():
        contents["tokenizer"] = [content_hash(spiece)]
    contents["scheduler"] = []
    configs = {name: config.to_dict() for name in CONFIG_TYPES if (config := getattr(manifest, name)) is not None}
    return {name: fingerprint(RESULTS, configs[name], *found) for name, found in contents.items() if name in configs}


def _open(native_dir: str | Path, component: str, manifest: Manifest) -> TensorFile:
    if component not in manifest.weights or getattr(manifest, component) is None:
        has = ", ".join(manifest.weights) or "no component"
        raise CheckpointError(
            f"{native_dir} has no {component} (it holds {has}). "
            f"Convert one with `python -m conversion SRC {native_dir} --component {component}`."
        )
    return TensorFile(file_of(native_dir, component))


def _match(file: TensorFile, module: nnx.Module) -> None:
    wanted = {name: leaf.shape for name, leaf in parameters(module).items()}
    found = {name: info.shape for name, info in file.tensors.items()}
    faults = [f"  missing  {name}" for name in wanted if name not in found]
    faults += [f"  unused   {name}" for name in found if name not in wanted]
    faults += [
        f"  shape    {name}: got {found[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise CheckpointError(
            f"{file.path} does not match its config.json ({len(faults)} faults); convert it again\n" + "\n".join(faults)
        )


def _load(component: str, native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Any:
    manifest = read_manifest(native_dir)
    with _open(native_dir, component, manifest) as file:
        module = manifest.abstract(component)
        _match(file, module)
        check_contents(native_dir, manifest, component)
        if component == "transformer" and manifest.transformer is not None:
            manifest.transformer.check_dtype(np.dtype(dtype or manifest.weights[component]["dtype"]).name)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(module)
        arrays = []
        for path, leaf in leaves:
            name = sharding.parameter_name(path)
            stored = file.tensors[name].dtype
            target = np.dtype(dtype) if dtype is not None and not _keeps_its_dtype(name, leaf) else stored
            placement = sharding.parameter_sharding(mesh, component, name, leaf.shape) if mesh is not None else None
            arrays.append(_place(file, name, target, placement))
        return jax.tree_util.tree_unflatten(treedef, arrays)


def _keeps_its_dtype(name: str, leaf: Any) -> bool:
    """Quantized weights and their scales are what they are in any precision."""
    return quantized.kind_of(leaf.dtype) is not None or bool(
        re.fullmatch(r"blocks\.(attn|mlp)\.(?!norm_)\w+\.scale", name)
    )


def _place(file: TensorFile, name: str, dtype: np.dtype, placement: jax.sharding.Sharding | None) -> jax.Array:
    """One parameter from disk to its device or devices; at most one host copy in the target dtype, and a few rows.

    A CPU computes on the file's own pages where the dtype is the stored one. Otherwise rows of the leading axis are
    read and cast by themselves, layers side by side, and each shard takes only its own columns.
    """
    shape = file.tensors[name].shape
    if placement is None and file.tensors[name].dtype == dtype and jax.default_backend() == "cpu":
        pages = file.mapped(name)
        if pages is not None:
            return jax.device_put(pages, may_alias=True)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        if len(shape) < 2:
            return file.read(name).astype(dtype, copy=False)[index]
        if file.tensors[name].dtype == dtype and all(s == slice(None) for s in index):
            return file.read(name)
        rows = range(shape[0])[index[0]]
        sizes = [len(range(n)[s]) for n, s in zip(shape, index, strict=True)]
        out = aligned_empty(tuple(sizes), dtype)

        def fill(i: int) -> None:
            out[i] = file.read(name, rows[i])[index[1:]]

        if len(shape) > 2:
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(fill, range(len(rows))))
        else:  # rows are words or channels, too little each for a thread
            for i in range(len(rows)):
                fill(i)
        return out

    if placement is None:
        return jax.device_put(shard((slice(None),) * len(shape)), may_alias=True)
    return jax.make_array_from_callback(shape, placement, lambda index: shard(index or ()))


def load_text_encoder(native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> TextEncoder:
    """The T5 encoder: ids int32 [B, L] -> [B, L, E]. Arguments and errors as for `load_transformer`."""
    return _load("text_encoder", native_dir, dtype, mesh)


def load_transformer(native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Transformer:
    """The 3D transformer: (latents [B, T, h, w, C], context [B, L, E], timestep, ofs) -> float32 [B, T, h, w, C].

    Args:
        native_dir: a native checkpoint that holds the component.
        dtype: of weights and activations; None keeps what is stored.
        mesh: from `sharding.make_mesh`; each device gets its share by the table there. None: the default device.

    Raises:
        CheckpointError: no such component, or files that do not match their config.
        InputError: float16 for a release that does not survive it; a parameter that does not divide over the mesh.
    """
    return _load("transformer", native_dir, dtype, mesh)


def load_vae(native_dir: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> Autoencoder:
    """The video VAE, with `encode` and `decode`. Arguments and errors as for `load_transformer`."""
    return _load("vae", native_dir, dtype, mesh)


def save(
    native_dir: str | Path,
    manifest: Manifest,
    modules: Mapping[str, nnx.Module],
    dtype: str | dict[str, str],
    source: dict[str, Any],
    spiece: str | Path | None = None,
    kept: str | Path | None = None,
) -> None:
    """Write modules as a native checkpoint, whole or not at all.

    Args:
        native_dir: a new or empty directory, or a native checkpoint, which is replaced.
        manifest: the configs; its records of weights are replaced by those of `modules`.
        modules: component -> module.
        dtype: of the stored weights, for all or per component: float32, bfloat16 or float16.
        source: where the weights came from, stored with each component.
        spiece: the tokenizer's spiece.model, copied in.
        kept: the native checkpoint that `manifest` is of; its components that are not in `modules` are linked in, or
            copied where the file system has no links.

    Raises:
        InputError: the directory holds something else, cannot be written, or the disk is too small.
    """
    target = Path(native_dir)
    if target.exists() and not is_native(target) and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not a native checkpoint; choose another place")
    with atomic_directory(target) as work:
        records: dict[str, dict[str, Any]] = {}
        for component, module in modules.items():
            kind = dtype if isinstance(dtype, str) else dtype[component]
            path = file_of(work, component)
            path.parent.mkdir()
            _write(path, component, module, np.dtype(jnp.dtype(kind)))
            records[component] = {"dtype": kind, "sha256": content_hash(path), "source": source}
            if found := {quantized.kind_of(leaf.dtype) for leaf in jax.tree.leaves(module)} - {None}:
                records[component]["quantized"] = found.pop()
            del module  # before the next one, which may be loaded only now
        if kept is not None:
            for component in manifest.weights.keys() - modules.keys():
                file_of(work, component).parent.mkdir()
                _link(file_of(kept, component), file_of(work, component))
                records[component] = manifest.weights[component]
        digest = None
        if spiece is not None:
            file_of(work, "tokenizer").parent.mkdir()
            shutil.copyfile(spiece, file_of(work, "tokenizer"))
            digest = content_hash(file_of(work, "tokenizer"))
        write_manifest(work, dataclasses.replace(manifest, weights=records, spiece_sha256=digest))


def write_manifest(native_dir: Path, manifest: Manifest) -> None:
    """Write config.json.

    Raises:
        InputError: it cannot be written.
    """
    write_record(native_dir / CONFIG_FILE, manifest.to_json())


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no such thing."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        sync_file(target)


def _write(path: Path, component: str, module: nnx.Module, dtype: np.dtype) -> None:
    arrays = parameters(module)
    kinds = {name: np.dtype(x.dtype) if _keeps_its_dtype(name, x) else dtype for name, x in arrays.items()}
    writer = TensorWriter(path, {name: (x.shape, kinds[name]) for name, x in arrays.items()}, {"component": component})
    try:
        for name, x in arrays.items():
            writer.write(name, np.asarray(x).astype(kinds[name]))
    finally:
        writer.close()


LOADERS: dict[str, Callable[..., Any]] = {
    "text_encoder": load_text_encoder,
    "transformer": load_transformer,
    "vae": load_vae,
}

__all__ = [
    "COMPONENTS",
    "LOADERS",
    "SPIECE_FILE",
    "Manifest",
    "check_weights",
    "load_text_encoder",
    "load_transformer",
    "load_vae",
    "read_manifest",
    "save",
    "verify",
]
