"""JAX's settings: no result depends on them, whether a program, an environment variable or a context sets them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, UInt32

from cogvideox_flax.errors import InputError

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

_PRNG = "threefry2x32"

_REFUSED = {
    "eager_constant_folding": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_scan3": False,
}
"""Settings that change programs and have no context, and what they must be."""


@contextmanager
def own_settings() -> Iterator[None]:
    """Context in which JAX's settings that decide results are JAX's defaults; also a decorator.

    Everything is traced, compiled and run in it.

    Raises:
        InputError: one of `_REFUSED` is set, in a way that a context cannot undo.
    """
    settings: dict[str, Any] = jax.config.values
    for name, value in _REFUSED.items():
        if settings.get(name, value) != value:
            raise InputError(
                f"JAX's setting {name} is {settings[name]!r}, which changes what programs compute; expected its "
                f"default {value!r}: take it out of this program's jax.config.update, or unset {name.upper()}"
            )
    with ExitStack() as context:
        for setting in (
            jax.allow_f16_reductions(True),
            jax.default_matmul_precision(None),  # products that need more name it
            jax.default_prng_impl(_PRNG),
            jax.disable_jit(False),
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.softmax_custom_jvp(False),
            jax.threefry_partitionable(True),
            jax.transfer_guard("allow"),
        ):
            context.enter_context(setting)
        yield


def in_own_settings(steps: Generator[T, S, R]) -> Generator[T, S | None, R]:
    """The same generator, advanced in `own_settings`; between its steps the caller's settings hold."""
    try:
        while True:
            with own_settings():
                try:
                    step = next(steps)
                except StopIteration as end:
                    return end.value
            while (sent := (yield step)) is not None:
                with own_settings():
                    step = steps.send(sent)
    finally:
        steps.close()


def random_key(seed: int | UInt32[Array, ""]) -> Key[Array, ""]:
    """`jax.random.key(seed)` of a seed below 2^32, whatever jax_default_prng_impl and jax_random_seed_offset are."""
    low = jnp.asarray(seed, jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(low), low]), impl=_PRNG)
