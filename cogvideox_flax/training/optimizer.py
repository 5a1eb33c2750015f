"""The optimizers, with warm-up, decay of the learning rate, and gradient clipping (optax).

Sources: AdamW (arXiv 1711.05101); Muon (kellerjordan.github.io/posts/muon) with the update scale of arXiv 2502.16982,
which makes AdamW's learning rates fit it; Adafactor (arXiv 1804.04235) without momentum and without relative steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from cogvideox_flax import sharding
from cogvideox_flax.training.config import OptimizerConfig
from cogvideox_flax.training.moments import scale_by_adam_8bit

_MUON_MATRICES = re.compile(r"(.*\.)?blocks\.(attn|mlp)\.\w+\.(kernel|weight)")
_MUON_RMS = 0.2
"""Root mean square of an update before the learning rate, about that of AdamW."""


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each of `steps` steps: a linear warm-up, then the decay of `config.schedule`."""
    warmup, peak, last = min(config.warmup_steps, steps - 1), config.learning_rate, config.final_learning_rate
    decays = {
        "cosine": lambda count: optax.cosine_decay_schedule(peak, count, last / peak),
        "linear": lambda count: optax.linear_schedule(peak, last, count),
        "constant_with_warmup": lambda _: optax.constant_schedule(peak),
    }
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, decays[config.schedule](max(steps - warmup, 1))], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Gradient clipping, then the update of `config.kind` with the scheduled learning rate."""
    rate = learning_rate(config, steps)
    if config.kind == "muon":
        update = _muon(config, rate)
    else:
        decay = optax.add_decayed_weights(config.weight_decay, weight_decay_mask)
        update = optax.chain(_SCALINGS[config.kind](config), decay, optax.scale_by_learning_rate(rate))
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


_SCALINGS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda config: optax.scale_by_adam(config.b1, config.b2, config.eps),
    "adamw_bfloat16": lambda config: optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=jnp.bfloat16),
    "adamw_8bit": lambda config: scale_by_adam_8bit(config.b1, config.b2, config.eps),
    "adafactor": lambda _: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
}
"""The optimizers that scale a gradient, to which AdamW's decay and the learning rate are applied."""


def _muon(config: OptimizerConfig, rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.contrib.muon(
        rate,
        eps=config.eps,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        muon_weight_dimension_numbers=_muon_axes,
        consistent_rms=_MUON_RMS,
    )


def _muon_axes(params: Any) -> Any:
    """The two axes of the matrix of each parameter that Muon trains; None for those that Adam trains.

    Axis 0 of the blocks' parameters is the layer.
    """

    def axes(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        match = _MUON_MATRICES.fullmatch(sharding.parameter_name(path))
        if leaf.ndim != 3 or not match:
            return None
        in_axis, out_axis = (1, 2) if match[3] == "kernel" else (2, 1)
        return optax.contrib.MuonDimensionNumbers(reduction_axis=in_axis, output_axis=out_axis)

    return jax.tree_util.tree_map_with_path(axes, params)


def weight_decay_mask(params: Any) -> Any:
    """True for the parameters that decay: kernels and embeddings.

    Names decide, not the rank: a bias of stacked layers has two axes.
    """

    def is_matrix(path: jax.tree_util.KeyPath, leaf: Any) -> bool:
        names = {str(getattr(key, "name", getattr(key, "key", ""))) for key in path}
        return leaf.ndim > 1 and not names & {"bias", "scale", "position_bias", "pos_embedding"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)
