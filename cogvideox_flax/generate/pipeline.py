"""Text to video: prompts in, frames out.

A run has three stages, each usable by itself: `encode_prompts`, `denoise`, `decode_latents`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32, UInt8
from tqdm import tqdm

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import hub
from cogvideox_flax.config import CONFIG_TYPES, Release, TransformerConfig, VAEConfig
from cogvideox_flax.errors import InputError, NonFiniteError
from cogvideox_flax.generate import programs
from cogvideox_flax.generate.checks import (
    check_arrays,
    check_loop,
    check_model,
    check_prompts,
    check_sampling,
    check_tiling,
)
from cogvideox_flax.generate.components import Components
from cogvideox_flax.generate.memory import check_fits, checked_stages
from cogvideox_flax.generate.programs import DenoiseState
from cogvideox_flax.generate.result import Video
from cogvideox_flax.io.contents import fingerprint
from cogvideox_flax.io.private import NotPrivateError
from cogvideox_flax.models.cogvideox.autoencoder import Tiling
from cogvideox_flax.models.cogvideox.sizes import Size, resolve_size
from cogvideox_flax.plan import STAGES, Request
from cogvideox_flax.runtime.compile_cache import CompileCache
from cogvideox_flax.runtime.execution import Program, Programs, Watch, say, stoppable
from cogvideox_flax.runtime.hosts import fetch
from cogvideox_flax.schedulers import SCHEDULERS, Plan, Scheduler, guidance_scales, make_scheduler
from cogvideox_flax.tokenizer import Tokenizer
from cogvideox_flax.version import __version__

log = logging.getLogger(__name__)

Callback = Callable[[int, int, Float32[Array, "B T h w C"]], bool | None]
"""callback(step, timestep, latents), after each step; True stops the run there."""

OUTPUT_TYPES = ("uint8", "float", "latent")


class CogVideoXPipeline(Components):
    """Text to video with CogVideoX-2b, 5b or 1.5-5B.

    Components are loaded when they are first used and stay; `release` lets them go, for a machine that holds only one
    of them at a time (the command line does so between its stages).

    Attributes:
        tokenizer: list of prompts -> int32 [B, L].
        scheduler: the checkpoint's own sampler, DDIM or DPM.
        released_as: the release that the transformer's architecture belongs to, or None.
        loras: the adapters that are part of the transformer's weights.
        watch: what to look at while it runs: memory, a profile, operations one by one.
    """

    def __init__(self, native_dir: Path, dtype: str, mesh: Mesh | None):
        check_model(checkpoint.read_manifest(native_dir), native_dir, dtype, mesh)
        super().__init__(native_dir, dtype, mesh)
        configs = {name: getattr(self.manifest, name) for name in CONFIG_TYPES}
        self.transformer_config: TransformerConfig = configs["transformer"]
        self.vae_config: VAEConfig = configs["vae"]
        self.released_as: Release | None = self.manifest.release
        self.scheduler: Scheduler = make_scheduler(configs["scheduler"])
        self._schedulers = {configs["scheduler"].kind: self.scheduler}
        self.tokenizer = Tokenizer(
            native_dir / checkpoint.SPIECE_FILE,
            configs["tokenizer"].max_length,
            vocab_size=configs["text_encoder"].vocab_size,
        )
        self.watch = Watch()
        self._programs = Programs(dtype, mesh, fingerprint({name: part.to_dict() for name, part in configs.items()}))

    def keep_programs(self, folder: Path) -> None:
        """Keep compiled programs in a folder, and take those that are there: a second process compiles nothing.

        It applies to programs compiled after this call. A user-defined sampler's are not kept.

        Raises:
            InputError: others could put programs into the folder, or it cannot be made.
        """
        try:
            self._programs.kept = CompileCache(folder)
        except NotPrivateError as e:
            raise InputError(f"compiled programs cannot be kept in {folder}: {e}; name a folder of your own") from e
        except OSError as e:
            raise InputError(f"compiled programs cannot be kept in {folder}: {e.strerror}; name another folder") from e

    @classmethod
    def from_pretrained(
        cls,
        where: str | Path | None,
        dtype: str = "bfloat16",
        mesh: Mesh | None = None,
        *,
        revision: str | None = None,
        progress: bool = True,
    ) -> Self:
        """Open a checkpoint.

        Args:
            where: a native directory; a Hugging Face layout directory or hub id, which are converted once into a
                cache, with progress; None for the embedded checkpoint.
            dtype: "bfloat16", "float32" or "float16" (2b only, and not on TPUs); the dtype of weights and activations.
            mesh: from `sharding.make_mesh`; None for one device.
            revision: for a hub id: branch, tag or commit.
            progress: progress bars of downloads and conversions on stderr.

        Raises:
            InputError: not a complete text-to-video checkpoint, damaged, a dtype that it does not survive or the
                devices do not serve, or a mesh that it does not divide over. What the configs rule out is refused
                before anything is converted.
        """
        check_model(hub.peek(where, revision, progress=progress), where or hub.EMBEDDED, dtype, mesh)
        return cls(hub.resolve(where, revision, progress=progress), dtype, mesh)

    @property
    def fps(self) -> int:
        """Frames per second of training: 8, or 16 for 1.5 releases."""
        if self.released_as is not None:
            return self.released_as.fps
        return 16 if self.transformer_config.patch_size_t else 8

    def size(self, num_frames: int | None = None, height: int | None = None, width: int | None = None) -> Size:
        """Defaults filled in and rules checked; see `sizes.resolve_size`."""
        return resolve_size(
            self.transformer_config,
            self.vae_config,
            self.released_as,
            num_frames=num_frames,
            height=height,
            width=width,
        )

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] = "",
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float | None = None,
        use_dynamic_cfg: bool | Literal["index"] = False,
        scheduler: str | Scheduler | None = None,
        seed: int = 0,
        latents: Float[Any, "B T h w C"] | None = None,
        output_type: str = "uint8",
        callback: Callback | None = None,
        progress: bool = True,
        *,
        noise: Float[Any, "N B T h w C"] | None = None,
        tiling: bool = False,
        compiled_loop: bool = False,
        one_program: bool = False,
    ) -> Video:
        """Generate one video per prompt.

        Args:
            prompt: one prompt or a list.
            negative_prompt: what to steer away from; one for all or one per prompt. Used when guidance_scale > 1.
            num_frames: 8 n + 1; default: the release's.
            height, width: pixels, multiples of 16; default: the release's.
            num_inference_steps: 1 to 1000.
            guidance_scale: weight of the prompt (classifier-free guidance); 1 or less runs without guidance; default:
                the checkpoint's, which is 6 for the releases.
            use_dynamic_cfg: False: constant; True: as the reference computes it, from the raw timestep; "index": a
                monotonic rise over the steps. See `schedulers.guidance_scales`.
            scheduler: "ddim", "dpm" or a Scheduler; default: the checkpoint's.
            seed: of the initial latents and the sampler's noise; item b of a batch does not depend on the others.
            latents: initial latents in place of random ones; 1.5 releases count the extra frame.
            output_type: "uint8", "float" or "latent"; see `Video`.
            callback: called after each step, may stop the run or read the latents.
            progress: progress bar and compile times on stderr.
            noise: the sampler's noise for every step, in place of random noise (DPM only).
            tiling: decode in the official overlapping tiles: less memory, slightly different video.
            compiled_loop: run all steps as one compiled program; no callback, no progress within it.
            one_program: run everything, token ids to frames, as one compiled program, all parts loaded at once; no
                callback, no progress within it, no "latent" output.

        Raises:
            InputError: an argument that cannot be served; before anything is loaded or compiled.
            NonFiniteError: NaN or infinity in the latents, naming the step.
        """
        prompts, negatives = check_prompts(prompt, negative_prompt)
        if output_type not in OUTPUT_TYPES:
            raise InputError(f"unknown output_type {output_type!r}; known are {', '.join(OUTPUT_TYPES)}")
        size = self.size(num_frames, height, width)
        sampler = self.get_scheduler(scheduler)
        sampler.plan(num_inference_steps)
        guidance_scale = self._guidance(guidance_scale)
        check_sampling(guidance_scale, use_dynamic_cfg, seed)
        sharding.check_batch(self.mesh, len(prompts) * (2 if guidance_scale > 1 else 1))
        if tiling:
            check_tiling(self.vae_config)
        check_arrays(self.latent_shape(size, len(prompts)), size, num_inference_steps, sampler, latents, noise)
        check_loop(compiled_loop or one_program, callback)
        self.watch.check(num_inference_steps, compiled_loop or one_program)
        settings = {
            "num_frames": size.num_frames,
            "height": size.height,
            "width": size.width,
            "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale,
            "use_dynamic_cfg": use_dynamic_cfg,
            "scheduler": sampler.config.kind,
            "dtype": self.dtype,
            **({"lora": self.loras} if self.loras else {}),
        }
        if one_program:
            if output_type == "latent":
                raise InputError('one program ends in frames; leave one_program off for output_type "latent"')
            ids = self.tokenizer([*(negatives if guidance_scale > 1 else []), *prompts])
            schedule = num_inference_steps, guidance_scale, use_dynamic_cfg
            start = self._start(sampler, size, len(prompts), schedule, seed, latents, noise, progress)
            frames = self._all_at_once(sampler, size, ids, start, output_type, tiling, progress)
            settings["steps_done"] = len(start[0])
            return Video(fetch(frames), self.fps, self.metadata(prompts, negatives, seed, settings))

        self.check_memory(
            size,
            len(prompts),
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            scheduler=sampler,
            stages=checked_stages(
                denoise=not compiled_loop and noise is None, decode=not tiling and output_type == "uint8"
            ),
            progress=progress,
        )
        context, negative = self.encode_prompts(prompts, negatives if guidance_scale > 1 else None, progress=progress)
        denoised, steps_done = self.denoise(
            context,
            negative,
            size,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            use_dynamic_cfg=use_dynamic_cfg,
            scheduler=sampler,
            seed=seed,
            latents=latents,
            noise=noise,
            callback=callback,
            progress=progress,
            compiled_loop=compiled_loop,
        )
        if output_type == "latent":
            frames = denoised
        else:
            kept = denoised[:, size.extra_latents :]
            frames = self.decode_latents(kept, output_type=output_type, tiling=tiling, progress=progress)
        settings["steps_done"] = steps_done
        return Video(fetch(frames), self.fps, self.metadata(prompts, negatives, seed, settings))

    def metadata(
        self, prompts: list[str], negatives: list[str], seed: int | None, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """What is stored with a video."""
        return {
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "negative_prompt": negatives if len(prompts) > 1 else negatives[0],
            "seed": seed,
            "release": self.released_as.name if self.released_as else str(self.native_dir.name),
            "version": f"cogvideox-flax {__version__}",
            "settings": settings,
        }

    def get_scheduler(self, scheduler: str | Scheduler | None) -> Scheduler:
        """None: the checkpoint's; a name: that sampler on the checkpoint's noise schedule; a Scheduler: itself."""
        if scheduler is None:
            return self.scheduler
        if isinstance(scheduler, Scheduler):
            return scheduler
        if scheduler not in SCHEDULERS:
            raise InputError(f"unknown scheduler {scheduler!r}; known are {', '.join(SCHEDULERS)}")
        if scheduler not in self._schedulers:
            self._schedulers[scheduler] = make_scheduler(dataclasses.replace(self.scheduler.config, kind=scheduler))
        return self._schedulers[scheduler]

    def check_memory(
        self,
        size: Size,
        prompts: int = 1,
        *,
        num_inference_steps: int = 50,
        guidance_scale: float | None = None,
        scheduler: str | Scheduler | None = None,
        stages: Sequence[str] = STAGES,
        keep: bool = True,
        progress: bool = True,
    ) -> None:
        """Compile the stages before anything is loaded, and refuse what the devices cannot hold.

        What is compiled is what then runs, so this costs no time of its own. Devices that do not say what they have
        (CPUs) are taken to have enough. Not looked at: runs as one program or with all steps in one, decoding in tiles
        or to floats.

        Args:
            keep: the weights of a stage stay when the next one runs.

        Raises:
            InputError: with the numbers and what to change.
        """
        if not self.watch.jit:
            return
        request = Request(
            self.manifest,
            self.dtype,
            size.num_frames,
            size.height,
            size.width,
            prompts,
            num_inference_steps,
            self._guidance(guidance_scale),
            self.get_scheduler(scheduler),
        )
        check_fits(request, size, self._programs, self.mesh, stages, keep=keep, progress=progress)

    def _guidance(self, given: float | None) -> float:
        return self.manifest.default_guidance if given is None else given

    def latent_shape(self, size: Size, batch: int) -> tuple[int, int, int, int, int]:
        """[B, T, h, w, C] of the latents that are denoised."""
        return batch, size.latent_frames, size.latent_height, size.latent_width, self.vae_config.latent_channels

    def _run(self, program: Program, *args: Any, announce: bool) -> Any:
        return program(*args, announce=announce, jit=self.watch.jit)

    def encode_prompts(
        self, prompts: Sequence[str], negatives: Sequence[str] | None = None, *, progress: bool = True
    ) -> tuple[Float[Array, "B L E"], Float[Array, "B L E"] | None]:
        """Embeddings of the prompts, and of the negative prompts where guidance will need them.

        Raises:
            InputError: the text encoder gives NaN or infinity.
        """
        program = self._programs.get(programs.encoding())

        def encode(texts: Sequence[str]) -> Float[Array, "B L E"]:
            ids = self.tokenizer(list(texts))  # before the encoder is loaded: a cut prompt is reported at once
            embeddings = self._run(program, self.text_encoder, self._programs.put(ids), announce=progress)
            if not np.isfinite(fetch(embeddings)).all():
                raise InputError(
                    f"the text encoder gives NaN or infinity in {self.dtype}. Try --dtype float32; if that gives the "
                    "same, download the checkpoint again and convert it again."
                )
            return embeddings

        result = encode(prompts), encode(negatives) if negatives is not None else None
        self.watch.stage(program.name)
        return result

    def denoise(
        self,
        context: Float[Any, "B L E"],
        negative: Float[Any, "B L E"] | None,
        size: Size,
        *,
        num_inference_steps: int = 50,
        guidance_scale: float | None = None,
        use_dynamic_cfg: bool | Literal["index"] = False,
        scheduler: str | Scheduler | None = None,
        seed: int = 0,
        latents: Float[Any, "B T h w C"] | None = None,
        noise: Float[Any, "N B T h w C"] | None = None,
        callback: Callback | None = None,
        progress: bool = True,
        compiled_loop: bool = False,
        state: DenoiseState | None = None,
        on_state: Callable[[DenoiseState], None] | None = None,
    ) -> tuple[Float32[Array, "B T h w C"], int]:
        """The denoising loop. Arguments as in `__call__`; `negative` None runs without guidance.

        Args:
            state: of an earlier loop with the same arguments, to go on from.
            on_state: called after each step with what a later call may go on from.

        Returns:
            The latents (scaled; the extra frames of 1.5 releases included) and how many steps were done.

        Raises:
            InputError: an argument that cannot be served.
            NonFiniteError: NaN or infinity in the latents, naming the step.
        """
        sampler = self.get_scheduler(scheduler)
        check_sampling(self._guidance(guidance_scale), use_dynamic_cfg, seed)
        check_arrays(self.latent_shape(size, len(context)), size, num_inference_steps, sampler, latents, noise)
        check_loop(compiled_loop, callback)
        if compiled_loop and (state is not None or on_state is not None):
            raise InputError("a loop to go on from needs the step-by-step loop; leave compiled_loop off")
        self.watch.check(num_inference_steps, compiled_loop)
        # float32 whatever the encoder's dtype, as stage files hold it: one program for both ways
        both = np.concatenate([fetch(x) for x in (negative, context) if x is not None]).astype(np.float32)
        schedule = num_inference_steps, self._guidance(guidance_scale), use_dynamic_cfg
        plan, *tables, carry = self._start(sampler, size, len(context), schedule, seed, latents, noise, progress)
        fixed = (self.transformer, *self._programs.put((both, plan, *tables)))
        if compiled_loop:
            return self._denoise_at_once(sampler, fixed, carry, plan, progress), len(plan)

        program = self._programs.get(programs.denoising_step(sampler))
        if self.watch.jit:
            first = program.as_it_takes((*fixed, *self._programs.put((jnp.int32(0), carry))))
            program.prepare(*first, announce=progress)
            fixed = first[: len(fixed)]  # so that no step takes the transformer apart again
        done = 0
        if state is not None:
            done, carry = state.step, (jnp.asarray(state.latents), state.sampler)
        x = carry[0]  # the result of a loop that was stopped after its last step
        # compiling is over, so the bar's rate and time left are those of steps that wait for their result
        bar = tqdm(total=len(plan), initial=done, desc="denoising", unit="step", disable=not progress)
        with bar, self.watch.steps() as step, stoppable() as check:
            for x, sampler_state in self._steps(program, fixed, carry, plan, done, step):
                bar.update()
                done += 1
                if on_state is not None:
                    on_state(DenoiseState(done, x, sampler_state))
                check()
                if callback is not None and callback(done - 1, int(plan.timesteps[done - 1]), x):
                    say(f"stopped by the callback after step {done} of {len(plan)}", progress)
                    break
        self.watch.stage("denoising")
        return x, done

    def _start(
        self,
        sampler: Scheduler,
        size: Size,
        batch: int,
        schedule: tuple[int, float, bool | Literal["index"]],
        seed: int,
        latents: Any | None,
        noise: Any | None,
        progress: bool,
    ) -> tuple[Plan, Array, Array, programs.Carry]:
        """What the loop starts from: the sampler's tables, guidance per step, the source of noise, and the carry.

        schedule: number of steps, guidance scale, dynamic guidance.
        """
        steps, guidance_scale, use_dynamic_cfg = schedule
        plan = sampler.plan(steps)
        guidance = guidance_scales(plan.timesteps, steps, guidance_scale, use_dynamic_cfg)
        program = self._programs.get(programs.initial_noise(self.latent_shape(size, batch)))
        x, noise_key = self._run(program, self._programs.put(np.uint32(seed)), announce=progress)
        if latents is not None:
            x = jnp.array(latents, jnp.float32)  # a copy: its memory may be given away
        draw = noise_key if noise is None else jnp.asarray(noise, jnp.float32)
        return plan, jnp.asarray(guidance), draw, (x, sampler.init_state(x))

    def _steps(
        self, program: Program, fixed: tuple, carry: tuple, plan: Plan, start: int, around: Callable[[int], Any]
    ) -> Iterator[programs.Carry]:
        """Yields the latents and the sampler's state after each step, when they are really there.

        start: the first step. around: a context for each step's number.
        """
        for i in range(start, len(plan)):
            with around(i):
                carry, finite = self._run(program, *fixed, *self._programs.put((jnp.int32(i), carry)), announce=False)
                fine = bool(finite)
            if not fine:
                raise self._non_finite(i, plan)
            yield carry

    def _non_finite(self, step: int, plan: Plan) -> NonFiniteError:
        hint = "float32 holds what a sound checkpoint computes: download it again and convert it again."
        return NonFiniteError(step, int(plan.timesteps[step]), len(plan), hint if self.dtype == "float32" else "")

    def _denoise_at_once(
        self, sampler: Scheduler, fixed: tuple, carry: tuple, plan: Plan, progress: bool
    ) -> Float32[Array, "B T h w C"]:
        """All steps as one program: a scan over the step."""
        program = self._programs.get(programs.denoising_loop(sampler))
        (x, _), finite = self._run(program, *fixed, self._programs.put(carry), announce=progress)
        self.watch.stage(program.name)
        if not finite.all():
            bad = int(jnp.argmin(finite))
            raise self._non_finite(bad, plan)
        return x

    def _all_at_once(
        self,
        sampler: Scheduler,
        size: Size,
        ids: Int32[np.ndarray, "GB L"],
        start: tuple[Plan, Array, Array, programs.Carry],
        output_type: str,
        tiling: bool,
        progress: bool,
    ) -> UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"]:
        """Ids to frames as one program."""
        tiles = Tiling.official(self.vae_config) if tiling else None
        recipe = programs.whole_run(sampler, self.vae_config.scaling_factor, size.extra_latents, output_type, tiles)
        program = self._programs.get(recipe)
        parts = self.text_encoder, self.transformer, self.vae
        given = self._programs.put((ids, *start))
        frames, steps_finite, finite = self._run(program, *parts, *given, announce=progress)
        self.watch.stage(program.name)
        if not steps_finite.all():
            raise self._non_finite(int(jnp.argmin(steps_finite)), start[0])
        if not finite:
            raise self._bad_frames()
        return frames

    def decode_latents(
        self,
        latents: Float[Any, "B T h w C"],
        *,
        output_type: str = "uint8",
        tiling: bool = False,
        progress: bool = True,
    ) -> UInt8[Array, "B F H W 3"] | Float32[Array, "B F H W 3"]:
        """Scaled latents (extra frames already dropped) to frames: uint8, or float32 in [0, 1] for "float".

        Raises:
            InputError: the decoder gives NaN or infinity.
        """
        tiles = Tiling.official(self.vae_config) if tiling else None
        program = self._programs.get(programs.decoding(self.vae_config.scaling_factor, output_type, tiles))
        z = self._programs.put(jnp.asarray(latents, jnp.float32))
        frames, finite = self._run(program, self.vae, z, announce=progress)
        self.watch.stage(program.name)
        if not finite:
            raise self._bad_frames()
        return frames

    def _bad_frames(self) -> InputError:
        return InputError(
            f"the VAE gives NaN or infinity in {self.dtype}. Decode in --dtype float32; if that gives the same, "
            "download the checkpoint again and convert it again."
        )
