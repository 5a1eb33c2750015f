"""JAX's own splash attention, for comparison; keys past kv_len are masked by segment ids."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from cogvideox_flax.nn.layers import round_up

Q_BLOCK, KV_BLOCK, COMPUTE = 2048, 2048, 1024
"""Its best tile sizes at 45,106 tokens, by the static schedule for v6e."""


def attend(
    q: Float[Array, "B Q N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N K"],
    kv_len: Int[Array, " B"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B Q N K"]:
    """softmax(q k^T / sqrt(K)) v of float32 or bfloat16; see `cogvideox_flax.attention.attend`."""
    batch, queries, heads, dim = q.shape
    keys = k.shape[1]
    q_block, kv_block = min(Q_BLOCK, round_up(queries, 128)), min(KV_BLOCK, round_up(keys, 128))
    compute = COMPUTE if kv_block % COMPUTE == 0 else 128
    dtype = q.dtype
    q = (q.astype(jnp.float32) / math.sqrt(dim)).astype(dtype)
    q, k, v = (_heads(x, block, dim) for x, block in ((q, q_block), (k, kv_block), (v, kv_block)))
    shape = q.shape[2], k.shape[2]
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.FullMask(shape)] * heads),
        block_sizes=splash.BlockSizes(block_q=q_block, block_kv=kv_block, block_kv_compute=compute),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    lengths = jnp.full(batch, keys, jnp.int32) if kv_len is None else kv_len

    def one(q: Array, k: Array, v: Array, length: Array) -> Array:
        segments = splash.SegmentIds(jnp.zeros(shape[0], jnp.int32), (jnp.arange(shape[1]) >= length).astype(jnp.int32))
        return kernel(q, k, v, segment_ids=segments)

    return jax.vmap(one)(q, k, v, lengths)[:, :, :queries, :dim].swapaxes(1, 2).astype(dtype)


def _heads(x: Float[Array, "B S N K"], block: int, dim: int) -> Float[Array, "B N s k"]:
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, -x.shape[1] % block), (0, -dim % 64)))
