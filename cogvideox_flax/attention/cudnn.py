"""cuDNN's flash attention, for NVIDIA GPUs: exact, in 16 bit, with a derivative."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cogvideox_flax.attention import nvidia
from cogvideox_flax.errors import InputError

DTYPES = (jnp.bfloat16, jnp.float16)


def why_not(q: Float[Array, "B Q N K"]) -> str | None:
    """Why cuDNN cannot attend with these queries here, or None if it can."""
    if q.dtype not in DTYPES:
        return f"it computes in bfloat16 or float16; got {q.dtype}"
    if q.shape[-1] % 8:
        return f"its heads are multiples of 8; got {q.shape[-1]}"
    return nvidia.why_not(q.shape[-1])


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v; see `cogvideox_flax.attention.attend`.

    Raises:
        InputError: no NVIDIA GPU, or a dtype or a head size that cuDNN does not serve.
    """
    if reason := why_not(q):
        raise InputError(f"attention backend 'cudnn': {reason}. Take 'auto'")
    lengths = None if kv_len is None else jnp.broadcast_to(jnp.asarray(kv_len, jnp.int32), q.shape[:1])
    return jax.nn.dot_product_attention(
        q, k, v, scale=1 / math.sqrt(q.shape[-1]), key_value_seq_lengths=lengths, implementation="cudnn"
    )
