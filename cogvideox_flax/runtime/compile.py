"""Programs: compiled ahead of time, once for given shapes, and cached for later processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from cogvideox_flax.nn.cpu import unstack_layers
from cogvideox_flax.nn.platforms import compiling_for, platform_of
from cogvideox_flax.runtime.compile_cache import CompileCache
from cogvideox_flax.runtime.settings import own_settings
from cogvideox_flax.runtime.terminal import out_of_reach


@dataclass(frozen=True)
class Program:
    """A pure function to be compiled. Its fields decide what it computes; equal programs are compiled once.

    Class attributes:
        donate: names of arguments whose memory the result may reuse.
        fast_compile: for a program that runs once and takes longer to compile than to run.

    tokens: how many tokens go through each layer of the first argument, a model; None if that has no stacked layers.
    """

    donate: ClassVar[tuple[str, ...]] = ()
    fast_compile: ClassVar[bool] = False
    tokens: int | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """The name of the program in messages."""
        raise NotImplementedError

    @property
    def __name__(self) -> str:
        """The name in the compiler's dumps and in profiles."""
        return self.name.replace(" ", "_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def mesh_for(self, mesh: Mesh | None, *args: Any) -> Mesh | None:
        """The mesh for compiling with these arguments: the same devices in the same order."""
        return mesh


def stable_name(part: Any) -> str | None:
    """Text that names a program, or a field of one, in every process; None if its code is not this package's."""
    if part is None or isinstance(part, bool | int | float | str):
        return repr(part)
    if isinstance(part, tuple):
        parts = [stable_name(each) for each in part]
        return None if None in parts else repr(parts)
    is_function = isinstance(part, FunctionType)
    kind = part if is_function else type(part)
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0] or (is_function and _is_inner(part)):
        return None
    name = f"{kind.__module__}.{kind.__qualname__}"
    if is_function:
        return name
    if not dataclasses.is_dataclass(part):
        return f"{name} {part!r}"
    fields = {each.name: stable_name(getattr(part, each.name)) for each in dataclasses.fields(part)}
    return None if None in fields.values() else f"{name} {fields}"


def _is_inner(function: FunctionType) -> bool:
    """Whether it is a lambda or made inside another function, so that its name does not tell which it is."""
    return "<" in function.__qualname__


_PROGRAMS: dict[Any, CompiledProgram] = {}
"""The programs of this process, the latest last: pipelines of one model compile them once, also one after the other."""

MAX_PROGRAMS = 64
"""The maximum number of programs in `_PROGRAMS`; a pipeline keeps its own as long as it lives."""


class Programs:
    """The programs that a pipeline uses, with what was compiled of them.

    model: everything besides programs and arguments that determines them, as text.
    cache: of compiled programs; None: no cache.
    """

    def __init__(self, dtype: str, mesh: Mesh | None, model: str):
        self.dtype, self.mesh, self.model = dtype, mesh, model
        self.cache: CompileCache | None = None
        self._compiled: dict[Any, CompiledProgram] = {}  # by program and default device

    def get(self, program: Program) -> CompiledProgram:
        """A program with what was compiled of it, so far nothing on first use."""
        config: Any = jax.config  # its attributes are made at run time
        here = program, config.jax_default_device
        if here not in self._compiled:
            options = compiler_options(self.dtype, fast_compile=program.fast_compile)
            name = stable_name(program)
            # user-defined code may change between runs, so its programs are not cached
            cache = None if name is None else self.cache
            key = repr((name, program.donate, self.model, options))
            shared = here, self.mesh, key, None if cache is None else cache.folder
            compiled = _PROGRAMS.pop(shared, None) or CompiledProgram(program, options, self.mesh, key, cache)
            self._compiled[here] = _PROGRAMS[shared] = compiled
            for oldest in list(_PROGRAMS)[:-MAX_PROGRAMS]:
                _PROGRAMS.pop(oldest, None)
        return self._compiled[here]


class CompiledProgram:
    """A jitted program that is compiled before it runs, so that no step time includes compiling.

    key: everything besides its arguments that determines the program, as text.
    cache: as for `Programs`.
    """

    def __init__(
        self,
        program: Program,
        options: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        key: str = "",
        cache: CompileCache | None = None,
    ):
        self.program, self.mesh, self._key, self._cache = program, mesh, key, cache
        self._jit = jax.jit(program, compiler_options=dict(options or {}), donate_argnames=program.donate)
        self._compiled: dict[Any, Any] = {}

    def model_argument(self, model: Any) -> Any:
        """The first argument as the program takes it. Call this once before a loop over steps.

        On one CPU its layers may be separate arguments; see `nn.cpu.unstack_layers`.
        """
        one_cpu = self.mesh is None and jax.default_backend() == "cpu"
        tokens = self.program.tokens
        return unstack_layers(model, tokens) if one_cpu and tokens is not None else model

    def is_ready(self, model: Any, *args: Any) -> bool:
        """Whether the program need not be compiled for these arguments, which may be abstract shapes."""
        args = (self.model_argument(model), *args)
        shapes = _shapes(args)
        if shapes not in self._compiled and self._cache is not None:
            found = self._cache.find(self._key, args, self.mesh)
            if found is not None:
                self._compiled[shapes] = found
        return shapes in self._compiled

    def prepare(self, model: Any, *args: Any) -> Any:
        """The executable for these arguments, which may be abstract shapes."""
        return self._executable((self.model_argument(model), *args))

    def _executable(self, args: tuple[Any, ...]) -> Any:
        shapes = _shapes(args)
        if shapes not in self._compiled:
            make = partial(self._compile, args)
            cache = self._cache
            self._compiled[shapes] = make() if cache is None else cache.get(self._key, args, self.mesh, make)
        return self._compiled[shapes]

    def _compile(self, args: tuple[Any, ...]) -> Any:
        return compile_for(self._jit, args, self.program.mesh_for(self.mesh, *args))

    def __call__(self, model: Any, *args: Any, jit: bool = True) -> Any:
        if not jit:
            with own_settings(), jax.disable_jit(), compiling_on(self.program.mesh_for(self.mesh, model, *args)):
                return self.program(model, *args)
        args = (self.model_argument(model), *args)
        executable = self._executable(args)
        with own_settings(), compiling_on(self.program.mesh_for(self.mesh, *args)):
            return executable(*args)


def compile_for(jitted: Any, args: tuple[Any, ...], mesh: Mesh | None) -> Any:
    """The executable of a jitted function for these arguments, which may be abstract shapes."""

    config: Any = jax.config  # its attributes are made at run time
    device = config.jax_default_device  # of this thread; the one that compiles has none of its own

    def compile_it() -> Any:
        with jax.default_device(device), own_settings(), compiling_on(mesh):
            return jitted.lower(*args).compile()

    return out_of_reach(compile_it)


def compiled_once(
    jitted: Any, mesh: Mesh | None, known: tuple[tuple[Any, ...], Any] | None = None
) -> Callable[..., Any]:
    """A jitted function that is compiled once for each shapes of its arguments, by the first call with them.

    known: arguments, which may be abstract shapes, for which it is compiled already, and the executable.
    """
    executables: dict[Any, Any] = {} if known is None else {_shapes(known[0]): known[1]}

    def call(*args: Any) -> Any:
        shapes = _shapes(args)
        if shapes not in executables:
            executables[shapes] = compile_for(jitted, args, mesh)
        with own_settings():
            return executables[shapes](*args)

    return call


def compiling_on(mesh: Mesh | None) -> ExitStack:
    """Context in which programs are traced for the devices of a mesh, or for JAX's first one."""
    context = ExitStack()
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    context.enter_context(compiling_for(platform_of(device)))
    if mesh is not None:
        context.enter_context(jax.set_mesh(mesh))
    return context


def _shapes(args: tuple[Any, ...]) -> Any:
    """The structure, the shapes and the dtypes of a program's arguments."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


_LOWEST_OPTIMIZATION_LEVEL = 9
"""XLA's O0, by number: not every version of JAX takes its name."""


TPU_TRAINING_OPTIONS = {
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
"""XLA's options for a training step on TPUs, with which exchanges wait less: products run beside more of them."""


def compiler_options(
    dtype: str, *, platform: str | None = None, fast_compile: bool = False, training: bool = False
) -> dict[str, Any]:
    """XLA's options for weights of this dtype.

    TPU: exchanges over sp run beside products and kernels that do not need them, which XLA leaves off by default. With
    fast_compile, the decoder compiles in a third of the time and runs a seventh longer.

    CPU: by default XLA orders operations for concurrency, which copies all weights of a layer out of their stack before
    the first is needed, and it uses vectors of 256 bits where the CPU has 512. It also widens bfloat16 operands to
    float32 and hoists that out of the loop over layers, which makes a float32 copy of all weights: 21 GiB beside the
    10 GiB of a 5B transformer.

    Args:
        platform: "cpu", "gpu" or "tpu"; None is JAX's default.
        training: with `TPU_TRAINING_OPTIONS`.
    """
    platform = platform or jax.default_backend()
    if platform == "tpu":
        options: dict[str, Any] = {"xla_tpu_enable_async_all_to_all": True}
        options |= TPU_TRAINING_OPTIONS if training else {}
        return options | ({"optimization_level": _LOWEST_OPTIMIZATION_LEVEL} if fast_compile else {})
    if platform != "cpu":
        return {}
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_cpu_prefer_vector_width": 512}
    if dtype != "float32":
        options["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion"
    return options
