"""The order of the training examples: a function of the step's number, so that a resumed run sees the same ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def shuffled_indices(step: int, *, batch: int, count: int, seed: int) -> Int[np.ndarray, " batch"]:
    """Indices of the examples of one step. Every epoch is a new permutation; a batch may span two epochs.

    Args:
        step: from 0.
        batch: examples per step.
        count: examples in all.
    """
    positions = step * batch + np.arange(batch)
    epochs = positions // count
    permutations = {int(e): np.random.default_rng([seed, int(e)]).permutation(count) for e in np.unique(epochs)}
    return np.array([permutations[int(e)][p] for e, p in zip(epochs, positions % count, strict=True)])
