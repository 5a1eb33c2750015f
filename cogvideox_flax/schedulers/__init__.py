"""The schedulers: those of the releases (DDIM, the second-order DPM solver, flow matching), one of a single step, and
the usual ones by ComfyUI's names (`solvers`). CogVideoX's noise schedule is shifted, with zero terminal SNR.

Everything that depends on the schedule is computed once, in float64, on the host (`Scheduler.plan`); a step is then one
linear combination with coefficients looked up by the step's index. Notation: abar is the cumulative product of 1 -
beta, a noised sample is sqrt(abar) x0 + sqrt(1 - abar) noise, and the model predicts v = sqrt(abar) noise - sqrt(1 -
abar) x0. Flow matching is in `flow_match`.

Source: DDIM (arXiv 2010.02502), DPM-Solver++ (arXiv 2211.01095, its SDE form of second order), zero terminal SNR (arXiv
2305.08891); diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`.
"""

from cogvideox_flax.schedulers.base import DDIMScheduler, DPMScheduler, Scheduler, StepTable
from cogvideox_flax.schedulers.flow_match import FlowMatchConfig, FlowMatchScheduler
from cogvideox_flax.schedulers.one_step import OneStepScheduler
from cogvideox_flax.schedulers.solvers import (
    DPM2MScheduler,
    DPM2MSDEScheduler,
    EulerAncestralScheduler,
    EulerScheduler,
    FlowDPM2MScheduler,
    FlowDPM2MSDEScheduler,
    FlowEulerAncestralScheduler,
    FlowUniPCScheduler,
    LCMScheduler,
    UniPCScheduler,
)
from cogvideox_flax.schedulers.timestep_law import TimestepLaw

_DIFFUSION = (
    DDIMScheduler,
    DPMScheduler,
    EulerScheduler,
    EulerAncestralScheduler,
    DPM2MScheduler,
    DPM2MSDEScheduler,
    UniPCScheduler,
    LCMScheduler,
    OneStepScheduler,
)
SCHEDULERS: dict[str, type[Scheduler]] = {cls.kind: cls for cls in _DIFFUSION}
"""Those on a diffusion schedule, by name."""

_FLOW = (FlowEulerAncestralScheduler, FlowDPM2MScheduler, FlowDPM2MSDEScheduler, FlowUniPCScheduler)
FLOW_SCHEDULERS: dict[str, type[Scheduler]] = {
    FlowMatchScheduler.kind: FlowMatchScheduler,
    EulerScheduler.kind: FlowMatchScheduler,
    **{cls.kind: cls for cls in _FLOW},
}
"""Those of flow matching, by name."""


__all__ = [
    "FLOW_SCHEDULERS",
    "SCHEDULERS",
    "DDIMScheduler",
    "DPMScheduler",
    "FlowMatchConfig",
    "FlowMatchScheduler",
    "OneStepScheduler",
    "Scheduler",
    "StepTable",
    "TimestepLaw",
]
