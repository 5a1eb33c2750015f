"""config.json of a native checkpoint: format version, family, configs, and the source and hashes of its weights."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from cogvideox_flax.checkpoint.domain import Domain
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.contents import content_hash, content_hashes, fingerprint, is_as_written, write_record
from cogvideox_flax.io.stand_ins import refuse_stand_in
from cogvideox_flax.io.values import is_finite_number, load_json, short_repr, typed
from cogvideox_flax.models.model import Release, VideoModel
from cogvideox_flax.models.registry import FIRST_FAMILY, get_family
from cogvideox_flax.nn import quantized
from cogvideox_flax.version import RESULTS

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

FLOAT32_BELOW = 10**9
"""Denoisers with fewer parameters run in float32 by default: they take less than 4 GB, and small models suffer most
from bfloat16's rounding. The smallest release has 1.7 billion parameters."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of config.json.

    Attributes:
        family: name of the model family.
        configs: of the checkpoint's components, of the "scheduler" and of the "tokenizer".
        release_name: of the release that it came from; None: not recorded, so its configs tell.
        guidance_scale: recommended by the checkpoint's authors; None if config.json has none.
        weights: component -> dtype, sha256, source, quantized.
        tokenizer_sha256: tokenizer file -> SHA-256; empty in checkpoints of older versions.
        preview: latents to colours, where the checkpoint has a map of its own; see `preview_matrix`.
        domain: of the training of a small model; None: not limited, or not known.
    """

    family: str
    configs: dict[str, Any] = field(default_factory=dict)
    release_name: str | None = None
    guidance_scale: float | None = None
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokenizer_sha256: dict[str, str] = field(default_factory=dict)
    preview: tuple[tuple[float, float, float], ...] | None = None
    domain: Domain | None = None

    @cached_property
    def model(self) -> VideoModel:
        """The model that these configs make."""
        family = get_family(self.family)
        return family(self.configs, family.releases.get(self.release_name or ""), self.guidance_scale)

    @property
    def release(self) -> Release | None:
        """The release that the checkpoint says it came from; else the one with these configs, or None."""
        return self.model.release

    @property
    def preview_matrix(self) -> Float32[np.ndarray, "C+1 3"] | None:
        """Latents, not normalized, to colours: the checkpoint's own map, or its family's; None: not known."""
        return self.model.codec.preview_matrix if self.preview is None else np.array(self.preview, np.float32)

    @property
    def default_dtype(self) -> str:
        """The default compute dtype: bfloat16, or float32 for a small model (`FLOAT32_BELOW`)."""
        denoiser = self.model.denoiser
        if (config := self.configs.get(denoiser)) is None:
            return "float32"
        return "float32" if self.model.components[denoiser].num_parameters(config) < FLOAT32_BELOW else "bfloat16"

    def check_complete(self, where: object) -> None:
        """Refuse a checkpoint without the config of a component, the tokenizer or the scheduler."""
        if missing := [name for name in self.model.config_types() if name not in self.configs]:
            raise InputError(f"{where} has no {' and no '.join(missing)} config; a run needs the whole checkpoint")

    def quantized(self, component: str) -> str | None:
        """The quantization of a component's weights: "int8" or "float8"; None: not quantized."""
        kind = self.weights.get(component, {}).get("quantized")
        if kind not in (None, *quantized.KINDS):
            raise CheckpointError(f"the {component} is stored as {kind!r}, which this version does not know; update it")
        return kind

    def abstract(self, component: str) -> Any:
        """A component's module with shapes in place of arrays, quantized as in the checkpoint."""
        return self.model.components[component].abstract(self.configs[component], self.quantized(component))

    @classmethod
    def of_release(cls, release: Release) -> Manifest:
        """The manifest of a release, without a checkpoint."""
        return cls(
            family=release.family,
            configs=dict(release.configs),
            release_name=release.name,
            guidance_scale=release.guidance_scale,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "family": self.family,
            "release": self.release.name if self.release else None,
            **{name: self.configs[name].to_dict() for name in self.model.config_types() if name in self.configs},
            **({"guidance_scale": self.guidance_scale} if self.guidance_scale is not None else {}),
            **({"tokenizer_sha256": self.tokenizer_sha256} if self.tokenizer_sha256 else {}),
            **({"preview": self.preview} if self.preview is not None else {}),
            **({"domain": asdict(self.domain)} if self.domain is not None else {}),
            "weights": self.weights,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            InputError: a family that this version does not know.
            CheckpointError, KeyError, TypeError, AttributeError, ValueError: it is damaged.
        """
        family = get_family(_text(raw.get("family", FIRST_FAMILY)))
        configs = {name: kind.from_dict(raw[name]) for name, kind in family.config_types().items() if name in raw}
        if not isinstance(records := raw["weights"], dict):
            raise TypeError("weights is not an object")
        weights = {n: {**records[n], "sha256": _text(records[n]["sha256"])} for n in family.components if n in records}
        guidance, hashes = raw.get("guidance_scale"), raw.get("tokenizer_sha256", {})
        if "spiece_sha256" in raw:  # as older versions wrote it
            hashes = {family.tokenizer_files[0]: raw["spiece_sha256"]}
        if (release := raw.get("release")) is not None:
            release = _text(release)
        if guidance is not None and not is_finite_number(guidance):
            raise ValueError(f"guidance_scale is {short_repr(guidance)}; expected a finite number")
        return cls(
            family=family.name,
            configs=configs,
            release_name=release,
            guidance_scale=None if guidance is None else float(guidance),
            weights=weights,
            tokenizer_sha256={name: _text(hashes[name]) for name in family.tokenizer_files if name in hashes},
            preview=typed(tuple[tuple[float, float, float], ...], raw["preview"]) if "preview" in raw else None,
            domain=Domain.from_json(raw["domain"]) if "domain" in raw else None,
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


def read_manifest(native_dir: str | Path, *, warn: bool = True) -> Manifest:
    """Read config.json of a native checkpoint.

    Args:
        warn: say so if the file was edited.

    Raises:
        CheckpointError: not a native checkpoint, or of a format this version does not know.
    """
    path = Path(native_dir) / CONFIG_FILE
    try:
        raw = load_json(path)
    except OSError as e:
        raise CheckpointError(
            f"{native_dir} is not a native checkpoint: no readable {CONFIG_FILE} ({e.strerror}). "
            "Convert a Hugging Face checkpoint with `cogvideox convert SRC DST`."
        ) from e
    except ValueError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}, this version reads {FORMAT_VERSION}. "
            + ("Convert the checkpoint again." if version else "Convert it with `cogvideox convert SRC DST`.")
        )
    if warn and not is_as_written(raw):
        log.warning("%s was edited or damaged after it was written; it is taken as it stands", path)
    try:
        manifest = Manifest.from_json(raw)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        if isinstance(e, InputError):
            raise CheckpointError(f"{path}: {e}") from e
        raise CheckpointError(f"{path} is damaged ({type(e).__name__}: {e}); convert the checkpoint again") from e
    if warn and manifest.release_name not in (None, *manifest.model.releases):
        log.warning(
            "%s names the release %s, which this version does not know; the defaults of a run are those of its configs",
            path,
            short_repr(manifest.release_name),
        )
    return manifest


def write_manifest(native_dir: Path, manifest: Manifest) -> None:
    """Write config.json.

    Raises:
        InputError: it cannot be written.
    """
    write_record(native_dir / CONFIG_FILE, manifest.to_json())


def weights_file(native_dir: str | Path, component: str) -> Path:
    """The file of a component's weights."""
    return Path(native_dir) / component / WEIGHTS_FILE


def check_contents(native_dir: str | Path, manifest: Manifest, *names: str, cached: bool = True) -> None:
    """Compare files with the hashes in config.json. A file is read only if it may have changed since its last hash.

    Args:
        manifest: of this directory.
        names: components, or "tokenizer"; default: all that have hashes in the manifest.
        cached: False reads every file.

    Raises:
        CheckpointError: a file is missing, or its hash differs.
    """
    expected = {
        weights_file(native_dir, name): record["sha256"]
        for name, record in manifest.weights.items()
        if name in names or not names
    }
    if "tokenizer" in names or not names:
        expected |= {Path(native_dir) / name: digest for name, digest in manifest.tokenizer_sha256.items()}
    for file, found in zip(expected, content_hashes(list(expected), cached=cached), strict=True):
        if found != expected[file] and content_hash(file, cached=False) != expected[file]:
            refuse_stand_in(file)
            raise CheckpointError(
                f"{file} is not the file that {CONFIG_FILE} describes (its SHA-256 differs): it was damaged or "
                "changed. Copy or convert the checkpoint again."
            )


def verify(native_dir: str | Path) -> None:
    """Read every file that has a hash in config.json, and compare.

    Raises:
        CheckpointError: a file's hash differs.
    """
    check_contents(native_dir, read_manifest(native_dir), cached=False)


def fingerprints(native_dir: str | Path, manifest: Manifest) -> dict[str, str]:
    """A fingerprint of the config and contents of each part.

    Args:
        manifest: of this directory, whose contents were checked.

    Returns:
        Component, "tokenizer" or "scheduler" -> fingerprint.
    """
    contents: dict[str, Any] = {name: [record["sha256"]] for name, record in manifest.weights.items()}
    if files := manifest.model.tokenizer_files_in(Path(native_dir)):
        contents["tokenizer"] = content_hashes([Path(native_dir) / name for name in files])
    contents["scheduler"] = []
    configs = {name: config.to_dict() for name, config in manifest.configs.items()}
    return {name: fingerprint(RESULTS, configs[name], *found) for name, found in contents.items() if name in configs}
