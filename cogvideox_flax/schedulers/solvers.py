"""Schedulers that lead from each timestep of a list to the next one, by ComfyUI's names, for diffusion and for flows.

Their coefficients are functions of the signal a and the noise level s before and after each step (x = a x0 + s noise):
sqrt(abar) and sqrt(1 - abar) of a diffusion process, 1 - sigma and sigma of a flow. Notation: a step from (a, s) to
(a', s'), lambda = log(a / s), h = lambda' - lambda.

Source: Euler and its ancestral form (arXiv 2206.00364, as k-diffusion has them), DPM-Solver++ (arXiv 2211.01095), UniPC
(arXiv 2302.04867), latent consistency models (arXiv 2310.04378); diffusers `EulerDiscreteScheduler`,
`EulerAncestralDiscreteScheduler`, `DPMSolverMultistepScheduler`, `UniPCMultistepScheduler`, `LCMScheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.schedulers.base import DiffusionScheduler, StepTable
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.schedulers.flow_match import FlowMatchScheduler

MIN_ALPHA_CUMPROD = 2.0**-24
"""In place of the zero of a schedule with zero terminal SNR, as in the reference: lambda must be finite."""

Levels = Float[np.ndarray, " N"]


@dataclass(frozen=True)
class Path:
    """N steps on the host, in float64. a, s: signal and noise level before each; a1, s1: after each.

    `rows` of each scheduler below makes the tables of `StepTable` of it that say what a step does; those that are left
    out are zero.
    """

    a: Levels
    s: Levels
    a1: Levels
    s1: Levels

    @property
    def h(self) -> Levels:
        """The change of lambda, infinite in a step to x0."""
        with np.errstate(divide="ignore"):
            return np.log(self.a1 / self.a) - np.log(self.s1 / self.s)

    @property
    def slope(self) -> Levels:
        """Of x0 over lambda, in half steps from the x0 of the step before; 0 in the first step, and in one to x0."""
        h, found = self.h, np.zeros(len(self.a))
        with np.errstate(invalid="ignore"):
            found[1:] = np.where(np.isfinite(h[1:]), h[1:] / (2 * h[:-1]), 0)
        return found


class _Euler:
    kind = "euler"

    def rows(self, path: Path) -> dict[str, np.ndarray]:
        ratio = path.s1 / path.s
        return {"from_sample": ratio, "from_x0": path.a1 - path.a * ratio}


class _EulerAncestral:
    kind = "euler_ancestral"
    needs_noise = True
    keeps_x0 = True  # for those who watch

    def rows(self, path: Path) -> dict[str, np.ndarray]:
        a, s, a1, s1 = path.a, path.s, path.a1, path.s1
        kept = (s1 * a / (a1 * s)) ** 2  # of the noise
        return {
            "from_sample": s1**2 * a / (a1 * s**2),
            "from_x0": a1 * (1 - kept),
            "from_noise": s1 * np.sqrt(1 - kept),
        }


class _DPM2M:
    kind = "dpmpp_2m"
    keeps_x0 = True

    def rows(self, path: Path) -> dict[str, np.ndarray]:
        from_denoised = -path.a1 * np.expm1(-path.h)
        return {
            "from_sample": path.s1 / path.s,
            "from_x0": from_denoised * (1 + path.slope),
            "from_previous_x0": -from_denoised * path.slope,
        }


class _DPM2MSDE:
    kind = "dpmpp_2m_sde"
    needs_noise = True
    keeps_x0 = True

    def rows(self, path: Path) -> dict[str, np.ndarray]:
        gained = -np.expm1(-2 * path.h)
        return {
            "from_sample": path.s1 / path.s * np.exp(-path.h),
            "from_x0": path.a1 * gained * (1 + path.slope),
            "from_previous_x0": -path.a1 * gained * path.slope,
            "from_noise": path.s1 * np.sqrt(gained),
        }


class _UniPC:
    """Predictor and corrector of second order (bh2). The model's x0 at a timestep corrects the sample there, from which
    the step then goes on."""

    kind = "uni_pc"

    def rows(self, path: Path) -> dict[str, np.ndarray]:
        return _DPM2M.rows(self, path) | {"corrector": self._corrector(path)}  # type: ignore[arg-type]

    def _corrector(self, path: Path) -> np.ndarray:
        """Row i: the corrected sample at step i from the sample, the corrected one before, and the x0 of this step, of
        the one before and of that before it."""
        found = np.zeros((len(path.a), 5))
        found[0, 0] = 1
        h = path.h
        for i in range(1, len(found)):
            step = h[i - 1]
            e = np.expm1(-step)
            phi = -e / step
            if i == 1:
                older, now, r = 0.0, 0.5, 1.0
            else:
                r = -h[i - 2] / step
                b1, b2 = (phi - 1) / e, 2 * (-(phi - 1) / step - 0.5) / e
                now = (b2 - r * b1) / (1 - r)
                older = b1 - now
            x0s = np.array([now, 1 - older / r - now, older / r])
            found[i, 1:] = [path.s[i] / path.s[i - 1], *(-path.a[i] * e * x0s)]
        return found

    def init_state(self, sample: Float[Array, "*shape"]) -> tuple[Float32[Array, "*shape"], ...]:
        """The corrected sample and the x0 of the step before, and the x0 of that before it."""
        return tuple(jnp.zeros(sample.shape, jnp.float32) for _ in range(3))

    def x0_of(self, state: Any) -> Any:
        return state[1]

    def step(
        self,
        plan: StepTable,
        i: int | Int[Array, ""],
        prediction: Float[Array, "*shape"],
        sample: Float[Array, "*shape"],
        state: Any = None,
        noise: Float[Array, "*shape"] | None = None,
    ) -> tuple[Float[Array, "*shape"], Any]:
        c, (before, previous, older) = plan.row(i), state
        x = sample.astype(jnp.float32)
        x0 = c.signal * x - c.sigma * prediction.astype(jnp.float32)
        assert c.corrector is not None
        parts = x, before, x0, previous, older
        x = sum((c.corrector[k] * part for k, part in enumerate(parts)), jnp.zeros_like(x))
        new = c.from_sample * x + c.from_x0 * x0 + c.from_previous_x0 * previous
        return new.astype(sample.dtype), (x, x0, previous)


class _DiffusionSolver(DiffusionScheduler):
    """The base of these schedulers on a diffusion process."""

    to_next = True

    def __init__(self, config: SchedulerConfig):
        super().__init__(replace(config, set_alpha_to_one=True))
        self.alphas_cumprod = np.maximum(self.alphas_cumprod, MIN_ALPHA_CUMPROD)

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        path = Path(np.sqrt(here), np.sqrt(1 - here), np.sqrt(there), np.sqrt(1 - there))
        return self.rows(path)  # type: ignore[attr-defined]


class EulerScheduler(_Euler, _DiffusionSolver):
    """First order, deterministic: DDIM to the next timestep of the list."""


class EulerAncestralScheduler(_EulerAncestral, _DiffusionSolver):
    """First order, with as much fresh noise as keeps the noise level."""


class DPM2MScheduler(_DPM2M, _DiffusionSolver):
    """DPM-Solver++ (2M): second order from the x0 of the step before, deterministic."""


class DPM2MSDEScheduler(_DPM2MSDE, _DiffusionSolver):
    """SDE-DPM-Solver++ (2M): as `dpm`, but to the next timestep of the list."""


class UniPCScheduler(_UniPC, _DiffusionSolver):
    """UniPC of second order, deterministic."""


class LCMScheduler(DiffusionScheduler):
    """Latent consistency: x0 from each timestep, noised to the next one. For models that were distilled for it."""

    kind = "lcm"
    needs_noise = True
    keeps_x0 = True
    to_next = True

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        scaled = 10.0 * t  # the timestep over 0.1, as in the reference
        kept = 0.25 / (scaled**2 + 0.25)
        denoised = scaled / np.sqrt(scaled**2 + 0.25)
        signal = np.where(last, 1, np.sqrt(there))
        return {
            "from_sample": signal * kept,
            "from_x0": signal * denoised,
            "from_noise": np.where(last, 0, np.sqrt(1 - there)),
        }


class _FlowSolver(FlowMatchScheduler):
    """The base of these schedulers on a flow."""

    def _sigmas(self, num_inference_steps: int) -> np.ndarray:
        """As in the reference, a little below 1: at 1, lambda is infinite."""
        top = self.num_train_timesteps - 1
        return top / self.num_train_timesteps * np.linspace(1, 0, num_inference_steps + 1)

    def _rows(self, here: np.ndarray, there: np.ndarray) -> dict[str, np.ndarray]:
        path = Path(1 - here, here, 1 - there, there)
        return self.rows(path)  # type: ignore[attr-defined]


class FlowEulerAncestralScheduler(_EulerAncestral, _FlowSolver):
    """`EulerAncestralScheduler` on a flow."""

    def _sigmas(self, num_inference_steps: int) -> np.ndarray:
        return np.linspace(1, 0, num_inference_steps + 1)


class FlowDPM2MScheduler(_DPM2M, _FlowSolver):
    """`DPM2MScheduler` on a flow."""


class FlowDPM2MSDEScheduler(_DPM2MSDE, _FlowSolver):
    """`DPM2MSDEScheduler` on a flow."""


class FlowUniPCScheduler(_UniPC, _FlowSolver):
    """`UniPCScheduler` on a flow. As in the reference, the highest noise level is below 1: at 1, lambda is infinite."""

    max_sigma = 1 - 1e-6

    def _sigmas(self, num_inference_steps: int) -> np.ndarray:
        return np.append(np.linspace(1, 1 / self.num_train_timesteps, num_inference_steps + 1)[:-1], 0)
