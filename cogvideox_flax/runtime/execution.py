"""How a run's programs run: compiled apart from running, on a mesh of one or many hosts, watched where asked."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.layers import apart
from cogvideox_flax.runtime.compile_cache import CompileCache
from cogvideox_flax.runtime.hosts import put_on_all_hosts

log = logging.getLogger(__name__)

GIB = 2**30


@dataclass(frozen=True)
class Watch:
    """What to look at while a pipeline runs; nothing by default.

    jit: False runs operation by operation (`jax.disable_jit`): slow, but prints and debuggers see values.
    memory: say after each stage what the devices hold, and where they tell, what they held at most.
    profile: a folder for a profiler's trace of some denoising steps, for TensorBoard or Perfetto.
    profile_steps: the first and the last of them, counted from 0. A jitted program compiles before the first step.
    """

    jit: bool = True
    memory: bool = False
    profile: Path | None = None
    profile_steps: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        first, last = self.profile_steps
        if not 0 <= first <= last:
            raise InputError(f"profile_steps must be the first and the last step, 0 or more; got {first} and {last}")

    def check(self, steps: int, at_once: bool) -> None:
        """Refuse a profile of steps that a run does not have.

        Raises:
            InputError: fewer steps than that, or all of them in one program.
        """
        if self.profile is not None and at_once:
            raise InputError("steps can be profiled one by one only; leave compiled_loop and one_program off")
        if self.profile is not None and self.profile_steps[1] >= steps:
            first, last = self.profile_steps
            raise InputError(f"steps {first} to {last} are to be profiled, but the run has {steps}, counted from 0")

    @contextmanager
    def steps(self) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """Around all steps; gives what is to be around each, up to its result. A trace is written however they end."""
        first, last = self.profile_steps
        with ExitStack() as trace:

            @contextmanager
            def step(i: int) -> Iterator[None]:
                if self.profile is None or not first <= i <= last:
                    yield
                    return
                if i == first:
                    jax.profiler.start_trace(str(self.profile))
                    trace.callback(jax.profiler.stop_trace)
                with jax.profiler.StepTraceAnnotation("denoise", step_num=i):
                    yield
                if i == last:
                    trace.close()
                    log.info("steps %d to %d are in %s", first, last, self.profile)

            yield step

    def stage(self, name: str) -> None:
        """After a stage."""
        if self.memory:
            say(f"after the {name}: {describe_memory()}", True)


def always(*args: Any) -> bool:
    """For `Recipe.apart`."""
    return True


def never(*args: Any) -> bool:
    """For `Recipe.apart`."""
    return False


@dataclass(frozen=True)
class Recipe:
    """How a program is made. Equal recipes make the same program.

    name: for people.
    make, given: `make(*given)` is the function to be jitted.
    donate: arguments whose memory the result may take.
    quickly: it runs once in a run, and takes longer to compile than to run.
    apart: of the arguments: whether the layers of the first, a model, are on one CPU better given one by one
        (`layers.apart`).
    """

    name: str
    make: Callable[..., Callable[..., Any]]
    given: tuple[Any, ...] = ()
    donate: tuple[int, ...] = ()
    quickly: bool = False
    apart: Callable[..., bool] = never

    def function(self) -> Callable[..., Any]:
        """To be jitted."""
        return self.make(*self.given)


class Programs:
    """The compiled programs of a pipeline.

    model: all that they are made from beside their recipes and arguments, as text.
    kept: where compiled programs are looked for, and kept; None: nowhere.
    """

    def __init__(self, dtype: str, mesh: Mesh | None, model: str):
        self.dtype, self.mesh, self.model = dtype, mesh, model
        self.kept: CompileCache | None = None
        self._programs: dict[Recipe, Program] = {}

    def get(self, recipe: Recipe) -> Program:
        """One program per recipe, made when it is first wanted."""
        if recipe not in self._programs:
            options = compiler_options(self.dtype, quickly=recipe.quickly)
            # a user-defined sampler may change between runs, so its programs are not kept
            ours = all(
                type(part).__module__.partition(".")[0] in ("builtins", __name__.partition(".")[0])
                for part in recipe.given
            )
            what = repr((recipe.make.__qualname__, recipe.given, recipe.donate, self.model, options))
            self._programs[recipe] = Program(recipe, options, self.mesh, what, self.kept if ours else None)
        return self._programs[recipe]

    def put(self, tree: Any) -> Any:
        """Everything but weights is small and lies whole on every device between programs."""
        if self.mesh is None:
            return jax.device_put(tree)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        if jax.process_count() == 1:
            return jax.device_put(tree, everywhere)
        return jax.tree.map(lambda x: put_on_all_hosts(x, everywhere), tree)


def _is_ours(kind: type) -> bool:
    """Whether a class is Python's or this package's."""
    return kind.__module__.partition(".")[0] in ("builtins", __name__.partition(".")[0])


class Program:
    """A jitted function that compiles apart from running, and says so, so that no step time includes compiling.

    what: all that it is made from beside its arguments, as text.
    kept: as for `Programs`; what was compiled in an earlier process is taken from there.
    """

    def __init__(
        self,
        recipe: Recipe,
        options: Mapping[str, Any],
        mesh: Mesh | None,
        what: str,
        kept: CompileCache | None,
    ):
        self.name, self._f, self._mesh, self._what, self._kept = recipe.name, recipe.function(), mesh, what, kept
        self._apart, self._on_one_cpu = recipe.apart, mesh is None and jax.default_backend() == "cpu"
        self._jit = jax.jit(self._f, compiler_options=dict(options), donate_argnums=recipe.donate)
        self._compiled: dict[Any, Any] = {}

    def prepare(self, *args: Any, announce: bool) -> Any:
        """The executable for arguments of these shapes, which may be shapes only."""
        return self._executable(self.as_it_takes(args), announce)

    def as_it_takes(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the model's layers one by one where they run so; whoever calls often does this once."""
        return (apart(args[0]), *args[1:]) if self._on_one_cpu and self._apart(*args) else args

    def _executable(self, args: tuple[Any, ...], announce: bool) -> Any:
        leaves, tree = jax.tree.flatten(args)
        key = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._compiled:
            make = partial(self._compile, args, announce)
            if self._kept is None:
                self._compiled[key] = make()
            else:
                self._compiled[key] = self._kept.get(self._what, args, self._mesh, make)
        return self._compiled[key]

    def _compile(self, args: tuple[Any, ...], announce: bool) -> Any:
        say(f"compiling the {self.name} ...", announce)
        start = time.perf_counter()
        with self._on_mesh():
            executable = self._jit.lower(*args).compile()
        say(f"compiled the {self.name} in {time.perf_counter() - start:.1f} s", announce)
        return executable

    def __call__(self, *args: Any, announce: bool, jit: bool = True) -> Any:
        if not jit:
            with jax.disable_jit(), self._on_mesh():
                return self._f(*args)
        args = self.as_it_takes(args)
        executable = self._executable(args, announce)
        with self._on_mesh():
            return executable(*args)

    def _on_mesh(self) -> Any:
        return jax.set_mesh(self._mesh) if self._mesh is not None else nullcontext()

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


def bytes_needed(memory: Any) -> int:
    """On each device, of a program's `memory_analysis()`: arguments, results and temporaries, where a result that takes
    an argument's place counts once."""
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return whole - memory.alias_size_in_bytes


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Makes Ctrl-C reliable in a loop: yields a function that raises a pending KeyboardInterrupt.

    Python drops an exception that is raised while a destructor or the garbage collector's callbacks run, of which JAX
    has some in every step.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    pressed = threading.Event()

    def press(number: int, frame: Any) -> None:
        try:
            before(number, frame)  # one of another kind may do without an exception
        except KeyboardInterrupt:
            pressed.set()
            raise

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def compiler_options(dtype: str, *, platform: str | None = None, quickly: bool = False) -> dict[str, Any]:
    """What to tell XLA for weights of this dtype.

    On a TPU a program can be compiled quickly: the decoder in a third of the time, to run a seventh longer.

    On a CPU it orders operations for concurrency unless told otherwise, and so copies all weights of a layer out of
    their stack at once, before the first is needed, and it computes on 256 bits at a time where the CPU has 512. There
    it also widens bfloat16 operands to float32 and moves that out of the loop over layers: a float32 copy of all
    weights, 21 GiB beside the 10 GiB of a 5B transformer.

    Args:
        platform: "cpu", "gpu" or "tpu"; None is JAX's default one.
    """
    platform = platform or jax.default_backend()
    if platform != "cpu":
        return {"exec_time_optimization_effort": -1.0} if quickly and platform == "tpu" else {}
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_cpu_prefer_vector_width": 512}
    if dtype != "float32":
        options["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion"
    return options


def memory_limit(mesh: Mesh | None) -> int | None:
    """Bytes that programs may use on each of this host's devices; None where the devices do not say."""
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()] if mesh is not None else []
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices or jax.local_devices()[:1]]
    return None if None in limits else min(limit for limit in limits if limit is not None)


def describe_memory() -> str:
    """What each of this host's devices holds now, and held at most where it tells."""
    held: dict[Any, int] = defaultdict(int)
    seen = set()  # an array over several devices and its parts are live arrays both
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffer = shard.device, shard.data.unsafe_buffer_pointer()
            if buffer not in seen:
                seen.add(buffer)
                held[shard.device] += shard.data.nbytes
    parts = []
    for device in sorted(held, key=lambda d: d.id):
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        most = f", {peak / GIB:.3f} at most" if peak is not None else ""
        parts.append(f"{device} {held[device] / GIB:.3f} GiB{most}")
    return "; ".join(parts) or "no arrays"


def say(message: str, announce: bool) -> None:
    """To people where they watch, else to the log."""
    if announce:
        tqdm.write(message, file=sys.stderr)
    else:
        log.info(message)
