"""attend(): exact attention. It checks shapes, chooses a backend and runs that on each device's heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax import sharding
from cogvideox_flax.attention import cudnn, splash, triton, xla
from cogvideox_flax.attention.gradient import own_keys
from cogvideox_flax.attention.sparse_tiles import Grid, SparseTiles, attend_in_tiles
from cogvideox_flax.attention.tile_sizes import TileSizes
from cogvideox_flax.errors import InputError
from cogvideox_flax.nn.platforms import by_platform, compiling_for
from cogvideox_flax.sharding import JointQKV

Backend = Callable[..., Float[Array, "B S N K"]]
BackendWithLse = Callable[..., tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]]


def _auto(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B T M K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None,
    *,
    first_head: int | None = None,
) -> Float[Array, "B Q N K"]:
    """For more than `xla.SHORT` tokens: splash on a TPU, except in float16; cuDNN on an NVIDIA GPU in 16 bit, or triton
    where cuDNN does not serve the heads. XLA otherwise. first_head: as for `splash.attend`."""
    if max(q.shape[1], v.shape[1]) <= xla.SHORT:
        return xla.attend(q, own_keys(k, v, first_head), v, kv_len)
    lengths = jnp.full(q.shape[0], v.shape[1], jnp.int32) if kv_len is None else kv_len
    kernels: dict[str, Callable[..., Array]] = {}
    if splash.why_not(q) is None:
        kernels["tpu"] = partial(splash.attend, first_head=first_head)
    if cudnn.why_not(q) is None:
        # kv_len None: cuDNN applies no mask
        kernels["cuda"] = lambda q, k, v, _: cudnn.attend(q, own_keys(k, v, first_head), v, kv_len)
    elif triton.is_fast(q):
        kernels["cuda"] = partial(_with_own_keys(triton.attend), first_head=first_head)
    default = lambda q, k, v, _: xla.attend(q, own_keys(k, v, first_head), v, kv_len)  # noqa: E731
    return by_platform(q, k, v, lengths, **kernels, default=default)


def _with_own_keys(attend: Backend) -> Backend:
    """The backend, with the keys of its heads cut out of those of all heads."""

    def run(q: Array, k: Array, v: Array, *kv_len: Any, first_head: int | None = None, **options: Any) -> Array:
        return attend(q, own_keys(k, v, first_head), v, *kv_len, **options)

    return run


def _auto_with_lse(
    q: Float[Array, "B Q N K"], k: Float[Array, "B S N K"], v: Float[Array, "B S N K"], kv_len: Int[Array, " B"]
) -> tuple[Float32[Array, "B Q N K"], Float32[Array, "B Q N"]]:
    """For more than `xla.SHORT` tokens our kernels, XLA otherwise. cuDNN's kernel does not return log_sum_exp."""
    if max(q.shape[1], k.shape[1]) <= xla.SHORT:
        return xla.attend_with_lse(q, k, v, kv_len)
    kernels: dict[str, BackendWithLse] = {"tpu": splash.attend_with_lse} if splash.why_not(q) is None else {}
    if triton.is_fast(q):
        kernels["cuda"] = triton.attend_with_lse
    return by_platform(q, k, v, kv_len, **kernels, default=xla.attend_with_lse)


BACKENDS: dict[str, Backend] = {
    "auto": _auto,
    "xla": _with_own_keys(xla.attend),
    "splash": splash.attend,
    "cudnn": _with_own_keys(cudnn.attend),
    "triton": _with_own_keys(triton.attend),
}
"""name -> f(q, k, v, kv_len, first_head=None): exact attention on one device; kv_len is None or int32 [B]; first_head
is as for `splash.attend`."""

BACKENDS_WITH_LSE: dict[str, BackendWithLse] = {
    "auto": _auto_with_lse,
    "xla": xla.attend_with_lse,
    "splash": splash.attend_with_lse,
    "triton": triton.attend_with_lse,
}
"""name -> f(q, k, v, kv_len): attention to some of the keys and log_sum_exp, for ring attention."""

KERNELS = frozenset({"splash", "triton"})
"""The backends that are Pallas kernels and can be interpreted."""


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    *,
    q_len: int | None = None,
    kv_len: int | Int[Array, " B"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    tile_sizes: TileSizes | None = None,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v, softmax in float32, result in q's dtype.

    Finite, and exact up to rounding, where products and sums fit float32: |q| |k| below 2^126 for every query and key,
    and |v| times the number of keys below 2^126. Products are rounded to float32, so the error of a score is a few
    times 2^-24 |q| |k| log2(e) / sqrt(K); where that exceeds 1, keys with closer scores split their weight arbitrarily.
    Numbers below 2^-126, and products of a probability and a value below 2^-126, count as 0.
    "splash" and "triton" were tested interpreted; "cudnn" was not tested at these limits.

    Args:
        q, k, v: float32, bfloat16 or float16, the same for all three, of any length. "splash" refuses float16,
            which the TPU compiler does not support in a kernel; "auto" is XLA in float16 on a TPU.
        q_len: how many queries are attended; None: all. Those past it are padding, and what is returned for them is
            finite, no more.
        kv_len: how many keys are attended, for all or per batch element: 1 to S. An array is clipped to that range,
            since its values may only be known on the device. The values of keys past it must be finite.
        backend: a name in BACKENDS, or "auto" for the best one on this platform.
        interpret: run a Pallas backend in interpret mode (on any device, slowly).
        tile_sizes: of the splash kernel; None takes the best ones from its table.

    Raises:
        InputError: shapes or dtypes disagree, q_len or kv_len is out of range, the backend is unknown or does not serve
            the dtype or this machine, or it takes no `interpret` or `tile_sizes`.
    """
    _check(q, k, v, backend, interpret, tile_sizes)
    if q_len is not None and not 1 <= q_len <= q.shape[1]:
        raise InputError(f"q_len must be between 1 and the number of queries, {q.shape[1]}; got {q_len}")
    kv_len = _check_length(kv_len, q.shape[0], k.shape[1])
    options: dict[str, Any] = {"interpret": interpret} if interpret else {}
    options |= {"tile_sizes": tile_sizes} if tile_sizes is not None else {}
    with_lse = partial(BACKENDS_WITH_LSE[backend], **options) if backend in BACKENDS_WITH_LSE else None
    if backend == "auto" and cudnn.why_not(q) is None:
        with_lse = None  # pads with zero heads and stays with cuDNN; a ring with our kernel was not measured
    run = partial(BACKENDS[backend], **options)
    in_tiles = compiling_for.value == "tpu"
    return sharding.sequence_parallel_attention(run, q, k, v, kv_len, with_lse, q_len=q_len, in_tiles=in_tiles)


def attend_jointly(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    joint: JointQKV,
    *,
    kv_len: int | None = None,
    joint_len: Int[Array, " B"] | None = None,
    backend: str = "auto",
    interpret: bool = False,
    tiles: tuple[SparseTiles, Grid] | None = None,
) -> tuple[Float[Array, "B Q N K"], Float[Array, "B L N K"]]:
    """`attend` of two kinds of tokens in one sequence: many, and few joint ones such as a prompt's.

    Args:
        joint: queries, keys and values of the joint tokens, which sp does not split.
        kv_len: how many of the keys in k are attended, 1 to S; None: all.
        joint_len: how many of the joint keys, for each batch element; clipped to 0 to L. None: all.
        backend, interpret: as for `attend`; with `tiles`, they apply to the joint queries only, since each platform has
            one form of sparse attention.
        tiles: which tiles of q attend to which of k, and the frames, rows and columns of their tokens (but for padding
            at the end); None: all. All queries attend to the joint keys, and the joint queries to all keys.

    Returns:
        The result for q, and for the joint queries.

    Raises:
        InputError: as for `attend`.
    """
    _check(q, k, v, backend, interpret, None)
    _check(*joint, backend, interpret, None)
    if (joint[0].dtype, joint[0].shape[0], joint[0].shape[2:]) != (q.dtype, q.shape[0], q.shape[2:]):
        raise InputError(f"joint tokens must be as q {q.dtype} {q.shape} but for their number; got {joint[0].shape}")
    kv_len = None if kv_len is None else int(_check_length(kv_len, q.shape[0], k.shape[1]))  # type: ignore[arg-type]
    if joint_len is not None:
        joint_len = jnp.clip(jnp.asarray(joint_len, jnp.int32), 0, joint[0].shape[1])
    run = partial(BACKENDS[backend], interpret=True) if interpret else BACKENDS[backend]
    if tiles is not None:
        run = partial(attend_in_tiles, run, *tiles, q.shape[1], joint[0].shape[1])
    return sharding.joint_attention(run, q, k, v, joint, kv_len, joint_len)


def _check(q: Array, k: Array, v: Array, backend: str, interpret: bool, tile_sizes: TileSizes | None) -> None:
    if backend not in BACKENDS:
        raise InputError(f"unknown attention backend {backend!r}; known are {', '.join(BACKENDS)}")
    if interpret and backend not in KERNELS:
        raise InputError(f"interpret=True needs a Pallas backend ({', '.join(sorted(KERNELS))}); got {backend!r}")
    if tile_sizes is not None and backend != "splash":
        raise InputError(f"tile_sizes are of backend 'splash'; got {backend!r}")
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise InputError(f"attend expects q [B, Q, N, K] and k, v [B, S, N, K]; got {q.shape}, {k.shape}, {v.shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"attend expects one dtype; got q {q.dtype}, k {k.dtype}, v {v.dtype}")


def _check_length(kv_len: int | Int[Array, " B"] | None, batch: int, keys: int) -> int | Int[Array, " B"] | None:
    """kv_len as an int, int32 [B] clipped to the keys, or None."""
    if kv_len is None:
        return None
    if isinstance(kv_len, int | np.integer):
        if not 1 <= kv_len <= keys:
            raise InputError(f"kv_len must be between 1 and the number of keys, {keys}; got {kv_len}")
        return int(kv_len)
    kv_len = jnp.asarray(kv_len, jnp.int32)
    if kv_len.shape != (batch,):
        raise InputError(f"kv_len must be an int or one int per batch element, {(batch,)}; got {kv_len.shape}")
    return jnp.clip(kv_len, 1, keys)


__all__ = ["BACKENDS", "BACKENDS_WITH_LSE", "KERNELS", "SparseTiles", "TileSizes", "attend", "attend_jointly"]
