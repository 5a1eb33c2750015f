"""attend(): the one door to attention. It checks shapes, picks a backend and runs it on each device's heads."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cogvideox_flax import sharding
from cogvideox_flax.attention import xla
from cogvideox_flax.errors import InputError

Backend = Callable[..., Float[Array, "B S N K"]]

BACKENDS: dict[str, Backend] = {"xla": xla.attend}
"""name -> f(q, k, v, kv_len): exact attention on one device; kv_len is None or int32 [B]."""

KERNELS: frozenset[str] = frozenset()
"""The backends that are Pallas kernels and can be interpreted."""


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    *,
    kv_len: int | Int[Array, " B"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v, softmax in float32, result in q's dtype.

    Args:
        q, k, v: any float dtype, the same for all three; no limit on lengths, which need not divide anything.
        kv_len: how many keys are real, in all or per batch element (1 to S; an array is clipped to that range, since
            its values may only be known on the device). Keys past it are never attended.
        backend: a name in BACKENDS, or "auto" for the best one on this platform.
        interpret: run a Pallas backend in interpret mode (on any device, slowly).

    Raises:
        InputError: shapes or dtypes disagree, kv_len out of range, unknown backend, nothing to interpret.
    """
    name = "xla" if backend == "auto" else backend
    if name not in BACKENDS:
        raise InputError(f"unknown attention backend {backend!r}; known are auto, {', '.join(BACKENDS)}")
    if interpret and name not in KERNELS:
        raise InputError(f"interpret=True needs a Pallas backend; {name!r} is not one")
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise InputError(f"attend expects q [B, Q, N, K] and k, v [B, S, N, K]; got {q.shape}, {k.shape}, {v.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"attend expects one dtype; got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if isinstance(kv_len, int | np.integer):
        if not 1 <= kv_len <= k.shape[1]:
            raise InputError(f"kv_len must be between 1 and the number of keys, {k.shape[1]}; got {kv_len}")
        k, v, kv_len = k[:, :kv_len], v[:, :kv_len], None
    if kv_len is not None:
        kv_len = jnp.asarray(kv_len, jnp.int32)
        if kv_len.shape != q.shape[:1]:
            raise InputError(f"kv_len must be an int or one int per batch element, {q.shape[:1]}; got {kv_len.shape}")
        kv_len = jnp.clip(kv_len, 1, k.shape[1])
    return sharding.over_heads(BACKENDS[name], q, k, v, kv_len)


__all__ = ["BACKENDS", "KERNELS", "attend"]
