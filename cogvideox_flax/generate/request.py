"""Everything that a user can ask of a run: each option once, with its default, its help and its check."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxtyping import Float

from cogvideox_flax.generate.option import Option, Stage, option, options_of
from cogvideox_flax.generate.step_schedule import FORMS, check_step_cache, parse_schedule
from cogvideox_flax.generate.values import (
    MAX_SEED,
    Faults,
    check_arrays,
    check_prompts,
    check_values,
    describe_adapter,
    fixed_settings,
    parse_lora,
)
from cogvideox_flax.io.clips import FITS
from cogvideox_flax.io.limits import MAX_WRITTEN_FPS
from cogvideox_flax.io.values import is_finite_number

if TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.generate.media import Media
    from cogvideox_flax.models.family import Size
    from cogvideox_flax.schedulers import Scheduler

log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float32", "float16")

STAGES = ("encode", "denoise", "decode")
"""Of a run in stages. "run" is all of them as one program."""

_SIDE = "pixels; default: the release's, or what suits the picture"


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate. None stands for what the release's authors recommend; `resolve` fills it in.

    prompt: one prompt or a list, each a video of one batch.
    negative_prompt: what to steer away from; one for all or one per prompt. Used where guidance is on.
    latents: initial standard normal noise float32 [B, T, h, w, C] in place of random noise; extra latent frames count.
    output_type: "uint8", "float" or "latent"; see `GenerationResult`.
    lora: adapters of this run, each a file, "FILE:SCALE", or a mapping with file and scale; None stands for those that
        the pipeline has loaded.
    noise: the sampler's noise [N, B, T, h, w, C] for every step that is done, in place of random noise.
    image, last_image: a path, a PIL image or uint8 [H, W, 3]. One for all prompts, or a list with one each.
    video, control_video: a path, a folder of PNGs or uint8 [F, H, W, 3] at the model's frame rate; as many.
    mask_video: as a video; or one picture for all of its frames, [H, W, 3] in Python; as many.
    encoder_noise: "image", "last_image", "video" or "mask_video" -> standard normal [B, T, h, w, C], in place of random
        noise, of the encoder's posterior. A clip's extra latent frames do not count. [B, F, H, W, 3] for inpainting
        models with `add_noise_in_inpaint_model`: what is added to "image" or, with "mask_video", to the video.
    one_program: run everything, tokens to frames, as one compiled program, all components loaded at once.
    The others say it in their help.
    """

    prompt: str | Sequence[str]
    negative_prompt: str | Sequence[str] = option("", "what to steer away from", stage="encode")
    num_frames: int | None = option(
        None, "such as 49; default: the release's, or what the video has", parse=int, for_media=True
    )
    height: int | None = option(None, _SIDE, parse=int, for_media=True)
    width: int | None = option(None, _SIDE, parse=int, for_media=True)
    num_inference_steps: int | None = option(None, "default: the release's, such as 50", flags=("--steps",), parse=int)
    guidance_scale: float | None = option(
        None, "default: the checkpoint's, such as 6; 1 turns guidance off", parse=float
    )
    use_dynamic_cfg: bool | Literal["index"] | None = option(
        None,
        "guidance that changes over the steps: as released (timestep) or rising (index); default: the release's",
        flags=("--dynamic-cfg",),
        choices={"off": False, "timestep": True, "index": "index"},
    )
    scheduler: str | Scheduler | None = option(  # noqa: RUF009
        None, "the sampler, such as ddim or dpm; default: the release's", parse=str
    )
    seed: int = option(0, f"0 to {MAX_SEED}; default: 0", parse=int, for_media=True)
    latents: Float[Any, "B T h w C"] | None = dataclasses.field(default=None, compare=False)
    output_type: str = "uint8"
    _: KW_ONLY
    lora: Sequence[Any] | None = option(
        None,
        "an adapter in diffusers' layout and its strength (1); several are added one after the other",
        parse=parse_lora,
        metavar="FILE[:SCALE]",
        repeat=True,
    )
    num_videos: int = option(
        1, "videos of each prompt, of seed, seed + 1, ...; default: 1", stage="generate", recorded=False, parse=int
    )
    image: Any = option(  # noqa: RUF009
        None,
        "the first frame, for image-to-video and inpainting models (without --model an embedded one): PNG, JPEG or "
        "WebP; once for all prompts, or once for each",
        stage="encode",
        parse=str,
        metavar="FILE",
        repeat=True,
    )
    last_image: Any = option(  # noqa: RUF009
        None,
        "the last frame too, for inpainting models and checkpoints trained on both",
        stage="encode",
        parse=str,
        metavar="FILE",
        repeat=True,
    )
    video: Any = option(  # noqa: RUF009
        None,
        "a clip to start from, for text-to-video and inpainting models: a video file or a folder of PNGs",
        stage="encode",
        parse=str,
        metavar="FILE",
        repeat=True,
    )
    control_video: Any = option(  # noqa: RUF009
        None,
        "a clip of poses, edges or depths to follow, for control models: a video file or a folder of PNGs",
        stage="encode",
        parse=str,
        metavar="FILE",
        repeat=True,
    )
    mask_video: Any = option(  # noqa: RUF009
        None,
        "what of the video is made anew, for inpainting models: white is, black stays; a video file, a folder of PNGs, "
        "or one picture for all frames",
        stage="encode",
        parse=str,
        metavar="FILE",
        repeat=True,
    )
    strength: float | None = option(
        None,
        "how much of the video is changed: above 0 to 1, which forgets it; default: 0.8, with a mask 1",
        parse=float,
    )
    fit: str = option(
        "crop",
        "what happens to pictures of another aspect ratio: crop uses their middle, stretch is the reference's way; "
        "default: crop",
        stage="encode",
        choices={name: name for name in FITS},
    )
    image_scale: float | None = option(
        None,
        "factor of the pictures' latents; default: as released. 1.5-I2V divides by 0.7, where its authors' own code "
        "has 1; users report first frames nearer to the picture with 1",
        stage="encode",
        parse=float,
    )
    encoder_noise: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    positions: str | None = option(
        None,
        "for clips longer than in training: riflex lowers the rotary frequency that makes them repeat; default: as "
        "trained",
        choices={"riflex": "riflex"},
    )
    window: int | None = option(
        None,
        "frames that are denoised at once, such as 49: longer clips are made in overlapping windows, in the memory of "
        "one; default: the whole clip",
        parse=int,
    )
    window_overlap: int | None = option(None, "frames that two windows share; default: a third of one", parse=int)
    step_cache: str | None = option(
        None,
        "leave out most blocks in some steps: faster, another video; deepcache reuses the tokens of the last full step "
        "(as the reference TPU system), residual adds the skipped blocks' updates to the step's own tokens; default: "
        "every step is full",
        choices={name: name for name in FORMS},
    )
    step_cache_schedule: Sequence[int] | None = option(
        None,
        "which of the steps, counted from 0, are full: those before START, then every INTERVAL-th before END, and all "
        "from END on; default: 11,45,4 for 50 steps, START and END scaled for others, about half of the steps",
        parse=parse_schedule,
        metavar="START,END,INTERVAL",
    )
    compiled_loop: bool = option(False, "run all steps as one compiled program", recorded=False)
    tiling: bool = option(False, "decode in tiles: less memory, slightly different", stage="decode", recorded=False)
    fps: int | None = option(None, f"1 to {MAX_WRITTEN_FPS}; default: the release's", stage="decode", parse=int)
    noise: Float[Any, "N B T h w C"] | None = dataclasses.field(default=None, compare=False)
    one_program: bool = False

    def resolve(self, manifest: Manifest) -> ResolvedRequest:
        """Every None filled with the release's recommendation, and everything checked without weights.

        Warns of a size that the release was not trained for. A request that was resolved for this model stays as it is.

        Raises:
            InputError: all that this model cannot serve, in one message.
        """
        from cogvideox_flax.generate import media
        from cogvideox_flax.generate.windows import check_long

        resolved_for = getattr(self, "_resolved_for", None)
        if isinstance(self, ResolvedRequest) and resolved_for and resolved_for.configs == manifest.configs:
            return self
        manifest.check_complete("the model")
        family, configs, faults = manifest.model_family, manifest.configs, Faults()
        filled = self._recommended(manifest)
        filled |= fixed_settings(self, family, faults)
        with faults.caught():
            filled["prompt"], filled["negative_prompt"] = check_prompts(self.prompt, self.negative_prompt)
        size, num_frames = None, self.num_frames
        with faults.caught():
            given = {name: getattr(self, name) for name in media.MEDIA}
            filled |= media.resolve_media(family, configs, given, len(filled.get("prompt", [""])))
            if num_frames is None:
                num_frames = media.frames_of_clips(family, configs, filled, any_length=self.window is not None)
            media.check_image_scale(family, configs, self.image_scale)
        with faults.caught():
            steps = filled.get("num_inference_steps", self.num_inference_steps)
            strength, has = filled.get("strength", self.strength), (self.video is not None, self.mask_video is not None)
            filled["strength"] = media.resolve_strength(strength, *has, steps)
        with faults.caught():
            asked = media.picture_size(family, configs, filled, (self.height, self.width))
            size = family.resolve_size(configs, num_frames, *asked)
            filled |= size.video
            shown_size = check_long(family, configs, self, size)
        if self.lora is not None:
            adapters = [self.lora] if isinstance(self.lora, str | os.PathLike) else self.lora
            with faults.caught():
                filled["lora"] = [describe_adapter(adapter, manifest) for adapter in adapters]
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        result = ResolvedRequest(**given | filled)
        with faults.caught():
            check_values(result)
        with faults.caught():
            sampler = result.sampler(manifest)
            sampler.plan(result.num_inference_steps)
            check_step_cache(result)
            if size is not None and not faults:
                check_arrays(result, size, sampler)
        if self.tiling:
            with faults.caught():
                family.check_tiling(configs)
        faults.raise_all()
        assert size is not None
        # a model that restores clips was trained at sizes of its own, which its release does not tell
        untrained = [] if sampler.needs_video else family.size_warnings(configs, shown_size)
        for warning in (*untrained, *result._unused_media(size)):
            log.warning(warning)
        object.__setattr__(result, "_resolved_for", manifest)
        return result

    def _recommended(self, manifest: Manifest) -> dict[str, Any]:
        """What the release's authors, and the checkpoint, recommend for fields that are None; others in one form."""
        defaults = manifest.model_family.defaults(manifest.configs)
        filled: dict[str, Any] = {
            field.name: getattr(defaults, field.name)
            for field in dataclasses.fields(defaults)
            if getattr(self, field.name) is None
        }
        if self.guidance_scale is None and manifest.guidance_scale is not None:
            filled["guidance_scale"] = manifest.guidance_scale
        if isinstance(self.step_cache_schedule, tuple):  # a list is what the settings of a run hold
            filled["step_cache_schedule"] = list(self.step_cache_schedule)
        if is_finite_number(self.guidance_scale):
            filled["guidance_scale"] = float(self.guidance_scale)  # type: ignore[arg-type]
        return filled


class ResolvedRequest(GenerationRequest):
    """A request whose every None was filled in, and that was checked for a model: from `GenerationRequest.resolve`."""

    if TYPE_CHECKING:
        prompt: list[str]
        negative_prompt: list[str]
        num_frames: int
        height: int
        width: int
        num_inference_steps: int
        guidance_scale: float
        use_dynamic_cfg: bool | Literal["index"]
        scheduler: str | Scheduler
        lora: list[Mapping[str, Any]] | None
        fps: int
        image: list[Media] | None
        last_image: list[Media] | None
        video: list[Media] | None
        control_video: list[Media] | None
        mask_video: list[Media] | None
        _resolved_for: Manifest

    @property
    def batch(self) -> int:
        """Videos that are made at once."""
        return len(self.prompt)

    @property
    def guided(self) -> bool:
        """Whether guidance is on, by the rule of the model's family."""
        return self._resolved_for.model_family.is_guided(self.guidance_scale)

    @property
    def first_step(self) -> int:
        """The first denoising step that is done: above 0 where the run starts from a video."""
        if self.strength is None:
            return 0
        return self.num_inference_steps - min(int(self.num_inference_steps * self.strength), self.num_inference_steps)

    def sampler(self, manifest: Manifest) -> Scheduler:
        """The sampler; a name is that sampler on the checkpoint's noise schedule.

        Raises:
            InputError: the family has no such sampler.
        """
        from cogvideox_flax.schedulers import Scheduler

        if isinstance(self.scheduler, Scheduler):
            return self.scheduler
        return manifest.model_family.sampler(manifest.configs, self.scheduler)

    def videos(self) -> list[ResolvedRequest]:
        """One request for each seed that is asked for."""
        if self.num_videos == 1:
            return [self]
        return [self.varied(num_videos=1, seed=self.seed + n) for n in range(self.num_videos)]

    def varied(self, **changes: Any) -> ResolvedRequest:
        """The same with other prompts or another seed, of which a check would say nothing new."""
        result = dataclasses.replace(self, **changes)
        object.__setattr__(result, "_resolved_for", self._resolved_for)
        return result

    def _unused_media(self, size: Size) -> list[str]:
        """Sentences about what of the pictures and clips the model does not see."""
        from cogvideox_flax.generate.media import MEDIA, describe_fit

        each = [(name, media) for name in MEDIA for media in getattr(self, name) or ()]
        video = (size.num_frames, size.height, size.width)
        return [said for name, media in each if (said := describe_fit(name, media, *video, self.fit))]


def options(*stages: Stage) -> dict[str, Option]:
    """Field of the request -> its option, for those of these stages."""
    return {name: option for name, option in options_of(GenerationRequest).items() if option.stage in stages}
