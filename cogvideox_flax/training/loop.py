"""The training loop: a pure step under a mesh, with checkpoints from which a run goes on as if never stopped.

Everything that a step sees is a function of the step's number: its batch, its random key, its learning rate. The state
on disk is therefore whole: parameters, their moving average, the optimiser's moments and the step.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, Key

from cogvideox_flax import sharding
from cogvideox_flax.errors import DivergedError, InputError
from cogvideox_flax.io.contents import match_record
from cogvideox_flax.models.cogvideox.family import COGVIDEOX
from cogvideox_flax.runtime.compile import compiler_options
from cogvideox_flax.training.metrics import Mean, MetricsLog
from cogvideox_flax.training.objectives import Metrics
from cogvideox_flax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from cogvideox_flax.training.snapshots import Snapshots

log = logging.getLogger(__name__)

Params = Any
"""What is trained: component name -> module, or any pytree of arrays."""

Batch = Any
"""A pytree of host arrays with the batch first."""

Loss = Callable[[Params, Any, Batch, Key[Array, ""]], tuple[Float32[Array, ""], Metrics]]
"""loss(trained, frozen, batch, key) -> (loss, metrics), both means over the batch, or `Mean`s over parts of it."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long and how to train.

    steps: optimiser steps in all. The schedule of the learning rate is laid out over them.
    accumulate: micro-batches per step, whose gradients are averaged.
    dtype: of the weights in the forward and backward pass; the trained weights themselves are float32.
    ema_decay: of the moving average of the weights, which starts with shorter memory: min(decay, (1 + n) / (10 + n)).
        0: no average is kept.
    save_minutes: how often the state is written while training; it is also written at the end and when stopped.
    """

    steps: int
    seed: int = 0
    accumulate: int = 1
    dtype: str = "float32"
    ema_decay: float = 0.999
    log_every: int = 10
    save_minutes: float = 5.0
    keep: int = 2
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        faults = [
            f"  {name}: got {getattr(self, name)!r}, expected {expected}"
            for name, holds, expected in (
                ("steps", 1 <= self.steps < 2**31, "1 or more"),
                ("seed", 0 <= self.seed < 2**32, f"0 to {2**32 - 1}"),
                ("accumulate", self.accumulate >= 1, "1 or more"),
                ("dtype", self.dtype in ("float32", "bfloat16"), "float32 or bfloat16"),
                ("ema_decay", 0 <= self.ema_decay < 1, "0 to below 1"),
                ("log_every", self.log_every >= 1, "1 or more"),
                ("save_minutes", self.save_minutes > 0, "above 0"),
                ("keep", self.keep >= 1, "1 or more"),
            )
            if not holds
        ]
        if faults:
            raise InputError("the training settings are invalid:\n" + "\n".join(faults))


@jax.tree_util.register_dataclass
@dataclass
class State:
    """All that changes while training. `ema` is like `params`, or None; `step` counts the steps done."""

    step: Int32[Array, ""]
    params: Params
    ema: Params | None
    opt_state: Any

    @property
    def result(self) -> Params:
        """The weights to use: the moving average where one is kept."""
        return self.params if self.ema is None else self.ema


def train(
    params: Params,
    frozen: Any,
    loss: Loss,
    batches: Callable[[int], Batch],
    config: LoopConfig,
    folder: Path,
    *,
    mesh: Mesh | None = None,
    on_step: Callable[[int, State], None] | None = None,
    stop_after: Callable[[int], bool] | None = None,
    stop_at: int | None = None,
    made_of: Mapping[str, Any] | None = None,
) -> State:
    """Train from `params`, or go on from the last state in `folder`.

    Args:
        params: component name -> module with the starting weights, float32; laid on the mesh by the table of sharding.
        frozen: passed through to `loss`; modules or None.
        batches: step (from 0) -> its batch, on the host; called ahead, in a thread.
        folder: gets `metrics.jsonl` and the states. A folder that was trained with other settings is refused.
        mesh: from `sharding.make_mesh`; None for one device. Batches are split over dp.
        on_step: called after each step with the number of steps done, for samples and the like.
        stop_at: end after this many of `config.steps`, for a schedule that is cut short and cooled down by another.
        stop_after: asked after each step; True ends the run there, in order. SIGTERM and Ctrl-C do the same.
        made_of: all else that decides the result, as JSON values; kept and compared with the settings.

    Returns:
        The state after the last step done.

    Raises:
        InputError: settings that differ from those of the run in `folder`.
        DivergedError: the loss is NaN or infinite; the last state on disk is from before it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_settings(folder, config, made_of or {})
    with jax.set_mesh(mesh) if mesh is not None else nullcontext(), Snapshots(folder / "states", config.keep) as states:
        state = _place(params, config, mesh)
        del params  # where the caller kept no name for it, the memory of what was loaded is free again
        found = states.restore_latest(state)
        if found is not None:
            done, state = found
            log.info("going on from step %d of %d in %s", done, config.steps, folder)
        start = int(state.step)
        metrics = MetricsLog(folder / "metrics.jsonl", keep_to=start)
        step = jax.jit(
            partial(_step, loss=loss, config=config),
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),  # what a step returns stays where it was
            compiler_options=compiler_options(config.dtype),
        )
        rate = learning_rate(config.optimizer, config.steps)
        last_save = clock = time.monotonic()  # the pace is taken from `clock`, when `logged_at` steps were done
        logged_at = start
        end = min(config.steps, stop_at or config.steps)
        with _stop_signals() as stopped, _ahead(batches, start, end) as queue:
            for done, batch in enumerate(queue, start + 1):
                state, logged = step(state, frozen, _on_mesh(batch, config, mesh))
                if done == start + 1:  # this one was compiled first, which is no part of a step's time
                    jax.block_until_ready(logged)
                    clock, logged_at = time.monotonic(), done
                if on_step is not None:
                    on_step(done, state)
                stop = stopped.is_set() or (stop_after is not None and stop_after(done))
                last = stop or done == end
                save = last or time.monotonic() - last_save > 60 * config.save_minutes
                if save or done % config.log_every == 0:
                    values = _numbers(logged)  # waits for the step
                    _check_finite(values, done, folder)
                    values["learning_rate"] = float(rate(done - 1))
                    if done > logged_at:
                        now = time.monotonic()
                        values["seconds_per_step"] = (now - clock) / (done - logged_at)
                        clock, logged_at = now, done
                    metrics.write({"step": done, **values})
                    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                    log.info("step %d of %d: %s", done, config.steps, shown)
                if save:
                    states.save(done, state)
                    last_save = time.monotonic()
                if stop:
                    log.warning("stopped after step %d of %d; the same command goes on from there", done, config.steps)
                    break
        return state


def to_the_end(
    params: Any,
    frozen: Any,
    loss: Loss,
    batches: Callable[[int], Any],
    config: LoopConfig,
    folder: Path,
    mesh: Mesh | None,
    stop_at: int | None = None,
    made_of: Mapping[str, Any] | None = None,
) -> State:
    """`train`, which returns early when it is told to stop: no later stage may start from what there is then.

    Raises:
        KeyboardInterrupt: stopped.
    """
    state = train(params, frozen, loss, batches, config, folder, mesh=mesh, stop_at=stop_at, made_of=made_of)
    if int(state.step) < min(config.steps, stop_at or config.steps):
        raise KeyboardInterrupt
    return state


def _step(state: State, frozen: Any, batch: Batch, *, loss: Loss, config: LoopConfig) -> tuple[State, Metrics]:
    optimizer = make_optimizer(config.optimizer, config.steps)
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)

    def gradient(micro: tuple[Batch, Array]) -> tuple[Params, Metrics]:
        batch, i = micro

        def mean_loss(params: Params) -> tuple[Array, Metrics]:
            return loss(_cast(params, config.dtype), _cast(frozen, config.dtype), batch, jax.random.fold_in(key, i))

        (value, logged), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        return grads, {"loss": value} | logged

    micros = batch, jnp.arange(config.accumulate)
    if config.accumulate == 1:
        grads, logged = gradient(jax.tree.map(lambda x: x[0], micros))
    else:
        shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], micros))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        total, _ = jax.lax.scan(lambda sum, micro: (jax.tree.map(jnp.add, sum, gradient(micro)), None), zero, micros)
        grads, logged = jax.tree.map(lambda x: x / config.accumulate, total)  # of a `Mean`, both parts

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = None
    if state.ema is not None:
        n = state.step.astype(jnp.float32)
        decay = jnp.minimum(config.ema_decay, (1 + n) / (10 + n))
        ema = jax.tree.map(lambda average, new: decay * average + (1 - decay) * new, state.ema, params)
    logged = logged | {"gradient_norm": optax.tree.norm(grads)}
    return State(state.step + 1, params, ema, opt_state), logged


def _cast(tree: Any, dtype: str) -> Any:
    target = jnp.dtype(dtype)
    return jax.tree.map(lambda x: x.astype(target) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _place(params: Params, config: LoopConfig, mesh: Mesh | None) -> State:
    """The state before the first step; on a mesh, moments and averages lie where their parameter lies."""
    places = _placements(params, mesh)
    params = jax.tree.map(lambda x, place: jax.device_put(jnp.array(x, jnp.float32), place), params, places)
    optimizer = make_optimizer(config.optimizer, config.steps)
    opt_state = optimizer.init(params)
    if mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        opt_state = optax.tree_utils.tree_map_params(
            optimizer,
            jax.device_put,
            opt_state,
            places,
            transform_non_params=lambda x: jax.device_put(x, everywhere),
        )
    step = jnp.zeros((), jnp.int32)
    if mesh is not None:
        step = jax.device_put(step, everywhere)
    ema = jax.tree.map(jnp.copy, params) if config.ema_decay else None
    return State(step, params, ema, opt_state)


def _placements(params: Params, mesh: Mesh | None) -> Any:
    """Where each parameter lies, by its component's rows; the outermost key is the component."""
    if mesh is None:
        return jax.tree.map(lambda _: jax.devices()[0], params)

    def place(path: jax.tree_util.KeyPath, leaf: Array) -> NamedSharding:
        component, _, name = sharding.parameter_name(path).partition(".")
        return sharding.parameter_sharding(mesh, COGVIDEOX.components[component].sharding, name, leaf.shape)

    return jax.tree_util.tree_map_with_path(place, params)


def _on_mesh(batch: Batch, config: LoopConfig, mesh: Mesh | None) -> Batch:
    """The batch cut into micro-batches [accumulate, batch, ...], the batch split over dp."""

    def put(x: np.ndarray) -> Array:
        if x.shape[0] % config.accumulate:
            raise InputError(f"a batch of {x.shape[0]} does not divide into {config.accumulate} micro-batches")
        x = x.reshape(config.accumulate, -1, *x.shape[1:])
        if mesh is None:
            return jnp.asarray(x)
        return jax.device_put(x, sharding.named(mesh, (None, "batch"), x.shape, "a training batch"))

    return jax.tree.map(put, batch)


def _numbers(logged: Metrics) -> dict[str, float]:
    """Metrics as numbers; the mean of nothing is left out."""
    there = {name: x for name, x in logged.items() if not isinstance(x, Mean) or float(x.count)}
    return {name: float(x) for name, x in there.items()}


def _check_finite(values: dict[str, float], step: int, folder: Path) -> None:
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
        raise DivergedError(
            f"{', '.join(bad)} not finite at training step {step}; the last state in {folder} is from before. "
            "Lower learning_rate or clip_norm, or train in float32."
        )


def _check_settings(folder: Path, config: LoopConfig, made_of: Mapping[str, Any]) -> None:
    """Remember the settings of the run in its folder, and refuse others: the two halves would not be one run."""
    path = folder / "settings.json"
    ours = json.loads(json.dumps(dataclasses.asdict(config) | dict(made_of)))
    theirs = match_record(path, ours)
    free = ("log_every", "save_minutes", "keep")
    differing = [k for k in ours if k not in free and ours[k] != theirs.get(k)]
    if differing:
        raise InputError(
            f"{folder} holds a run with other settings:\n"
            + "\n".join(f"  {k}: there {theirs.get(k)}, now {ours[k]}" for k in differing)
            + "\nUse another folder, or the same settings to go on."
        )


@contextmanager
def _ahead(batches: Callable[[int], Batch], start: int, stop: int) -> Iterator[Iterator[Batch]]:
    """The batches of steps start to stop - 1, each made while the step before it runs."""
    with ThreadPoolExecutor(1) as pool:

        def stream() -> Iterator[Batch]:
            coming = pool.submit(batches, start)
            for step in range(start, stop):
                batch = coming.result()
                if step + 1 < stop:
                    coming = pool.submit(batches, step + 1)
                yield batch

        yield stream()


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, so that a run ends between two steps. A second Ctrl-C ends it at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    for number in before:
        signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
