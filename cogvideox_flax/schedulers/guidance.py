"""The guidance scale of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float32, Num


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
