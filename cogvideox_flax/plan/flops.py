"""Floating-point operations of a function, counted exactly in its jaxpr; loops count once per iteration.

The compiler's own cost analysis counts the body of a loop once, and a Pallas kernel or cuDNN's attention not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from cogvideox_flax.nn.conv import winograd
from cogvideox_flax.nn.platforms import compiling_for
from cogvideox_flax.nn.scopes import share_of

CUDNN_PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
"""Primitive of cuDNN's attention -> products of queries x keys x head size; backward recomputes the scores."""


@dataclass(frozen=True)
class Flops:
    """A multiply-add counts as two.

    kernels: inside Pallas kernels and cuDNN's attention. convolutions, and rest, which is matrix products: all others.
    """

    rest: int = 0
    kernels: int = 0
    convolutions: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Flops:
        return Flops(*(round(times * each) for each in astuple(self)))

    @property
    def total(self) -> int:
        return sum(astuple(self))


Shares = Mapping[str, Sequence[float]]
"""Named scope of a `jax.lax.cond` -> how often each of its branches runs, the one of False first."""


def count_flops(
    f: Callable[..., Any], *args: Any, shares: Shares = MappingProxyType({}), platform: str | None = None
) -> Flops:
    """Matrix products, convolutions and kernels of f for arguments of these shapes, over all devices.

    Of a function with several platform-specific forms, and of any choice of which neither `shares` nor its own scope
    (`nn.scopes`) says how often it is made, the one with the
    least work counts: the others pad more. A Winograd convolution counts as a plain one.

    platform: whose forms are counted, by XLA's name; None: all.

    Raises:
        ValueError: a loop whose length is not known before it runs, or a kernel without a cost estimate.
    """
    with compiling_for(platform):
        return _count(jax.make_jaxpr(f)(*args).jaxpr, shares)


def _count(jaxpr: Jaxpr, shares: Shares) -> Flops:
    total = Flops()
    for eqn in jaxpr.eqns:
        params, name = eqn.params, eqn.primitive.name
        shapes: list[Any] = [getattr(x.aval, "shape", ()) for x in (*eqn.invars, *eqn.outvars)]
        if name == "dot_general":
            ((contracted, _), _) = params["dimension_numbers"]
            flops = 2 * prod(shapes[2]) * prod(shapes[0][i] for i in contracted)
            if winograd.SCOPE in str(eqn.source_info.name_stack):
                fewer, plain = winograd.PRODUCTS
                flops = flops * plain // fewer
            total += Flops(flops)
        elif name == "conv_general_dilated":
            spec = params["dimension_numbers"].rhs_spec
            taps = prod(shapes[1][i] for i in spec[1:])  # input channels of a group, and space
            total += Flops(convolutions=2 * prod(shapes[2]) * taps)
        elif name == "pallas_call":
            if params.get("cost_estimate") is None:
                raise ValueError(f"the kernel {params.get('name')} does not say what it costs")
            total += Flops(kernels=int(params["cost_estimate"].flops))
        elif name in CUDNN_PRODUCTS:
            batch, queries, heads, dim = shapes[0]
            keys = shapes[1][1]
            if params["layout"]:  # 1: B N S K; 0: B S N K
                queries, heads, keys = heads, queries, shapes[1][2]
            total += Flops(kernels=CUDNN_PRODUCTS[name] * 2 * batch * heads * queries * keys * dim)
        elif name == "scan":
            total += _count(params["jaxpr"].jaxpr, shares) * params["length"]
        elif name == "cond":
            branches = [_count(branch.jaxpr, shares) for branch in params["branches"]]
            path = str(eqn.source_info.name_stack)
            known = [shares[scope] for scope in shares if scope in path.split("/")]
            if (stated := share_of(path)) is not None:
                known = [(1 - stated, stated)]
            if known:
                total += sum((work * share for work, share in zip(branches, known[0], strict=True)), Flops())
            else:
                total += min(branches, key=lambda found: found.total)
        elif name == "while" and _count(params["body_jaxpr"].jaxpr, shares).total:
            raise ValueError("a loop whose length is not known does products")
        else:
            for inner in _inner(params):
                total += _count(inner, shares)
    return total


def _inner(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """The function that a call runs; of a function with a custom derivative, only the function."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        found = params.get(key)
        if isinstance(found, ClosedJaxpr):
            yield found.jaxpr
        elif isinstance(found, Jaxpr):
            yield found
