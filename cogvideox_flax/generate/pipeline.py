"""The pipeline: a request in, frames out.

A run has three stages, each usable by itself: `encode`, `denoise`, `decode`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.checks import check_run
from cogvideox_flax.generate.compiled_components import CompiledComponents
from cogvideox_flax.generate.conditioning import VIDEO_FEATURE, Conditioning
from cogvideox_flax.generate.decoding import Frames
from cogvideox_flax.generate.denoise import (
    DenoiseState,
    check_finite,
    denoise_at_once,
    denoise_steps,
    noise_key,
    place_state,
    with_progress,
)
from cogvideox_flax.generate.memory import check_memory
from cogvideox_flax.generate.programs import RunPrograms
from cogvideox_flax.generate.request import STAGES, GenerationRequest, ResolvedRequest
from cogvideox_flax.generate.result import GenerationResult, describe_request
from cogvideox_flax.models.family import VisualStage
from cogvideox_flax.runtime.global_arrays import fetch, replicate
from cogvideox_flax.runtime.terminal import say
from cogvideox_flax.schedulers import Scheduler

log = logging.getLogger(__name__)

Callback = Callable[[int, float, Float32[Array, "B T h w C"]], bool | None]
"""callback(step, timestep, latents), after each step; True stops the run there. Timesteps are as the sampler has them:
int or float."""


class Pipeline(CompiledComponents):
    """Text to video with a checkpoint of any family.

    Components are loaded when they are first used and stay; `release` lets them go, for a machine that holds only one
    of them at a time (the command line does so between its stages).

    Attributes:
        tokenizer: the family's; list of prompts -> tokens.
        scheduler: the checkpoint's own sampler.
        profiling: what to record while it runs: memory, a profile, operations one by one.
    """

    def __init__(self, native_dir: Path, dtype: str, mesh: Mesh | None):
        super().__init__(native_dir, dtype, mesh)
        family, configs = self.manifest.model_family, self.manifest.configs
        self.tokenizer: Any = family.make_tokenizer(native_dir, configs)
        self.scheduler: Scheduler = family.sampler(configs, configs["scheduler"].kind)
        self._last: tuple[Any, Any] = (None, None)  # the last request, as given and resolved

    def resolve(self, request: GenerationRequest) -> ResolvedRequest:
        """The request with every None filled, checked for this model and mesh.

        Raises:
            InputError: with every fault found.
        """
        if request is not self._last[0]:  # so that a warning is said once for a request that several stages take
            resolved = request.resolve(self.manifest)
            check_run(resolved, self.mesh, self.profiling)
            self._last = request, resolved
        return self._last[1]

    def programs(self, request: GenerationRequest) -> RunPrograms:
        """The programs of a request, and their arguments: sizes, sampler tables, shapes."""
        return RunPrograms(self.manifest, self.resolve(request), self.dtype)

    def __call__(
        self,
        prompt: str | Sequence[str] | GenerationRequest,
        *options: Any,
        callback: Callback | None = None,
        progress: bool = True,
        **named: Any,
    ) -> GenerationResult:
        """Generate videos.

        Args:
            prompt: one prompt, a list of them, or a whole `GenerationRequest`.
            options, named: the other fields of `GenerationRequest`, in its order or by name.
            callback: called after each step, may stop the run or read the latents.
            progress: progress bar and compile times on stderr.

        Raises:
            InputError: an argument that cannot be served; before anything is loaded or compiled.
            NonFiniteError: NaN or infinity in the latents, naming the step.
        """
        if not isinstance(prompt, GenerationRequest):
            prompt = GenerationRequest(prompt, *options, **named)
        elif options or named:
            raise TypeError("a GenerationRequest says everything; change it with dataclasses.replace")
        self._last = (None, None)  # its files may have changed since an earlier call with the same request
        request = self.resolve(prompt)
        if callback is not None and (request.compiled_loop or request.one_program):
            raise InputError("a callback needs the step-by-step loop; leave compiled_loop off")
        stages = ["run"] if request.one_program else STAGES[:-1] if request.output_type == "latent" else STAGES
        self.check_memory(request, stages, progress=progress)
        self._use_loras_of(request)
        frames: list[Any] = []
        conditioning = None if request.one_program else self.encode(request, progress=progress)
        for one in request.videos():
            if frames and conditioning is not None and self.programs(one).encodes_by_seed:
                conditioning = self.encode(one, text=conditioning, progress=progress)
            if conditioning is None:
                made, steps_done, stopped = *self._run_as_one_program(one, progress), False
            else:
                made, steps_done, stopped = self._denoise_and_decode(conditioning, one, callback, progress)
            frames.append(fetch(made))
            if stopped:
                break
        videos = frames[0] if len(frames) == 1 else np.concatenate(frames)
        metadata = describe_request(
            dataclasses.replace(request, num_videos=len(frames), lora=self._adapters),
            self.manifest,
            self.native_dir.name,
            self.dtype,
            steps_done,
        )
        return GenerationResult(videos, request.fps, metadata)

    def _use_loras_of(self, request: ResolvedRequest) -> None:
        self.use_loras(self.loras if request.lora is None else request.lora)

    def _denoise_and_decode(
        self, conditioning: Conditioning, request: ResolvedRequest, callback: Callback | None, progress: bool
    ) -> tuple[Any, int, bool]:
        """Frames, or latents; how many steps were done; whether the callback has stopped the run."""
        run, stopped = self.programs(request), False
        states = self.denoise(conditioning, request, progress=progress)
        with with_progress(states, len(run.steps), progress=progress) as each:
            for state in each:
                done = int(state.step)
                if callback is not None and callback(done - 1, run.steps.timesteps[done - 1].item(), state.latents):
                    stopped = True
                    say(f"stopped by the callback after step {done} of {len(run.steps)}", progress)
                    break
        self.profiling.after_stage("denoising")
        if request.output_type == "latent":
            return state.latents, done, stopped
        kept = state.latents[:, run.size.extra_latents :]
        how: dict[str, Any] = {"output_type": request.output_type, "progress": progress}
        if run.windows is not None:
            return np.stack([np.stack(list(clip)) for clip in self.decode_clips(kept, **how)]), done, stopped
        return self.decode(kept, tiling=request.tiling, **how), done, stopped

    def check_memory(
        self, request: GenerationRequest, stages: Sequence[str] = STAGES, *, keep: bool = True, progress: bool = True
    ) -> None:
        """Compile stages of a run before anything is loaded, and refuse what the devices cannot hold.

        Args:
            stages: of "encode", "denoise", "decode"; or "run", for all of them as one program.
            keep, progress: as for `memory.check_memory`.

        Raises:
            InputError: with the numbers and what to change.
        """
        if self.profiling.jit:
            run = self.programs(request)
            programs = ((stage, run.abstract(stage, self.mesh)) for stage in stages)
            check_memory(programs, self._compiled, keep=keep, progress=progress)

    def _tokens(self, texts: Sequence[str]) -> dict[str, Any]:
        stages = self.manifest.model_family.text
        return {stage.component: stage.tokenize(self.tokenizer, list(texts)) for stage in stages}

    def encode(
        self,
        request: GenerationRequest,
        *,
        negative: bool | None = None,
        text: Conditioning | None = None,
        progress: bool = True,
    ) -> Conditioning:
        """Text features of the prompts and, where guidance needs them, of the negative prompts; latents of the pictures
        and clips.

        Args:
            negative: encode the negative prompts in any case, or in none.
            text: an earlier result for the same prompts, whose text features are used again.

        Raises:
            InputError: an encoder gives NaN or infinity, or a frame cannot be decoded.
        """
        run = self.programs(request)
        if text is None:
            negative = run.request.guided if negative is None else negative
            text = Conditioning(**self._encode_text(run, negative, progress))
        latents = {stage.feature: self._encode_visual(run, stage, progress) for stage in run.visual}
        video = latents.pop(VIDEO_FEATURE, None)
        return Conditioning(text.text, text.negative_text, latents, video)

    def _encode_text(self, run: RunPrograms, negative: bool, progress: bool) -> dict[str, dict[str, Any]]:
        """`text` and, if `negative`, `negative_text` of a conditioning."""
        texts = {"text": run.request.prompt}
        if negative:
            texts["negative_text"] = run.request.negative_prompt
        tokens = {name: self._tokens(each) for name, each in texts.items()}  # first: a cut prompt is reported at once
        found: dict[str, Any] = {name: {} for name in texts}
        for stage in self.manifest.model_family.text:
            program = run.encode(stage)
            for name in texts:
                module = self.component(stage.component)
                features = self._run(
                    program, module, replicate(tokens[name][stage.component], self.mesh), progress=progress
                )
                if not all(np.isfinite(fetch(value)).all() for value in features.values()):
                    raise self._bad("text encoder")
                found[name] |= features
            self.profiling.after_stage(program.name)
        return found

    def _encode_visual(self, run: RunPrograms, stage: VisualStage, progress: bool) -> Any:
        """Scaled latents of a picture or clip."""
        program, inputs = run.encode_visual(stage), replicate(run.media(stage), self.mesh)
        latents, finite = self._run(program, self.component(stage.component), *inputs, progress=progress)
        self.profiling.after_stage(program.name)
        if not finite:
            raise self._bad("VAE")
        return latents

    def denoise(
        self,
        conditioning: Conditioning,
        request: GenerationRequest,
        *,
        state: DenoiseState | None = None,
        progress: bool = False,
    ) -> Generator[DenoiseState]:
        """The denoising loop: yields the state after each step (after the last only, with `compiled_loop`).

        What it needs is compiled and loaded before this returns.

        Args:
            conditioning: from `encode`; without negative_text it runs without guidance.
            state: of an earlier loop with the same arguments, to go on from. Without its `cache`, the next step must be
                full.
            progress: say on stderr what is compiled.

        Raises:
            InputError: an argument that cannot be served.
            NonFiniteError: NaN or infinity in the latents, naming the step.
        """
        run = self.programs(request)
        resolved = run.request
        run.check_conditioning(conditioning)
        if resolved.compiled_loop and state is not None:
            raise InputError("a loop to go on from needs the step-by-step loop; leave compiled_loop off")
        self._use_loras_of(resolved)
        latents, noise_source = self._start_noise(run, progress)
        inputs, first = run.start(conditioning.on_host(), latents, noise_source)
        first = run.with_cache(state or first, self.mesh)
        inputs, first = replicate(inputs, self.mesh), place_state(first, self.mesh)
        program = self._compiled.get(run.denoise)
        model = self.component(self.manifest.model_family.denoiser)
        if self.profiling.jit:
            model = program.model_argument(model)  # once, and not in each step
            program.prepare(model, inputs, first, announce=progress)
        loop = denoise_at_once if resolved.compiled_loop else denoise_steps
        return loop(program, model, inputs, first, self.profiling, self._hint())

    def _start_noise(self, run: RunPrograms, progress: bool) -> tuple[Any, Any]:
        """The initial latents, and the source of the sampler's noise: what was given, or by the seed."""
        request = run.request
        if request.latents is None:
            latents, key = self._run(
                run.initial_noise, replicate(np.uint32(request.seed), self.mesh), progress=progress
            )
        else:
            latents, key = jnp.array(request.latents, jnp.float32), noise_key(request.seed)  # a copy: it may be donated
        return latents, key if request.noise is None else jnp.asarray(request.noise, jnp.float32)

    def _run_as_one_program(self, request: ResolvedRequest, progress: bool) -> tuple[Frames, int]:
        """Tokens to frames as one program; and the number of its steps."""
        run = self.programs(request)
        models = {name: self.component(name) for name in self.manifest.model_family.components}
        tokens = self._tokens([*(request.negative_prompt if request.guided else ()), *request.prompt])
        inputs, state = run.start(None, *self._start_noise(run, progress))
        inputs, state = replicate(inputs, self.mesh), place_state(run.with_cache(state, self.mesh), self.mesh)
        media = {stage.feature: run.media(stage) for stage in run.visual}
        given = replicate(tokens, self.mesh), replicate(media, self.mesh), inputs, state
        frames, steps_finite, finite = self._run(run.whole_run, models, *given, progress=progress)
        self.profiling.after_stage(run.whole_run.name)
        check_finite(fetch(steps_finite), inputs, self._hint())
        if not finite:
            raise self._bad("VAE")
        return frames, len(run.steps)

    def _hint(self) -> str:
        """What to do about NaN in the latents."""
        sound = "float32 holds what a sound checkpoint computes: download it again and convert it again."
        return sound if self.dtype == "float32" else ""


class CogVideoXPipeline(Pipeline):
    """`Pipeline` for CogVideoX alone."""

    family = "cogvideox"
