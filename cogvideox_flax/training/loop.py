"""The training loop: jitted steps, metrics, and training states from which a stopped run resumes.

A step's batch, random key and learning rate are functions of its number. The state on disk (parameters, their moving
average, the optimizer's moments, the number of steps done) is therefore complete: a resumed run gives the same bits.

On several hosts, process 0 makes the batches, writes all files but its share of the training states, which the others
write too where they share its disk, and decides when to save and to stop.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from cogvideox_flax.errors import DivergedError, InputError
from cogvideox_flax.io.contents import match_record, write_record
from cogvideox_flax.io.interrupts import interrupt
from cogvideox_flax.runtime.compile import compiled_once, compiler_options, compiling_on
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.settings import own_settings, random_key
from cogvideox_flax.runtime.terminal import duration_text
from cogvideox_flax.sharding import ParameterRows
from cogvideox_flax.training.config import LoopConfig
from cogvideox_flax.training.metrics import Mean, MetricsLog
from cogvideox_flax.training.objectives import Metrics
from cogvideox_flax.training.optimizer import learning_rate
from cogvideox_flax.training.snapshots import Snapshots
from cogvideox_flax.training.step import Batch, Loss, Params, TrainState, in_dtype, init_state, jit_step, put_batch

log = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
METRICS_FILE = "metrics.jsonl"
_VALIDATION_SEED = 0
MAX_SAVE_SHARE = 0.05
"""Of the loop's time that it may wait for training states to be saved."""
MAY_CHANGE = ("log_every", "save_minutes", "keep", "tensorboard")
"""Settings that may differ when a run is resumed. `steps` may grow."""


@dataclass(frozen=True)
class Validation:
    """A loss that is measured at intervals with the same noise.

    name: of the metric.
    batches: number -> its micro-batch, as one of a training batch, on the host; called on process 0 alone.
    count: of them; the loss is the mean over them.
    every: steps between two measurements.
    """

    name: str
    batches: Callable[[int], Batch]
    count: int
    every: int


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A training run, all but its starting weights.

    loss: what is minimised.
    batches: step (from 0) -> its batch, on the host: on several hosts, arrays in dictionaries and lists. Called in a
        thread, for the step after the current one.
    config: the settings of the loop.
    folder: for `metrics.jsonl`, `settings.json` and the training states.
    frozen: modules or arrays that are not trained, passed to `loss` in the dtype in which they compute.
    mesh: from `sharding.make_mesh`; None for one device. Batches are split over dp.
    rows: component name -> the sharding of its parameters on the mesh.
    stop_at: end after this many of `config.steps`, to continue with another schedule; None: all of them.
    validation: a loss to measure besides.
    recorded: what else decides the result, as JSON values. Compared with the run in `folder`, like the settings.
    compiled: where the step is compiled already for arguments of some shapes: these, and the executable.
    """

    loss: Loss
    batches: Callable[[int], Batch]
    config: LoopConfig
    folder: Path
    frozen: Any = None
    mesh: Mesh | None = None
    rows: Mapping[str, ParameterRows] = field(default_factory=dict)
    stop_at: int | None = None
    validation: Validation | None = None
    recorded: Mapping[str, Any] = field(default_factory=dict)
    compiled: tuple[tuple[Any, ...], Any] | None = None

    @property
    def last_step(self) -> int:
        """The number of steps after which the run is done."""
        return min(self.config.steps, self.stop_at or self.config.steps)

    def train(
        self,
        params: Params,
        on_step: Callable[[int, TrainState], bool | None] | None = None,
        *,
        progress: bool = False,
    ) -> TrainState:
        """Train from `params`, or resume from the last training state in `folder`.

        Args:
            params: component name -> module with the starting weights. A caller that keeps no reference to them saves
                their memory.
            on_step: called after each step with the number of steps done; True stops the run there. SIGTERM and Ctrl-C
                stop it too, on any host.
            progress: a bar of the steps on a terminal.

        Returns:
            The state after the last step done.

        Raises:
            InputError: the run in `folder` has other settings.
            DivergedError: the loss is NaN or infinite. The last training state on disk is from before that.
        """
        config = self.config
        self._match_run()
        with own_settings(), compiling_on(self.mesh), Snapshots(self.folder / "states", config.keep) as snapshots:
            state = init_state(params, config, self.mesh, self.rows)
            del params
            state = snapshots.restore_latest(state) or state
            start = int(state.step)
            if start:
                log.info("resuming from step %d of %d in %s", start, config.steps, self.folder)
            step_log = _StepLog(self.folder, config, start, self.last_step)
            validate = self._validator(step_log)
            if not start:
                validate(0, state)
            last_save, waited = time.monotonic(), 0.0  # and how long the steps waited for it
            todo = range(start, self.last_step)
            with closing(step_log), _stop_signals() as stopped, closing(self._steps(state, todo, progress)) as steps:
                for done, state, metrics in steps:
                    if done == start + 1:
                        step_log.reset_clock(done)  # the first step's time is mostly compilation
                    step_log.add(metrics)
                    validate(done, state)
                    stop = hosts.stop_requested(bool(on_step and on_step(done, state)) or stopped.is_set())
                    is_due = partial(_has_passed, last_save + max(60 * config.save_minutes, waited / MAX_SAVE_SHARE))
                    save = hosts.broadcast(is_due) or stop or done == self.last_step
                    if save or done % config.log_every == 0:
                        step_log.write(done, metrics)
                    if save:
                        begin = time.monotonic()
                        snapshots.save(done, state)
                        last_save = time.monotonic()
                        waited = last_save - begin
                    if stop:
                        log.warning("stopped after step %d of %d; the same command resumes it", done, config.steps)
                        break
            return state

    def _steps(
        self, state: TrainState, todo: range, progress: bool
    ) -> Generator[tuple[int, TrainState, Metrics], None, None]:
        """Do these steps; yields the number of steps done, the state and the metrics of each."""
        if todo:
            log.info("compiling the training step ...")
        step = compiled_once(jit_step(self.loss, self.config, state), self.mesh, self.compiled)
        no_bar, begin = not (progress and sys.stderr.isatty()), time.monotonic()
        bar = tqdm(total=self.last_step, initial=todo.start, unit="step", disable=no_bar)
        with prefetch(self.batches, todo) as batches, bar, logging_redirect_tqdm():
            for done, batch in enumerate(batches, todo.start + 1):
                state, metrics = step(state, self.frozen, put_batch(batch, self.config, self.mesh))
                if done == todo.start + 1:
                    jax.block_until_ready(metrics)
                    log.info("compiled it and did the first step in %.1f s", time.monotonic() - begin)
                bar.update()
                yield done, state, metrics

    def _match_run(self) -> None:
        """Compare the settings with those of the run in `folder`, which may have had fewer steps."""
        record, ours = self.folder / SETTINGS_FILE, dataclasses.asdict(self.config) | dict(self.recorded)
        if self.config.optimizer.schedule == "cosine":  # as in all runs of earlier versions, which have no name for it
            del ours["optimizer"]["schedule"]
        before, now = match_run(record, ours, MAY_CHANGE, may_grow=("steps",))["steps"], self.config.steps
        if before < now:
            log.info("steps was raised from %d to %d; the learning rate follows the schedule of %d", before, now, now)
            hosts.on_process_0(write_record)(record, ours)

    def _validator(self, step_log: _StepLog) -> Callable[[int, TrainState], None]:
        """Measures and writes the validation loss of a state, where it is due after so many steps."""
        measure = self._jit_validation()

        def validate(done: int, state: TrainState) -> None:
            if self.validation is None or (done % self.validation.every and done != self.last_step):
                return
            if not done:
                log.info("compiling and measuring %s ...", self.validation.name)
            step_log.write_one(done, self.validation.name, measure(state))

        return validate

    def _jit_validation(self) -> Callable[[TrainState], float]:
        """A state to its validation loss."""
        loss, alone = in_dtype(self.loss, self.config.dtype), dataclasses.replace(self.config, accumulate=1)

        def validation_loss(params: Params, frozen: Any, batch: Batch, i: Int32[Array, ""]) -> Float32[Array, ""]:
            batch = jax.tree.map(lambda x: x[0], batch)
            key = jax.random.fold_in(random_key(_VALIDATION_SEED), i)
            return loss(params, frozen, batch, key)[0]

        one = compiled_once(jax.jit(validation_loss, compiler_options=compiler_options(self.config.dtype)), self.mesh)

        def measure(state: TrainState) -> float:
            assert self.validation is not None
            losses = []
            for i in range(self.validation.count):
                batch = hosts.broadcast(partial(self.validation.batches, i))
                losses.append(one(state.trained, self.frozen, put_batch(batch, alone, self.mesh), np.int32(i)))
            return float(np.mean([float(loss) for loss in losses]))

        return measure


def match_run(
    record: Path, ours: dict[str, Any], may_change: Collection[str] = (), may_grow: Collection[str] = ()
) -> dict[str, Any]:
    """Record in a directory what its run is made of, or compare that with the run that is there. On several hosts the
    directory is process 0's.

    Args:
        record: the file.
        ours: what this run is made of, as JSON values.
        may_change: names of values that may differ.
        may_grow: names of whole numbers that may be larger than they were.

    Returns:
        What the run that is there is made of.

    Raises:
        InputError: they are different runs, or the record is damaged.
    """
    ours = json.loads(json.dumps(ours))
    theirs = hosts.broadcast(lambda: match_record(record, ours))

    def may_differ(name: str) -> bool:
        before = theirs.get(name)
        return name in may_change or (name in may_grow and type(before) is int and before < ours[name])

    differing = [name for name in ours if ours[name] != theirs.get(name) and not may_differ(name)]
    if differing:
        raise InputError(
            f"{record.parent} holds a run of something else:\n"
            + "\n".join(f"  {name}: there {theirs.get(name)}, now {ours[name]}" for name in differing)
            + "\nChoose another directory, or the same settings, clips and model to resume it."
        )
    return theirs


def _has_passed(deadline: float) -> bool:
    return time.monotonic() > deadline


class _StepLog:
    """Writes the metrics of steps to the metrics file and the log, with the learning rate and the time per step.

    `mean_loss` is of all steps since the line before, where `loss` is of one batch.
    """

    def __init__(self, folder: Path, config: LoopConfig, start: int, last_step: int):
        self._folder, self._config, self._last_step = folder, config, last_step
        self._losses: list[Any] = []  # on the devices
        self._metrics = MetricsLog(folder / METRICS_FILE, start, config.tensorboard)
        self._rate = learning_rate(config.optimizer, config.steps)
        self.reset_clock(start)

    def close(self) -> None:
        """Write what is not written yet."""
        self._metrics.close()

    def reset_clock(self, done: int) -> None:
        """Measure the time per step from here on."""
        self._clock, self._clock_step = time.monotonic(), done

    def add(self, metrics: Metrics) -> None:
        """Note the loss of a step, without waiting for it."""
        self._losses.append(metrics["loss"])

    def write_one(self, done: int, name: str, value: float) -> None:
        """Write a single metric."""
        self._metrics.write({"step": done, name: value})
        log.info("step %d of %d: %s %.4g", done, self._config.steps, name, value)

    def write(self, done: int, metrics: Metrics) -> None:
        """Wait for the step's metrics and write them."""
        defined = {name: x for name, x in metrics.items() if not isinstance(x, Mean) or float(x.count)}
        values = {name: float(x) for name, x in defined.items()}
        values["mean_loss"] = float(np.mean([float(loss) for loss in self._losses]))
        self._losses.clear()
        if bad := [name for name, value in values.items() if not np.isfinite(value)]:
            raise DivergedError(
                f"{', '.join(bad)} not finite at training step {done}; the last state in {self._folder} is from "
                "before. Lower learning_rate or clip_norm, or train in float32."
            )
        values["learning_rate"] = float(self._rate(done - 1))
        if done > self._clock_step:
            values["seconds_per_step"] = (time.monotonic() - self._clock) / (done - self._clock_step)
            self.reset_clock(done)
        self._metrics.write({"step": done, **values})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        left = values.get("seconds_per_step", 0.0) * (self._last_step - done)
        log.info(
            "step %d of %d: %s%s", done, self._config.steps, shown, f"; {duration_text(left)} left" if left else ""
        )


@contextmanager
def prefetch(batches: Callable[[int], Batch], steps: range) -> Iterator[Iterator[Batch]]:
    """The batches of these steps, on all hosts. Process 0 makes each in a thread while the step before it runs."""
    with ThreadPoolExecutor(1) as pool:
        pending: dict[int, Future[Batch]] = {}

        def make(step: int) -> Batch:
            for each in (step, step + 1):
                if each in steps and each not in pending:
                    pending[each] = pool.submit(batches, each)
            return pending.pop(step).result()

        yield (hosts.broadcast(partial(make, step)) for step in steps)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, so that a run stops between two steps. A second one interrupts it."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():
            interrupt(number, frame)
        stopped.set()

    for number in before:
        signal.signal(number, stop)
    try:
        with hosts.handled_interrupt():
            yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
