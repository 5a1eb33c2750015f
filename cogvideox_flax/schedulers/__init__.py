"""The samplers: DDIM and the second-order DPM solver, on CogVideoX's shifted zero-terminal-SNR noise schedule.

Everything that depends on the schedule is computed once, in float64, on the host (`Scheduler.plan`); a step is then one
linear combination with coefficients looked up by the step's index. Notation: abar is the cumulative product of 1 -
beta, a noised sample is sqrt(abar) x0 + sqrt(1 - abar) noise, and the model predicts v = sqrt(abar) noise - sqrt(1 -
abar) x0.

Source: DDIM (arXiv 2010.02502), DPM-Solver++ (arXiv 2211.01095, its SDE form of second order), zero terminal SNR (arXiv
2305.08891); diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`.
"""

from cogvideox_flax.schedulers.base import Scheduler, StepTable
from cogvideox_flax.schedulers.ddim import DDIMScheduler
from cogvideox_flax.schedulers.dpm import DPMScheduler
from cogvideox_flax.schedulers.guidance import guidance_scales

SCHEDULERS: dict[str, type[Scheduler]] = {cls.kind: cls for cls in (DDIMScheduler, DPMScheduler)}


__all__ = [
    "SCHEDULERS",
    "DDIMScheduler",
    "DPMScheduler",
    "Scheduler",
    "StepTable",
    "guidance_scales",
]
