"""Training one stage of the embedded model to its end."""

from __future__ import annotations

from cogvideox_flax.training.loop import Trainer
from cogvideox_flax.training.step import Params, TrainState


def train_to_end(trainer: Trainer, params: Params) -> TrainState:
    """`trainer.train`, but a stopped run raises KeyboardInterrupt, since no later stage may start from its state.

    Raises:
        KeyboardInterrupt: the run was stopped.
    """
    state = trainer.train(params)
    if int(state.step) < trainer.last_step:
        raise KeyboardInterrupt
    return state
