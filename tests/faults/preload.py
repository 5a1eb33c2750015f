"""What the commands import, imported once; no device is started by it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from cogvideox_flax import cli
from cogvideox_flax.generate import store
from cogvideox_flax.training import finetune, loop, snapshots  # noqa: F401

keeper = store.StateKeeper
keeper.MIN_INTERVAL_S, keeper.MAX_TIME_SHARE = 0.0, float("inf")  # a state after every step, whatever it costs
loop.MAX_SAVE_SHARE = float("inf")


def main(argv: list[str], stop_at: int | None = None) -> int:
    """Run "cogvideox" or "conversion" with these arguments.

    Args:
        stop_at: a step of denoising or training; killed once its state is on disk.

    Returns:
        The exit code.
    """
    if stop_at is not None:
        _kill_after(store.StateKeeper, "_write", lambda state: state.step == stop_at)
        _kill_after(snapshots.Snapshots, "_write_hashes", lambda step: step == stop_at)
    logging.getLogger().handlers.clear()  # absl's, from an import that the commands do later
    name, *rest = argv
    return cli.main(["convert", *rest] if name == "conversion" else rest)


def _kill_after(owner: type, method: str, condition: Callable[[Any], bool]) -> None:
    real = getattr(owner, method)

    def replaced(self: Any, argument: Any) -> None:
        real(self, argument)
        if condition(argument):
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, method, replaced)
