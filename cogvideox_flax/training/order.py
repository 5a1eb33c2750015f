"""Which examples each step sees: a function of the step's number, so that a resumed run sees what it would have."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from cogvideox_flax.errors import InputError


def examples_of_step(step: int, *, batch: int, count: int, seed: int) -> Int[np.ndarray, " batch"]:
    """Indices of the examples of one step: every epoch is a new permutation, and batches run on across epochs.

    Args:
        step: from 0.
        batch: examples per step.
        count: examples in all.

    Raises:
        InputError: there are no examples.
    """
    if count < 1:
        raise InputError("there are no training examples")
    places = step * batch + np.arange(batch)
    epochs = places // count
    orders = {int(e): np.random.default_rng([seed, int(e)]).permutation(count) for e in np.unique(epochs)}
    return np.array([orders[int(e)][p] for e, p in zip(epochs, places % count, strict=True)])
