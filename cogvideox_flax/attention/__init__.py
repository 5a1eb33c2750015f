"""attend(): the one door to attention. It checks shapes, picks a backend and runs it on each device's heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax import sharding
from cogvideox_flax.attention import cudnn, nvidia, splash, stock, triton, xla
from cogvideox_flax.attention.blocks import Blocks
from cogvideox_flax.errors import InputError

Backend = Callable[..., Float[Array, "B S N K"]]
Part = Callable[..., tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]]


def _best(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
    *,
    window: tuple[int, int] | None,
) -> Float[Array, "B Q N K"]:
    """For more than `xla.SHORT` tokens: splash on a TPU (not in float16); on an NVIDIA GPU in 16 bit cuDNN or, for what
    it does not serve, triton. XLA otherwise."""
    plain = partial(xla.attend, window=window)
    if max(q.shape[1], k.shape[1]) <= xla.SHORT:
        return plain(q, k, v, kv_len)
    lengths = jnp.full(q.shape[0], k.shape[1], jnp.int32) if kv_len is None else kv_len
    where: dict[str, Callable[..., Array]] = {}
    if splash.why_not(q) is None:
        where["tpu"] = partial(splash.attend, window=window)
    if cudnn.why_not(q, window) is None:
        where["cuda"] = lambda q, k, v, _: cudnn.attend(q, k, v, kv_len)  # no mask where there are no lengths
    elif _flash_on_gpus(q):
        where["cuda"] = partial(triton.attend, window=window)
    return jax.lax.platform_dependent(q, k, v, lengths, **where, default=lambda q, k, v, _: plain(q, k, v, kv_len))


def _best_part(
    q: Float[Array, "B Q N K"], k: Float[Array, "B S N K"], v: Float[Array, "B S N K"], kv_len: Int[Array, " B"]
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """Where there is enough for them to do, our kernels; plain XLA elsewhere. cuDNN's does not tell what keys weigh."""
    if max(q.shape[1], k.shape[1]) <= xla.SHORT:
        return xla.attend_part(q, k, v, kv_len)
    where: dict[str, Part] = {"tpu": splash.attend_part} if splash.why_not(q) is None else {}
    if _flash_on_gpus(q):
        where["cuda"] = triton.attend_part
    return jax.lax.platform_dependent(q, k, v, kv_len, **where, default=xla.attend_part)


def _flash_on_gpus(q: Float[Array, "B Q N K"]) -> bool:
    """Whether our kernel for GPUs is for these: in float32 it has no tensor cores, as cuBLAS has none."""
    return q.dtype in cudnn.DTYPES and nvidia.why_not(q.shape[-1]) is None


BACKENDS: dict[str, Backend] = {
    "auto": _best,
    "xla": xla.attend,
    "splash": splash.attend,
    "stock": stock.attend,
    "cudnn": cudnn.attend,
    "triton": triton.attend,
}
"""name -> f(q, k, v, kv_len, window=): exact attention on one device; kv_len is None or int32 [B]."""

PARTS: dict[str, Part] = {
    "auto": _best_part,
    "xla": xla.attend_part,
    "splash": splash.attend_part,
    "triton": triton.attend_part,
}
"""name -> f(q, k, v, kv_len): attention to some of the keys, with their weight, where the backend can say it."""

KERNELS = frozenset({"splash", "stock", "triton"})
"""The backends that are Pallas kernels and can be interpreted where they do not run."""


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    *,
    kv_len: int | Int[Array, " B"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    window: tuple[int, int] | None = None,
    smooth_k: bool = False,
    blocks: Blocks | None = None,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v, softmax in float32, result in q's dtype.

    Finite, and exact but for rounding, where float32 holds the products and sums: |q| |k| below 2^126 for every query
    and key, and |v| times the number of keys below 2^126. Products are rounded as float32, so a score is known to 2^-24
    of |q| |k| log2(e) / sqrt(K) times a few; where that error exceeds 1, keys whose scores differ by less share the
    probability arbitrarily. Numbers below 2^-126 count as 0, products of a probability and a value among them. "splash"
    and "triton" were tested interpreted; "stock" and "cudnn" were not tested at these limits.

    Args:
        q, k, v: float32, bfloat16 or float16, the same for all three; no limit on lengths, which need not divide
            anything. "splash" and "stock" do not take float16, which the compiler for TPUs does not in a kernel;
            "auto" is plain XLA there.
        kv_len: how many keys are real, in all or per batch element (1 to S; an array is clipped to that range, since
            its values may only be known on the device). Keys past it are never attended; their values must be finite.
        backend: a name in BACKENDS, or "auto" for the best one on this platform.
        interpret: run a Pallas backend in interpret mode (on any device, slowly).
        window: (left, right): attend only keys from `left` before the query's position to `right` after it. A query
            whose window holds no real key gets a finite but meaningless row.
        smooth_k: subtract from the keys their mean. Softmax does not see it; scores become smaller, so that less is
            lost in low precision and more heads run without a running maximum.
        blocks: tile sizes of the splash kernel, in place of those of its table.

    Raises:
        InputError: shapes or dtypes disagree, kv_len out of range, unknown backend, one that does not serve the dtype
            or this machine, nothing to interpret.
    """
    if backend not in BACKENDS:
        raise InputError(f"unknown attention backend {backend!r}; known are {', '.join(BACKENDS)}")
    if interpret and backend not in KERNELS:
        raise InputError(f"interpret=True needs a Pallas backend ({', '.join(sorted(KERNELS))}); got {backend!r}")
    if blocks is not None and backend != "splash":
        raise InputError(f"blocks are the splash kernel's; the backend is {backend!r}")
    if window is not None and (len(window) != 2 or min(window) < 0):
        raise InputError(f"window must be two counts of tokens, 0 or more, before and after the query; got {window}")
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise InputError(f"attend expects q [B, Q, N, K] and k, v [B, S, N, K]; got {q.shape}, {k.shape}, {v.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"attend expects one dtype; got q {q.dtype}, k {k.dtype}, v {v.dtype}")
    if isinstance(kv_len, int | np.integer):
        if not 1 <= kv_len <= k.shape[1]:
            raise InputError(f"kv_len must be between 1 and the number of keys, {k.shape[1]}; got {kv_len}")
        kv_len = int(kv_len)
    elif kv_len is not None:
        kv_len = jnp.asarray(kv_len, jnp.int32)
        if kv_len.shape != q.shape[:1]:
            raise InputError(f"kv_len must be an int or one int per batch element, {q.shape[:1]}; got {kv_len.shape}")
        kv_len = jnp.clip(kv_len, 1, k.shape[1])
    if smooth_k:
        k = _smooth(k, kv_len)
    options: dict[str, Any] = {"interpret": interpret} if interpret else {}
    options |= {"blocks": blocks} if blocks is not None else {}
    part = partial(PARTS[backend], **options) if backend in PARTS and window is None else None
    if backend == "auto" and cudnn.why_not(q, window) is None:
        part = None  # heads of zeros in cuDNN's kernel, until rings of our own have been seen to cost less
    return sharding.over_heads(partial(BACKENDS[backend], window=window, **options), q, k, v, kv_len, part)


def _smooth(k: Float[Array, "B S N K"], kv_len: int | Int[Array, " B"] | None) -> Float[Array, "B S N K"]:
    """Keys without the mean of the real ones."""
    wide = k.astype(jnp.float32)
    lengths = jnp.reshape(jnp.asarray(k.shape[1] if kv_len is None else kv_len), (-1, 1))
    real = (jnp.arange(k.shape[1]) < lengths)[:, :, None, None]
    return (wide - wide.mean(1, keepdims=True, where=real)).astype(k.dtype)


__all__ = ["BACKENDS", "KERNELS", "Blocks", "attend"]
