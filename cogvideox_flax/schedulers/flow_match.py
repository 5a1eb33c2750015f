"""Flow matching with Euler's steps (arXiv 2210.02747), as diffusers `FlowMatchEulerDiscreteScheduler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from cogvideox_flax.config import Config, hf, require
from cogvideox_flax.schedulers.base import Batch, Scheduler, StepTable, Timestep
from cogvideox_flax.schedulers.config import solver_class, solver_kind

DIFFUSERS_NAMES = {
    "FlowMatchEulerDiscreteScheduler": "flow_match",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "UniPCMultistepScheduler": "uni_pc",
}
"""diffusers' class -> our scheduler on a flow."""


@dataclass(frozen=True, kw_only=True)
class FlowMatchConfig(Config):
    """The noise levels of a flow (scheduler_config.json). shift: above 1, more of the steps are at high noise."""

    diffusers_names: ClassVar[Mapping[str, str]] = DIFFUSERS_NAMES

    kind: str = hf("flow_match", None)
    num_train_timesteps: int = 1000
    shift: float = 1.0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        if (kind := solver_kind(raw, DIFFUSERS_NAMES)) != "flow_match":
            defaults = {"use_flow_sigmas": False, "prediction_type": "epsilon"}
            require("scheduler", defaults | dict(raw), use_flow_sigmas=True, prediction_type="flow_prediction")
            raw = {"shift": raw.get("flow_shift", 1.0)} | dict(raw)
        unsupported = ("dynamic_shifting", "karras_sigmas", "exponential_sigmas", "beta_sigmas")
        off = {f"use_{name}": False for name in unsupported} | {"invert_sigmas": False, "stochastic_sampling": False}
        require("scheduler", raw, shift_terminal=None, **off)
        return cls.named(raw, kind=kind)

    def to_hf(self) -> dict[str, Any]:
        named, values = solver_class(self.kind, DIFFUSERS_NAMES), super().to_hf()
        if self.kind != "flow_match":  # a solver for any model
            values |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": values.pop("shift")}
        return named | values


class FlowMatchScheduler(Scheduler):
    """x = (1 - sigma) x0 + sigma noise; the model predicts the velocity noise - x0.

    Noise levels fall linearly from 1 to 0 and are shifted: s sigma / (1 + (s - 1) sigma). A timestep is 1000 sigma, not
    rounded.

    max_sigma: a higher noise level is taken for this one.
    """

    kind = "flow_match"
    max_sigma: ClassVar[float] = 1.0

    def __init__(self, config: FlowMatchConfig):
        self.config: FlowMatchConfig = replace(config, kind=self.kind)

    def plan(self, num_inference_steps: int, *, start: int = 0, timesteps: Sequence[float] | None = None) -> StepTable:
        """As for `Scheduler.plan`; given timesteps are those that the model sees, and are not shifted."""
        self.check_steps(num_inference_steps, start)
        if timesteps is None:
            sigma = self._shifted(self._sigmas(num_inference_steps))
        else:
            most = self.num_train_timesteps
            self.check_timesteps(timesteps, num_inference_steps, most, taken_for=most * self.max_sigma)
            sigma = np.append(np.asarray(timesteps, np.float64) / most, 0)
        sigma = np.minimum(sigma, self.max_sigma)[start:]
        here, there, zero = sigma[:-1], sigma[1:], np.zeros(len(sigma) - 1)
        tables = {
            "signal": zero + 1,
            "sigma": here,
            "from_previous_x0": zero,
            "from_noise": zero,
            **self._rows(here, there),
            "timesteps": self.num_train_timesteps * here,
            "next_timesteps": self.num_train_timesteps * there,
        }
        return StepTable(**{name: table.astype(np.float32) for name, table in tables.items()})

    def _sigmas(self, num_inference_steps: int) -> np.ndarray:
        """The noise levels of all steps and 0, before they are shifted."""
        return np.linspace(1, 0, num_inference_steps + 1)

    def _shifted(self, sigmas: np.ndarray) -> np.ndarray:
        shift = self.config.shift
        return shift * sigmas / (1 + (shift - 1) * sigmas)

    def _rows(self, here: np.ndarray, there: np.ndarray) -> dict[str, np.ndarray]:
        """What a step from one noise level to another does; tables that are left out are zero."""
        return {"from_sample": there / here, "from_x0": 1 - there / here}

    def training_timesteps(self, shares: Float32[Array, " B"]) -> Float32[Array, " B"]:
        return shares * self.num_train_timesteps

    def add_noise(self, sample: Batch, noise: Batch, timestep: Timestep) -> Batch:
        sigma = jnp.asarray(timestep, jnp.float32) / self.num_train_timesteps
        sigma = sigma.reshape(sigma.shape + (1,) * (sample.ndim - sigma.ndim))
        return ((1 - sigma) * sample.astype(jnp.float32) + sigma * noise.astype(jnp.float32)).astype(sample.dtype)

    def velocity(self, sample: Batch, noise: Batch, timestep: Timestep) -> Float32[Array, "B ..."]:
        return noise.astype(jnp.float32) - sample.astype(jnp.float32)
