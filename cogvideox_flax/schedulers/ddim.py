"""DDIM (arXiv 2010.02502), as diffusers `CogVideoXDDIMScheduler`."""

from __future__ import annotations

import numpy as np

from cogvideox_flax.schedulers.base import DiffusionScheduler


class DDIMScheduler(DiffusionScheduler):
    """Deterministic, first order. Its state is None. Source: arXiv 2010.02502, eta 0."""

    kind = "ddim"

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        from_sample = np.sqrt((1 - there) / (1 - here))
        return {"from_sample": from_sample, "from_x0": np.sqrt(there) - np.sqrt(here) * from_sample}
