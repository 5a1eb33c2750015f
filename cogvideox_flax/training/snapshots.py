"""Training states on disk: written atomically in the background by Orbax, and verified before use.

On several hosts that share the disk, each process writes and reads its own shards. Otherwise process 0 alone writes and
reads: the other processes send it their shards, and the whole state passes through its memory.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.contents import content_hashes, read_record, write_record
from cogvideox_flax.io.paths import free_bytes, size_text
from cogvideox_flax.runtime.global_arrays import copy_own_shards, gather_on_first, on_all, put_from_first
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.multihost.disks import is_shared

log = logging.getLogger(__name__)

_METADATA_BYTES = 2**20
"""What a state takes beside its arrays, generously."""

_TIMEOUT_S = 24 * 3600
"""Seconds that Orbax' processes wait for each other's writes. The loss of a process is noticed without it."""


class Snapshots:
    """The last `keep` states in a folder, by step. A context manager: leaving it waits for the last write.

    When Orbax has put a state in place, each process hashes the files that it wrote: process 0 into STEP.json beside
    the state, process 1 into STEP.1.json, and so on.
    """

    def __init__(self, folder: Path, keep: int):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_has_no_traceback)
        self._folder = folder.resolve()
        self._nbytes = 0  # of the state being written
        self._shared = is_shared(self._folder)
        self._accesses_disk = self._shared or hosts.is_first()
        if not self._shared:
            log.info("the other hosts do not see %s: the training state goes through process 0", self._folder)
        self._manager: Any = _make_manager(self._folder, keep, self._shared) if self._accesses_disk else None
        self._background = ThreadPoolExecutor(1)
        self._write: Future[None] | None = None

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._report_unraisable
        return self

    def _report_unraisable(self, raised: Any) -> None:
        """Python's hook, but for the writes that end after one of them has failed, of which Orbax raises the error."""
        if str(raised.exc_value) != "Event loop is closed":
            self._hook(raised)

    def __exit__(self, *_: object) -> None:
        try:
            self._wait()
        finally:
            self._background.shutdown()
            with suppress(OSError, ValueError):  # raised already
                if self._manager is not None:
                    self._manager.close()
            sys.unraisablehook = self._hook

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as e:
            texts = map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
            raise self._failed(next((text for text in texts if text in str(e)), f"{e}\n".splitlines()[0])) from e

    def _failed(self, reason: str) -> InputError:
        return InputError(
            f"writing a training state to {self._folder} failed: {reason}; free some space: it needs about "
            f"{size_text(self._nbytes)}, and its disk has {size_text(free_bytes(self._folder))} free. The same command "
            "resumes from the last state"
        )

    def save(self, step: int, state: Any) -> None:
        """Copy this process' shards of a state to the host, then write it in the background.

        Args:
            step: later than those of the states that are there.
            state: a pytree of arrays, which may be donated when this returns.

        Raises:
            InputError: the state before it could not be written, or the disk has no room for this one.
        """
        arrays = _by_name(state)
        self._wait()
        self._nbytes = sum(x.nbytes for x in arrays.values()) + _METADATA_BYTES
        if self._accesses_disk and free_bytes(self._folder) < self._nbytes:  # Orbax would also print tracebacks
            raise self._failed(os.strerror(errno.ENOSPC))
        if self._shared:
            with self._errors():
                self._manager.save(step, args=ocp.args.StandardSave(arrays))  # returns when the arrays are copied
            self._write = self._background.submit(self._end_all_on_error, self._finish, step)
        else:
            shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
            shards = copy_own_shards(arrays)
            self._write = self._background.submit(self._end_all_on_error, self._write_gathered, step, shards, shapes)

    def _wait(self) -> None:
        """Wait for the last write, and raise its error."""
        if self._write is not None:
            write, self._write = self._write, None
            write.result()

    def _end_all_on_error(self, write: Callable[..., None], *args: Any) -> None:
        """Run a write. An error ends all processes at once, where there are several: the others may wait for this one
        before it raises the error."""
        try:
            with self._errors():
                write(*args)
        except Exception as e:
            hosts.fail(str(e), 2 if isinstance(e, InputError) else 1)
            raise

    def _write_gathered(self, step: int, shards: Any, shapes: dict[str, jax.ShapeDtypeStruct]) -> None:
        state = gather_on_first(shards, shapes)
        if self._accesses_disk:
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._finish(step)

    def _finish(self, step: int) -> None:
        self._manager.wait_until_finished()
        self._write_hashes(step)

    def restore_latest(self, like: Any) -> Any | None:
        """The newest undamaged state, with the structure, dtypes and placement of `like`; None if there is no state.

        Damaged states are removed, unless all are.

        Raises:
            CheckpointError: all states are damaged, or the state is of another model.
        """
        wanted = _by_name(like)
        step = self._newest_undamaged()
        if step is None:
            return None
        if self._shared:
            restored = self._read(step, {n: ocp.utils.to_shape_dtype_struct(x) for n, x in wanted.items()})
        else:
            unread = {name: np.empty(x.shape, x.dtype) for name, x in wanted.items()}  # no memory is touched
            restored = put_from_first(self._read(step, unread) if self._accesses_disk else {}, wanted)
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def _newest_undamaged(self) -> int | None:
        steps = hosts.broadcast(lambda: sorted(self._manager.all_steps(), reverse=True))
        undamaged = next((step for step in steps if on_all(not self._is_damaged(step))), None)
        if steps and undamaged is None:
            raise CheckpointError(
                f"all training states in {self._folder} are damaged; delete {self._folder.parent} to begin anew"
            )
        for step in steps[: steps.index(undamaged)] if steps else ():
            log.warning("the training state of step %d is damaged and is removed", step)
            if self._accesses_disk:
                self._manager.delete(step)
        self._remove_hashes_of_removed()
        return undamaged

    def _read(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a state, where those of `like` are: on devices, or in the host's memory."""
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except (ValueError, KeyError, TypeError, OSError) as e:
            raise CheckpointError(f"the training state {self._folder / str(step)} does not fit this run: {e}") from e

    def _write_hashes(self, step: int) -> None:
        """Write the hashes of the files of a state that this process wrote."""
        folder, process = self._folder / str(step), jax.process_index()
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and _writer(path) == process]
        try:
            hashes = dict(zip([str(path.relative_to(folder)) for path in files], content_hashes(files), strict=True))
            write_record(self._folder / f"{step}{f'.{process}' if process else ''}.json", {"sha256": hashes})
        except InputError as e:  # the disk is full
            log.info("the training state of step %d has no hashes: %s", step, e)
        self._remove_hashes_of_removed()

    @hosts.on_process_0
    def _remove_hashes_of_removed(self) -> None:
        """Remove the hashes of states that Orbax has removed."""
        for path in self._folder.glob("*.json"):
            step = path.name.partition(".")[0]
            if step.isdecimal() and not (self._folder / step).exists():
                path.unlink(missing_ok=True)

    def _is_damaged(self, step: int) -> bool:
        """Whether this process' share of a state's files differs from their hashes. There are none if their writer was
        killed before it hashed them."""
        if not self._accesses_disk:
            return False
        written: dict[str, str] = {}
        for record in (self._folder / f"{step}.json", *self._folder.glob(f"{step}.*.json")):
            with suppress(OSError, ValueError, KeyError):
                written |= read_record(record)["sha256"]
        readers, reader = (jax.process_count(), jax.process_index()) if self._shared else (1, 0)
        files = sorted(written)[reader::readers]
        try:
            return [written[name] for name in files] != content_hashes([self._folder / str(step) / f for f in files])
        except CheckpointError:  # one cannot be read
            return True


def _make_manager(folder: Path, keep: int, shared: bool) -> ocp.CheckpointManager:
    """Orbax' manager, of all processes, or of process 0 alone."""
    folder.mkdir(parents=True, exist_ok=True)
    several = jax.process_count() > 1
    alone = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="process 0")
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=False,
        enable_async_checkpointing=True,
        async_options=ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S),
        multiprocessing_options=alone if several and not shared else ocp.options.MultiprocessingOptions(),
        single_host_load_and_broadcast=several and shared,  # a network disk may show it to each process differently
        cleanup_tmp_directories=True,  # of a run that was killed, or whose disk was full
    )
    return ocp.CheckpointManager(folder, options=options)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """A logging filter: Orbax also raises the errors that it logs with a traceback."""
    return not record.exc_info


def _writer(path: Path) -> int:
    """The process that wrote a file of a state, by Orbax' name of the directory of its shards; else process 0."""
    found = re.search(r"/ocdbt\.process_(\d+)/", path.as_posix())
    return int(found[1]) if found else 0


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that the files do not depend on Python classes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
