"""One journey: a request becomes videos. Encode, denoise, decode, as a generator of `events`.

Everything that makes a video reads `run`: Python's call, the commands, upscaling, samples during training. Progress
bars, previews, callbacks and cancelling are its readers' part; it stops where its reader stops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.components import Components
from cogvideox_flax.generate.decode import Decode, DecodePiece
from cogvideox_flax.generate.denoise import DenoiseState, check_finite, noise_key, place_state, run_loop
from cogvideox_flax.generate.encode import VIDEO_FEATURE, Conditioning, text_conditioning
from cogvideox_flax.generate.events import Denoised, Events, Finished, LoopBegan, Step
from cogvideox_flax.generate.freshness import request_values
from cogvideox_flax.generate.predict.step_cache import StepCache
from cogvideox_flax.generate.programs import RunPrograms, decode_programs
from cogvideox_flax.generate.recipe import recipe
from cogvideox_flax.generate.request import STAGES, ResolvedRequest
from cogvideox_flax.generate.result import GenerationResult
from cogvideox_flax.generate.run_files import RunFiles
from cogvideox_flax.io.source import FrameStream
from cogvideox_flax.models.model import VisualStage
from cogvideox_flax.runtime.global_arrays import fetch, replicate

log = logging.getLogger(__name__)


def run(
    pipe: Components,
    request: ResolvedRequest,
    files: RunFiles | None = None,
    stages: Sequence[str] = STAGES,
    *,
    text: Conditioning | None = None,
    keep: bool | None = None,
) -> Events[None]:
    """Encode, denoise and decode.

    Args:
        request: from `resolve`, for this model.
        files: keeps what is finished and gives it back; then one stage is done for all videos before the next begins.
            None keeps nothing, and makes one video after the other.
        stages: those to do, of "encode", "denoise", "decode". A stage that is left out before them is in `files`.
        text: features of the prompts that are known already; the rest of a conditioning does not matter.
        keep: the components of a stage stay when the next begins; default: without files.

    Raises:
        InputError: it does not fit into the devices' memory, before anything is loaded; an encoder or the decoder gives
            NaN or infinity; what `files` hold is not of this request.
        NonFiniteError: NaN or infinity in the latents, naming the step.
    """
    if files is not None and (request.one_program or request.output_type == "latent"):
        raise InputError(
            "with files, a run is done in stages, and its latents are those of the `Denoised` event; leave one_program "
            'off, and output_type "latent" out'
        )
    if request.lora is None:
        request = request.varied(lora=list(pipe.loras))
    run = RunPrograms(request, pipe.dtype)
    if request.output_type == "latent":
        stages = [stage for stage in stages if stage != "decode"]
    parts, keep = ["run"] if request.one_program else stages, files is None if keep is None else keep
    yield from pipe.checking_memory(((part, run.abstract(part, pipe.mesh)) for part in parts), keep=keep)
    if request.one_program:
        for one in request.videos():
            yield from _run_as_one_program(pipe, one)
    else:
        yield from make_videos(pipe, request, files, stages, text=text, keep=keep)


def make_videos(
    pipe: Components,
    request: ResolvedRequest,
    files: RunFiles | None = None,
    stages: Sequence[str] = STAGES,
    *,
    text: Conditioning | None = None,
    keep: bool = True,
) -> Events[None]:
    """`run` without the check of the devices' memory.

    Args:
        text: an earlier conditioning for the same prompts, whose text features are used again.
        keep: the components of a stage stay when the next begins.
    """
    shared = None if RunPrograms(request, pipe.dtype).encodes_by_seed else _Encoded(pipe, request, files)
    videos = []
    for one in request.videos():
        own = None if files is None else files.of(one, request)
        videos.append(_Video(pipe, one, own, shared or _Encoded(pipe, one, own)))
    if files is None:
        order = [(stage, video) for video in videos for stage in stages]
    else:
        order = [(stage, video) for stage in stages for video in videos]
    before = stages[0]
    for stage, video in order:
        if not keep and stage != before:
            pipe.unload()
        before = stage
        match stage:
            case "encode":
                text = yield from video.encoded.encode(text)
            case "denoise":
                yield from video.denoise()
            case "decode":
                yield from video.decode()


@dataclass
class _Encoded:
    """The conditioning of one seed, or of all where the seed does not matter.

    files: None keeps it in memory.
    """

    pipe: Components
    request: ResolvedRequest
    files: RunFiles | None
    conditioning: Conditioning | None = None
    done: bool = False

    def encode(self, text: Conditioning | None) -> Events[Conditioning | None]:
        """Returns the conditioning, whose text features serve the next seed; `text` where it is there already."""
        if self.done:
            return text
        self.done = True
        if self.files is None:
            self.conditioning = yield from encoding(self.pipe, self.request, text=text)
            return self.conditioning
        if self.files.has_conditioning(self.request):
            return text
        # with the negative prompt also where guidance is off: another guidance scale then goes on from it
        conditioning = yield from encoding(self.pipe, self.request, text=text, negative=True)
        self.files.save_conditioning(self.request, conditioning)
        return conditioning

    def get(self) -> Conditioning:
        if self.files is not None:
            return self.files.conditioning(self.request)
        assert self.conditioning is not None
        return self.conditioning


@dataclass
class _Video:
    """The videos of one seed on their way.

    files: of this seed; None keeps the loop's last state in memory.
    """

    pipe: Components
    request: ResolvedRequest
    files: RunFiles | None
    encoded: _Encoded
    state: DenoiseState | None = None

    def denoise(self) -> Events[None]:
        conditioning = self.encoded.get()
        if self.files is None:
            states = yield from denoising(self.pipe, conditioning, self.request)
            yield from self._steps(states, done=0)
            assert self.state is not None
            if self.request.output_type == "latent":
                state, self.state = self.state, None
                yield from finish(self.pipe, self.request, state)
            return
        key = self.files.latents_key(self.request, conditioning)
        if not self.files.has_latents(self.request, key):
            with self.files.kept_state(self.request, key) as keeper:
                self.state = found = keeper.found(self.pipe.mesh)
                states = yield from denoising(self.pipe, conditioning, self.request, state=found)
                yield from self._steps(states, 0 if found is None else int(found.step), keeper.keep)
                assert self.state is not None  # of a loop that was stopped after its last step, the one that was found
                latents = fetch(self.state.video_latents)
                self.files.save_latents(self.request, key, latents)  # before the state is removed
                self.state = None
        yield Denoised(self.request, self.files.latents(self.request), recipe_of(self.pipe, self.request))

    def _steps(
        self, states: Generator[DenoiseState], done: int, keep: Callable[[DenoiseState], None] | None = None
    ) -> Events[None]:
        """The loop; `state` is then its last.

        done: steps of an earlier run.
        keep: takes each state.
        """
        yield LoopBegan(self.request, self.request.num_steps, done)
        timesteps = self._programs().steps.timesteps
        with closing(states):
            for self.state in states:
                if keep is not None:
                    keep(self.state)
                step = int(self.state.step) - 1
                yield Step(self.request, self.state, timesteps[step].item())
        predict = self._programs().predict
        if self.state is not None and self.state.cache is not None and isinstance(predict, StepCache):
            said = predict.said(self.state.cache)
            if said is not None:
                log.info(said)
        self.pipe.profiling.after_stage("denoising")

    def decode(self) -> Events[None]:
        if self.files is not None:
            latents: Any = self.files.latents(self.request)
        else:
            assert self.state is not None
            latents = self.state.video_latents
            self.state = None
        yield from _decode(self.pipe, self.request, latents)

    def _programs(self) -> RunPrograms:
        return RunPrograms(self.request, self.pipe.dtype)


def finish(pipe: Components, request: ResolvedRequest, state: DenoiseState) -> Events[None]:
    """What is made of a loop's state, which may be one in the middle: decoded frames, or latents."""
    done = int(state.step)
    if request.output_type == "latent":
        yield _finished(pipe, request, fetch(state.latents), done)
    else:
        yield from _decode(pipe, request, state.video_latents, done)


def _decode(
    pipe: Components, request: ResolvedRequest, latents: Float[Any, "B T h w C"], done: int | None = None
) -> Events[None]:
    in_pieces = RunPrograms(request, pipe.dtype).windows is not None
    how: Any = {"output_type": request.output_type, "tiling": request.tiling, "in_pieces": in_pieces}
    frames = yield from decoding(pipe, latents, **how)
    yield _finished(pipe, request, frames, done)


def _finished(pipe: Components, request: ResolvedRequest, frames: Any, done: int | None = None) -> Finished:
    return Finished(request, GenerationResult(frames, request.fps, recipe_of(pipe, request, done)))


def recipe_of(pipe: Components, request: ResolvedRequest, done: int | None = None) -> dict[str, Any]:
    """What a result stores of how it was made. done: the steps that were done; None: all."""
    made_of = request_values(request) | {"dtype": pipe.dtype}
    if done is not None and done < request.num_steps:
        made_of["steps_done"] = done
    if request.batch > 1 and not (request.same_noise and request.batch_is_alone):
        made_of["row"] = list(range(request.batch))
    return recipe(made_of, pipe.manifest, pipe.native_dir.name, pipe.fingerprints())


# --- the stages


def encoding(
    pipe: Components,
    request: ResolvedRequest,
    *,
    negative: bool | None = None,
    text: Conditioning | None = None,
) -> Events[Conditioning]:
    """Prompts to features, pictures and clips to latents; arguments and errors as for `Pipeline.encode`."""
    run = RunPrograms(request, pipe.dtype)
    if text is None:
        text = yield from encoding_text(pipe, request, negative=negative)
    latents = {}
    for stage in run.visual:
        latents[stage.feature] = yield from _encode_visual(pipe, run, stage)
    video = latents.pop(VIDEO_FEATURE, None)
    return Conditioning(text.text, text.negative_text, latents, video)


def encoding_text(pipe: Components, request: ResolvedRequest, *, negative: bool | None = None) -> Events[Conditioning]:
    """`encoding` of the prompts alone."""
    run, texts = RunPrograms(request, pipe.dtype), {"text": request.prompt}
    if request.text_features is not None:
        return text_conditioning(request.text_features, request.guided if negative is None else negative)
    if request.guided if negative is None else negative:
        texts["negative_text"] = request.negative_prompt
    tokens = {name: pipe.tokenize(each) for name, each in texts.items()}  # first: a cut prompt is reported at once
    found: dict[str, Any] = {name: {} for name in texts}
    for stage in run.model.text:
        program = run.encode(stage)
        for name in texts:
            module = pipe.component(stage.component)
            given = replicate(tokens[name][stage.component], pipe.mesh)
            features = yield from pipe.running(program, module, given)
            if not all(np.isfinite(fetch(value)).all() for value in features.values()):
                raise pipe.not_finite("text encoder")
            found[name] |= features
        pipe.profiling.after_stage(program.name)
    return Conditioning(**found)


def _encode_visual(pipe: Components, run: RunPrograms, stage: VisualStage) -> Events[Any]:
    """Scaled latents of a picture or clip."""
    program, inputs = run.encode_visual(stage), replicate(run.media(stage), pipe.mesh)
    latents, finite = yield from pipe.running(program, pipe.component(stage.component), *inputs)
    pipe.profiling.after_stage(program.name)
    if not finite:
        raise pipe.not_finite("VAE")
    return latents


def denoising(
    pipe: Components, conditioning: Conditioning, request: ResolvedRequest, *, state: DenoiseState | None = None
) -> Events[Generator[DenoiseState]]:
    """What comes before the denoising loop; returns the loop. Arguments and errors as for `Pipeline.denoise`."""
    run = RunPrograms(request, pipe.dtype)
    run.check_conditioning(conditioning)
    if request.compiled_loop and state is not None:
        raise InputError("a loop to go on from needs the step-by-step loop; leave compiled_loop off")
    if state is not None:
        run.check_state(state, pipe.mesh)
    latents, noise_source = yield from _start_noise(pipe, run)
    inputs, first = run.start(conditioning.on_host(), latents, noise_source)
    first = run.with_cache(state or first, pipe.mesh)
    inputs, first = replicate(inputs, pipe.mesh), place_state(first, pipe.mesh)
    program, model = pipe.program(run.denoise), pipe.denoiser(request)
    if pipe.profiling.jit:
        model = program.model_argument(model)  # once, and not in each step
        yield from pipe.preparing(run.denoise, model, inputs, first)
    return run_loop(program, model, inputs, first, pipe.profiling, pipe.hint)


def _start_noise(pipe: Components, run: RunPrograms) -> Events[tuple[Any, Any]]:
    """The initial latents, and the source of the sampler's noise: what was given, or by the seed."""
    request = run.request
    if request.latents is None:
        latents, key = yield from pipe.running(run.initial_noise, replicate(np.uint32(request.seed), pipe.mesh))
    else:
        latents, key = jnp.array(request.latents, jnp.float32), noise_key(request.seed)  # a copy: it may be donated
    return latents, key if request.noise is None else jnp.asarray(request.noise, jnp.float32)


def decoding(
    pipe: Components,
    latents: Float[Any, "B T h w C"],
    *,
    output_type: str = "uint8",
    tiling: bool = False,
    in_pieces: bool = False,
) -> Events[Any]:
    """Latents to frames on the host; arguments and errors as for `Pipeline.decode`.

    Args:
        in_pieces: of long clips, each is decoded while its frames are read, a few of them at a time: returns a
            `FrameStream` for each. On several hosts all of them read it to its end.
    """
    model, as_float = pipe.manifest.model, output_type == "float"
    if in_pieces:
        shape = tuple(latents.shape)
        for program, args, _ in decode_programs(pipe.manifest, pipe.dtype, shape, pipe.mesh, as_float, tiling, True):
            yield from pipe.preparing(program, *args)
        return _frame_streams(pipe, latents, as_float)
    program = Decode(model.codec, as_float, tiling)
    z = replicate(jnp.asarray(latents, jnp.float32), pipe.mesh)
    frames, finite = yield from pipe.running(program, pipe.component(model.decoder), z)
    pipe.profiling.after_stage(program.name)
    if not finite:
        raise pipe.not_finite("VAE")
    return fetch(frames)


def _frame_streams(pipe: Components, latents: Float[Any, "B T h w C"], as_float: bool) -> list[FrameStream]:
    codec, shape = pipe.manifest.model.codec, tuple(latents.shape)
    model, program = pipe.component(pipe.manifest.model.decoder), pipe.program(DecodePiece(codec, as_float))
    one = jax.ShapeDtypeStruct((1, *shape[1:]), jnp.float32)
    frames, _ = jax.eval_shape(Decode(codec, as_float, False), model, one)

    def decode(i: int) -> Iterator[np.ndarray]:
        cache, start = None, 0
        for size in codec.pieces(shape[1]):
            z = jnp.asarray(latents[i : i + 1, start : start + size], jnp.float32)
            frames, finite, cache = program(model, replicate(z, pipe.mesh), cache, jit=pipe.profiling.jit)
            if not finite:
                raise pipe.not_finite("VAE")
            start += size
            yield fetch(frames)[0]

    return [FrameStream(frames.shape[1:], partial(decode, i), frames.dtype) for i in range(shape[0])]


def _run_as_one_program(pipe: Components, request: ResolvedRequest) -> Events[None]:
    """Tokens to frames as one program."""
    run = RunPrograms(request, pipe.dtype)
    models = {name: pipe.component(name) for name in run.model.components}
    models[run.model.denoiser] = pipe.denoiser(request)
    tokens = pipe.tokenize([*(request.negative_prompt if request.guided else ()), *request.prompt])
    noise = yield from _start_noise(pipe, run)
    inputs, state = run.start(None, *noise)
    inputs, state = replicate(inputs, pipe.mesh), place_state(run.with_cache(state, pipe.mesh), pipe.mesh)
    media = {stage.feature: run.media(stage) for stage in run.visual}
    given = replicate(tokens, pipe.mesh), replicate(media, pipe.mesh), inputs, state
    frames, steps_finite, finite = yield from pipe.running(run.whole_run, models, *given)
    pipe.profiling.after_stage(run.whole_run.name)
    check_finite(fetch(steps_finite), inputs, pipe.hint)
    if not finite:
        raise pipe.not_finite("VAE")
    yield _finished(pipe, request, fetch(frames))
