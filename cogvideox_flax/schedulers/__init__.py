"""The samplers: DDIM and the second-order DPM solver, on CogVideoX's shifted zero-terminal-SNR noise schedule.

All that depends on the schedule is computed once, in float64, on the host (`Scheduler.plan`); a step is then one linear
combination with coefficients looked up by the step's index. Notation: abar is the cumulative product of 1 - beta, a
noised sample is sqrt(abar) x0 + sqrt(1 - abar) noise, and the model predicts v = sqrt(abar) noise - sqrt(1 - abar) x0.

Source: DDIM (arXiv 2010.02502), DPM-Solver++ (arXiv 2211.01095, its SDE form of second order), zero terminal SNR (arXiv
2305.08891); diffusers `CogVideoXDDIMScheduler`, `CogVideoXDPMScheduler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.errors import InputError
from cogvideox_flax.schedulers.config import SchedulerConfig

Table = Float32[np.ndarray, " N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """The N steps of one run: timesteps, and the coefficients of step i in row i of each table (float32).

    x0       = signal x - sigma v
    x        <- from_sample x + from_x0 x0 + from_previous_x0 (x0 of the step before) + from_noise noise

    The last two are zero for DDIM. Every entry is finite, so the equations hold for all rows without a branch.
    """

    timesteps: Int32[np.ndarray, " N"]
    signal: Table
    sigma: Table
    from_sample: Table
    from_x0: Table
    from_previous_x0: Table
    from_noise: Table

    def __len__(self) -> int:
        return self.timesteps.shape[0]

    def row(self, i: int | Int[Array, ""]) -> Plan:
        """The scalars of step i; i may be traced."""
        return jax.tree.map(lambda table: jnp.asarray(table)[i], self)


class Scheduler:
    """What both samplers share: the noise schedule, the timesteps and the prediction of x0.

    Attributes:
        config: the schedule; its `kind` is always that of the class.
        alphas_cumprod: abar for each training timestep, float64 [num_train_timesteps].
        needs_noise: whether `step` consumes fresh noise.
    """

    kind: ClassVar[str]
    needs_noise: ClassVar[bool]

    def __init__(self, config: SchedulerConfig):
        self.config = replace(config, kind=self.kind)
        self.alphas_cumprod = _alphas_cumprod(config)

    def plan(self, num_inference_steps: int, *, start: int = 0) -> Plan:
        """The tables of a run of `num_inference_steps` steps, on the host.

        Timesteps are spaced as in the reference ("trailing"), and so is its rule for the timestep that a step leads to:
        t - 1000 // N, which is not the next entry when N does not divide 1000.

        Args:
            num_inference_steps: 1 to num_train_timesteps.
            start: leave out this many steps at the noisy end, as video-to-video does.

        Raises:
            InputError: either number is out of range.
        """
        total = self.config.num_train_timesteps
        if not 1 <= num_inference_steps <= total:
            raise InputError(f"num_inference_steps is {num_inference_steps}; expected 1 to {total} (about 50 is usual)")
        if not 0 <= start < num_inference_steps:
            raise InputError(
                f"start is {start}, which leaves none of {num_inference_steps} steps; expected 0 to"
                f" {num_inference_steps - 1} (for video-to-video: raise the strength or the number of steps)"
            )
        # Rounding makes arange one entry too long for some N (61, 103, ...).
        timesteps = np.round(np.arange(total, 0, -total / num_inference_steps)).astype(int) - 1
        timesteps = timesteps[start:num_inference_steps]
        leads_to = timesteps - total // num_inference_steps
        final = 1.0 if self.config.set_alpha_to_one else self.alphas_cumprod[0]
        here = self.alphas_cumprod[timesteps]
        there = np.where(leads_to >= 0, self.alphas_cumprod[leads_to], final)
        tables = {"signal": np.sqrt(here), "sigma": np.sqrt(1 - here)} | self._tables(here, there, leads_to < 0)
        return Plan(timesteps=timesteps.astype(np.int32), **{k: v.astype(np.float32) for k, v in tables.items()})

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
        """The four `from_*` tables in float64. here, there: abar before and after each step; last: x0 is reached."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"

    def init_state(self, sample: Float[Array, "*shape"]) -> Float32[Array, "*shape"] | None:
        """What the first `step` takes as its state."""
        raise NotImplementedError

    def step(
        self,
        plan: Plan,
        i: int | Int[Array, ""],
        prediction: Float[Array, "*shape"],
        sample: Float[Array, "*shape"],
        state: Float32[Array, "*shape"] | None,
        noise: Float[Array, "*shape"] | None = None,
    ) -> tuple[Float[Array, "*shape"], Float32[Array, "*shape"] | None]:
        """One denoising step, in float32.

        Args:
            plan: from `plan`.
            i: the step's row, 0 to N - 1; may be traced.
            prediction: the model's output v, guidance applied.
            sample: the latents at `plan.timesteps[i]`.
            state: from the step before, or from `init_state`.
            noise: standard normal; used if `needs_noise`.

        Returns:
            The sample at the next timestep, in the dtype of `sample`, and the state for the next step.
        """
        raise NotImplementedError

    def add_noise(
        self,
        sample: Float[Array, "B ..."],
        noise: Float[Array, "B ..."],
        timestep: int | Int[Array, ""] | Int[Array, " B"],
    ) -> Float[Array, "B ..."]:
        """Noise clean latents up to `timestep` (one for all, or one per item), in float32; keeps the sample's dtype.

        The reference rounds abar to the sample's dtype first, which in bfloat16 loses all but three digits of it.
        """

        signal, sigma = self._signal_and_sigma(timestep, sample.ndim)
        return (signal * sample.astype(jnp.float32) + sigma * noise.astype(jnp.float32)).astype(sample.dtype)

    def velocity(
        self,
        sample: Float[Array, "B ..."],
        noise: Float[Array, "B ..."],
        timestep: int | Int[Array, ""] | Int[Array, " B"],
    ) -> Float32[Array, "B ..."]:
        """What the model is to predict for `add_noise` of the same: v = sqrt(abar) noise - sqrt(1 - abar) sample."""
        signal, sigma = self._signal_and_sigma(timestep, sample.ndim)
        return signal * noise.astype(jnp.float32) - sigma * sample.astype(jnp.float32)

    def _signal_and_sigma(self, timestep: int | Int[Array, "*B"], ndim: int) -> tuple[Array, Array]:
        """sqrt(abar) and sqrt(1 - abar) at the timestep, float32, with axes for a sample of `ndim`."""

        def at_timestep(table: np.ndarray) -> Array:
            values = jnp.asarray(table, jnp.float32)[timestep]
            return values.reshape(values.shape + (1,) * (ndim - values.ndim))

        return at_timestep(np.sqrt(self.alphas_cumprod)), at_timestep(np.sqrt(1 - self.alphas_cumprod))


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
        plan: Plan,
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


class DPMScheduler(Scheduler):
    """SDE-DPM-Solver++ (2M): second order from the x0 of the step before, fresh noise at every step.

    Its state is that x0. Where N does not divide 1000 the last step leads to timestep 0 and still adds noise, as in the
    reference. Source: arXiv 2211.01095.
    """

    kind = "dpm"
    needs_noise = True

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
        # Half log-SNR; -inf at pure noise and +inf at x0, whose rows are of first order and masked.
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

    def init_state(self, sample: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return jnp.zeros(sample.shape, jnp.float32)

    def step(
        self,
        plan: Plan,
        i: int | Int[Array, ""],
        prediction: Float[Array, "*shape"],
        sample: Float[Array, "*shape"],
        state: Float32[Array, "*shape"] | None,
        noise: Float[Array, "*shape"] | None = None,
    ) -> tuple[Float[Array, "*shape"], Float32[Array, "*shape"]]:
        if state is None or noise is None:
            raise TypeError("DPMScheduler.step needs the state of the step before (init_state at first) and noise")
        c = plan.row(i)
        x = sample.astype(jnp.float32)
        x0 = c.signal * x - c.sigma * prediction.astype(jnp.float32)
        x = c.from_sample * x + c.from_x0 * x0 + c.from_previous_x0 * state + c.from_noise * noise.astype(jnp.float32)
        return x.astype(sample.dtype), x0


SCHEDULERS: dict[str, type[Scheduler]] = {cls.kind: cls for cls in (DDIMScheduler, DPMScheduler)}


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The sampler that `config.kind` names.

    Raises:
        InputError: there is no such sampler.
    """
    if config.kind not in SCHEDULERS:
        raise InputError(f"unknown scheduler {config.kind!r}; known are {', '.join(SCHEDULERS)}")
    return SCHEDULERS[config.kind](config)


def guidance_scales(
    timesteps: Sequence[int] | Int[np.ndarray, " N"],
    num_inference_steps: int,
    guidance_scale: float,
    dynamic: bool | Literal["index"] = False,
) -> Float32[np.ndarray, " N"]:
    """The guidance scale of each step, computed in float64 on the host.

    dynamic=False: `guidance_scale` throughout.
    dynamic=True: 1 + guidance_scale (1 - cos(pi p^5)) / 2 with p = (N - t) / N, where t is the timestep (999 to 0), not
        the step. That is what the released pipeline computes: the scale swings between 1 and 1 + guidance_scale.
    dynamic="index": the same ramp with p = i / N for step i: a monotonic rise from 1 towards 1 + guidance_scale.

    Args:
        timesteps: `Plan.timesteps`.
        num_inference_steps: N; for video-to-video, the number of steps that are run.
        guidance_scale: the weight of the prompt; 1 is no guidance.
        dynamic: as above.
    """
    if not dynamic:
        return np.full(len(timesteps), guidance_scale, np.float32)
    n = num_inference_steps
    done = range(len(timesteps)) if dynamic == "index" else [n - int(t) for t in timesteps]
    # The math module, as in the reference: for few steps the argument is so large that its last bit decides the cosine.
    return np.array([1 + guidance_scale * ((1 - math.cos(math.pi * (d / n) ** 5.0)) / 2) for d in done], np.float32)


def _alphas_cumprod(config: SchedulerConfig) -> np.ndarray:
    betas = np.linspace(config.beta_start**0.5, config.beta_end**0.5, config.num_train_timesteps) ** 2
    abar = np.cumprod(1 - betas)
    shift = config.snr_shift_scale
    abar = abar / (shift + (1 - shift) * abar)
    if config.rescale_betas_zero_snr:
        root = np.sqrt(abar)
        abar = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2
    return abar
