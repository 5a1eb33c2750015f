"""The second-order DPM solver (DPM-Solver++, arXiv 2211.01095), as diffusers `CogVideoXDPMScheduler`."""

from __future__ import annotations

import numpy as np

from cogvideox_flax.schedulers.base import DiffusionScheduler


class DPMScheduler(DiffusionScheduler):
    """SDE-DPM-Solver++ (2M): second order from the x0 of the step before, fresh noise at every step.

    Its state is that x0. Where N does not divide 1000 the last step leads to timestep 0 and still adds noise, as in the
    reference. Source: arXiv 2211.01095.
    """

    kind = "dpm"
    needs_noise = True
    keeps_x0 = True

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        # Half log-SNR: -inf at pure noise and +inf at x0, where the step is first order and the rest is masked.
        with np.errstate(divide="ignore", invalid="ignore"):
            before = (np.log(here) - np.log1p(-here)) / 2
            after = (np.log(there) - np.log1p(-there)) / 2
            h = after - before
            slope = h[1:] / (2 * np.diff(before))
        second = np.zeros_like(here)
        second[1:] = np.where(last[1:], 0, slope)
        gained = -np.expm1(-2 * h)
        from_denoised = np.sqrt(there) * gained
        return {
            "from_sample": np.sqrt((1 - there) / (1 - here)) * np.exp(-h),
            "from_x0": from_denoised * (1 + second),
            "from_previous_x0": -from_denoised * second,
            "from_noise": np.sqrt((1 - there) * gained),
        }
