"""The journey: a run becomes videos. Encode, denoise, decode, as a generator of `events`.

Everything that makes a video reads these events: Python's call, the commands, upscaling, samples during training.
Progress bars, previews, callbacks and cancelling are its readers' part; it stops where its reader stops.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.decode import Decode, DecodeChunk
from cogvideox_flax.generate.denoise import DenoiseState, check_finite, noise_key, place_state, run_loop
from cogvideox_flax.generate.encode import VIDEO_FEATURE, Conditioning, text_features
from cogvideox_flax.generate.events import Denoised, Events, Finished, LoopBegan, Step
from cogvideox_flax.generate.media import clips_with_sound
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.predict.step_cache import StepCache
from cogvideox_flax.generate.request import STAGES
from cogvideox_flax.generate.result import GenerationResult
from cogvideox_flax.generate.run import Run, decode_programs
from cogvideox_flax.generate.store import Memory, Store
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.runtime.global_arrays import fetch, replicate

log = logging.getLogger(__name__)


def generate(
    model: OpenModel, run: Run, store: Store | None = None, stages: Sequence[str] = STAGES, *, keep: bool | None = None
) -> Events[None]:
    """Encode, denoise and decode: one video per seed and prompt.

    Args:
        run: from `resolve`, for this model.
        store: where finished work is kept, and taken from; default: `Memory`.
        stages: those to do, of "encode", "denoise", "decode"; what an earlier one makes is in the store.
        keep: leave a stage's weights on the devices when the next begins; default: in memory, not with a directory.

    Raises:
        InputError: it does not fit into the devices' memory, before anything is loaded; an encoder or the decoder gives
            NaN or infinity; what the store holds is not of this run.
        NonFiniteError: NaN or infinity in the latents, naming the step.
    """
    store = (Memory() if store is None else store).of(run)
    if run.request.lora is None:
        run = run.varied(lora=list(model.loras))
    if run.request.output_type == "latent":
        stages = [stage for stage in stages if stage != "decode"]
    keep = not store.one_stage_at_a_time if keep is None else keep
    compiled = ["run"] if run.request.one_program else stages
    yield from model.checking_memory(((stage, run.abstract(stage, model.mesh)) for stage in compiled), keep=keep)
    if not run.request.one_program:
        yield from make_videos(model, run, store, stages, keep=keep)
        return
    for one in run.seeds():
        yield from _as_one_program(model, one)


def make_videos(
    model: OpenModel, run: Run, store: Store, stages: Sequence[str] = STAGES, *, keep: bool = True
) -> Events[None]:
    """`generate` in stages, without the check of the devices' memory."""
    runs = run.seeds()
    todo = [(stage, one) for one in runs for stage in stages]
    if not run.encodes_by_seed:  # all seeds share one conditioning
        todo = [(stage, one) for stage, one in todo if stage != "encode" or one is runs[0]]
    if store.one_stage_at_a_time:
        todo.sort(key=lambda item: STAGES.index(item[0]))
    last, text = stages[0], store.text
    for stage, one in todo:
        if not keep and stage != last:
            model.unload()
        last = stage
        match stage:
            # 1. prompts, images and clips to features
            case "encode" if not store.has_conditioning(one):
                text = yield from encode(model, one, text=text, negative=store.negative)
                store.save_conditioning(one, text)
            # 2. noise to latents; an interrupted loop continues from its last state
            case "denoise":
                conditioning = store.conditioning(one)
                key = store.latents_key(one, conditioning)
                if not store.has_latents(one, key):
                    yield from _denoise_from_store(model, one, conditioning, store, key)
                if one.request.output_type == "latent" and isinstance(store, Memory):
                    yield _finished(model, one, store.output_latents())
                else:
                    yield Denoised(one, store.latents(one), model.recipe(one))
            # 3. latents to frames
            case "decode":
                yield from _decode_run(model, one, store.latents(one))


def _denoise_from_store(model: OpenModel, run: Run, conditioning: Conditioning, store: Store, key: str) -> Events[None]:
    """Denoise, with the states and the latents in the store under this key."""
    with store.states(run, key) as states:
        state = states.found(model.mesh)
        loop = yield from denoise(model, run, conditioning, state=state)
        yield LoopBegan(run, run.num_steps, 0 if state is None else int(state.step))
        with closing(loop):
            for state in loop:
                states.keep(state)
                while (
                    changed := (yield Step(run, state, run.steps.timesteps[int(state.step) - 1].item()))
                ) is not None:
                    state = loop.send(changed)
        assert state is not None  # of a loop that was stopped after its last step, the one that was found
        if isinstance(run.predict, StepCache) and (summary := run.predict.summary(state.cache)) is not None:
            log.info(summary)
        model.profiling.after_stage("denoising")
        store.save_latents(run, key, state)  # before the state is removed


def finish(model: OpenModel, run: Run, state: DenoiseState) -> Events[None]:
    """Decode the latents of a state, or return them, as the run asks; the loop need not have ended."""
    if run.request.output_type == "latent":
        yield _finished(model, run, fetch(state.latents), int(state.step))
    else:
        yield from _decode_run(model, run, state.video_latents, int(state.step))


def _decode_run(model: OpenModel, run: Run, latents: Float[Any, "B T h w C"], done: int | None = None) -> Events[None]:
    request = run.request
    how: Any = {"output_type": request.output_type, "tiling": request.tiling, "in_chunks": run.windows is not None}
    frames = yield from decode(model, latents, **how)
    yield _finished(model, run, frames, done)


def _finished(model: OpenModel, run: Run, frames: Any, done: int | None = None) -> Finished:
    request = run.request
    sound = clips_with_sound(request.video, run.batch, request.fps / run.model.defaults.fps)
    return Finished(run, GenerationResult(frames, request.fps, model.recipe(run, done), request.crf, sound))


# --- the stages


def encode(
    model: OpenModel, run: Run, *, negative: bool | None = None, text: Conditioning | None = None
) -> Events[Conditioning]:
    """Encode prompts to features, images and clips to latents; arguments and errors as for `Pipeline.encode`."""
    if text is None:
        text = yield from encode_text(model, run, negative=negative)
    latents = {}
    for stage in run.visual:
        program, inputs = run.encode_visual(stage), replicate(run.media(stage), model.mesh)
        latents[stage.feature], finite = yield from model.running(program, model.component(stage.component), *inputs)
        model.profiling.after_stage(program.name)
        if not finite:
            raise model.not_finite("VAE")
    return Conditioning(text.text, text.negative_text, latents, latents.pop(VIDEO_FEATURE, None))


def encode_text(model: OpenModel, run: Run, *, negative: bool | None = None) -> Events[Conditioning]:
    """`encode` of the prompts alone."""
    request, prompts = run.request, {"text": run.request.prompt}
    if run.guided if negative is None else negative:
        prompts["negative_text"] = request.negative_prompt
    given = {} if request.text_features is None else text_features(request.text_features)
    features: dict[str, Any] = {name: given.get(name, {}) for name in prompts}
    # before a component is loaded: a cut prompt is reported at once
    tokens = {name: model.tokenize(prompts[name]) for name in prompts if name not in given}
    for encoder in run.model.text if tokens else ():
        program, module = run.encode(encoder), model.component(encoder.component)
        for name in tokens:
            ids = replicate(tokens[name][encoder.component], model.mesh)
            features[name] |= yield from model.running(program, module, ids)
        if not all(np.isfinite(fetch(x)).all() for name in tokens for x in features[name].values()):
            raise model.not_finite("text encoder")
        model.profiling.after_stage(program.name)
    return Conditioning(**features)


def denoise(
    model: OpenModel, run: Run, conditioning: Conditioning, *, state: DenoiseState | None = None
) -> Events[Generator[DenoiseState, DenoiseState | None]]:
    """Compile and load what the denoising loop needs; returns the loop, which is that of `Pipeline.denoise`."""
    run.check_conditioning(conditioning)
    if state is not None:
        if run.request.compiled_loop:
            raise InputError("a loop to go on from needs the step-by-step loop; leave compiled_loop off")
        run.check_state(state, model.mesh)
    latents, noise_source = yield from _start_noise(model, run)
    inputs, first = run.start(conditioning.on_host(), latents, noise_source)
    first = run.with_cache(state or first, model.mesh)
    inputs, first = replicate(inputs, model.mesh), place_state(first, model.mesh)
    program, module = model.program(run.denoise), model.denoiser(run)
    if model.profiling.jit:
        module = program.model_argument(module)  # once, and not in each step
        yield from model.preparing(run.denoise, module, inputs, first)
    return run_loop(program, module, inputs, first, run.num_steps, model.profiling, model.nan_advice)


def _start_noise(model: OpenModel, run: Run) -> Events[tuple[Any, Any]]:
    """The initial latents, and the source of the scheduler's noise: what was given, or by the seed."""
    request = run.request
    if request.latents is None:
        latents, key = yield from model.running(run.initial_noise, replicate(np.uint32(request.seed), model.mesh))
    else:
        latents, key = jnp.array(request.latents, jnp.float32), noise_key(request.seed)  # a copy: it may be donated
    return latents, key if request.noise is None else jnp.asarray(request.noise, jnp.float32)


def decode(
    model: OpenModel,
    latents: Float[Any, "B T h w C"],
    *,
    output_type: str = "uint8",
    tiling: bool = False,
    in_chunks: bool = False,
) -> Events[Any]:
    """Decode latents to frames on the host; arguments and errors as for `Pipeline.decode`."""
    family, as_float = model.manifest.model, output_type == "float"
    if in_chunks:
        shape = tuple(latents.shape)
        for program, args, _ in decode_programs(model.manifest, model.dtype, shape, model.mesh, as_float, tiling, True):
            yield from model.preparing(program, *args)
        return _frame_streams(model, latents, as_float)
    program = Decode(family.codec, as_float, tiling)
    z = replicate(jnp.asarray(latents, jnp.float32), model.mesh)
    frames, finite = yield from model.running(program, model.component(family.decoder), z)
    model.profiling.after_stage(program.name)
    if not finite:
        raise model.not_finite("VAE")
    return fetch(frames)


def _frame_streams(model: OpenModel, latents: Float[Any, "B T h w C"], as_float: bool) -> list[FrameStream]:
    codec, shape = model.manifest.model.codec, tuple(latents.shape)
    decoder, program = model.component(model.manifest.model.decoder), model.program(DecodeChunk(codec, as_float))
    one = jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32)
    frames, _ = jax.eval_shape(Decode(codec, as_float, False), decoder, one)

    def chunks(i: int) -> Iterator[np.ndarray]:
        cache, start = None, 0
        for size in codec.chunks(shape[1]):
            z = jnp.asarray(latents[i : i + 1, start : start + size], jnp.float32)
            frames, finite, cache = program(decoder, replicate(z, model.mesh), cache, jit=model.profiling.jit)
            if not finite:
                raise model.not_finite("VAE")
            start += size
            yield fetch(frames)[0]

    return [FrameStream(frames.shape[1:], partial(chunks, i), frames.dtype) for i in range(shape[0])]


def _as_one_program(model: OpenModel, run: Run) -> Events[None]:
    """Tokens to frames as one program."""
    modules = {name: model.component(name) for name in run.model.components}
    modules[run.model.denoiser] = model.denoiser(run)
    tokens = model.tokenize([*(run.request.negative_prompt if run.guided else ()), *run.request.prompt])
    noise = yield from _start_noise(model, run)
    inputs, state = run.start(None, *noise)
    inputs, state = replicate(inputs, model.mesh), place_state(run.with_cache(state, model.mesh), model.mesh)
    media = {stage.feature: run.media(stage) for stage in run.visual}
    arguments = replicate(tokens, model.mesh), replicate(media, model.mesh), inputs, state
    frames, steps_finite, finite = yield from model.running(run.whole_run, modules, *arguments)
    model.profiling.after_stage(run.whole_run.name)
    check_finite(fetch(steps_finite), inputs, run.num_steps, model.nan_advice)
    if not finite:
        raise model.not_finite("VAE")
    yield _finished(model, run, fetch(frames))
