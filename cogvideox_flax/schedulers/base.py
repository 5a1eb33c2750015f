"""The noise schedule, the table of a run's steps, the base classes of the schedulers, and CogVideoX's own two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Num

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.schedulers.config import SchedulerConfig

Table = Float32[np.ndarray, " N"]
Batch = Float[Array, "B ..."]
Timestep = int | float | Num[Array, ""] | Num[Array, " B"]
"""One for all, or one per item."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, kw_only=True)
class StepTable:
    """The N steps of one run: timesteps, and the float32 coefficients of step i in row i of each table.

    timesteps: int32, or float32 where the scheduler's are not whole numbers.
    next_timesteps: to which each step leads, 0 after the last; of the same dtype.

    x0       = signal x - sigma v
    x        <- from_sample x + from_x0 x0 + from_previous_x0 (x0 of the step before) + from_noise noise

    The last two are zero for DDIM and flow matching. All entries are finite, so the same equations serve every row.

    corrector: of schedulers that correct x before the step, see `solvers`.
    """

    timesteps: Int32[np.ndarray, " N"] | Float32[np.ndarray, " N"]
    next_timesteps: Int32[np.ndarray, " N"] | Float32[np.ndarray, " N"]
    signal: Table
    sigma: Table
    from_sample: Table
    from_x0: Table
    from_previous_x0: Table
    from_noise: Table
    corrector: Float32[np.ndarray, "N 5"] | None = None

    def __len__(self) -> int:
        return self.timesteps.shape[0]

    def row(self, i: int | Int[Array, ""]) -> StepTable:
        """The scalars of step i; i may be traced."""
        return jax.tree.map(lambda table: jnp.asarray(table)[i], self)


class Scheduler:
    """The base of the schedulers. One whose step is a row of its table defines its `plan`, `add_noise` and `velocity`
    alone.

    Schedulers of this package are equal if they compute the same; those of other classes are equal to themselves alone.

    Attributes:
        config: the noise schedule; its `kind` is that of the class.
        needs_noise: whether `step` consumes fresh noise.
        keeps_x0: whether the state is the x0 of the step before; else there is none.
        needs_video: whether a run starts from a clip, never from noise.
        fixed: field of a request -> the only value that it serves, for those of which there is one.
    """

    kind: ClassVar[str]
    needs_noise: ClassVar[bool] = False
    keeps_x0: ClassVar[bool] = False
    needs_video: ClassVar[bool] = False
    fixed: ClassVar[Mapping[str, Any]] = {}
    config: Any

    @property
    def num_train_timesteps(self) -> int:
        return self.config.num_train_timesteps

    @property
    def identity(self) -> dict[str, Any] | None:
        """What decides the tables and the steps, as JSON values: the config with the scheduler's own `kind`.

        None for a class from outside this package: its code is not known, and may change.
        """
        is_known = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]
        return self.config.to_dict() if is_known else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scheduler) or self.identity is None:
            return self is other
        return type(self) is type(other) and self.config == other.config

    def __hash__(self) -> int:
        return object.__hash__(self) if self.identity is None else hash((type(self), self.config))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"

    def plan(self, num_inference_steps: int, *, start: int = 0, timesteps: Sequence[float] | None = None) -> StepTable:
        """The tables of a run of `num_inference_steps` steps, on the host.

        Args:
            num_inference_steps: 1 to num_train_timesteps.
            start: skip this many steps at the noisy end, as video-to-video does.
            timesteps: so many, in place of the scheduler's own; each step leads to the next of them, the last to x0.

        Raises:
            InputError: a number is out of range.
        """
        raise NotImplementedError

    def check_timesteps(
        self,
        timesteps: Sequence[float],
        num_inference_steps: int,
        most: float,
        *,
        whole: bool = False,
        taken_for: float = math.inf,
    ) -> None:
        """Refuse timesteps that do not fall from `most` or less, or are not as many as the steps.

        Args:
            whole: they are whole numbers down to 0. Else they end above 0, where the sample is x0 already, and fall as
                float32, in which the model sees them.
            taken_for: the timestep that higher ones are taken for.
        """
        in_range = len(timesteps) == num_inference_steps and all(0 <= t <= most for t in timesteps)
        seen = np.asarray(timesteps if in_range else [], np.float32).clip(max=taken_for)
        if not in_range or not (np.diff(seen) < 0).all() or not (whole or seen[-1] > 0):
            highest = f"{most:g}" if taken_for >= most else f"{most:g} (taken for {taken_for:g})"
            raise InputError(
                f"timesteps are {short_repr(list(timesteps))}; expected {num_inference_steps} that fall, from "
                f"{highest} to {'0' if whole else 'above 0'}, for {self.kind}"
            )
        if whole and any(t != int(t) for t in timesteps):
            raise InputError(f"timesteps are {short_repr(list(timesteps))}; those of this model are whole numbers")

    def check_steps(self, num_inference_steps: int, start: int) -> None:
        """Refuse the arguments of `plan` that are out of range."""
        total = self.num_train_timesteps
        if not 1 <= num_inference_steps <= total:
            raise InputError(f"num_inference_steps is {num_inference_steps}; expected 1 to {total} (about 50 is usual)")
        if not 0 <= start < num_inference_steps:
            raise InputError(
                f"start is {start}, which leaves none of {num_inference_steps} steps; expected 0 to"
                f" {num_inference_steps - 1} (for video-to-video: raise the strength or the number of steps)"
            )

    def init_state(self, sample: Float[Array, "*shape"]) -> Any:
        """The state of the first `step`, a pytree of arrays: zeros, float32 [*shape]; None without one."""
        return jnp.zeros(sample.shape, jnp.float32) if self.keeps_x0 else None

    def x0_of(self, state: Any) -> Float32[Any, "*shape"] | None:
        """The x0 of the step before, where the state holds it."""
        return state

    def step(
        self,
        plan: StepTable,
        i: int | Int[Array, ""],
        prediction: Float[Array, "*shape"],
        sample: Float[Array, "*shape"],
        state: Any = None,
        noise: Float[Array, "*shape"] | None = None,
    ) -> tuple[Float[Array, "*shape"], Any]:
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
        if (self.keeps_x0 and state is None) or (self.needs_noise and noise is None):
            raise TypeError(f"a step of {self.kind} needs the state of the one before (init_state at first), and noise")
        c = plan.row(i)
        x = sample.astype(jnp.float32)
        x0 = c.signal * x - c.sigma * prediction.astype(jnp.float32)
        x = c.from_sample * x + c.from_x0 * x0
        if self.keeps_x0:
            x = x + c.from_previous_x0 * state
        if self.needs_noise:
            assert noise is not None
            x = x + c.from_noise * noise.astype(jnp.float32)
        return x.astype(sample.dtype), x0 if self.keeps_x0 else None

    def add_noise(self, sample: Batch, noise: Batch, timestep: Timestep) -> Batch:
        """Noise clean latents to `timestep`, in float32; the dtype does not change."""
        raise NotImplementedError

    def training_timesteps(self, shares: Float32[Array, " B"]) -> Int32[Array, " B"] | Float32[Array, " B"]:
        """The timesteps at these shares, 0 to 1, of the noise schedule: whole numbers."""
        return (shares * self.num_train_timesteps).astype(jnp.int32).clip(0, self.num_train_timesteps - 1)

    def start_from(self, latents: Batch, noise: Batch, timestep: Timestep) -> Batch:
        """The sample with which a run from a clip begins: the clip's latents, noised to the first timestep."""
        return self.add_noise(latents, noise, timestep)

    def velocity(self, sample: Batch, noise: Batch, timestep: Timestep) -> Float32[Array, "B ..."]:
        """The target of the model for `add_noise` of the same arguments."""
        raise NotImplementedError


class DiffusionScheduler(Scheduler):
    """The base of the schedulers of a diffusion process with v-prediction.

    Attributes:
        alphas_cumprod: abar for each training timestep, float64 [num_train_timesteps].
        to_next: whether a step leads to the next timestep of the list; else to t - 1000 // N, as in the reference's
            DDIM and DPM, which is not the next entry when N does not divide 1000.
    """

    to_next: ClassVar[bool] = False
    config: SchedulerConfig

    def __init__(self, config: SchedulerConfig):
        self.config = replace(config, kind=self.kind)
        self.alphas_cumprod = _alphas_cumprod(config)

    def plan(self, num_inference_steps: int, *, start: int = 0, timesteps: Sequence[float] | None = None) -> StepTable:
        """As for `Scheduler.plan`; timesteps are spaced as in the reference ("trailing")."""
        self.check_steps(num_inference_steps, start)
        total = self.num_train_timesteps
        if timesteps is None:
            # Because of rounding, arange has one entry too many for some N (61, 103, ...).
            steps = np.round(np.arange(total, 0, -total / num_inference_steps)).astype(int) - 1
        else:
            self.check_timesteps(timesteps, num_inference_steps, total - 1, whole=True)
            steps = np.asarray(timesteps).astype(int)
        steps = steps[start:num_inference_steps]
        is_listed = self.to_next or timesteps is not None
        leads_to = np.append(steps[1:], -1) if is_listed else steps - total // num_inference_steps
        final = 1.0 if self.config.set_alpha_to_one else self.alphas_cumprod[0]
        here = self.alphas_cumprod[steps]
        there = np.where(leads_to >= 0, self.alphas_cumprod[leads_to], final)
        tables = {name: np.zeros_like(here) for name in ("from_previous_x0", "from_noise")}
        tables |= {"signal": np.sqrt(here), "sigma": np.sqrt(1 - here)}
        tables |= self._tables(here, there, leads_to < 0, steps)
        return StepTable(
            timesteps=steps.astype(np.int32),
            next_timesteps=np.maximum(leads_to, 0).astype(np.int32),
            **{name: table.astype(np.float32) for name, table in tables.items()},
        )

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        """The `from_*` tables in float64; those that are left out are zero.

        here, there: abar before and after each step. last: steps to x0. t: timesteps.
        """
        raise NotImplementedError

    def add_noise(self, sample: Batch, noise: Batch, timestep: Timestep) -> Batch:
        """sqrt(abar) sample + sqrt(1 - abar) noise.

        The reference rounds abar to the sample's dtype first, which in bfloat16 leaves three digits.
        """
        signal, sigma = self._signal_and_sigma(timestep, sample.ndim)
        return (signal * sample.astype(jnp.float32) + sigma * noise.astype(jnp.float32)).astype(sample.dtype)

    def velocity(self, sample: Batch, noise: Batch, timestep: Timestep) -> Float32[Array, "B ..."]:
        """sqrt(abar) noise - sqrt(1 - abar) sample."""
        signal, sigma = self._signal_and_sigma(timestep, sample.ndim)
        return signal * noise.astype(jnp.float32) - sigma * sample.astype(jnp.float32)

    def _signal_and_sigma(self, timestep: Any, ndim: int) -> tuple[Array, Array]:
        """sqrt(abar) and sqrt(1 - abar) at the timestep, float32, with axes for a sample of `ndim`."""

        def at_timestep(table: np.ndarray) -> Array:
            values = jnp.asarray(table, jnp.float32)[timestep]
            return values.reshape(values.shape + (1,) * (ndim - values.ndim))

        return at_timestep(np.sqrt(self.alphas_cumprod)), at_timestep(np.sqrt(1 - self.alphas_cumprod))


class DDIMScheduler(DiffusionScheduler):
    """Deterministic, first order. Its state is None. Source: arXiv 2010.02502, eta 0."""

    kind = "ddim"

    def _tables(self, here: np.ndarray, there: np.ndarray, last: np.ndarray, t: np.ndarray) -> dict[str, np.ndarray]:
        from_sample = np.sqrt((1 - there) / (1 - here))
        return {"from_sample": from_sample, "from_x0": np.sqrt(there) - np.sqrt(here) * from_sample}


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


def _alphas_cumprod(config: SchedulerConfig) -> np.ndarray:
    betas = np.linspace(config.beta_start**0.5, config.beta_end**0.5, config.num_train_timesteps) ** 2
    abar = np.cumprod(1 - betas)
    shift = config.snr_shift_scale
    abar = abar / (shift + (1 - shift) * abar)
    if config.rescale_betas_zero_snr:
        root = np.sqrt(abar)
        abar = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2
    return abar
