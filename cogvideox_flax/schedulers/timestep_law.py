"""The distribution of the timesteps that a model is trained at.

Sources: arXiv 2403.03206 (logit-normal and mode sampling, the shift); Tencent's `train.py` of HunyuanVideo-1.5 (the
order of both, and the margin).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

Shares = Float32[Array, " B"]

MODE_SCALE = 1.29


def _uniform(law: TimestepLaw, u: Shares) -> Shares:
    return u


def _logit_normal(law: TimestepLaw, u: Shares) -> Shares:
    return jax.nn.sigmoid(law.mean + law.std * jax.scipy.special.ndtri(u))


def _mode(law: TimestepLaw, u: Shares) -> Shares:
    return 1 - u - MODE_SCALE * (jnp.cos(math.pi / 2 * u) ** 2 - 1 + u)


LAWS: Mapping[str, Callable[[TimestepLaw, Shares], Shares]] = {
    "uniform": _uniform,
    "logit_normal": _logit_normal,
    "mode": _mode,
}
"""Name -> uniform numbers in [0, 1) to shares of the noise schedule, 0 without noise."""


@dataclass(frozen=True, kw_only=True)
class TimestepLaw:
    """A map from uniform numbers in [0, 1) to shares of the noise schedule, by which timesteps are drawn.

    Attributes:
        law: of `LAWS`.
        mean, std: of the normal distribution of "logit_normal".
        shift: above 1, more of the timesteps are at high noise: shift s / (1 + (shift - 1) s), after the law.
        margin: no share is nearer to 0 or 1 than this, before the shift.
    """

    law: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    margin: float = 0.0

    def __call__(self, u: Shares) -> Shares:
        share = LAWS[self.law](self, u)
        share = self.margin + (1 - 2 * self.margin) * share if self.margin else share
        return share if self.shift == 1 else self.shift * share / (1 + (self.shift - 1) * share)
