"""The programs of a run as pure functions, and their arguments: real ones to run, abstract ones to compile ahead.

`RunPrograms` is what a resolved request means for one model. The pipeline runs its programs; the memory check and the
planner compile them for the same arguments, as shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32, UInt8, UInt32

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.generate.conditioning import Conditioning
from cogvideox_flax.generate.request import ResolvedRequest
from cogvideox_flax.io.video import to_uint8
from cogvideox_flax.models.family import ModelFamily, Size, TextStage
from cogvideox_flax.runtime.compile import ProgramSpec
from cogvideox_flax.runtime.compile_cache import result_type
from cogvideox_flax.schedulers import Scheduler, StepTable, guidance_scales

Frames = UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseInputs:
    """What does not change from step to step.

    conditioning: None where the program makes its own.
    steps: the sampler's tables.
    guidance: its scale at each step.
    noise_source: a key from which each step's noise is drawn, or the noise of all steps [N, B, T, h, w, C].
    """

    conditioning: Conditioning | None
    steps: StepTable
    guidance: Float32[Any, " N"]
    noise_source: Any


@result_type
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenoiseState:
    """Where the denoising loop is, between two steps.

    step: how many are done.
    latents: after them; scaled, with the extra latent frames.
    sampler: its own state, from `Scheduler.step`.
    """

    step: Int32[Any, ""]
    latents: Float32[Any, "B T h w C"]
    sampler: Any


Function = Callable[..., Any]


def _identity(function: Function) -> Function:
    return function


def _make_step(predict: Function, sampler: Scheduler) -> Callable[..., tuple[DenoiseState, Array]]:
    """One denoising step, to be jitted alone or scanned."""

    def denoise_step(model: Any, inputs: DenoiseInputs, state: DenoiseState) -> tuple[DenoiseState, Array]:
        """Returns the next state, and whether its latents are finite."""
        i, x = state.step, state.latents
        assert inputs.conditioning is not None
        guided = inputs.conditioning.guided
        doubled = sharding.constrain(jnp.concatenate([x, x]) if guided else x, "batch")
        prediction = predict(model, doubled, inputs.conditioning.guided_features(), inputs.steps.timesteps[i])
        if guided:
            without, with_prompt = jnp.split(prediction, 2)
            prediction = without + inputs.guidance[i] * (with_prompt - without)
        noise = None
        if sampler.needs_noise:
            source = inputs.noise_source
            is_key = jnp.issubdtype(source.dtype, jax.dtypes.prng_key)
            noise = standard_normal(jax.random.fold_in(source, i), x.shape) if is_key else source[i]
        x, sampler_state = sampler.step(inputs.steps, i, prediction, x, state.sampler, noise)
        x, sampler_state = jax.tree.map(sharding.constrain, (x, sampler_state))
        return DenoiseState(i + 1, x, sampler_state), jnp.isfinite(x).all()

    return denoise_step


def _make_loop(predict: Function, sampler: Scheduler) -> Callable[..., tuple[DenoiseState, Array]]:
    """All denoising steps; finite or not is said of each."""
    step = _make_step(predict, sampler)

    def denoise_loop(model: Any, inputs: DenoiseInputs, state: DenoiseState) -> tuple[DenoiseState, Array]:
        return jax.lax.scan(lambda state, _: step(model, inputs, state), state, length=len(inputs.steps))

    return denoise_loop


def _make_decode(decode: Function, output_type: str, tiled: bool) -> Callable[..., tuple[Frames, Array]]:
    """Scaled latents to frames, and whether all of it is finite."""

    def decode_frames(model: Any, latents: Float32[Array, "B T h w C"]) -> tuple[Frames, Array]:
        video = decode(model, latents, tiled)
        frames = to_uint8(video) if output_type == "uint8" else jnp.clip(video / 2 + 0.5, 0, 1)
        return frames, jnp.isfinite(video).all()

    return decode_frames


def _make_run(
    encoders: tuple[tuple[str, Function], ...],
    predict: tuple[str, Function],
    decode: tuple[str, Function],
    sampler: Scheduler,
    extra_latents: int,
    how: tuple[str, bool],
) -> Callable[..., tuple[Frames, Array, Array]]:
    """The whole run as one program, tokens to frames.

    encoders, predict, decode: components and what is done with each. how: output type, and whether it decodes in tiles.
    """
    (denoiser, predict_with), (decoder, decode_with) = predict, decode
    loop, to_frames = _make_loop(predict_with, sampler), _make_decode(decode_with, *how)

    def run(
        models: dict[str, Any], tokens: dict[str, Any], inputs: DenoiseInputs, state: DenoiseState
    ) -> tuple[Frames, Array, Array]:
        """tokens: of the negative prompts, if guidance is on, then of the prompts. inputs: without conditioning.

        Returns the frames, whether each step was finite, and whether the frames are.
        """
        features: dict[str, Array] = {}
        for component, encode in encoders:
            features |= encode(models[component], tokens[component])
        batch = len(state.latents)
        guided = len(next(iter(features.values()))) == 2 * batch
        negative = {name: value[:batch] for name, value in features.items()} if guided else None
        conditioning = Conditioning({name: value[-batch:] for name, value in features.items()}, negative)
        inputs = dataclasses.replace(inputs, conditioning=conditioning)
        state, steps_finite = loop(models[denoiser], inputs, state)
        frames, finite = to_frames(models[decoder], state.latents[:, extra_latents:])
        return frames, steps_finite, finite

    return run


def _make_noise(shape: tuple[int, ...]) -> Callable[..., tuple[Float32[Array, "B T h w C"], Array]]:
    def noise(seed: UInt32[Array, ""]) -> tuple[Float32[Array, "B T h w C"], Array]:
        """The initial latents of a seed, and the key of the sampler's noise."""
        latent_key, noise_key = jax.random.split(jax.random.key(seed))
        return standard_normal(latent_key, shape), noise_key

    return noise


def standard_normal(key: Array, shape: tuple[int, ...]) -> Float32[Array, "B T h w C"]:
    """Standard normal whose row b depends on the key and b alone, not on the size of the batch."""
    keys = jax.vmap(lambda b: jax.random.fold_in(key, b))(jnp.arange(shape[0]))
    return jax.vmap(lambda key: jax.random.normal(key, shape[1:], jnp.float32))(keys)


def noise_key(seed: int) -> Array:
    """The key of the sampler's noise, for a run whose initial latents were given."""
    return jax.random.split(jax.random.key(np.uint32(seed)))[1]


def decoding(family: ModelFamily, output_type: str, tiled: bool) -> ProgramSpec:
    """(decoder, scaled latents) -> (frames, finite). output_type: "float" gives float32 in [0, 1], else uint8."""
    given = family.decode, "float" if output_type == "float" else "uint8", tiled
    return ProgramSpec("VAE decoder", _make_decode, given, fast_compile=True)


@dataclass(frozen=True)
class RunPrograms:
    """The programs of a resolved request for one model, and their arguments.

    request: from `GenerationRequest.resolve`.
    dtype: of weights and activations.
    """

    manifest: Manifest
    request: ResolvedRequest
    dtype: str

    @property
    def family(self) -> ModelFamily:
        return self.manifest.model_family

    @cached_property
    def size(self) -> Size:
        request = self.request
        return self.family.resolve_size(self.manifest.configs, request.num_frames, request.height, request.width)

    @cached_property
    def sampler(self) -> Scheduler:
        return self.request.sampler(self.manifest)

    @cached_property
    def steps(self) -> StepTable:
        """The sampler's tables, on the host."""
        return self.sampler.plan(self.request.num_inference_steps)

    @property
    def denoiser_batch(self) -> int:
        """What the denoiser sees at once: twice the prompts, with guidance."""
        return self.request.batch * (2 if self.request.guided else 1)

    # --- programs

    def encode(self, stage: TextStage) -> ProgramSpec:
        """(text encoder, tokens) -> features."""
        shapes = stage.token_shapes(self.manifest.configs, self.request.batch)
        tokens = max(x.size for x in jax.tree.leaves(shapes))
        return ProgramSpec(stage.component.replace("_", " "), _identity, (stage.encode,), tokens=tokens)

    @property
    def initial_noise(self) -> ProgramSpec:
        """(seed) -> (latents, the key of the sampler's noise)."""
        return ProgramSpec("initial noise", _make_noise, (self.size.latent_shape(self.request.batch),))

    @property
    def denoise(self) -> ProgramSpec:
        """(denoiser, inputs, state) -> (state, finite): a step, or all of them with `compiled_loop`."""
        tokens = self.denoiser_batch * self.family.workload(self.manifest.configs, self.size).tokens
        given = self.family.predict, self.sampler
        if self.request.compiled_loop:
            return ProgramSpec("denoising loop", _make_loop, given, donate=("state",), tokens=tokens)
        return ProgramSpec("denoising step", _make_step, given, tokens=tokens)

    @property
    def whole_run(self) -> ProgramSpec:
        """(all components, tokens, inputs, state) -> (frames, steps finite, finite)."""
        family, request = self.family, self.request
        encoders = tuple((stage.component, stage.encode) for stage in family.text)
        ends = (family.denoiser, family.predict), (family.decoder, family.decode)
        how = request.output_type, request.tiling
        return ProgramSpec("whole run", _make_run, (encoders, *ends, self.sampler, self.size.extra_latents, how))

    # --- arguments

    def start(
        self, conditioning: Conditioning | None, latents: Float32[Any, "B T h w C"], noise_source: Any
    ) -> tuple[DenoiseInputs, DenoiseState]:
        """What the loop begins with; of arrays, or under `jax.eval_shape`.

        Args:
            conditioning: None where the program makes its own.
            latents: standard normal.
            noise_source: as for `DenoiseInputs`.
        """
        request = self.request
        steps = request.num_inference_steps
        scales = guidance_scales(self.steps.timesteps, steps, request.guidance_scale, request.use_dynamic_cfg)
        inputs = DenoiseInputs(conditioning, self.steps, scales, noise_source)
        return inputs, DenoiseState(np.int32(0), latents, self.sampler.init_state(latents))

    def abstract(self, stage: str, mesh: Mesh | None = None) -> list[tuple[ProgramSpec, tuple[Any, ...], int]]:
        """The programs of a stage ("encode", "denoise", "decode" or "run"), as they are compiled without a model.

        Returns:
            For each: the spec; its arguments as shapes with the dtypes and the shardings that they will have, weights
            by the table and the rest whole on every device; how often it runs.
        """
        request, configs = self.request, self.manifest.configs

        def whole(tree: Any) -> Any:
            return jax.tree.map(lambda x: _shape(x, mesh), tree)

        def weights(component: str) -> Any:
            return abstract_weights(self.manifest, component, self.dtype, mesh)

        if stage == "encode":
            texts = 2 if request.guided else 1
            tokens = {part.component: part.token_shapes(configs, request.batch) for part in self.family.text}
            return [
                (self.encode(part), (weights(part.component), whole(tokens[part.component])), texts)
                for part in self.family.text
            ]
        shape = self.size.latent_shape(request.batch)
        if stage == "decode":
            kept = shape[0], shape[1] - self.size.extra_latents, *shape[2:]
            spec = decoding(self.family, request.output_type, request.tiling)
            return [(spec, decode_arguments(self.manifest, self.dtype, kept, mesh), 1)]
        features: Any = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in self.family.feature_shapes(configs, request.batch).items()
        }
        conditioning = Conditioning(features, features if request.guided else None) if stage == "denoise" else None
        latents, key = jax.eval_shape(self.initial_noise.function(), jax.ShapeDtypeStruct((), jnp.uint32))
        noise = key if request.noise is None else jax.ShapeDtypeStruct((len(self.steps), *shape), jnp.float32)
        inputs, state = whole(jax.eval_shape(self.start, conditioning, latents, noise))
        if stage == "run":
            models = {name: weights(name) for name in self.family.components}
            tokens = {part.component: part.token_shapes(configs, self.denoiser_batch) for part in self.family.text}
            return [(self.whole_run, (models, whole(tokens), inputs, state), 1)]
        runs = 1 if request.compiled_loop else len(self.steps)
        return [(self.denoise, (weights(self.family.denoiser), inputs, state), runs)]


def abstract_weights(manifest: Manifest, component: str, dtype: str, mesh: Mesh | None) -> Any:
    """A component's module as shapes, in the dtype and where it will lie."""
    module = checkpoint.cast(manifest.abstract(component), dtype)
    if mesh is None:
        return module
    rows = manifest.model_family.components[component].sharding

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        where = sharding.parameter_sharding(mesh, rows, sharding.parameter_name(path), leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(place, module)


def decode_arguments(manifest: Manifest, dtype: str, shape: tuple[int, ...], mesh: Mesh | None) -> tuple[Any, ...]:
    """(decoder, latents) as shapes, for latents [B, T, h, w, C]."""
    latents = _shape(jax.ShapeDtypeStruct(shape, jnp.float32), mesh)
    return abstract_weights(manifest, manifest.model_family.decoder, dtype, mesh), latents


def _shape(x: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """Whole on every device of the mesh."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
