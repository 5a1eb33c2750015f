"""Named scopes by which `plan` knows how often a part of a program runs."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import jax


def runs_in(share: float) -> AbstractContextManager[None]:
    """The scope of a `jax.lax.cond` whose branch of True runs in so many cases of one."""
    return jax.named_scope(f"runs_in_{share:.4f}")


def share_of(conditional: str) -> float | None:
    """The share that the scope of a conditional states; None if it states none.

    conditional: its scopes ("decode/runs_in_0.5161"), or its line of HLO (with op_name="decode/runs_in_0.5161/cond").
    """
    stated = re.search(r"\bruns_in_([\d.]+)(?:$|/cond\")", conditional)
    return None if stated is None else float(stated[1])
