"""The stages of a run as pure functions, to be jitted: encoding, a denoising step, the loop, decoding, all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt8, UInt32

from cogvideox_flax import sharding
from cogvideox_flax.generate.conditioning import Conditioning, in_one_batch
from cogvideox_flax.generate.step_cache import predict_with_cache
from cogvideox_flax.generate.windows import Windows, in_windows
from cogvideox_flax.io.video import to_uint8
from cogvideox_flax.models.denoiser import predict
from cogvideox_flax.runtime.compile_cache import result_type
from cogvideox_flax.schedulers import Scheduler, StepTable

Frames = UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseInputs:
    """What does not change from step to step.

    conditioning: None where the program makes its own.
    steps: the sampler's tables.
    guidance: its scale at each step.
    noise_source: a key from which each step's noise is drawn, or the noise of all steps [N, B, T, h, w, C].
    full_steps: which steps are full, with a step cache; else None.
    """

    conditioning: Conditioning | None
    steps: StepTable
    guidance: Float32[Any, " N"]
    noise_source: Any
    full_steps: Bool[Any, " N"] | None = None


@result_type
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseState:
    """Where the denoising loop is, between two steps.

    step: how many are done.
    latents: after them; scaled, with the extra latent frames.
    sampler: its own state, from `Scheduler.step`.
    cache: what the last full step kept, with a step cache; else None. A pytree of float32 [B, S, D], with guidance of
        twice the batch.
    """

    step: Int32[Any, ""]
    latents: Float32[Any, "B T h w C"]
    sampler: Any
    cache: Any = None


Function = Callable[..., Any]

VIDEO_FEATURE = "video_latents"
"""The encoded clip that the loop starts from, among the results of the visual stages."""


def identity(function: Function) -> Function:
    return function


def make_step(
    embed: Function, sampler: Scheduler, windows: Windows | None = None, cache: str | None = None
) -> Callable[..., tuple[DenoiseState, Array]]:
    """One denoising step, to be jitted alone or scanned.

    Args:
        embed: of the family, or of its `positions`.
        cache: the form of the step cache, which does not go with windows; None: every step is full.
    """
    predict_clip = in_windows(partial(predict, embed), windows)

    def denoise_step(model: Any, inputs: DenoiseInputs, state: DenoiseState) -> tuple[DenoiseState, Array]:
        """Returns the next state, and whether its latents are finite."""
        i, x = state.step, state.latents
        assert inputs.conditioning is not None
        guided = inputs.conditioning.guided
        doubled = in_one_batch(x, x) if guided else sharding.constrain(x, "batch")
        features, table = inputs.conditioning.guided_features(), inputs.steps
        t, following = table.timesteps[i], table.next_timesteps[i]
        kept = state.cache
        if cache is None:
            prediction = predict_clip(model, doubled, features, t, following)
        else:
            assert inputs.full_steps is not None
            tokens = partial(embed, model, doubled, features, t, next_timestep=following)
            prediction, kept = predict_with_cache(cache, tokens, model, inputs.full_steps[i], kept)
        if guided:
            without, with_prompt = jnp.split(prediction, 2)
            prediction = without + inputs.guidance[i] * (with_prompt - without)
        noise = None
        if sampler.needs_noise:
            source = inputs.noise_source
            is_key = jnp.issubdtype(source.dtype, jax.dtypes.prng_key)
            noise = _noise_of(jax.random.fold_in(source, i), x.shape, windows) if is_key else source[i]
        x, sampler_state = sampler.step(inputs.steps, i, prediction, x, state.sampler, noise)
        x, sampler_state = jax.tree.map(sharding.constrain, (x, sampler_state))
        return DenoiseState(i + 1, x, sampler_state, kept), jnp.isfinite(x).all()

    return denoise_step


def make_loop(
    embed: Function, sampler: Scheduler, windows: Windows | None = None, cache: str | None = None
) -> Callable[..., tuple[DenoiseState, Array]]:
    """All denoising steps; finite or not is said of each. Arguments as for `make_step`."""
    step = make_step(embed, sampler, windows, cache)

    def denoise_loop(model: Any, inputs: DenoiseInputs, state: DenoiseState) -> tuple[DenoiseState, Array]:
        return jax.lax.scan(lambda state, _: step(model, inputs, state), state, length=len(inputs.steps))

    return denoise_loop


def make_decode(decode: Function, output_type: str, tiled: bool) -> Callable[..., tuple[Frames, Array]]:
    """Scaled latents to frames, and whether all of it is finite."""

    def decode_frames(model: Any, latents: Float32[Array, "B T h w C"]) -> tuple[Frames, Array]:
        return to_frames(decode(model, latents, tiled), output_type)

    return decode_frames


def to_frames(video: Float32[Array, "B F H W 3"], output_type: str) -> tuple[Frames, Array]:
    """A video in about [-1, 1] as frames, and whether all of it is finite."""
    frames = to_uint8(video) if output_type == "uint8" else jnp.clip(video / 2 + 0.5, 0, 1)
    return frames, jnp.isfinite(video).all()


def make_visual(
    encode: Function, scale: float, extra_latents: int, tiled: bool
) -> Callable[..., tuple[Float32[Array, "B T h w C"], Array]]:
    """Frames to scaled latents, and whether all of it is finite."""

    def encode_visual(
        model: Any, frames: UInt8[Array, "B F H W C"], noise: Float32[Array, "B T h w C"]
    ) -> tuple[Float32[Array, "B T h w C"], Array]:
        """frames, noise: as the stage's `encode` takes them, but for the range."""
        latents = scale * encode(model, frames.astype(jnp.float32) / 127.5 - 1, noise, tiled=tiled)
        # the extra frames are copies of the first, as in fine-tuning
        latents = jnp.concatenate([*[latents[:, :1]] * extra_latents, latents], 1)
        return latents, jnp.isfinite(latents).all()

    return encode_visual


def make_run(
    encoders: tuple[tuple[str, Function], ...],
    embed: tuple[str, Function],
    decode: tuple[str, Function],
    sampler: Scheduler,
    extra_latents: int,
    how: tuple[str, bool],
    visual: tuple[tuple[Any, ...], ...] = (),
    per_step: tuple[Windows | None, str | None] = (None, None),
) -> Callable[..., tuple[Frames, Array, Array]]:
    """The whole run as one program, tokens to frames.

    encoders, embed, decode: components and what is done with each. how: output type, and whether it decodes in tiles.
    visual: of each picture and clip its feature, its component, and the arguments of `make_visual`.
    per_step: windows and the form of the step cache, as for `make_step`.
    """
    (denoiser, embed_with), (decoder, decode_with) = embed, decode
    loop, to_frames = make_loop(embed_with, sampler, *per_step), make_decode(decode_with, *how)

    def run(
        models: dict[str, Any],
        tokens: dict[str, Any],
        media: dict[str, tuple[Array, Array]],
        inputs: DenoiseInputs,
        state: DenoiseState,
    ) -> tuple[Frames, Array, Array]:
        """tokens: of the negative prompts, if guidance is on, then of the prompts. media: frames and noise of each
        feature of a picture or clip. inputs: without conditioning. state: its latents are noise.

        Returns the frames, whether each step was finite, and whether the frames are.
        """
        features: dict[str, Array] = {}
        for component, encode in encoders:
            features |= encode(models[component], tokens[component])
        batch = len(state.latents)
        guided = len(next(iter(features.values()))) == 2 * batch
        negative = {name: value[:batch] for name, value in features.items()} if guided else None
        latents = {}
        for feature, component, *arguments in visual:
            latents[feature], _ = make_visual(*arguments)(models[component], *media[feature])
        video = latents.pop(VIDEO_FEATURE, None)
        positive = {name: value[-batch:] for name, value in features.items()}
        inputs = dataclasses.replace(inputs, conditioning=Conditioning(positive, negative, latents, video))
        if video is not None:
            first = sampler.start_from(video, state.latents, inputs.steps.timesteps[0])
            state = dataclasses.replace(state, latents=first)
        state, steps_finite = loop(models[denoiser], inputs, state)
        frames, finite = to_frames(models[decoder], state.latents[:, extra_latents:])
        return frames, steps_finite, finite

    return run


def make_noise(
    shape: tuple[int, ...], windows: Windows | None = None
) -> Callable[..., tuple[Float32[Array, "B T h w C"], Array]]:
    def noise(seed: UInt32[Array, ""]) -> tuple[Float32[Array, "B T h w C"], Array]:
        """The initial latents of a seed, and the key of the sampler's noise."""
        latent_key, noise_key = jax.random.split(jax.random.key(seed))
        return _noise_of(latent_key, shape, windows), noise_key

    return noise


def _noise_of(key: Array, shape: tuple[int, ...], windows: Windows | None) -> Float32[Array, "B T h w C"]:
    """Standard normal; in windows that of the first one, repeated."""
    if windows is None:
        return standard_normal(key, shape)
    first = standard_normal(key, (shape[0], windows.length, *shape[2:]))
    return first[:, np.asarray(windows.noise_order)]


def standard_normal(key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
    """Standard normal whose row b depends on the key and b alone, not on the size of the batch."""
    keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(shape[0]))
    return jax.vmap(lambda key: jax.random.normal(key, shape[1:], jnp.float32))(keys)


def noise_key(seed: int) -> Array:
    """The key of the sampler's noise, for a run whose initial latents were given."""
    return jax.random.split(jax.random.key(np.uint32(seed)))[1]


def encoder_noise_key(seed: int, index: int) -> Array:
    """The key of the posterior noise of one of the pictures and clips; 0 and 1 are those of `make_noise`' split."""
    return jax.random.fold_in(jax.random.key(np.uint32(seed)), 2 + index)
