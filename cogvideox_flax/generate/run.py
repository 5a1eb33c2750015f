"""A run: what a request means for one model and dtype, decided once.

The journey runs its programs; the memory check and the planner compile them for the same arguments, as shapes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float32

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.decode import Decode, DecodeChunk
from cogvideox_flax.generate.denoise import (
    DenoiseInputs,
    DenoiseLoop,
    DenoiseState,
    DenoiseStep,
    InitialNoise,
    encoder_noise_key,
)
from cogvideox_flax.generate.encode import VIDEO_FEATURE, Conditioning, EncodeText, EncodeVisual
from cogvideox_flax.generate.guidance import (
    GUIDANCE,
    SKIP_LAYER_SHARES,
    Guidance,
    SkipLayer,
    Unguided,
    guidance_scales,
    steps_between,
)
from cogvideox_flax.generate.media import CLIPS, MEDIA, read_masked, read_media
from cogvideox_flax.generate.predict import step_cache
from cogvideox_flax.generate.predict.adaptive import magcache_steps
from cogvideox_flax.generate.predict.plain import Plain, Predict, standard_normal
from cogvideox_flax.generate.predict.windows import Windowed, resolve_windows, window_size
from cogvideox_flax.generate.request import STEP_CACHES, FilledRequest
from cogvideox_flax.generate.tiles import Windows
from cogvideox_flax.generate.whole_run import WholeRun
from cogvideox_flax.models.model import TextInput, VideoModel, VisualInput
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.runtime.compile import Program
from cogvideox_flax.schedulers import Scheduler, StepTable

ProgramCall = tuple[Program, tuple[Any, ...], int]
"""A program, its arguments as shapes with their shardings, weights first, and how often it runs."""


@dataclass(frozen=True)
class Run:
    """A request, resolved for one model and dtype: from `resolve`. Immutable; what follows from it is computed once.

    request: every None that stands for a recommendation is filled in.
    manifest: of the model.
    dtype: of weights and activations.
    asked: the options that were given; the others were filled in.
    """

    request: FilledRequest
    manifest: Manifest = field(repr=False)
    dtype: str
    asked: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def model(self) -> VideoModel:
        return self.manifest.model

    def varied(self, **changes: Any) -> Run:
        """The same run with other prompts, images or another seed, which are not checked again."""
        return dataclasses.replace(self, request=dataclasses.replace(self.request, **changes))

    def seeds(self) -> list[Run]:
        """One run for each seed that is asked for."""
        seed, count = self.request.seed, self.request.num_videos
        return [self] if count == 1 else [self.varied(num_videos=1, seed=seed + n) for n in range(count)]

    def row(self, i: int, seed: int) -> Run:
        """The run of one video of the batch alone, with a seed of its own; it is not checked again."""
        request, fields = self.request, ("prompt", "negative_prompt", "latents", *MEDIA)
        rows = {name: x[i : i + 1] for name in fields if (x := getattr(request, name)) is not None and len(x) > 1}
        noise = {} if request.noise is None else {"noise": request.noise[:, i : i + 1]}
        for name in ("text_features", "encoder_noise"):
            if (arrays := getattr(request, name)) is not None:
                rows[name] = {key: x[i : i + 1] for key, x in arrays.items()}
        return self.varied(**rows, **noise, seed=seed, num_videos=1)

    @property
    def batch(self) -> int:
        """Number of videos that are made at once."""
        return len(self.request.prompt)

    @property
    def batch_is_alone(self) -> bool:
        """Whether the videos of a batch are computed as each alone: no step cache decides over all of them at once."""
        name, full = self.request.step_cache, self.request.step_cache_full
        return name is None or full is not None or not STEP_CACHES[name].decides_itself

    @cached_property
    def size(self) -> Size:
        request = self.request
        return self.model.resolve_size(request.num_frames, request.height, request.width)

    @cached_property
    def windows(self) -> Windows | None:
        """The windows of a long clip; None: it is denoised whole."""
        return resolve_windows(self.model, self.request, self.size)

    # --- steps

    @property
    def first_step(self) -> int:
        """The first denoising step that is done: above 0 where the run starts from a video."""
        steps, strength = self.request.num_inference_steps, self.request.strength
        return 0 if strength is None else steps - min(int(steps * strength), steps)

    @property
    def num_steps(self) -> int:
        """Number of denoising steps that are done."""
        return self.request.num_inference_steps - self.first_step

    @cached_property
    def scheduler(self) -> Scheduler:
        """The scheduler; a name is that scheduler on the checkpoint's noise schedule.

        Raises:
            InputError: the family has no such scheduler.
        """
        scheduler = self.request.scheduler
        return self.model.scheduler(scheduler) if isinstance(scheduler, str) else scheduler

    @cached_property
    def steps(self) -> StepTable:
        """The scheduler's tables of the steps that are done, on the host.

        Raises:
            InputError: a number of steps, or timesteps, that it does not have.
        """
        timesteps = {} if self.request.timesteps is None else {"timesteps": self.request.timesteps}
        return self.scheduler.plan(self.request.num_inference_steps, start=self.first_step, **timesteps)

    @cached_property
    def full_steps(self) -> Bool[np.ndarray, " N"] | None:
        """Which of the steps that are done are full; None without a step cache, or if it decides itself."""
        request, predict = self.request, self.predict
        if not isinstance(predict, step_cache.StepCache):
            return None
        if request.step_cache_full is not None:
            return np.isin(np.arange(self.num_steps), request.step_cache_full)
        if request.step_cache_schedule is not None:
            return step_cache.scheduled_steps(request.step_cache_schedule, self.num_steps)
        if request.step_cache_ratios is not None:
            return magcache_steps(request.step_cache_ratios, self.num_steps, self._step_cache_threshold)
        return predict.default_steps(self.steps.timesteps)

    @property
    def _step_cache_threshold(self) -> float:
        """That of the request, or the form's default; 0 for forms without one."""
        name, threshold = self.request.step_cache, self.request.step_cache_threshold
        assert name is not None
        return (STEP_CACHES[name].threshold or 0.0) if threshold is None else threshold

    @property
    def guided(self) -> bool:
        """Whether guidance is on, by the rule of the model's family."""
        return self.model.is_guided(self.request.guidance_scale)

    @cached_property
    def guided_steps(self) -> Bool[np.ndarray, " N"] | None:
        """Which of the steps that are done have guidance; None: all, or none."""
        interval = self.request.guidance_interval
        if interval is None or not self.guided:
            return None
        return steps_between(interval, self.request.num_inference_steps, self.first_step)

    @cached_property
    def predict(self) -> Predict:
        """How a prediction is made."""
        model, request = self.model, self.request
        plain = Plain(model.embed_for(request.positions, request.sparse_attention))
        if self.windows is not None:
            return Windowed(plain, self.windows)
        if request.step_cache is None:
            return plain
        form, layers = step_cache.class_of(request.step_cache), model.workload(self.size).layers
        return form.of(plain, model, layers, self._step_cache_threshold, request.step_cache_ratios)

    @property
    def guidance(self) -> Guidance:
        request = self.request
        return GUIDANCE[request.guidance](request.guidance_rescale) if self.guided else Unguided()

    @property
    def visual(self) -> list[VisualInput]:
        """The encodings of the given images and clips."""
        return [visual for visual in self.model.visual if getattr(self.request, visual.input) is not None]

    @property
    def encodes_by_seed(self) -> bool:
        """Whether latents of the given images and clips hold noise that is drawn by the request's seed."""
        given = self.request.encoder_noise or {}
        return any(visual.noise is not None and visual.input not in given for visual in self.visual)

    @property
    def denoiser_batch(self) -> int:
        """What the denoiser sees at once: twice the prompts, with guidance."""
        return self.batch * self.guidance.passes

    # --- programs

    def encode(self, text: TextInput) -> EncodeText:
        shapes = text.token_shapes(self.batch)
        return EncodeText(text.component, text.encode, tokens=max(x.size for x in jax.tree.leaves(shapes)))

    def encode_visual(self, visual: VisualInput) -> EncodeVisual:
        """Its frames are uint8 [B, F, H, W, 3 or 4]."""
        is_clip, statistics = _is_clip(visual), visual.statistics
        if self.request.image_scale is not None and not is_clip and visual.shape is None:
            statistics = dataclasses.replace(statistics, scale=self.request.image_scale)
        extra_latents = self.size.extra_latents if is_clip else 0
        return EncodeVisual(visual.input, visual.encode, statistics, extra_latents, self.request.tiling)

    def media_shapes(self, visual: VisualInput) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """[B, F, H, W, 3] of its frames (4 with a mask), and the shape of its noise: that of the frames, or of their
        latents without the extra ones."""
        size, (batch, latents, *rest) = self.size, self.size.latent_shape(self.batch)
        is_clip = _is_clip(visual)
        frames = batch, size.num_frames if is_clip else 1, *(visual.frame_size or (size.height, size.width))
        count = latents - size.extra_latents if is_clip else 1
        noise = (*frames, 3) if visual.noise == "frames" else (batch, count, *rest)
        return (*frames, 4 if visual.mask_channels else 3), noise

    def feature_shape(self, visual: VisualInput) -> tuple[int, ...]:
        """[B, T, h, w, C] of its result, or [B, ...] of other features than latents."""
        batch, count, height, width, channels = self.size.latent_shape(self.batch)
        if visual.shape is not None:
            return batch, *visual.shape
        return batch, count if _is_clip(visual) else 1, height, width, channels + visual.mask_channels

    @property
    def initial_noise(self) -> InitialNoise:
        return InitialNoise(self.predict, self.size.latent_shape(self.batch), self.request.same_noise)

    @property
    def denoise(self) -> DenoiseStep | DenoiseLoop:
        """A step, or all of them with `compiled_loop`."""
        seen = window_size(self.model, self.request, self.size)
        tokens = self.denoiser_batch * self.model.workload(seen).tokens
        step = dataclasses.replace(self._step, tokens=tokens)
        return DenoiseLoop(step, tokens=tokens) if self.request.compiled_loop else step

    @property
    def _step(self) -> DenoiseStep:
        return DenoiseStep(self.predict, self.guidance, self.scheduler, self.request.same_noise, self.skip_layer)

    @property
    def skip_layer(self) -> SkipLayer | None:
        request = self.request
        if request.skip_layer is None:
            return None
        return SkipLayer(self.model.embed, request.skip_layer, request.skip_layer_scale)

    @property
    def whole_run(self) -> WholeRun:
        model, request = self.model, self.request
        return WholeRun(
            text=tuple(EncodeText(text.component, text.encode) for text in model.text),
            visual=tuple((visual.feature, visual.component, self.encode_visual(visual)) for visual in self.visual),
            loop=DenoiseLoop(self._step),
            decode=Decode(model.codec, request.output_type == "float", request.tiling),
            denoiser=model.denoiser,
            decoder=model.decoder,
        )

    # --- arguments

    def media(self, visual: VisualInput) -> tuple[Any, Any]:
        """Frames of an image or clip, and the noise of its latents: what was given, or by the seed."""
        request, (frames, noise) = self.request, self.media_shapes(visual)
        index = [known.input for known in self.model.visual].index(visual.input)
        sample = (request.encoder_noise or {}).get(visual.input)
        if visual.noise is None:
            sample = np.zeros(noise, np.float32)
        elif sample is None:
            rows = 1 if request.same_noise else noise[0]
            sample = standard_normal(encoder_noise_key(request.seed, index), (rows, *noise[1:]))
            sample = jnp.broadcast_to(sample, noise)
        if visual.mask_channels:
            read = read_masked({name: getattr(request, name) for name in MEDIA}, frames, request.fit)
        else:
            read = read_media(getattr(request, visual.input), frames, request.fit, (self.size.height, self.size.width))
        return read, jnp.asarray(sample, jnp.float32)

    def check_conditioning(self, conditioning: Conditioning) -> None:
        """Refuse a conditioning that is not this request's."""
        request = self.request
        if conditioning.guided != self.guided or conditioning.batch != self.batch:
            raise InputError(
                f"the conditioning is of {conditioning.batch} prompts {'with' if conditioning.guided else 'without'} "
                f"negative prompts; the request has {self.batch} and guidance_scale {request.guidance_scale:g}"
            )
        wanted = {visual.feature for visual in self.visual}
        found = conditioning.visual.keys() | ({VIDEO_FEATURE} if conditioning.video is not None else set())
        if found != wanted:
            raise InputError(
                f"the conditioning has {', '.join(sorted(found)) or 'no latents of images or clips'}; the request's "
                f"inputs give {', '.join(sorted(wanted)) or 'none'}"
            )

    def start(
        self, conditioning: Conditioning | None, latents: Float32[Any, "B T h w C"], noise_source: Any
    ) -> tuple[DenoiseInputs, DenoiseState]:
        """What the loop begins with, but for the step cache (`with_cache`); of arrays, or under `jax.eval_shape`.

        Args:
            conditioning: None where the program makes its own.
            latents: standard normal.
            noise_source: as for `DenoiseInputs`.
        """
        request = self.request
        timesteps = self.steps.timesteps
        scales = guidance_scales(timesteps, request.guidance_scale, request.use_dynamic_cfg)
        inputs = DenoiseInputs(conditioning, self.steps, scales, noise_source, self.full_steps, self.guided_steps)
        if request.skip_layer is not None:
            those = steps_between(SKIP_LAYER_SHARES, request.num_inference_steps, self.first_step, is_open=True)
            inputs = dataclasses.replace(inputs, skip_layer_steps=those)
        # a loop that is compiled has a row for each step, and a user-defined scheduler may count them
        if not (request.compiled_loop or conditioning is None or self.scheduler.identity is None):
            inputs = inputs.padded()
        if conditioning is not None and conditioning.video is not None:
            latents = self.scheduler.start_from(conditioning.video, latents, timesteps[0])
        scheduler_state = self.scheduler.init_state(latents)
        static: Any = {"extra_latents": self.size.extra_latents, "scheduler": self.scheduler.kind}
        return inputs, DenoiseState(np.int32(0), latents, scheduler_state, **static)

    def scheduler_state(self) -> Any:
        """The scheduler's own state as shapes."""
        latents = jax.ShapeDtypeStruct(self.size.latent_shape(self.batch), jnp.float32)
        return jax.eval_shape(self.scheduler.init_state, latents)

    def cache_shapes(self, mesh: Mesh | None) -> Any:
        """The step cache in `DenoiseState` as shapes with their shardings; None without one."""
        if self.request.step_cache is None:
            return None
        denoiser = abstract_weights(self.manifest, self.model.denoiser, self.dtype, None)
        latents = jax.ShapeDtypeStruct(self.size.latent_shape(self.denoiser_batch), jnp.float32)

        predict = self.predict
        assert isinstance(predict, step_cache.StepCache)

        def embedded(denoiser: Any, latents: Any, conditioning: Conditioning, t: Any) -> Any:
            features = self.guidance.features(conditioning)
            return predict.inner.embed(denoiser, latents, features, t, next_timestep=t)

        given = denoiser, latents, self._conditioning(), jax.ShapeDtypeStruct((), self.steps.timesteps.dtype)
        with nullcontext() if mesh is None else jax.set_mesh(mesh):  # tokens may be padded on a mesh
            tokens = jax.eval_shape(embedded, *given)
            shapes = predict.shapes(denoiser, tokens, latents, len(self.steps))
            return step_cache.with_shardings(shapes, mesh)

    def check_state(self, state: DenoiseState, mesh: Mesh | None) -> None:
        """Refuse a state that no loop of this request, on a mesh, can have."""
        expected = self.size.latent_shape(self.batch), self.size.extra_latents
        found = tuple(np.shape(state.latents)), state.extra_latents
        if found != expected:
            raise InputError(f"the state has latents {list(found[0])}, {found[1]} of them extra; expected {expected}")
        if not 0 <= int(state.step) <= len(self.steps):
            raise InputError(f"the state is after step {int(state.step)}; this run has {len(self.steps)} steps")
        kind = self.scheduler.kind
        if state.scheduler != kind or _shapes(state.scheduler_state) != _shapes(self.scheduler_state()):
            raise InputError(f"the state is of another scheduler, {state.scheduler}; this run's is {kind}")
        if state.cache is not None and _shapes(state.cache) != _shapes(self.cache_shapes(mesh)):
            raise InputError("the state is of another step cache; go on with the one that it was made with")

    def with_cache(self, state: DenoiseState, mesh: Mesh | None) -> DenoiseState:
        """A state with a step cache, where the request has one and the state has nothing of it.

        Raises:
            InputError: the steps that follow need the cache of earlier ones.
        """
        if state.cache is not None or self.may_resume(int(state.step)):
            return self.with_empty_cache(state, mesh)
        raise InputError(
            f"the steps from {int(state.step)} on use the step cache of earlier ones, which the state does not have; "
            "go on from a state with its cache"
        )

    def with_empty_cache(self, state: DenoiseState, mesh: Mesh | None) -> DenoiseState:
        """The state with zeros for a step cache, where the request has one and the state has nothing of it."""
        if self.request.step_cache is None or state.cache is not None:
            return state
        return dataclasses.replace(state, cache=step_cache.empty(self.cache_shapes(mesh)))

    def may_resume(self, done: int) -> bool:
        """Whether the loop can go on after so many steps without the step cache of the earlier ones."""
        if done in (0, len(self.steps)) or not isinstance(predict := self.predict, step_cache.StepCache):
            return True
        return predict.may_begin(done, self.full_steps)

    def abstract(self, stage: str, mesh: Mesh | None = None) -> list[ProgramCall]:
        """The programs of a stage ("encode", "denoise", "decode" or "run"), as they are compiled without a model.

        Returns:
            For each: the program; its arguments as shapes with the dtypes and the shardings that they will have,
            weights by the table and the rest whole on every device; how often it runs.
        """
        request = self.request

        def whole(tree: Any) -> Any:
            return jax.tree.map(lambda x: shape_on(x, mesh), tree)

        def weights(component: str) -> Any:
            return abstract_weights(self.manifest, component, self.dtype, mesh)

        if stage == "encode":
            texts = 2 if self.guided else 1
            tokens = {part.component: part.token_shapes(self.batch) for part in self.model.text}
            text = [
                (self.encode(part), (weights(part.component), whole(tokens[part.component])), texts)
                for part in self.model.text
            ]
            images = [
                (self.encode_visual(visual), (weights(visual.component), *whole(self._media(visual))), 1)
                for visual in self.visual
            ]
            return [*text, *images]
        shape = self.size.latent_shape(self.batch)
        if stage == "decode":
            how = request.output_type == "float", request.tiling, self.windows is not None
            return decode_programs(self.manifest, self.dtype, self.size.video_latent_shape(self.batch), mesh, *how)
        conditioning = self._conditioning() if stage == "denoise" else None
        latents, key = jax.eval_shape(self.initial_noise, jax.ShapeDtypeStruct((), jnp.uint32))
        noise = key if request.noise is None else jax.ShapeDtypeStruct((len(self.steps), *shape), jnp.float32)
        inputs, state = whole(jax.eval_shape(self.start, conditioning, latents, noise))
        state = dataclasses.replace(state, cache=self.cache_shapes(mesh))
        if stage == "run":
            models = {name: weights(name) for name in self.model.components}
            tokens = {part.component: part.token_shapes(self.denoiser_batch) for part in self.model.text}
            media = {each.feature: self._media(each) for each in self.visual}
            return [(self.whole_run, (models, whole(tokens), whole(media), inputs, state), 1)]
        runs = 1 if request.compiled_loop else len(self.steps)
        return [(self.denoise, (weights(self.model.denoiser), inputs, state), runs)]

    def _conditioning(self) -> Conditioning:
        """The conditioning as shapes."""
        features: Any = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in self.model.feature_shapes(self.batch).items()
        }
        shapes = {visual.feature: self.feature_shape(visual) for visual in self.visual}
        latents: Any = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        video = latents.pop(VIDEO_FEATURE, None)
        return Conditioning(features, features if self.guided else None, latents, video)

    def _media(self, visual: VisualInput) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        frames, noise = self.media_shapes(visual)
        media = [] if visual.mask_channels else getattr(self.request, visual.input)  # a mask's frames are uint8
        dtype = np.result_type(np.uint8, *(each.dtype for each in media))
        return jax.ShapeDtypeStruct(frames, dtype), jax.ShapeDtypeStruct(noise, jnp.float32)


def _shapes(tree: Any) -> Any:
    """The structure of a pytree, and the shapes of its arrays."""
    return jax.tree.structure(tree), [tuple(x.shape) for x in jax.tree.leaves(tree)]


def _is_clip(visual: VisualInput) -> bool:
    """Whether its frames are those of a whole video, and not one image."""
    return visual.input in CLIPS or visual.mask_channels > 0


def abstract_weights(manifest: Manifest, component: str, dtype: str, mesh: Mesh | None) -> Any:
    """A component's module as shapes, in the dtype and where it will lie."""
    module = checkpoint.cast(manifest.abstract(component), dtype)
    return shapes_on(module, mesh, manifest.model.components[component].sharding)


def shapes_on(module: Any, mesh: Mesh | None, rows: sharding.ParameterRows) -> Any:
    """A module of shapes where its parameters will lie."""
    if mesh is None:
        return module

    def place(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        where = sharding.parameter_sharding(mesh, rows, sharding.parameter_name(path), leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(place, module)


def shape_on(x: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """Whole on every device of the mesh."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def decode_programs(
    manifest: Manifest,
    dtype: str,
    shape: tuple[int, ...],
    mesh: Mesh | None,
    as_float: bool,
    tiling: bool,
    in_chunks: bool,
) -> list[ProgramCall]:
    """The programs that decode normalized latents of a shape [B, T, h, w, C].

    as_float, tiling: as for `Decode`. in_chunks: clip by clip, chunk by chunk.
    """
    codec, model = manifest.model.codec, abstract_weights(manifest, manifest.model.decoder, dtype, mesh)
    if not in_chunks:
        return [(Decode(codec, as_float, tiling), (model, shape_on(jax.ShapeDtypeStruct(shape, jnp.float32), mesh)), 1)]
    program = DecodeChunk(codec, as_float)
    runs = Counter((size, i > 0) for i, size in enumerate(codec.chunks(shape[1])))
    programs: list[ProgramCall] = []
    cache = None
    for (size, _), count in runs.items():
        latents = shape_on(jax.ShapeDtypeStruct((1, size, *shape[2:]), jnp.float32), mesh)
        programs.append((program, (model, latents, cache), shape[0] * count))
        if cache is None:
            *_, cache = jax.eval_shape(program, model, latents, None)
            cache = jax.tree.map(partial(_cache_on, mesh=mesh, latents=latents.shape), cache)
    return programs


def _cache_on(x: jax.ShapeDtypeStruct, mesh: Mesh | None, latents: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    if mesh is None:
        return x
    mesh = sharding.image_mesh(mesh, latents)
    where = NamedSharding(mesh, sharding.spatial_layout(mesh, latents, x.ndim))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
