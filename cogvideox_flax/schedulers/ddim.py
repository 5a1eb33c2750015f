"""DDIM (arXiv 2010.02502), as diffusers `CogVideoXDDIMScheduler`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.schedulers.base import Scheduler, StepTable


class DDIMScheduler(Scheduler):
    """Deterministic, first order. Its state is None. Source: arXiv 2010.02502, eta 0."""

    kind = "ddim"
    needs_noise = False

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
        from_sample = np.sqrt((1 - there) / (1 - here))
        zero = np.zeros_like(here)
        return {
            "from_sample": from_sample,
            "from_x0": np.sqrt(there) - np.sqrt(here) * from_sample,
            "from_previous_x0": zero,
            "from_noise": zero,
        }

    def init_state(self, sample: Float[Array, "*shape"]) -> None:
        return None

    def step(
        self,
        plan: StepTable,
        i: int | Int[Array, ""],
        prediction: Float[Array, "*shape"],
        sample: Float[Array, "*shape"],
        state: Float32[Array, "*shape"] | None = None,
        noise: Float[Array, "*shape"] | None = None,
    ) -> tuple[Float[Array, "*shape"], None]:
        c = plan.row(i)
        x = sample.astype(jnp.float32)
        x0 = c.signal * x - c.sigma * prediction.astype(jnp.float32)
        return (c.from_sample * x + c.from_x0 * x0).astype(sample.dtype), None
