"""Training one stage of the embedded model to its end."""

from __future__ import annotations

from typing import Any

from cogvideox_flax.training.config import LoopConfig
from cogvideox_flax.training.loop import Trainer
from cogvideox_flax.training.step import Params, TrainState
from weights.toy_world.make.settings import ROWS, Run


def train_stage(run: Run, name: str, config: LoopConfig, params: Params, **how: Any) -> TrainState:
    """Train a stage in the folder RUN/`name`.

    Args:
        how: what else `Trainer` takes.

    Raises:
        KeyboardInterrupt: the run was stopped; no later stage may start from its state.
    """
    trainer = Trainer(config=config, folder=run.folder / name, mesh=run.mesh, rows=ROWS, **how)
    state = trainer.train(params)
    if int(state.step) < trainer.last_step:
        raise KeyboardInterrupt
    return state
