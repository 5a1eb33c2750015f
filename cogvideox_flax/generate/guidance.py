"""Guidance: how the denoiser's predictions with and without the prompt become one, and its scale at each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Num

from cogvideox_flax import sharding
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.models.denoiser import Features


class Guidance(Protocol):
    """What a denoising step asks of guidance.

    passes: how often the denoiser sees each video.
    """

    passes: ClassVar[int]

    def batch(self, latents: Float32[Array, "B T h w C"]) -> Float32[Array, "P*B T h w C"]:
        """The latents as the denoiser sees them."""

    def features(self, conditioning: Conditioning) -> Features:
        """What steers the denoiser, with rows as in `batch`."""

    def __call__(
        self, prediction: Float32[Array, "P*B T h w C"], scale: Float32[Array, ""]
    ) -> Float32[Array, "B T h w C"]:
        """One prediction for each video. scale: of this step."""


@dataclass(frozen=True)
class Unguided:
    """The prediction with the prompt, as it is."""

    passes: ClassVar[int] = 1

    def batch(self, latents: Float32[Array, "B T h w C"]) -> Float32[Array, "B T h w C"]:
        return sharding.constrain(latents, "batch")

    def features(self, conditioning: Conditioning) -> Features:
        return {**conditioning.text, **conditioning.pictures}

    def __call__(
        self, prediction: Float32[Array, "B T h w C"], scale: Float32[Array, ""]
    ) -> Float32[Array, "B T h w C"]:
        return prediction


@dataclass(frozen=True)
class ClassifierFree:
    """Away from the prediction with the negative prompt, by a scale that may change over the steps.

    Source: classifier-free guidance (arXiv 2207.12598).
    """

    passes: ClassVar[int] = 2

    def batch(self, latents: Float32[Array, "B T h w C"]) -> Float32[Array, "2*B T h w C"]:
        return _in_one_batch(latents, latents)

    def features(self, conditioning: Conditioning) -> Features:
        """Those of the negative prompts, then those of the prompts."""
        assert conditioning.negative_text is not None
        halves = [{**text, **conditioning.pictures} for text in (conditioning.negative_text, conditioning.text)]
        return jax.tree.map(_in_one_batch, *halves)

    def __call__(
        self, prediction: Float32[Array, "2*B T h w C"], scale: Float32[Array, ""]
    ) -> Float32[Array, "B T h w C"]:
        without, with_prompt = jnp.split(prediction, 2)
        return without + scale * (with_prompt - without)


def _in_one_batch(first: Float[Array, "B ..."], second: Float[Array, "B ..."]) -> Float[Array, "2B ..."]:
    """Both, one after the other.

    Each device selects its items. Of a concatenation, the TPU's compiler would make exchanges between all devices, and
    take a third longer to compile the step of a large model.
    """
    is_first = jnp.arange(2).reshape(2, *[1] * first.ndim) == 0
    return sharding.constrain(jnp.where(is_first, first, second).reshape(-1, *first.shape[1:]), "batch")


def guidance_scales(
    timesteps: Sequence[int] | Num[np.ndarray, " N"],
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
        timesteps: `StepTable.timesteps`.
        num_inference_steps: N; for video-to-video, the number of steps that are run.
        guidance_scale: the weight of the prompt; 1 is no guidance.
        dynamic: as above.
    """
    if not dynamic:
        return np.full(len(timesteps), guidance_scale, np.float32)
    n = num_inference_steps
    done = range(len(timesteps)) if dynamic == "index" else [n - int(t) for t in timesteps]
    # The math module, as in the reference: with few steps the argument is large, and its last bit changes the cosine.
    return np.array([1 + guidance_scale * ((1 - math.cos(math.pi * (d / n) ** 5.0)) / 2) for d in done], np.float32)
