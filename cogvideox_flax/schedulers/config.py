"""The config of a noise schedule (scheduler_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from cogvideox_flax.config import Config, hf, require
from cogvideox_flax.errors import CheckpointError

DIFFUSERS_NAMES = {
    "CogVideoXDDIMScheduler": "ddim",
    "CogVideoXDPMScheduler": "dpm",
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "EulerDiscreteScheduler": "euler",
    "LCMScheduler": "lcm",
    "UniPCMultistepScheduler": "uni_pc",
}
"""diffusers' class -> our scheduler on a diffusion schedule."""

_SDE = {"algorithm_type": "sde-dpmsolver++"}


def is_general(raw: Mapping[str, Any]) -> bool:
    """Whether it is the config of one of diffusers' solvers for any model, not of one that was released with ours."""
    return not raw.get("_class_name", "CogVideoX").startswith(("CogVideoX", "FlowMatch"))


def solver_kind(raw: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """The name of our scheduler for a config of diffusers' general solvers; with their options as ours have them.

    Args:
        known: diffusers' class -> name.

    Raises:
        CheckpointError: another class, or an option that ours does not have.
    """
    name = raw.get("_class_name", next(iter(known)))
    if name not in known:
        raise CheckpointError(
            f"scheduler config names {name}, which has no counterpart here; expected one of {', '.join(known)}. Save "
            "the pipeline with one of these, or name the model with --release, whose schedule is then taken"
        )
    if not is_general(raw):
        return known[name]
    is_sde = known[name] == "dpmpp_2m" and raw.get("algorithm_type") == _SDE["algorithm_type"]
    solvers: dict[str, dict[str, Any]] = {
        "dpmpp_2m": {"algorithm_type": "dpmsolver++", "solver_type": "midpoint"} | (_SDE if is_sde else {}),
        "uni_pc": {"predict_x0": True, "solver_type": "bh2", "disable_corrector": [], "solver_p": None},
    }
    solver = solvers.get(known[name], {})
    off = ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas", "thresholding"]
    off += ["euler_at_final", "use_dynamic_shifting"]
    solver |= dict.fromkeys(off, False) | {"interpolation_type": "linear", "final_sigmas_type": "zero"}
    if name == "DDIMScheduler":
        raw = {"clip_sample": True} | dict(raw)
    require("scheduler", raw, solver_order=2, lower_order_final=True, variance_type=None, clip_sample=False, **solver)
    return "dpmpp_2m_sde" if is_sde else known[name]


def solver_class(kind: str, known: Mapping[str, str]) -> dict[str, Any]:
    """What names diffusers' class in a config: the inverse of `solver_kind`."""
    is_sde = kind == "dpmpp_2m_sde"
    name = next(name for name, each in known.items() if each == ("dpmpp_2m" if is_sde else kind))
    return {"_class_name": name} | (_SDE if is_sde else {})


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Config):
    """The noise schedule (diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`; see `DIFFUSERS_NAMES`)."""

    diffusers_names: ClassVar[Mapping[str, str]] = DIFFUSERS_NAMES

    kind: str = hf("ddim", None)
    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    snr_shift_scale: float = 3.0
    rescale_betas_zero_snr: bool = True
    set_alpha_to_one: bool = True
    hf_values: ClassVar[Mapping[str, Any]] = {
        "beta_schedule": "scaled_linear",
        "prediction_type": "v_prediction",
        "timestep_spacing": "trailing",
        "clip_sample": False,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta_start <= self.beta_end < 1:
            raise CheckpointError(
                f"the noise schedule goes from beta {self.beta_start} to {self.beta_end}; expected it to rise, below 1"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        kind = solver_kind(raw, DIFFUSERS_NAMES)
        defaults: dict[str, Any] = {"prediction_type": "epsilon", "timestep_spacing": "leading", "snr_shift_scale": 3.0}
        if is_general(raw):  # which have other defaults
            defaults |= {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02, "snr_shift_scale": 1.0}
        raw = defaults | dict(raw)
        require(
            "scheduler",
            raw,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            timestep_spacing="trailing",
            use_flow_sigmas=False,
            trained_betas=None,  # the reference ignores clip_sample and steps_offset
        )
        return cls.named({"rescale_betas_zero_snr": False} | dict(raw), kind=kind)

    def to_hf(self) -> dict[str, Any]:
        return solver_class(self.kind, DIFFUSERS_NAMES) | super().to_hf()
