"""Training states on disk: written atomically in the background by Orbax, and verified before use.

On several hosts, process 0 alone writes and reads them, so that the disk need not be shared: the whole state passes
through its memory, one array after the other over the network.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.contents import content_hashes, read_record, write_record
from cogvideox_flax.io.paths import free_bytes, size_text
from cogvideox_flax.runtime.global_arrays import fetch_on_first, put_from_first
from cogvideox_flax.runtime.multihost import hosts

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_METADATA_BYTES = 2**20
"""What a state takes beside its arrays, generously."""


class Snapshots:
    """The last `keep` states in a folder, by step. A context manager: leaving it waits for the last write.

    When Orbax has put a state in place, its files are hashed, into STEP.json beside it.
    """

    def __init__(self, folder: Path, keep: int):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_has_no_traceback)
        self._folder = folder.resolve()
        self._nbytes = 0  # of the state being written
        self._manager: Any = _make_manager(self._folder, keep) if hosts.is_first() else None
        self._hashing = ThreadPoolExecutor(1)
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._report_unraisable
        return self

    def _report_unraisable(self, raised: Any) -> None:
        """Python's hook, but for the writes that end after one of them has failed, of which Orbax raises the error."""
        if str(raised.exc_value) != "Event loop is closed":
            self._hook(raised)

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
        finally:
            sys.unraisablehook = self._hook

    def _close(self) -> None:
        if self._manager is None:
            return
        with self._errors():
            try:
                self._manager.wait_until_finished()
            finally:
                self._closing.set()
                self._hashing.shutdown()
                self._remove_hashes_of_removed()  # Orbax may have removed a state after the last one was hashed
                self._manager.close()  # which raises the error of the last write again

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
        """Copy the state to the host, then write it in the background. A step already there stays.

        Raises:
            InputError: the state before it could not be written, or the disk has no room for this one.
        """
        state = fetch_on_first(_by_name(state))
        if self._manager is None or step == self._manager.latest_step():
            return
        with self._errors():
            self._manager.wait_until_finished()
        self._nbytes = sum(leaf.nbytes for leaf in state.values()) + _METADATA_BYTES
        if free_bytes(self._folder) < self._nbytes:  # Orbax would also print tracebacks of its threads
            raise self._failed(os.strerror(errno.ENOSPC))
        with self._errors():
            self._manager.save(step, args=ocp.args.StandardSave(state))
        self._hashing.submit(self._write_hashes, step)

    def restore_latest(self, like: Any) -> Any | None:
        """The newest undamaged state, with the structure, dtypes and placement of `like`; None if there is no state.

        Damaged states are removed, unless all are.

        Raises:
            CheckpointError: all states are damaged, or the state is of another model.
        """
        wanted, found = _by_name(like), {}

        @hosts.broadcast_result
        def read() -> bool:
            if (step := self._newest_undamaged()) is not None:
                found.update(self._read(step, wanted))
            return step is not None

        if not read():
            return None
        restored = put_from_first(found, wanted)
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def _newest_undamaged(self) -> int | None:
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            return None
        undamaged = next((step for step in steps if not self._is_damaged(step)), None)
        if undamaged is None:
            raise CheckpointError(
                f"all training states in {self._folder} are damaged; delete {self._folder.parent} to begin anew"
            )
        for step in steps[: steps.index(undamaged)]:
            log.warning("the training state of step %d is damaged and is removed", step)
            self._manager.delete(step)
            self._hash_file(step).unlink(missing_ok=True)
        return undamaged

    def _read(self, step: int, like: dict[str, jax.Array]) -> dict[str, np.ndarray]:
        """The arrays of a state, in the host's memory."""
        shapes = {name: np.empty(x.shape, x.dtype) for name, x in like.items()}  # no memory is touched
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        except (ValueError, KeyError, TypeError, OSError) as e:
            raise CheckpointError(f"the training state {self._folder / str(step)} does not fit this run: {e}") from e

    def _hash_file(self, step: int) -> Path:
        return self._folder / f"{step}.json"

    def _write_hashes(self, step: int) -> None:
        """Write the hashes of a state's files when it is in place."""
        folder = self._folder / str(step)
        while not folder.exists():
            later = (path for path in self._folder.iterdir() if path.name.isdecimal() and int(path.name) > step)
            if self._closing.is_set() or any(later):  # not written, or removed already
                return
            time.sleep(_POLL_SECONDS)
        try:
            write_record(self._hash_file(step), {"sha256": _hashes(folder)})
            self._remove_hashes_of_removed()
        except InputError as e:  # the state was removed meanwhile, or the disk is full
            log.info("the training state of step %d has no hashes: %s", step, e)

    def _remove_hashes_of_removed(self) -> None:
        """Remove the hashes of states that Orbax has removed."""
        for path in self._folder.glob("*.json"):
            if path.stem.isdecimal() and not (self._folder / path.stem).exists():
                path.unlink(missing_ok=True)

    def _is_damaged(self, step: int) -> bool:
        """Whether a state differs from its hashes. It has none if its writer was killed before it was hashed."""
        try:
            written = read_record(self._hash_file(step))["sha256"]
        except (OSError, ValueError, KeyError):
            return False
        try:
            return written != _hashes(self._folder / str(step))
        except CheckpointError:  # it cannot be read
            return True


def _make_manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    """Orbax' manager, used by process 0 alone."""
    folder.mkdir(parents=True, exist_ok=True)
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0,
        active_processes={0} if jax.process_count() > 1 else None,
        barrier_sync_key_prefix="process 0",
    )
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=False,
        enable_async_checkpointing=True,
        multiprocessing_options=alone,
        cleanup_tmp_directories=True,  # of a run that was killed, or whose disk was full
    )
    return ocp.CheckpointManager(folder, options=options)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """A logging filter: Orbax also raises the errors that it logs with a traceback."""
    return not record.exc_info


def _hashes(folder: Path) -> dict[str, str]:
    """File -> hash, of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return dict(zip([str(path.relative_to(folder)) for path in files], content_hashes(files), strict=True))


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that the files do not depend on Python classes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
