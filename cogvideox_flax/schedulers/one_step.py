"""The one-step scheduler of models that restore a clip, such as DOVE (arXiv 2505.16239)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from cogvideox_flax.errors import InputError
from cogvideox_flax.schedulers.base import Batch, DDIMScheduler, StepTable, Timestep

TIMESTEP = 399
"""Of the only step. Source: `sr_noise_step` of the authors' inference_script.py."""


class OneStepScheduler(DDIMScheduler):
    """From the latents of a clip to x0 in one step of DDIM; no noise is added.

    The clip's latents take the place of a sample at timestep 399: x0 = sqrt(abar) latents - sqrt(1 - abar) v.
    """

    kind = "one_step"
    needs_video = True
    fixed: ClassVar[Mapping[str, Any]] = {
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "use_dynamic_cfg": False,
        "strength": 1.0,
        "timesteps": None,
    }

    def plan(
        self, num_inference_steps: int = 1, *, start: int = 0, timesteps: Sequence[float] | None = None
    ) -> StepTable:
        """The table of the only step.

        Raises:
            InputError: another number of steps, a start other than 0, or a schedule that ends before timestep 399.
        """
        if (num_inference_steps, start, timesteps) != (1, 0, None):
            raise InputError(
                f"num_inference_steps is {num_inference_steps} and start {start}; the {self.kind} scheduler does 1 "
                "step from 0"
            )
        if self.num_train_timesteps <= TIMESTEP:
            raise InputError(
                f"the noise schedule has {self.num_train_timesteps} timesteps; the {self.kind} scheduler needs more "
                f"than {TIMESTEP}. Use another scheduler"
            )
        return super().plan(1, timesteps=[TIMESTEP])

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        return super()._tables(here, np.ones_like(here), last, t)  # to x0, whatever the config's last abar is

    def start_from(self, latents: Batch, noise: Batch, timestep: Timestep) -> Batch:
        return latents
