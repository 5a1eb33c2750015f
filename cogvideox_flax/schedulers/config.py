"""The config of a noise schedule (scheduler_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from cogvideox_flax.config import Config, require
from cogvideox_flax.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Config):
    """The noise schedule (diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`)."""

    kind: str = "ddim"
    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    snr_shift_scale: float = 3.0
    rescale_betas_zero_snr: bool = True
    set_alpha_to_one: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta_start <= self.beta_end < 1:
            raise CheckpointError(
                f"the noise schedule goes from beta {self.beta_start} to {self.beta_end}; expected it to rise, below 1"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        kinds = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm"}
        name = raw.get("_class_name", "CogVideoXDDIMScheduler")
        if name not in kinds:
            raise CheckpointError(f"scheduler config names {name}; expected one of {sorted(kinds)}")
        require(
            "scheduler",
            {"prediction_type": "epsilon", "timestep_spacing": "leading"} | dict(raw),
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            timestep_spacing="trailing",
            trained_betas=None,  # the reference ignores clip_sample and steps_offset
        )
        return cls(
            kind=kinds[name],
            num_train_timesteps=raw.get("num_train_timesteps", 1000),
            beta_start=raw.get("beta_start", 0.00085),
            beta_end=raw.get("beta_end", 0.012),
            snr_shift_scale=raw.get("snr_shift_scale", 3.0),
            rescale_betas_zero_snr=raw.get("rescale_betas_zero_snr", False),
            set_alpha_to_one=raw.get("set_alpha_to_one", True),
        )
