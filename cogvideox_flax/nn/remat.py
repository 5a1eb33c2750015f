"""What of a layer is stored for the backward pass, and what is recomputed there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_name

RematChoice = Literal["none", "full", "attention", "offload"]
"""none: nothing is recomputed, and all that the gradient needs is stored. full: a layer is recomputed from its input.
attention: the same, but for attention, whose result is stored too. offload: as attention, and what is stored is in the
host's memory. Attention's result has names where a kernel for TPUs computes it; elsewhere it is recomputed."""

Remat = bool | RematChoice
"""A choice; True is full, and False is none."""

ATTENDED = "attn_out", "attn_lse"
"""Names, for policies of `jax.checkpoint`, of attention's result and its log_sum_exp."""

HIDDEN = "hidden"
"""The name of a layer's input."""

Body = Callable[[Any, Any], tuple[Any, None]]


def choice_of(remat: Remat) -> RematChoice:
    """The choice that a boolean stands for."""
    return ("full" if remat else "none") if isinstance(remat, bool) else remat


def recomputed(body: Body, remat: Remat) -> Body:
    """The body of a scan over layers, body(x, layer), with this choice."""
    name = choice_of(remat)
    if name == "none":
        return body
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "attention": policies.save_only_these_names(*ATTENDED),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[HIDDEN, *ATTENDED],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[name]

    def named(x: Any, layer: Any) -> tuple[Any, None]:
        return body(checkpoint_name(x, HIDDEN), layer)

    # in a scan, no barrier is needed against common subexpression elimination
    return jax.checkpoint(named if name == "offload" else body, prevent_cse=False, policy=policy)
