"""The optimisers, with warm-up, cosine decay and clipping of the gradient's norm (optax).

Sources: AdamW (arXiv 1711.05101); Muon (kellerjordan.github.io/posts/muon), with the step size of arXiv 2502.16982,
which lets it take AdamW's learning rates.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import optax
import optax.contrib

from cogvideox_flax import sharding
from cogvideox_flax.errors import InputError

KINDS = ("adamw", "muon")
_MUON_MATRICES = re.compile(r"(.*\.)?blocks\.(attn|mlp)\.\w+\.(kernel|weight)")
_MUON_RMS = 0.2  # of a step's entries before the learning rate, about that of AdamW


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimiser and its schedule.

    kind: "adamw"; or "muon", which makes the steps of the blocks' attention and feed-forward matrices orthogonal and
        leaves the rest to Adam with Nesterov momentum. It learns faster from scratch; weights that AdamW trained are
        better left to AdamW.
    learning_rate: at the end of the warm-up, from where a cosine leads to `final_learning_rate` at the last step.
    weight_decay: applies to matrices and kernels, not to biases, norm scales and other vectors.
    clip_norm: gradients with a larger global norm are scaled down to it.
    """

    kind: str = "adamw"
    learning_rate: float = 1e-4
    final_learning_rate: float = 0.0
    warmup_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-3
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        faults = [
            f"  {name}: got {getattr(self, name)}, expected {expected}"
            for name, holds, expected in (
                ("kind", self.kind in KINDS, " or ".join(KINDS)),
                ("learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0"),
                ("final_learning_rate", 0 <= self.final_learning_rate <= self.learning_rate, "0 to learning_rate"),
                ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
                ("b1", 0 <= self.b1 < 1, "0 to below 1"),
                ("b2", 0 <= self.b2 < 1, "0 to below 1"),
                ("eps", 0 <= self.eps < math.inf, "a finite number, 0 or more"),
                ("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number, 0 or more"),
                ("clip_norm", self.clip_norm > 0, "above 0"),
            )
            if not holds
        ]
        if faults:
            raise InputError("the optimizer settings are invalid:\n" + "\n".join(faults))


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each of `steps` steps."""
    warmup = min(config.warmup_steps, steps - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.final_learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip, then a step of `config.kind` at the scheduled rate."""
    rate = learning_rate(config, steps)
    adamw = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    step = (
        optax.adamw(rate, **adamw, weight_decay=config.weight_decay, mask=_decayed)
        if config.kind == "adamw"
        else optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            consistent_rms=_MUON_RMS,
            muon_weight_dimension_numbers=_muon_axes,
            **{f"adam_{name}": value for name, value in adamw.items() if name != "eps"},
            eps=config.eps,
        )
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), step)


def _muon_axes(params: Any) -> Any:
    """Which axes of a parameter are the matrix that Muon acts on; None where AdamW does. Axis 0 is the layer."""

    def axes(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        found = _MUON_MATRICES.fullmatch(sharding.parameter_name(path))
        if leaf.ndim != 3 or not found:
            return None
        into, out = (1, 2) if found[3] == "kernel" else (2, 1)
        return optax.contrib.MuonDimensionNumbers(reduction_axis=into, output_axis=out)

    return jax.tree_util.tree_map_with_path(axes, params)


def _decayed(params: Any) -> Any:
    """Which parameters decay: kernels and embeddings. Stacked layers give a vector a second axis, so names decide."""

    def is_matrix(path: jax.tree_util.KeyPath, leaf: Any) -> bool:
        names = {str(getattr(key, "name", getattr(key, "key", ""))) for key in path}
        return leaf.ndim > 1 and not names & {"bias", "scale", "position_bias", "pos_embedding"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)
