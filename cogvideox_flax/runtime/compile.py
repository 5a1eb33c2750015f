"""Programs: compiled ahead of running, once for given shapes, kept for later processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import jax
from jax.sharding import Mesh

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.cpu import unstack_layers
from cogvideox_flax.runtime.compile_cache import CompileCache
from cogvideox_flax.runtime.devices import GIB, bytes_needed
from cogvideox_flax.runtime.terminal import say


@dataclass(frozen=True)
class ProgramSpec:
    """How a program is made. Equal specs make the same program.

    name: for people.
    make, given: `make(*given)` is the function to be jitted.
    donate: names of arguments whose memory the result may take.
    fast_compile: it runs once in a run, and would take longer to compile than to run.
    tokens: how many tokens go through each layer of the first argument, a model; None where that is no model of
        stacked layers.
    """

    name: str
    make: Callable[..., Callable[..., Any]]
    given: tuple[Any, ...] = ()
    donate: tuple[str, ...] = ()
    fast_compile: bool = False
    tokens: int | None = None

    def function(self) -> Callable[..., Any]:
        """To be jitted."""
        return self.make(*self.given)


class Programs:
    """The compiled programs of a pipeline.

    model: everything that they are made from beside their specs and arguments, as text.
    cache: where compiled programs are looked for and kept; None: nowhere.
    """

    def __init__(self, dtype: str, mesh: Mesh | None, model: str):
        self.dtype, self.mesh, self.model = dtype, mesh, model
        self.cache: CompileCache | None = None
        self._programs: dict[ProgramSpec, Program] = {}

    def get(self, spec: ProgramSpec) -> Program:
        """One program per spec, made when it is first wanted."""
        if spec not in self._programs:
            options = compiler_options(self.dtype, fast_compile=spec.fast_compile)
            names = [_name(part) for part in spec.given]
            # user-defined code may change between runs, so its programs are not kept
            cache = None if None in names else self.cache
            key = repr((spec.make.__qualname__, names, spec.donate, self.model, options))
            self._programs[spec] = Program(spec, options, self.mesh, key, cache)
        return self._programs[spec]


def _name(part: Any) -> str | None:
    """What makes a part of a spec the same in another process; None for one whose code is not this package's."""
    if isinstance(part, tuple):
        names = [_name(each) for each in part]
        return None if None in names else repr(names)
    is_function = isinstance(part, FunctionType)
    module = part.__module__ if is_function else type(part).__module__
    if module.partition(".")[0] not in ("builtins", __name__.partition(".")[0]) or (is_function and _is_inner(part)):
        return None
    return f"{module}.{part.__qualname__}" if is_function else repr(part)


def _is_inner(function: FunctionType) -> bool:
    """Whether it is a lambda or made inside another function, so that its name does not tell which it is."""
    return "<" in function.__qualname__


class Program:
    """A jitted function that compiles apart from running, and says so, so that no step time includes compiling.

    key: everything that it is made from beside its arguments, as text.
    cache: as for `Programs`; what an earlier process compiled is taken from there.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        options: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        key: str = "",
        cache: CompileCache | None = None,
    ):
        self.name, self.mesh, self._tokens, self._key, self._cache = spec.name, mesh, spec.tokens, key, cache
        self._f = spec.function()
        self._jit = jax.jit(self._f, compiler_options=dict(options or {}), donate_argnames=spec.donate)
        self._compiled: dict[Any, Any] = {}

    def model_argument(self, model: Any) -> Any:
        """The first argument as the program takes it. Whoever calls often asks for it once.

        On one CPU its layers may be arguments of their own; see `nn.cpu.unstack_layers`.
        """
        one_cpu = self.mesh is None and jax.default_backend() == "cpu"
        return unstack_layers(model, self._tokens) if one_cpu and self._tokens is not None else model

    def prepare(self, model: Any, *args: Any, announce: bool) -> Any:
        """The executable for arguments of these shapes, which may be shapes only."""
        return self._executable((self.model_argument(model), *args), announce)

    def _executable(self, args: tuple[Any, ...], announce: bool) -> Any:
        leaves, tree = jax.tree.flatten(args)
        shapes = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in self._compiled:
            make = partial(self._compile, args, announce)
            if self._cache is None:
                self._compiled[shapes] = make()
            else:
                self._compiled[shapes] = self._cache.get(self._key, args, self.mesh, make)
        return self._compiled[shapes]

    def _compile(self, args: tuple[Any, ...], announce: bool) -> Any:
        say(f"compiling the {self.name} ...", announce)
        start = time.perf_counter()
        with self._on_mesh():
            executable = self._jit.lower(*args).compile()
        say(f"compiled the {self.name} in {time.perf_counter() - start:.1f} s", announce)
        return executable

    def __call__(self, model: Any, *args: Any, announce: bool, jit: bool = True) -> Any:
        if not jit:
            with jax.disable_jit(), self._on_mesh():
                return self._f(model, *args)
        args = (self.model_argument(model), *args)
        executable = self._executable(args, announce)
        with self._on_mesh():
            return executable(*args)

    def _on_mesh(self) -> Any:
        return jax.set_mesh(self.mesh) if self.mesh is not None else nullcontext()

    def check_memory(self, *args: Any, limit: int, held: int, advice: str, announce: bool) -> None:
        """Compile for these shapes and refuse what a device cannot hold.

        Args:
            limit: bytes that a device has.
            held: bytes that it holds beside this program.
            advice: what to do about it, for the error.

        Raises:
            InputError: with the numbers.
        """
        memory = self.prepare(*args, announce=announce).memory_analysis()
        if memory is None:
            return
        needed = bytes_needed(memory)
        if needed + held > limit:
            beside = f" beside {held / GIB:.2f} GiB of other weights" if held else ""
            raise InputError(
                f"the {self.name} needs {needed / GIB:.2f} GiB on each device{beside}, which has {limit / GIB:.2f} "
                f"GiB. {advice}"
            )


def compiler_options(dtype: str, *, platform: str | None = None, fast_compile: bool = False) -> dict[str, Any]:
    """What to tell XLA for weights of this dtype.

    On a TPU a program can be compiled fast_compile: the decoder in a third of the time, to run a seventh longer.

    On a CPU it orders operations for concurrency unless told otherwise, and so copies all weights of a layer out of
    their stack at once, before the first is needed, and it computes on 256 bits at a time where the CPU has 512. There
    it also widens bfloat16 operands to float32 and moves that out of the loop over layers: a float32 copy of all
    weights, 21 GiB beside the 10 GiB of a 5B transformer.

    Args:
        platform: "cpu", "gpu" or "tpu"; None is JAX's default one.
    """
    platform = platform or jax.default_backend()
    if platform != "cpu":
        return {"exec_time_optimization_effort": -1.0} if fast_compile and platform == "tpu" else {}
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_cpu_prefer_vector_width": 512}
    if dtype != "float32":
        options["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion"
    return options
