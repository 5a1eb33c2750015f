"""The samplers: DDIM, the second-order DPM solver and one of a single step, on CogVideoX's noise schedule, which is
shifted, with zero terminal SNR; and Euler's method for flow matching.

Everything that depends on the schedule is computed once, in float64, on the host (`Scheduler.plan`); a step is then one
linear combination with coefficients looked up by the step's index. Notation: abar is the cumulative product of 1 -
beta, a noised sample is sqrt(abar) x0 + sqrt(1 - abar) noise, and the model predicts v = sqrt(abar) noise - sqrt(1 -
abar) x0. Flow matching is in `flow_match`.

Source: DDIM (arXiv 2010.02502), DPM-Solver++ (arXiv 2211.01095, its SDE form of second order), zero terminal SNR (arXiv
2305.08891); diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`.
"""

from cogvideox_flax.schedulers.base import Scheduler, StepTable
from cogvideox_flax.schedulers.ddim import DDIMScheduler
from cogvideox_flax.schedulers.dpm import DPMScheduler
from cogvideox_flax.schedulers.flow_match import FlowMatchConfig, FlowMatchScheduler
from cogvideox_flax.schedulers.one_step import OneStepScheduler

SCHEDULERS: dict[str, type[Scheduler]] = {cls.kind: cls for cls in (DDIMScheduler, DPMScheduler, OneStepScheduler)}
"""Those on a diffusion schedule, by name."""


__all__ = [
    "SCHEDULERS",
    "DDIMScheduler",
    "DPMScheduler",
    "FlowMatchConfig",
    "FlowMatchScheduler",
    "OneStepScheduler",
    "Scheduler",
    "StepTable",
]
