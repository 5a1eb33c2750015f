"""Training states on disk: written in the background by Orbax, whole or not at all, and checked before use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from cogvideox_flax.errors import CheckpointError, InputError
from cogvideox_flax.io.contents import content_hashes, read_record, write_record

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class Snapshots:
    """The last `keep` states in a folder, by step. Use it as a context: leaving waits for the last write.

    A state's files are hashed once Orbax has put it in place, into STEP.json beside it.
    """

    def __init__(self, folder: Path, keep: int):
        logging.getLogger("absl").addFilter(_has_no_traceback)
        self._folder = folder.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._hashing = ThreadPoolExecutor(1)
        self._leaving = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self._errors():
                self._manager.wait_until_finished()
        finally:
            self._leaving.set()
            self._hashing.shutdown()
            self._manager.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as e:
            reason = "No space left on device" if "No space left on device" in str(e) else str(e).splitlines()[0]
            raise InputError(
                f"writing a training state to {self._folder} failed: {reason}; free some space, the same command goes "
                "on from the last one"
            ) from e

    def latest_step(self) -> int | None:
        """The step of the newest state; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Copy the state to the host, then write it in the background. A step already there stays.

        Raises:
            InputError: the state before it could not be written.
        """
        if step == self._manager.latest_step():
            return
        with self._errors():
            self._manager.save(step, args=ocp.args.StandardSave(_by_name(state)))
        if jax.process_index() == 0:
            self._hashing.submit(self._write_hashes, step)

    def restore_latest(self, like: Any) -> tuple[int, Any] | None:
        """The newest state that is as it was written, and its step; None if there is no state.

        Damaged ones are removed. The result has the structure, dtypes and placement of `like`.

        Raises:
            CheckpointError: all are damaged, or one belongs to another model.
        """
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
        return undamaged, self._restore(undamaged, like)

    def _restore(self, step: int, like: Any) -> Any:
        names = list(_by_name(like))  # the order of the leaves; jax.tree.map would sort a dictionary
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (ValueError, KeyError, TypeError, OSError) as e:
            raise CheckpointError(f"the training state {self._folder / str(step)} does not fit this run: {e}") from e
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in names])

    def _hash_file(self, step: int) -> Path:
        return self._folder / f"{step}.json"

    def _write_hashes(self, step: int) -> None:
        """Write the hashes of a state's files once it is in place, and remove those of states that are gone."""
        folder = self._folder / str(step)
        while not folder.exists():
            later = (path for path in self._folder.iterdir() if path.name.isdecimal() and int(path.name) > step)
            if self._leaving.is_set() or any(later):  # it was not written, or is gone already
                return
            time.sleep(_POLL_SECONDS)
        try:
            write_record(self._hash_file(step), {"sha256": _hashes(folder)})
            for path in self._folder.glob("*.json"):
                if path.stem.isdecimal() and not (self._folder / path.stem).exists():
                    path.unlink(missing_ok=True)
        except InputError as e:  # gone again, or a full disk: the state is there without hashes
            log.info("the training state of step %d has no hashes: %s", step, e)

    def _is_damaged(self, step: int) -> bool:
        """Whether a state differs from what was written, where that is known: its writer may have been killed before
        it was hashed."""
        try:
            written = read_record(self._hash_file(step))["sha256"]
        except (OSError, ValueError, KeyError):
            return False
        try:
            return written != _hashes(self._folder / str(step))
        except CheckpointError:  # it cannot be read
            return True


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """A filter for Orbax' messages: the errors that it logs with a traceback it also raises."""
    return not record.exc_info


def _hashes(folder: Path) -> dict[str, str]:
    """File -> hash, of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return dict(zip([str(path.relative_to(folder)) for path in files], content_hashes(files), strict=True))


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that what is on disk does not depend on Python classes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
