"""Training states on disk: written in the background by Orbax, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from cogvideox_flax.errors import CheckpointError


class Snapshots:
    """The last `keep` states in a folder, by step. Use it as a context: leaving waits for the last write."""

    def __init__(self, folder: Path, keep: int):
        self._folder = folder.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def latest_step(self) -> int | None:
        """The step of the newest whole state; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Copy the state to the host, then write it in the background. A step already there stays."""
        if step != self._manager.latest_step():
            self._manager.save(step, args=ocp.args.StandardSave(_by_name(state)))

    def restore(self, step: int, like: Any) -> Any:
        """The state of `step`, with the structure, dtypes and placement of `like`.

        Raises:
            CheckpointError: it cannot be read, or belongs to another model.
        """
        names = list(_by_name(like))  # the order of the leaves; jax.tree.map would sort a dictionary
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(like))
        try:
            found = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except (ValueError, KeyError, OSError) as e:
            raise CheckpointError(f"the training state {self._folder / str(step)} does not fit this run: {e}") from e
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in names])


def _by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their path, so that what is on disk does not depend on Python classes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
