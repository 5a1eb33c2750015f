"""Guidance: how the denoiser's predictions with and without the prompt become one, and its scale at each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Num

from cogvideox_flax import sharding
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.generate.predict.plain import Embed, Latents, StepInfo
from cogvideox_flax.models.denoiser import Denoiser, Features
from cogvideox_flax.schedulers import StepTable


class GuidanceInputs(NamedTuple):
    """What guidance takes of a step, beside the prediction.

    scale, step: guidance's scale, and the scheduler's scalars.
    sample: the latents that the prediction is for.
    shift: of other guidance, see `SkipLayer`.
    """

    scale: Float32[Array, ""]
    sample: Latents
    step: StepTable
    shift: Latents | float = 0.0


@dataclass(frozen=True)
class Unguided:
    """The prediction with the prompt, as it is.

    passes: how often the denoiser sees each video.
    """

    passes: ClassVar[int] = 1

    def batch(self, latents: Latents) -> Latents:
        """The latents as the denoiser sees them."""
        return sharding.constrain(latents, "batch")

    def features(self, conditioning: Conditioning) -> Features:
        """What steers the denoiser, with rows as in `batch`."""
        return {**conditioning.text, **conditioning.visual}

    def __call__(self, prediction: Float32[Array, "B T h w C"], inputs: GuidanceInputs) -> Latents:
        """One prediction for each video."""
        return prediction + inputs.shift


@dataclass(frozen=True)
class ClassifierFree:
    """Away from the prediction with the negative prompt, by a scale that may change over the steps.

    rescale: how much of the deviation that guidance adds to each video's prediction is taken back, 0 to 1: against
        colours that are too strong. Source: arXiv 2305.08891, section 3.4.

    Source: classifier-free guidance (arXiv 2207.12598).
    """

    rescale: float = 0.0

    passes: ClassVar[int] = 2

    def batch(self, latents: Latents) -> Float32[Array, "2*B T h w C"]:
        return _in_one_batch(latents, latents)

    def features(self, conditioning: Conditioning) -> Features:
        """Those of the negative prompts, then those of the prompts."""
        assert conditioning.negative_text is not None
        halves = [{**text, **conditioning.visual} for text in (conditioning.negative_text, conditioning.text)]
        return jax.tree.map(_in_one_batch, *halves)

    def __call__(self, prediction: Float32[Array, "2*B T h w C"], inputs: GuidanceInputs) -> Latents:
        without, with_prompt = jnp.split(prediction, 2)
        guided = self.combine(without, with_prompt, inputs) + inputs.shift
        if not self.rescale:
            return guided
        ratio = with_prompt.std(_VIDEO, keepdims=True) / guided.std(_VIDEO, keepdims=True)
        return guided * (self.rescale * ratio + (1 - self.rescale))

    def combine(self, without: Latents, with_prompt: Latents, inputs: GuidanceInputs) -> Latents:
        """The guided prediction, before it is rescaled."""
        return without + inputs.scale * (with_prompt - without)


@dataclass(frozen=True)
class CFGZeroStar(ClassifierFree):
    """CFG-Zero*: the prediction without the prompt is scaled to what of it points along the one with it.

    Source: arXiv 2503.18886, equation 9; its zeroed first steps are left out, since a velocity of 0 is no still stand
    on a diffusion schedule.
    """

    def combine(self, without: Latents, with_prompt: Latents, inputs: GuidanceInputs) -> Latents:
        along = _dot(with_prompt, without) / (_dot(without, without) + 1e-8) * without
        return along + inputs.scale * (with_prompt - along)


@dataclass(frozen=True)
class APG(ClassifierFree):
    """Adaptive projected guidance: of the difference that the prompt makes to x0, what points along x0 is left out.

    Source: arXiv 2410.02416, without its momentum and its bound of the norm.
    """

    def combine(self, without: Latents, with_prompt: Latents, inputs: GuidanceInputs) -> Latents:
        step = inputs.step
        x0 = step.signal * inputs.sample - step.sigma * with_prompt
        difference = -step.sigma * (with_prompt - without)  # of x0
        across = difference - _dot(difference, x0) / _dot(x0, x0) * x0
        return with_prompt - (inputs.scale - 1) * across / step.sigma


@dataclass(frozen=True)
class SkipLayer:
    """Away from what the denoiser predicts with the prompt without one of its blocks: a worse prediction of its own.

    block: counted from 0.
    scale: of the difference.

    Source: skip-layer guidance of Stable Diffusion 3.5 as in diffusers' guider; spatiotemporal skip guidance (arXiv
    2411.18664).
    """

    embed: Embed
    block: int
    scale: float

    def __call__(
        self, denoiser: Denoiser, latents: Latents, features: Features, info: StepInfo, prediction: Latents
    ) -> Latents:
        """What is added to the guided prediction.

        features: of the prompts.
        prediction: with all blocks.
        """
        tokens: Any = self.embed(denoiser, latents, features, info.timestep, next_timestep=info.next_timestep)
        before = denoiser.run_blocks(tokens, stop=self.block) if self.block else tokens
        after = denoiser.run_blocks(before, start=self.block + 1)
        return self.scale * (prediction - denoiser.head(after).astype(jnp.float32))


SKIP_LAYER_SHARES = (0.01, 0.2)
"""Skip-layer guidance is for the steps between these shares of all, the ends left out: diffusers' defaults."""


Guidance = Unguided | ClassifierFree
"""What makes one prediction of those of a denoising step."""

GUIDANCE: dict[str, type[ClassifierFree]] = {"cfg": ClassifierFree, "cfg_zero": CFGZeroStar, "apg": APG}
"""Name -> form of guidance."""

_VIDEO = (1, 2, 3, 4)
"""The axes of a video in a batch."""


def _dot(a: Float32[Any, "B T h w C"], b: Float32[Any, "B T h w C"]) -> Float32[Array, "B 1 1 1 1"]:
    return jnp.sum(a * b, _VIDEO, keepdims=True)


def _in_one_batch(first: Float[Array, "B ..."], second: Float[Array, "B ..."]) -> Float[Array, "2B ..."]:
    """Both, one after the other.

    Each device selects its items. Of a concatenation, the TPU's compiler would make exchanges between all devices, and
    take a third longer to compile the step of a large model.
    """
    is_first = jnp.arange(2).reshape(2, *[1] * first.ndim) == 0
    return sharding.constrain(jnp.where(is_first, first, second).reshape(-1, *first.shape[1:]), "batch")


def steps_between(
    shares: Sequence[float], num_inference_steps: int, first: int, *, is_open: bool = False
) -> Bool[np.ndarray, " N"]:
    """Which steps are from the first to below the second share of all; `is_open`: above the first.

    Args:
        shares: two, 0 to 1.
        num_inference_steps: all steps.
        first: the first that is done.
    """
    start, stop = (int(share * num_inference_steps) for share in shares)
    steps = np.arange(first, num_inference_steps)
    return (start + is_open <= steps) & (steps < stop)


def guidance_scales(
    timesteps: Sequence[int] | Num[np.ndarray, " N"],
    guidance_scale: float,
    dynamic: bool | Literal["index"] = False,
) -> Float32[np.ndarray, " N"]:
    """The guidance scale of each step, computed in float64 on the host.

    dynamic=False: `guidance_scale` throughout.
    dynamic=True: 1 + guidance_scale (1 - cos(pi p^5)) / 2 with p = (N - t) / N, where t is the timestep (999 to 0), not
        the step. That is what the released pipeline computes: the scale swings between 1 and 1 + guidance_scale.
    dynamic="index": the same ramp with p = i / N for step i: a monotonic rise from 1 towards 1 + guidance_scale.

    Args:
        timesteps: `StepTable.timesteps`, of the N steps that are done, as in the reference.
        guidance_scale: the weight of the prompt; 1 is no guidance.
        dynamic: as above.
    """
    if not dynamic:
        return np.full(len(timesteps), guidance_scale, np.float32)
    n = len(timesteps)
    done = range(n) if dynamic == "index" else [n - int(t) for t in timesteps]
    # The math module, as in the reference: with few steps the argument is large, and its last bit changes the cosine.
    return np.array([1 + guidance_scale * ((1 - math.cos(math.pi * (d / n) ** 5.0)) / 2) for d in done], np.float32)
