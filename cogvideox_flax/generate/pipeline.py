"""The pipeline: a request in, frames out.

The whole journey is in `journey`; `encode`, `denoise` and `decode` are its stages, each usable by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32
from PIL import Image

from cogvideox_flax import hub
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.denoise import DenoiseState
from cogvideox_flax.generate.diffusers_names import CALL, DIFFUSERS_OUTPUT_TYPES, PT, check_keywords, with_options
from cogvideox_flax.generate.encode import NEGATIVE, Conditioning
from cogvideox_flax.generate.events import Events, Finished, Step, last_of, result_of, show
from cogvideox_flax.generate.journey import decode, denoise, encode, finish, generate
from cogvideox_flax.generate.open_model import OpenModel
from cogvideox_flax.generate.recipe import array_hash
from cogvideox_flax.generate.request import STAGES, GenerationRequest, check_option
from cogvideox_flax.generate.resolve import check_run, log_warnings, numbers, plain, resolve
from cogvideox_flax.generate.result import GenerationResult, items, join
from cogvideox_flax.generate.run import Run
from cogvideox_flax.generate.store import Store
from cogvideox_flax.io.arrays import channels_last_advice, dtype_name, from_torch
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.lora import ActiveAdapters, describe_lora
from cogvideox_flax.runtime import libtpu
from cogvideox_flax.runtime.settings import in_own_settings
from cogvideox_flax.runtime.terminal import say
from cogvideox_flax.schedulers import Scheduler

Callback = Callable[[int, float, Float32[Array, "B T h w C"]], Any]
"""callback(step, timestep, latents), after each step. True stops the run there; latents that it returns, alone or as
{"latents": ...}, are those to go on with. Timesteps are the scheduler's, int or float."""


Request = GenerationRequest | str | Sequence[str] | Run
"""A whole request, the prompts of one, or one that was resolved."""


class Pipeline(OpenModel):
    """Text to video with a checkpoint of any family: `Pipeline.from_pretrained(where)(prompt)`.

    Wherever a request is taken, a prompt or a list of them will do.

    Components are loaded when they are first used and stay; `release` lets them go, for a machine that holds only one
    of them at a time (the command line does so between its stages).

    Attributes:
        scheduler: that of requests which name none; the checkpoint's own unless another one is assigned.
    """

    def __init__(self, native_dir: Path, dtype: str, mesh: Mesh | None):
        super().__init__(native_dir, dtype, mesh)
        self._scheduler: Scheduler | None = None  # in place of the checkpoint's
        self._warned: set[str] = set()  # warnings about the current request

    @classmethod
    def from_pretrained(
        cls,
        where: str | Path | None = None,
        dtype: Any = None,
        mesh: Mesh | None = None,
        *,
        revision: str | None = None,
        transformer: str | Path | None = None,
        variant: str | None = None,
        progress: bool = True,
        **others: Any,
    ) -> Self:
        """Open a checkpoint.

        Args:
            where: a native directory; a Hugging Face layout directory or hub id, which are converted once into a
                cache, with progress; "embedded" (the default) and "embedded-image-to-video" come with the package.
            dtype: "bfloat16", "float32" or "float16" (2b only, and not on TPUs), or JAX's or PyTorch's types of these
                names; the dtype of weights and activations. Default: bfloat16; float32 below 10^9 parameters.
            mesh: from `sharding.make_mesh`; None for one device.
            revision: for a hub id: branch, tag or commit.
            transformer: one in place of the checkpoint's own, such as a fine-tuned one: its directory or file, a model
                that has one, or a hub id; converted once. A module is set afterwards: `pipe.transformer = module`.
            variant: of the weight files that are converted, such as "fp16"; default: the plain ones, or the only ones.
            progress: progress bars of downloads and conversions on stderr.

        Raises:
            InputError: not a complete text-to-video checkpoint, damaged, a dtype that it does not survive or the
                devices do not serve, or a mesh that it does not divide over. What the configs rule out is refused
                before anything is converted.
            TypeError: another keyword; diffusers' torch_dtype is answered with the name to use.
        """
        for name in others:
            answer = CALL.get(
                name, "from_pretrained takes where, dtype, mesh, revision, transformer, variant and progress"
            )
            raise TypeError(f"from_pretrained has no keyword {name}: {answer}")
        if mesh is not None and not isinstance(mesh, Mesh):
            raise InputError(
                f"mesh is {short_repr(mesh)}; expected sharding.make_mesh(dp, sp, tp), or None for one device"
            )
        if not isinstance(transformer, str | Path | None):
            raise InputError(
                f"transformer is {short_repr(transformer)}; expected a directory, file or hub id. A module is set "
                "afterwards: pipe.transformer = module"
            )
        libtpu.quiet_without_tpu()
        manifest = hub.peek(where, revision, transformer, variant, progress=progress)
        dtype = None if dtype is None else dtype_name(dtype)
        cls._check_model(manifest, where or hub.EMBEDDED, dtype, mesh)
        return cls(hub.find(where, revision, transformer, variant, progress=progress), dtype, mesh)

    @property
    def scheduler(self) -> Scheduler:
        model, kind = self.manifest.model, self.manifest.configs["scheduler"].kind
        return model.scheduler(kind) if self._scheduler is None else self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        model = self.manifest.model
        own = model.own_scheduler(scheduler)
        self._scheduler = model.scheduler(own) if isinstance(own, str) else own

    @with_options
    def __call__(
        self,
        prompt: Request | None = None,
        *options: Any,
        num_videos_per_prompt: int | None = None,
        callback: Callback | None = None,
        progress: bool = True,
        **named: Any,
    ) -> GenerationResult:
        """Generate videos.

        Args:
            prompt: one prompt, a list of them, or a whole `GenerationRequest`; may be left out with `prompt_embeds`.
            num_videos_per_prompt: diffusers' `num_videos`: the same videos, those of one prompt side by side; those of
                `num_videos` are in the order of their seeds.
            callback: called after each step; may read the latents, stop the run, or return latents to go on with.
            progress: progress bar and compile times on stderr.

        output_type: "uint8" and "float" give frames [B, F, H, W, 3], "latent" gives latents [B, T, h, w, C], which
        `latents` and `decode` take. diffusers' names: "np" is "float", and "pil" gives a list of PIL images for each
        video; its own latents have the axes [B, T, C, h, w], or [B, C, T, h, w] of HunyuanVideo-1.5.

        `prompt_embeds` and `negative_prompt_embeds` (for HunyuanVideo-1.5 also those with _mask, _2 and _mask_2), float
        [B, L, E], stand for the prompts; without the latter, the `negative_prompt` is encoded. Arrays may be tensors of
        PyTorch, in bfloat16 and with gradients too.

        `seed` may be a list: one seed for each video, prompt by prompt, each made as it is alone.

        Raises:
            InputError: an argument that cannot be served; before anything is loaded or compiled.
            TypeError: a keyword that is no option; one of diffusers' is answered with the name to use.
            NonFiniteError: NaN or infinity in the latents, naming the step.
        """
        if num_videos_per_prompt is not None:
            if "num_videos" in named:
                raise TypeError("num_videos and num_videos_per_prompt are the same; give one of them")
            named["num_videos"] = num_videos_per_prompt
        request = self._asked(prompt, options, named)
        output_type = (request.request if isinstance(request, Run) else request).output_type
        if output_type == "pt":
            raise InputError(PT)
        if isinstance(request, GenerationRequest) and (ours := DIFFUSERS_OUTPUT_TYPES.get(str(output_type))):
            request = replace(request, output_type=ours)
        if callback is not None and not callable(callback):
            raise TypeError(f"callback is {short_repr(callback)}; expected a function of step, timestep and latents")
        self._warned.clear()
        runs = self._runs(request)
        if callback is not None and (runs[0].request.compiled_loop or runs[0].request.one_program):
            raise InputError("a callback needs the step-by-step loop; leave compiled_loop off")
        results, changed = self._results(runs, callback, progress)
        if num_videos_per_prompt is not None:
            results = [item for prompts in zip(*map(items, results), strict=True) for item in prompts]
        result = join(results)
        if changed is not None:
            settings = result.metadata["settings"]
            settings["arrays"] = settings.get("arrays", {}) | {"callback": array_hash(changed)}
        if output_type == "pil":
            return replace(result, frames=[[Image.fromarray(frame) for frame in clip] for clip in result.frames])
        return result

    def _asked(self, prompt: Request | None, options: Sequence[Any], named: dict[str, Any]) -> GenerationRequest | Run:
        """The request of a call's arguments; text features are keywords by diffusers' names."""
        shapes = self.manifest.model.feature_shapes(1)
        names = {*shapes, *(NEGATIVE + name for name in shapes)}
        features = {name: x for name, x in named.items() if name in names and x is not None}
        named = {name: x for name, x in named.items() if name not in names}
        if isinstance(prompt, GenerationRequest | Run):
            if options or named or features:
                raise TypeError("a GenerationRequest says everything; change it with dataclasses.replace")
            return prompt
        check_keywords(named)
        if features:
            named["text_features"] = features
        if prompt is None and named.get("text_features") is None:
            raise TypeError("a prompt is missing")
        return GenerationRequest("" if prompt is None else prompt, *options, **named)

    def _results(
        self, runs: Sequence[Run], callback: Callback | None, progress: bool
    ) -> tuple[list[GenerationResult], Array | None]:
        """The results of runs, up to the one that the callback stops; and the last latents that it changed."""
        results, changed, stopped = [], None, None
        with closing(show(_all_of(generate(self, run) for run in runs), progress)) as events:
            for event in events:
                match event:
                    case Finished(result=result):
                        results.append(result)
                    case Step(_, state, timestep) if callback is not None:
                        answer = callback(int(state.step) - 1, timestep, state.latents)
                        if (latents := _latents_of(answer, state)) is not None:
                            changed = latents
                            events.send(replace(state, latents=latents))
                        elif answer and not isinstance(answer, Mapping):
                            stopped = event
                            break
        if stopped is not None:
            done, of = int(stopped.state.step), stopped.run.num_steps
            say(f"stopped by the callback after step {done} of {of}", progress)
            results.append(last_of(finish(self, stopped.run, stopped.state), progress).result)
        return results, changed

    def _runs(self, request: Request) -> list[Run]:
        """The run of a request; of one with a list of seeds, a run for each of its videos."""
        seeds = plain(request.seed) if isinstance(request, GenerationRequest) else None
        if not isinstance(request, GenerationRequest) or not isinstance(seeds, list) or not seeds:
            return [self.resolve(request)]
        seeds = [check_option("seed", seed) for seed in seeds]
        batch = self.resolve(replace(request, seed=max(seeds), num_videos=1))
        count = batch.batch * request.num_videos
        if len(seeds) != count and (batch.batch, request.num_videos) != (1, 1):
            raise InputError(f"seed holds {len(seeds)} seeds for {count} videos; give one for each, or the first alone")
        each = len(seeds) // batch.batch
        return [self.resolve(batch.row(i // each, seed)) for i, seed in enumerate(seeds)]

    def run(self, request: Request, store: Store | None = None) -> Events[None]:
        """The whole journey, owned by the caller: see `journey.generate`."""
        self._warned.clear()
        return in_own_settings(generate(self, self.resolve(request), store))

    def resolve(self, request: Request) -> Run:
        """What a request means for this model, checked for its mesh: sizes, steps, programs and their arguments.

        A run of this model stays as it is.

        Adapters and scheduler are the pipeline's at this moment, where the request names none. A warning is given once
        until the next whole run.

        Raises:
            InputError: with every fault found.
        """
        if isinstance(request, Run) and (request.manifest, request.dtype) != (self.manifest, self.dtype):
            request = request.request
        if not isinstance(request, Run):
            if not isinstance(request, GenerationRequest):
                request = GenerationRequest(request)
            if request.lora is None:
                request = replace(request, lora=list(self.loras))
            request = resolve(request, self.manifest, self.dtype, self._warn_once, self._scheduler)
        check_run(request, self.mesh, self.profiling)  # which another pipeline of this model may not have
        return request

    def _warn_once(self, warnings: Sequence[str]) -> None:
        """Log those of the warnings that were not given for the current request yet."""
        log_warnings([warning for warning in warnings if warning not in self._warned])
        self._warned.update(warnings)

    def encode(
        self,
        request: Request,
        *,
        negative: bool | None = None,
        text: Conditioning | None = None,
        progress: bool = True,
    ) -> Conditioning:
        """Text features of the prompts and, where guidance needs them, of the negative prompts; latents of the images
        and clips.

        Args:
            negative: encode the negative prompts in any case, or in none; default: where guidance needs them.
            text: an earlier result for the same prompts, whose text features are used again.

        Raises:
            InputError: an encoder gives NaN or infinity, or a frame cannot be decoded.
        """
        return result_of(encode(self, self.resolve(request), negative=negative, text=text), progress)

    def denoise(
        self,
        conditioning: Conditioning,
        request: Request,
        *,
        state: DenoiseState | None = None,
        progress: bool = False,
    ) -> Generator[DenoiseState, DenoiseState | None]:
        """The denoising loop: yields the state after each step (after the last only, with `compiled_loop`).

        A state that is sent to it, such as one with other latents, takes the place of the one that was yielded.

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
        run = self.resolve(request)
        _check_concrete(
            "denoise", "resolve(request).denoise", conditioning, state, run.request.latents, run.request.noise
        )
        loop = result_of(denoise(self, run, conditioning, state=state), progress)
        return in_own_settings(loop)

    def decode(
        self,
        latents: DenoiseState | Float[Any, "B T h w C"],
        *,
        output_type: str = "uint8",
        tiling: bool = False,
        in_chunks: bool = False,
        progress: bool = True,
    ) -> Any:
        """Decode a state of the denoising loop, or scaled latents, to frames.

        Args:
            latents: a state, which knows its extra latent frames; or latents without them.
            in_chunks: for long clips: each is decoded while its frames are read, a few of them at a time. On several
                hosts all of them read a clip to its end.

        Returns:
            uint8 [B, F, H, W, 3], or float32 in [0, 1] for "float"; in chunks, a `FrameStream` for each clip.

        Raises:
            InputError: the decoder gives NaN or infinity; in chunks, while frames are read.
        """
        if isinstance(latents, DenoiseState):
            latents = latents.video_latents
        _check_concrete("decode", "manifest.model.codec.decode", latents)
        latents = from_torch(latents)
        channels = self.manifest.model.codec.latent_channels
        if np.ndim(latents) != 5 or np.shape(latents)[-1] != channels:
            shape = list(np.shape(latents))
            advice = channels_last_advice(shape, channels)
            raise InputError(f"latents must be a state or [B, T, h, w, {channels}]; got {shape}{advice}")
        how: Any = {"output_type": output_type, "tiling": tiling, "in_chunks": in_chunks}
        return result_of(decode(self, latents, **how), progress)

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
        run = self.resolve(request)
        compiled = ((stage, run.abstract(stage, self.mesh)) for stage in stages)
        result_of(self.checking_memory(compiled, keep=keep), progress)

    # --- adapters

    def load_lora(
        self, path: str | Path, scale: float = 1.0, name: str | None = None, alpha: float | None = None
    ) -> None:
        """Add an adapter to the denoiser's weights; several may be added, one after the other.

        Args:
            path: a LoRA file in a layout of docs/adapters.md, or the directory that holds its
                pytorch_lora_weights.safetensors.
            scale: its strength; 1 is as trained where the file says its alpha.
            name: for `set_adapters`; default: default_0, default_1, ...
            alpha: that of its training, in place of the file's.

        Raises:
            InputError: the file is missing, damaged or does not fit, before any weights are loaded; or the scale or
                alpha is not a finite number; or the name is taken.
        """
        component = self.manifest.model.lora.component
        record = describe_lora(self.manifest.model, path, scale, self.manifest.configs[component], alpha)
        self.use_adapters(self._adapters.add(record, name))

    def load_lora_weights(
        self, path: str | Path, weight_name: str | None = None, adapter_name: str | None = None
    ) -> None:
        """`load_lora` by diffusers' name.

        Args:
            weight_name: of the file in the directory `path`.
        """
        self.load_lora(path if weight_name is None else Path(path) / weight_name, name=adapter_name)

    def set_adapters(self, names: str | Sequence[str], weights: float | Sequence[float] | None = None) -> None:
        """Run with these of the adapters that were loaded, and no others.

        The weights that had adapters are read again, so that what is left out leaves no rounding behind.

        Args:
            weights: the strength of each, or of all; None: as they were loaded.

        Raises:
            InputError: an unknown name, another number of weights, or one that is not a finite number.
        """
        self.use_adapters(self._adapters.use(names, weights))

    def unload_lora_weights(self) -> None:
        """Run with the checkpoint's own weights, and forget all adapters."""
        self.use_adapters(ActiveAdapters())

    def get_active_adapters(self) -> list[str]:
        """The names of the adapters that are in use."""
        return list(self._adapters.active)

    def get_list_adapters(self) -> list[str]:
        """The names of all that were loaded."""
        return list(self._adapters.loaded)


def _check_concrete(name: str, function: str, *arrays: Any) -> None:
    """Refuse arrays of a transformation of JAX."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        raise InputError(
            f"pipe.{name} runs compiled programs, which jax.grad, jit and vmap cannot trace; pipe.{function} is the "
            "function of arrays that they can: see docs/activations.md"
        )


def _all_of(runs: Iterable[Events[None]]) -> Events[None]:
    """One after the other."""
    for events in runs:
        yield from events


def _latents_of(answer: Any, state: DenoiseState) -> Array | None:
    """The latents to go on with that a callback returns; None if it returns none."""
    if isinstance(answer, Mapping):
        if others := answer.keys() - {"latents"}:
            raise InputError(f"the callback returns {', '.join(map(str, others))}; it can change the latents alone")
        answer = answer.get("latents")
    if not np.ndim(from_torch(answer)):
        return None
    latents, shape = numbers("latents of the callback", answer), state.latents.shape
    if latents.shape != shape:
        advice = channels_last_advice(latents.shape, shape[-1])
        raise InputError(f"the callback returns latents {list(latents.shape)}; expected {list(shape)}{advice}")
    return jnp.asarray(latents, jnp.float32)


class CogVideoXPipeline(Pipeline):
    """`Pipeline` for CogVideoX alone."""

    family = "cogvideox"
