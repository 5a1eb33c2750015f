"""A checkpoint that was opened: its components, loaded when they are first used and released when told to."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
from jax.sharding import Mesh

from cogvideox_flax import checkpoint
from cogvideox_flax.checkpoint import hub
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.checks import check_model
from cogvideox_flax.io.contents import content_hash
from cogvideox_flax.lora import describe_lora, load_lora, merge_lora

log = logging.getLogger(__name__)


class Components:
    """The components of a native checkpoint, attributes by their names: checked at construction, loaded on first use.

    Attributes:
        manifest: what the checkpoint says of itself.
        loras: the adapters that `load_lora` added, as `LoRARecord`.

    Raises:
        InputError: as for `from_pretrained`.
    """

    family: ClassVar[str | None] = None
    """The only family that this class opens; None opens all."""

    def __init__(self, native_dir: Path, dtype: str, mesh: Mesh | None):
        self._loaded: dict[str, Any] = {}
        self.native_dir, self.dtype, self.mesh = native_dir, dtype, mesh
        self.manifest = checkpoint.read_manifest(native_dir)
        self._check_model(self.manifest, native_dir, dtype, mesh)
        for component in self.manifest.model_family.components:
            checkpoint.check_weights(native_dir, component, self.manifest)
        checkpoint.check_contents(native_dir, self.manifest)
        self.loras: list[Mapping[str, Any]] = []
        self._adapters: list[Mapping[str, Any]] = []  # those in the weights: of `loras`, or of the last request

    @classmethod
    def _check_model(cls, manifest: checkpoint.Manifest, where: object, dtype: str, mesh: Mesh | None) -> None:
        if cls.family not in (None, manifest.family):
            raise InputError(f"{where} is a {manifest.family} model; open it with Pipeline")
        check_model(manifest, where, dtype, mesh)

    @classmethod
    def from_pretrained(
        cls,
        where: str | Path | None,
        dtype: str = "bfloat16",
        mesh: Mesh | None = None,
        *,
        revision: str | None = None,
        progress: bool = True,
    ) -> Self:
        """Open a checkpoint.

        Args:
            where: a native directory; a Hugging Face layout directory or hub id, which are converted once into a
                cache, with progress; None for the embedded checkpoint.
            dtype: "bfloat16", "float32" or "float16" (2b only, and not on TPUs); the dtype of weights and activations.
            mesh: from `sharding.make_mesh`; None for one device.
            revision: for a hub id: branch, tag or commit.
            progress: progress bars of downloads and conversions on stderr.

        Raises:
            InputError: not a complete text-to-video checkpoint, damaged, a dtype that it does not survive or the
                devices do not serve, or a mesh that it does not divide over. What the configs rule out is refused
                before anything is converted.
        """
        manifest = hub.peek(where, revision, progress=progress)
        cls._check_model(manifest, where or hub.EMBEDDED, dtype, mesh)
        return cls(hub.resolve(where, revision, progress=progress), dtype, mesh)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "manifest" not in self.__dict__ or name not in self.manifest.model_family.components:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.component(name)

    def component(self, name: str) -> Any:
        """A component by its name, loaded if it is not there yet."""
        if name not in self._loaded:
            start = time.perf_counter()
            if checkpoint.read_manifest(self.native_dir, warn=False) != self.manifest:
                raise CheckpointError(f"{self.native_dir} was replaced while this run was under way; start it again")
            module = checkpoint.load_component(name, self.native_dir, dtype=self.dtype, mesh=self.mesh)
            for record in self._adapters if name == self.manifest.model_family.lora.component else ():
                module = self._merge(record, module)
            self._loaded[name] = jax.block_until_ready(module)
            log.info("loaded %s in %.1f s", name, time.perf_counter() - start)
        return self._loaded[name]

    def load_lora(self, path: str | Path, scale: float = 1.0) -> None:
        """Add an adapter to the denoiser's weights; several may be added, one after the other.

        Args:
            path: a LoRA file in diffusers' layout, or the directory that holds its pytorch_lora_weights.safetensors.
            scale: its strength; 1 is as trained where the file says its alpha.

        Raises:
            InputError: the file is missing, damaged or does not fit, before any weights are loaded; or the scale is
                not a finite number; or the weights are quantized.
        """
        family = self.manifest.model_family
        name = family.lora.component
        if kind := self.manifest.quantized(name):
            raise InputError(f"adapters go with weights as they were trained; those of {self.native_dir} are {kind}")
        record = describe_lora(family, path, scale, self.manifest.configs[name])
        self.use_loras(self.loras)
        if name in self._loaded:
            self._loaded[name] = self._merge(record, self._loaded[name])
        self.loras = self._adapters = [*self.loras, record]

    def use_loras(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Run with these adapters, as described by `describe_lora`, in place of those of an earlier run."""
        if list(records) != self._adapters:
            self._adapters = list(records)
            self.release(self.manifest.model_family.lora.component)

    def _merge(self, record: Mapping[str, Any], denoiser: Any) -> Any:
        family = self.manifest.model_family
        adapted = load_lora(family, record["file"], denoiser, record["scale"], mesh=self.mesh)
        if not content_hash(Path(record["file"])).startswith(record["sha256"]):  # after it was read
            raise CheckpointError(f"{record['file']} changed while this run was under way; start it again")
        return merge_lora(adapted)

    def fingerprints(self) -> dict[str, str]:
        """Names for all that decides what the checkpoint computes; see `checkpoint.fingerprints`."""
        return checkpoint.fingerprints(self.native_dir, self.manifest)

    def use(self, component: str, module: Any) -> None:
        """Run with this module in place of the checkpoint's, until `release` lets go of it.

        Args:
            component: its name.
            module: of the checkpoint's architecture, in the pipeline's dtype, laid out on its mesh.
        """
        self._loaded[component] = module

    def release(self, *components: str) -> None:
        """Let go of loaded components' memory (default: of all); they load again when used."""
        for name in components or tuple(self._loaded):
            self._loaded.pop(name, None)
