"""The pipeline: a request in, frames out.

The whole journey is in `run`; `encode`, `denoise` and `decode` are its stages, each usable by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Float32
from PIL import Image

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.components import Components
from cogvideox_flax.generate.denoise import DenoiseState
from cogvideox_flax.generate.encode import Conditioning
from cogvideox_flax.generate.events import Events, Finished, Step, last_of, result_of, show
from cogvideox_flax.generate.keywords import OUTPUT_TYPES, check_keywords, with_options
from cogvideox_flax.generate.programs import RunPrograms
from cogvideox_flax.generate.request import STAGES, GenerationRequest, ResolvedRequest
from cogvideox_flax.generate.resolve import check_run, resolve
from cogvideox_flax.generate.result import GenerationResult, join
from cogvideox_flax.generate.run import decoding, denoising, encoding, finish, run
from cogvideox_flax.generate.run_files import NEGATIVE, RunFiles
from cogvideox_flax.runtime.terminal import say

Callback = Callable[[int, float, Float32[Array, "B T h w C"]], bool | None]
"""callback(step, timestep, latents), after each step; True stops the run there. Timesteps are as the sampler has them:
int or float."""


Request = GenerationRequest | str | Sequence[str]
"""A whole request, or the prompts of one."""


class Pipeline(Components):
    """Text to video with a checkpoint of any family: `Pipeline.from_pretrained(where)(prompt)`.

    Wherever a request is taken, a prompt or a list of them will do.

    Components are loaded when they are first used and stay; `release` lets them go, for a machine that holds only one
    of them at a time (the command line does so between its stages).
    """

    _resolved: tuple[Any, Any] = None, None  # the last request, as given and resolved

    @with_options
    def __call__(
        self,
        prompt: Request | None = None,
        *options: Any,
        callback: Callback | None = None,
        progress: bool = True,
        **named: Any,
    ) -> GenerationResult:
        """Generate videos.

        Args:
            prompt: one prompt, a list of them, or a whole `GenerationRequest`; may be left out with `prompt_embeds`.
            callback: called after each step, may stop the run or read the latents.
            progress: progress bar and compile times on stderr.

        diffusers' names: output_type "np" is "float", and "pil" gives a list of PIL images for each video.
        `prompt_embeds` and `negative_prompt_embeds` (for HunyuanVideo-1.5 also those with _mask, _2 and _mask_2), float
        [B, L, E], stand for the prompts.

        Raises:
            InputError: an argument that cannot be served; before anything is loaded or compiled.
            TypeError: a keyword that is no option; one of diffusers' is answered with the name to use.
            NonFiniteError: NaN or infinity in the latents, naming the step.
        """
        text, named = self._take_embeds(named)
        if isinstance(prompt, GenerationRequest):
            if options or named:
                raise TypeError("a GenerationRequest says everything; change it with dataclasses.replace")
        else:
            check_keywords(named)
            if prompt is None:
                if text is None:
                    raise TypeError("a prompt is missing")
                prompt = [""] * text.batch
            prompt = GenerationRequest(prompt, *options, **named)
        output_type = prompt.output_type
        if output_type in OUTPUT_TYPES:
            prompt = replace(prompt, output_type=OUTPUT_TYPES[output_type])
        self._resolved = None, None  # its files may have changed since an earlier call with the same request
        request = self.resolve(prompt)
        if callback is not None and (request.compiled_loop or request.one_program):
            raise InputError("a callback needs the step-by-step loop; leave compiled_loop off")
        if text is not None:
            self._check_embeds(request, text)
            text = text if request.guided else Conditioning(text.text)
        results, stopped = [], None
        with closing(show(run(self, request, text=text), progress)) as events:
            for event in events:
                match event:
                    case Finished(result=result):
                        results.append(result)
                    case Step(_, state, timestep) if callback is not None:
                        if callback(int(state.step) - 1, timestep, state.latents):
                            stopped = event
                            break
        if stopped is not None:
            done, of = int(stopped.state.step), stopped.request.num_steps
            say(f"stopped by the callback after step {done} of {of}", progress)
            results.append(last_of(finish(self, stopped.request, stopped.state), progress).result)
        result = join(results)
        if output_type == "pil":
            return replace(result, frames=[[Image.fromarray(frame) for frame in clip] for clip in result.frames])
        return result

    def _take_embeds(self, named: dict[str, Any]) -> tuple[Conditioning | None, dict[str, Any]]:
        """The features of prompts among the keywords, and the other keywords."""
        names = self.manifest.model.feature_shapes(1)
        text, negative = (
            {name: np.asarray(named[prefix + name]) for name in names if named.get(prefix + name) is not None}
            for prefix in ("", NEGATIVE)
        )
        rest = {key: value for key, value in named.items() if key.removeprefix(NEGATIVE) not in names}
        if negative and not text:
            raise InputError("negative_prompt_embeds go with prompt_embeds; give both, or the negative_prompt as text")
        return Conditioning(text, negative or None) if text else None, rest

    def _check_embeds(self, request: ResolvedRequest, text: Conditioning) -> None:
        """Refuse features that do not go with a request.

        Raises:
            InputError: with what is expected.
        """
        if request.one_program:
            raise InputError("one program begins with the prompts; leave prompt_embeds or one_program out")
        if request.guided and text.negative_text is None:
            raise InputError("with guidance, prompt_embeds need negative_prompt_embeds; or take guidance_scale=1")
        shapes, halves = self.manifest.model.feature_shapes(request.batch), {"": text.text}
        halves |= {NEGATIVE: text.negative_text} if text.negative_text is not None else {}
        for prefix, features in halves.items():
            for name, shape in shapes.items():
                found = tuple(np.shape(features[name])) if name in features else "none"
                if found != shape:
                    raise InputError(f"{prefix}{name} must be {list(shape)} for {request.batch} prompts; got {found}")

    def run(self, request: Request, files: RunFiles | None = None) -> Events[None]:
        """The whole journey, owned by the caller: see `generate.run.run`."""
        return run(self, self.resolve(request), files)

    def resolve(self, request: Request) -> ResolvedRequest:
        """The request with every None filled, checked for this model and mesh; a resolved one stays as it is.

        Raises:
            InputError: with every fault found.
        """
        before, resolved = self._resolved
        if not isinstance(request, GenerationRequest):
            request = GenerationRequest(request)
        if request is not before:  # a warning is said once for a request that several stages take
            used = request if request.lora is not None else replace(request, lora=list(self.loras))
            resolved = resolve(used, self.manifest)
            self._resolved = request, resolved
        check_run(resolved, self.mesh, self.profiling)
        return resolved

    def programs(self, request: Request) -> RunPrograms:
        """The programs of a request, and their arguments: sizes, sampler tables, shapes."""
        return RunPrograms(self.resolve(request), self.dtype)

    def encode(
        self,
        request: Request,
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
        return result_of(encoding(self, self.resolve(request), negative=negative, text=text), progress)

    def denoise(
        self,
        conditioning: Conditioning,
        request: Request,
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
        return result_of(denoising(self, conditioning, self.resolve(request), state=state), progress)

    def decode(
        self,
        latents: Float[Any, "B T h w C"],
        *,
        output_type: str = "uint8",
        tiling: bool = False,
        in_pieces: bool = False,
        progress: bool = True,
    ) -> Any:
        """Scaled latents (extra frames already dropped) to frames.

        Args:
            in_pieces: for long clips: each is decoded while its frames are read, a few of them at a time. On several
                hosts all of them read a clip to its end.

        Returns:
            uint8 [B, F, H, W, 3], or float32 in [0, 1] for "float"; in pieces, a `FrameStream` for each clip.

        Raises:
            InputError: the decoder gives NaN or infinity; in pieces, while frames are read.
        """
        how: Any = {"output_type": output_type, "tiling": tiling, "in_pieces": in_pieces}
        return result_of(decoding(self, latents, **how), progress)

    def check_memory(
        self, request: Request, stages: Sequence[str] = STAGES, *, keep: bool = True, progress: bool = True
    ) -> None:
        """Compile stages of a run before anything is loaded, and refuse what the devices cannot hold.

        Args:
            stages: of "encode", "denoise", "decode"; or "run", for all of them as one program.
            keep: as for `checking_memory`.
            progress: say on stderr what is compiled.

        Raises:
            InputError: with the numbers and what to change.
        """
        programs = self.programs(request)
        compiled = ((stage, programs.abstract(stage, self.mesh)) for stage in stages)
        result_of(self.checking_memory(compiled, keep=keep), progress)


class CogVideoXPipeline(Pipeline):
    """`Pipeline` for CogVideoX alone."""

    family = "cogvideox"
