"""A checkpoint that was opened: its components, its adapters, its compiled programs."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import jax
from jax.sharding import Mesh

from cogvideox_flax import checkpoint, hub, sharding
from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.generate.diffusers_names import METHODS
from cogvideox_flax.generate.events import Compiling, Events
from cogvideox_flax.generate.model_choice import ModelChoice
from cogvideox_flax.generate.recipe import recipe, request_values
from cogvideox_flax.generate.resolve import check_model
from cogvideox_flax.generate.run import ProgramCall, Run, abstract_weights
from cogvideox_flax.io.contents import fingerprint
from cogvideox_flax.io.paths import NotPrivateError, private_cache_dir
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.lora import (
    ActiveAdapters,
    LoRARecord,
    Merged,
    merge_files,
    with_parameters,
    without_adapters,
)
from cogvideox_flax.runtime.compile import CompiledProgram, Program, Programs
from cogvideox_flax.runtime.compile_cache import CompileCache
from cogvideox_flax.runtime.devices import GIB, bytes_needed, bytes_per_device, host_memory, memory_limit
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.profiling import ProfilingOptions
from cogvideox_flax.runtime.settings import own_settings

log = logging.getLogger(__name__)

MEMORY_ADVICE = {
    "encode": "Split its weights over more devices (--mesh 1,1,N or DP,SP,TP,fsdp), or take int8 ones.",
    "denoise": "Take fewer frames or pixels, more devices (`cogvideox plan` compares meshes), or int8 weights.",
    "decode": "Take fewer frames or pixels, more devices (--mesh), or decode in tiles (--tiling).",
    "run": "Run it in stages, which hold one component at a time.",
}
"""Stage -> what to do when it does not fit."""


class OpenModel:
    """The components of a native checkpoint, attributes by their names: checked at construction, loaded on first use.

    Attributes:
        manifest: what the checkpoint says of itself.
        tokenizer: the family's; list of prompts -> tokens.
        loras: the adapters in use of requests which name none, as `LoRARecord`.
        profiling: what to record while it runs: memory, a profile, operations one by one.

    Raises:
        InputError: as for `Pipeline.from_pretrained`.
    """

    family: ClassVar[str | None] = None
    """The only family that this class opens; None opens all."""

    def __init__(self, native_dir: Path, dtype: str | None, mesh: Mesh | None):
        self._lock = threading.RLock()  # of the components and the adapters in them
        self._loaded: dict[str, Any] = {}
        self._replaced: dict[str, Any] = {}  # the modules of `replace_component`, as they were given
        self._replaced_names: dict[str, str] = {}  # theirs in place of fingerprints: no two are equal
        self.manifest = checkpoint.read_manifest(native_dir)
        self.native_dir, self.dtype, self.mesh = native_dir, dtype or self.manifest.default_dtype, mesh
        self._check_model(self.manifest, native_dir, dtype, mesh)
        model, configs = self.manifest.model, self.manifest.configs
        for component in model.components:
            checkpoint.check_weights(native_dir, component, self.manifest)
        checkpoint.check_contents(native_dir, self.manifest)
        self.tokenizer: Any = model.make_tokenizer(native_dir)
        self._adapters = ActiveAdapters()
        self._merged_loras: list[LoRARecord] = []  # in the loaded denoiser: the active ones, or a request's
        self._adapted: set[str] = set()  # the parameters that they changed
        self.profiling = ProfilingOptions()
        programs = fingerprint({name: part.to_dict() for name, part in configs.items()})
        self._compiled = Programs(self.dtype, mesh, programs)
        self._keep_programs_by_default()
        self._fixed = frozenset(self.__dict__)  # what cannot be set from now on

    @classmethod
    def _check_model(cls, manifest: checkpoint.Manifest, where: object, dtype: str | None, mesh: Mesh | None) -> None:
        if cls.family not in (None, manifest.family):
            raise InputError(f"{where} is a {manifest.family} model; open it with Pipeline")
        check_model(manifest, where, dtype, mesh)

    @classmethod
    def open_on_hosts(cls, choice: ModelChoice, *, progress: bool) -> Self:
        """Open a checkpoint that `hub.peek` has checked, on all hosts: process 0 is the first, and converts it for all
        that share its disk.

        Raises:
            InputError: as for `Pipeline.from_pretrained`; a mesh that leaves out a host, or hosts with different
                checkpoints.
        """
        mesh = sharding.mesh_of(choice.mesh)

        def open_here() -> Any:
            return cls(hub.find(choice.where, **choice.which, progress=progress), choice.dtype, mesh)

        hosts.check_mesh(mesh)
        return hosts.process_0_then_others(open_here, "the checkpoints", cls.fingerprints)

    def __repr__(self) -> str:
        mesh = "" if self.mesh is None else f", mesh {','.join(map(str, self.mesh.devices.shape))}"
        adapters = f", {len(self.loras)} adapters" if self.loras else ""
        return f"<{type(self).__name__} of {self.native_dir.name}, {self.dtype}{mesh}{adapters}>"

    # --- components

    def tokenize(self, prompts: Sequence[str]) -> dict[str, Any]:
        """Text encoder -> its tokens."""
        stages = self.manifest.model.text
        return {stage.component: stage.tokenize(self.tokenizer, list(prompts)) for stage in stages}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "manifest" not in self.__dict__ or name not in self.manifest.model.components:
            hint = f"; diffusers' {name} is here: {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
        if name == self.manifest.model.denoiser:
            with self._lock:
                self._merge(self.loras)
        return self.component(name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_") or name in ("profiling", "scheduler")
        is_of_a_subclass = type(self).__module__.partition(".")[0] != __name__.partition(".")[0]
        is_new = not hasattr(OpenModel, name) and name not in self.__dict__.get("_fixed", ())
        if is_own or "_fixed" not in self.__dict__ or (is_of_a_subclass and is_new):
            super().__setattr__(name, value)
        elif name not in self.manifest.model.components:
            raise AttributeError(
                f"{name} of a pipeline cannot be set; what a run can change is an option of its request, and dtype and "
                "mesh are from_pretrained's"
            )
        elif value is None:
            self.release(name)
        else:
            self.replace_component(name, value)

    @own_settings()
    def component(self, name: str) -> Any:
        """A component by its name, loaded if it is not there yet; the denoiser with the adapters that it had last."""
        with self._lock:
            if name not in self._loaded:
                start = time.perf_counter()
                module = self._base(name)
                if name == self.manifest.model.lora.component:
                    module, self._adapted = self._merged(module, self._merged_loras)
                self._loaded[name] = jax.block_until_ready(module)
                log.info("loaded %s in %.1f s", name, time.perf_counter() - start)
            return self._loaded[name]

    def _base(self, name: str) -> Any:
        """A component as `replace_component` or the checkpoint has it."""
        if name in self._replaced:
            return self._replaced[name]
        self._check_unchanged()
        return checkpoint.load_component(name, self.native_dir, dtype=self.dtype, mesh=self.mesh)

    def denoiser(self, run: Run) -> Any:
        """The denoiser with the adapters of a run; where it names none, with those that `load_lora` added.

        Later calls do not change the module that was returned.
        """
        records = self.loras if run.request.lora is None else cast(list[LoRARecord], run.request.lora)
        with self._lock:
            self._merge(list(records))
            return self.component(self.manifest.model.denoiser)

    def replace_component(self, component: str, module: Any) -> None:
        """Run with this module in place of the checkpoint's, until `release` lets go of it. Adapters are added to it.

        Args:
            component: its name.
            module: of the checkpoint's architecture, in the pipeline's dtype, laid out on its mesh.

        Raises:
            InputError: it is no such module.
        """
        expected = type(self.manifest.abstract(component))
        if not isinstance(module, expected):
            raise InputError(f"the {component} is {short_repr(module)}; expected a {expected.__name__} of this package")
        with self._lock:
            self._loaded.pop(component, None)
            self._replaced[component] = module
            self._replaced_names[component] = secrets.token_hex(32)

    def release(self, *components: str) -> None:
        """Let go of loaded components' memory (default: of all); they load again when used."""
        with self._lock:
            for name in components or (*self._loaded, *self._replaced):
                self._loaded.pop(name, None)
                self._replaced.pop(name, None)
                self._replaced_names.pop(name, None)

    def unload(self) -> None:
        """Let go of all loaded components' memory; unlike `release`, modules of `replace_component` stay."""
        with self._lock:
            self._loaded.clear()

    def fits_at_once(self) -> bool:
        """Whether all components take less than half of each device's memory; of the host's, for CPUs."""
        weights = [
            abstract_weights(self.manifest, name, self.dtype, self.mesh) for name in self.manifest.model.components
        ]
        return 2 * sum(map(bytes_per_device, weights)) < (memory_limit(self.mesh) or host_memory())

    def fingerprints(self) -> dict[str, str]:
        """Names for all that decides what the checkpoint computes; see `checkpoint.fingerprints`."""
        return checkpoint.fingerprints(self.native_dir, self.manifest) | self._replaced_names

    # --- adapters

    @property
    def loras(self) -> list[LoRARecord]:
        return self._adapters.records

    def use_adapters(self, adapters: ActiveAdapters) -> None:
        """Put the adapters in use into the denoiser, in place of those that it had."""
        with self._lock:
            self._merge(adapters.records)
            self._adapters = adapters

    @own_settings()
    def _merge(self, records: list[LoRARecord]) -> None:
        """Put these adapters into the denoiser, in place of those that it had.

        Of a denoiser that is loaded, only the weights that had adapters are read again.
        """
        if records == self._merged_loras:
            return
        name = self.manifest.model.lora.component
        if name in self._loaded:
            if name in self._replaced:
                base = self._replaced[name]
            else:
                self._check_unchanged()
                own = checkpoint.load_parameters(name, self.native_dir, self._adapted, self.dtype, self.mesh)
                base = with_parameters(without_adapters(self._loaded[name]), own)
            module, self._adapted = self._merged(base, records)
            self._loaded[name] = jax.block_until_ready(module)
        self._merged_loras = records

    def _merged(self, denoiser: Any, records: Sequence[LoRARecord]) -> Merged:
        model, component = self.manifest.model, self.manifest.model.lora.component
        return merge_files(model, self.manifest.configs[component], denoiser, records, mesh=self.mesh)

    def _check_unchanged(self) -> None:
        if checkpoint.read_manifest(self.native_dir, warn=False) != self.manifest:
            raise CheckpointError(f"{self.native_dir} was replaced while this run was under way; start it again")

    # --- programs

    def checking_memory(
        self, stages: Iterable[tuple[str, Sequence[ProgramCall]]], *, keep: bool = True
    ) -> Events[None]:
        """Compile programs before anything is loaded, and refuse what the devices cannot hold.

        What is compiled is what then runs, so this costs no time of its own. Devices that do not say what they have
        (CPUs) are taken to have enough.

        Args:
            stages: each stage and its programs, in the order in which they run; asked for only where devices say what
                they have.
            keep: leave a stage's weights on the devices for the next one; weights of the running stage always count.

        Raises:
            InputError: with the numbers and what to change.
        """
        limit = memory_limit(self.mesh)
        if limit is None or not self.profiling.jit:
            return
        for stage, program, args, held in _with_weights_held(stages, keep):
            yield from self.preparing(program, *args)
            needed = self._bytes_needed(program, args)
            if needed + held > limit:
                beside = f" beside {held / GIB:.2f} GiB of other weights" if held else ""
                raise InputError(
                    f"the {program.name} needs {needed / GIB:.2f} GiB on each device{beside}, which has "
                    f"{limit / GIB:.2f} GiB. {MEMORY_ADVICE[stage]}"
                )

    def memory_needed(self, stages: Iterable[tuple[str, Sequence[ProgramCall]]], *, keep: bool = True) -> int:
        """The most bytes on each device that programs need beside the weights that are held, as the compiler says.

        Programs that are not compiled count as their weights. Arguments as for `checking_memory`.
        """
        needed = [0]
        for _, program, args, held in _with_weights_held(stages, keep):
            is_ready = self._compiled.get(program).is_ready(*args)
            own = self._bytes_needed(program, args) if is_ready else bytes_per_device(args[0])
            needed.append(own + held)
        return max(needed)

    def _bytes_needed(self, program: Program, args: Sequence[Any]) -> int:
        memory = self._compiled.get(program).prepare(*args).memory_analysis()
        return 0 if memory is None else bytes_needed(memory)

    def program(self, program: Program) -> CompiledProgram:
        """The program with what was compiled of it."""
        return self._compiled.get(program)

    def preparing(self, program: Program, *args: Any) -> Events[None]:
        """Compile a program for these arguments, or shapes, where that was not done yet."""
        compiled = self._compiled.get(program)
        if self.profiling.jit and not compiled.is_ready(*args):
            yield Compiling(program.name)
            start = time.perf_counter()
            compiled.prepare(*args)
            yield Compiling(program.name, time.perf_counter() - start)

    def running(self, program: Program, *args: Any) -> Events[Any]:
        """Compile a program where that was not done yet, and run it; returns its result."""
        yield from self.preparing(program, *args)
        return self._compiled.get(program)(*args, jit=self.profiling.jit)

    def _keep_programs_by_default(self) -> None:
        """Keep compiled programs, unless the user has chosen a cache of JAX for them, or none."""
        config: Any = jax.config  # its attributes are made at run time
        if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache or jax.process_count() > 1:
            return
        try:
            self.keep_programs(private_cache_dir("programs"))
        except (NotPrivateError, InputError, OSError) as e:
            _warn_not_kept(str(e))

    def keep_programs(self, folder: Path) -> None:
        """Keep compiled programs in this folder, and take those that are there: a second process compiles nothing.

        Default: in the library's cache directory, on one host, unless JAX has a compilation cache of its own or is told
        to use none. It applies to programs compiled after this call. A user-defined scheduler's are not kept.

        Raises:
            InputError: others could put programs into the folder, or it cannot be made.
        """
        try:
            self._compiled.cache = CompileCache(folder)
        except NotPrivateError as e:
            raise InputError(f"compiled programs cannot be kept in {folder}: {e}; name a folder of your own") from e
        except OSError as e:
            raise InputError(f"compiled programs cannot be kept in {folder}: {e.strerror}; name another folder") from e

    # --- messages

    def recipe(self, run: Run, done: int | None = None) -> dict[str, Any]:
        """What a result stores of how it was made.

        done: the steps that were done; None: all.
        """
        made_of = request_values(run) | {"dtype": self.dtype}
        if done is not None and done < run.num_steps:
            made_of["steps_done"] = done
        if run.batch > 1 and not (run.request.same_noise and run.batch_is_alone):
            made_of["row"] = list(range(run.batch))
        return recipe(made_of, self.manifest, self.native_dir.name, self.fingerprints())

    def not_finite(self, part: str) -> InputError:
        """NaN or infinity out of a part of the model."""
        return InputError(
            f"the {part} gives NaN or infinity in {self.dtype}. Try --dtype float32; if that gives the same, download "
            "the checkpoint again and convert it again."
        )

    @property
    def nan_advice(self) -> str:
        """What to do about NaN in the latents."""
        sound = "float32 holds what a sound checkpoint computes: download it again and convert it again."
        return sound if self.dtype == "float32" else ""


def _with_weights_held(
    stages: Iterable[tuple[str, Sequence[ProgramCall]]], keep: bool
) -> Iterator[tuple[str, Program, tuple[Any, ...], int]]:
    """Stage, program and arguments of each program, and the bytes of other weights that lie on a device meanwhile."""
    held = 0
    for stage, programs in stages:
        held_before = held
        for program, args, _ in programs:
            yield stage, program, args, held
            held += bytes_per_device(args[0])
        held = held if keep else held_before


@cache
def _warn_not_kept(reason: str) -> None:
    """Warn once per process and reason."""
    log.warning("compiled programs are not kept, so every start compiles anew: %s", reason)
