"""The stages of a run as pure functions: what `pipeline` jits to run them and `plan` compiles to forecast them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt8, UInt32

from cogvideox_flax import sharding
from cogvideox_flax.io.video import to_uint8
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder, Tiling
from cogvideox_flax.models.cogvideox.config import TransformerConfig
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.runtime.execution import Recipe, always
from cogvideox_flax.schedulers import Plan, Scheduler

OFS = 2.0
"""The motion scalar that the released pipeline gives to releases that take one."""

FEW_TOKENS = 4096
"""Below it a CPU notices whether a layer's weights are copied before it multiplies by them."""

Carry = tuple[Float32[Array, "B T h w C"], Any]
"""Latents and the sampler's state, from step to step."""


@dataclass(frozen=True)
class DenoiseState:
    """Where the denoising loop is, between two steps.

    step: how many are done.
    latents: after them.
    sampler: its own state, from `Scheduler.step`.
    """

    step: int
    latents: Float32[Any, "B T h w C"]
    sampler: Any


def encode(encoder: TextEncoder, ids: Int32[Array, "B L"]) -> Float[Array, "B L E"]:
    """Token ids to the features that the transformer reads."""
    return encoder(ids)


def _make_encode() -> Callable[..., Float[Array, "B L E"]]:
    return encode


def _make_step(sampler: Scheduler) -> Callable[..., tuple[Carry, Array]]:
    """One denoising step with this sampler, to be jitted alone or scanned."""

    def step(
        transformer: Transformer,
        both: Float[Array, "GB L E"],
        plan: Plan,
        guidance: Float32[Array, " N"],
        draw: Array,
        i: Int32[Array, ""],
        carry: Carry,
    ) -> tuple[Carry, Array]:
        """both: [negative, positive] embeddings, or positive alone. draw: a key, or all steps' noise."""
        x, state = carry
        guided = both.shape[0] == 2 * x.shape[0]
        ofs = None if transformer.config.ofs_width is None else OFS
        inputs = sharding.constrain(jnp.concatenate([x, x]) if guided else x, "batch")
        v = transformer(inputs, both, plan.timesteps[i], ofs).astype(jnp.float32)
        if guided:
            without, with_prompt = jnp.split(v, 2)
            v = without + guidance[i] * (with_prompt - without)
        noise = None
        if sampler.needs_noise:
            is_key = jnp.issubdtype(draw.dtype, jax.dtypes.prng_key)
            noise = normal(jax.random.fold_in(draw, i), x.shape) if is_key else draw[i]
        x, state = sampler.step(plan, i, v, x, state, noise)
        return jax.tree.map(sharding.constrain, (x, state)), jnp.isfinite(x).all()

    return step


def few_tokens(config: TransformerConfig, latents: Float[Array, "B T h w C"], both: Float[Array, "GB L E"]) -> bool:
    """Whether all tokens that go through the transformer in a step are fewer than `FEW_TOKENS`."""
    return both.shape[0] * (both.shape[1] + math.prod(latents.shape[1:4]) // config.patch_volume) < FEW_TOKENS


def _few_of_step(transformer: Transformer, both: Float[Array, "GB L E"], *others: Any) -> bool:
    carry: Carry = others[-1]
    return few_tokens(transformer.config, carry[0], both)


def _make_loop(sampler: Scheduler) -> Callable[..., tuple[Carry, Array]]:
    """All denoising steps; finite or not is said of each step."""
    step = _make_step(sampler)

    def loop(*args: Any) -> tuple[Carry, Array]:
        *fixed, carry = args
        steps = jnp.arange(fixed[3].shape[0])
        return jax.lax.scan(lambda carry, i: step(*fixed, i, carry), carry, steps)

    return loop


def _make_decode(
    scaling_factor: float, output_type: str, tiles: Tiling | None
) -> Callable[..., tuple[UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"], Array]]:
    """Scaled latents to frames, and whether all of it is finite."""

    def decode(vae: Autoencoder, z: Float32[Array, "B T h w C"]) -> tuple[Array, Array]:
        video = vae.decode(z / scaling_factor, tiling=tiles, slicing=len(z) > 1).astype(jnp.float32)
        frames = to_uint8(video) if output_type == "uint8" else jnp.clip(video / 2 + 0.5, 0, 1)
        return frames, jnp.isfinite(video).all()

    return decode


def _make_run(
    sampler: Scheduler, scaling_factor: float, extra_latents: int, output_type: str, tiles: Tiling | None
) -> Callable[..., tuple[UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"], Array, Array]]:
    """The whole run as one program, token ids to frames; arguments as for the stages, extra latents dropped between."""
    loop, to_frames = _make_loop(sampler), _make_decode(scaling_factor, output_type, tiles)

    def run(
        encoder: TextEncoder,
        transformer: Transformer,
        vae: Autoencoder,
        ids: Int32[Array, "GB L"],
        plan: Plan,
        guidance: Float32[Array, " N"],
        draw: Array,
        carry: Carry,
    ) -> tuple[Array, Array, Array]:
        """Returns the frames, whether each step was finite, and whether the frames are."""
        both = encode(encoder, ids)
        (x, _), steps_finite = loop(transformer, both, plan, guidance, draw, carry)
        frames, finite = to_frames(vae, x[:, extra_latents:])
        return frames, steps_finite, finite

    return run


def _make_noise(shape: tuple[int, ...]) -> Callable[..., tuple[Float32[Array, "B T h w C"], Array]]:
    def noise(seed: UInt32[Array, ""]) -> tuple[Float32[Array, "B T h w C"], Array]:
        """The initial latents of a seed, and the key of the sampler's noise."""
        latent_key, noise_key = jax.random.split(jax.random.key(seed))
        return normal(latent_key, shape), noise_key

    return noise


def initial_noise(shape: tuple[int, ...]) -> Recipe:
    """Arguments as for the function that `_make_noise` makes. shape: [B, T, h, w, C] of the latents."""
    return Recipe("initial noise", _make_noise, (shape,))


def encoding() -> Recipe:
    """Arguments as for `encode`."""
    return Recipe("text encoder", _make_encode, apart=always)


def denoising_step(sampler: Scheduler) -> Recipe:
    """Arguments as for the step that `_make_step` makes."""
    return Recipe("denoising step", _make_step, (sampler,), apart=_few_of_step)


def denoising_loop(sampler: Scheduler) -> Recipe:
    """All steps: the arguments of a step without its number."""
    donated = (5,)  # the carry
    return Recipe("denoising loop", _make_loop, (sampler,), donated, apart=_few_of_step)


def decoding(scaling_factor: float, output_type: str, tiles: Tiling | None) -> Recipe:
    """Arguments as for the function that `_make_decode` makes.

    output_type: "uint8", or "float" for float32 in [0, 1].
    """
    return Recipe("VAE decoder", _make_decode, (scaling_factor, output_type, tiles), quickly=True)


def whole_run(
    sampler: Scheduler, scaling_factor: float, extra_latents: int, output_type: str, tiles: Tiling | None
) -> Recipe:
    """Arguments as for the function that `_make_run` makes."""
    return Recipe("whole run", _make_run, (sampler, scaling_factor, extra_latents, output_type, tiles))


def normal(key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
    """Standard normal whose row b depends on the key and b alone, not on the size of the batch."""
    keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(shape[0]))
    return jax.vmap(lambda key: jax.random.normal(key, shape[1:], jnp.float32))(keys)
