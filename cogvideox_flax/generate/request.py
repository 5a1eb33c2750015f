"""Everything that a user can ask of a run: each option once, with its default, its help and its check."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.option import Option, Stage, option
from cogvideox_flax.io.limits import MAX_WRITTEN_FPS
from cogvideox_flax.io.values import is_count, is_finite_number, shown

if TYPE_CHECKING:
    from cogvideox_flax.checkpoint import Manifest
    from cogvideox_flax.models.family import Size
    from cogvideox_flax.schedulers import Scheduler

log = logging.getLogger(__name__)

MAX_SEED = 2**32 - 1

MAX_VIDEOS = 10_000
"""Videos of one request."""

DTYPES = ("bfloat16", "float32", "float16")

STAGES = ("encode", "denoise", "decode")
"""Of a run in stages. "run" is all of them as one program."""

OUTPUT_TYPES = ("uint8", "float", "latent")


def _lora(text: str) -> dict[str, Any]:
    """'my.safetensors:0.8' -> file and scale; a colon that no number follows is part of the name."""
    file, _, scale = text.rpartition(":")
    try:
        return {"file": file, "scale": float(scale)} if file else {"file": text, "scale": 1.0}
    except ValueError:
        return {"file": text, "scale": 1.0}


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate. None stands for what the release's authors recommend; `resolve` fills it in.

    prompt: one prompt or a list, each a video of one batch.
    negative_prompt: what to steer away from; one for all or one per prompt. Used when guidance_scale > 1.
    latents: initial standard normal noise float32 [B, T, h, w, C] in place of random noise; extra latent frames count.
    output_type: "uint8", "float" or "latent"; see `GenerationResult`.
    lora: adapters of this run, each a file, "FILE:SCALE", or a mapping with file and scale; None stands for those that
        the pipeline has loaded.
    noise: the sampler's noise [N, B, T, h, w, C] for every step, in place of random noise.
    one_program: run everything, tokens to frames, as one compiled program, all components loaded at once.
    The others say it in their help.
    """

    prompt: str | Sequence[str]
    negative_prompt: str | Sequence[str] = option("", "what to steer away from", stage="encode")
    num_frames: int | None = option(None, "such as 49; default: the release's", parse=int)
    height: int | None = option(None, "pixels; default: the release's", parse=int)
    width: int | None = option(None, "pixels; default: the release's", parse=int)
    num_inference_steps: int | None = option(None, "default: the release's (50)", flags=("--steps",), parse=int)
    guidance_scale: float | None = option(
        None, "default: the checkpoint's (6 for the releases); 1 turns guidance off", parse=float
    )
    use_dynamic_cfg: bool | Literal["index"] | None = option(
        None,
        "guidance that changes over the steps: as released (timestep) or rising (index); default: the release's",
        flags=("--dynamic-cfg",),
        choices={"off": False, "timestep": True, "index": "index"},
    )
    scheduler: str | Scheduler | None = option(  # noqa: RUF009
        None, "the sampler, ddim or dpm; default: the release's", parse=str
    )
    seed: int = option(0, f"0 to {MAX_SEED}; default: 0", parse=int)
    latents: Float[Any, "B T h w C"] | None = dataclasses.field(default=None, compare=False)
    output_type: str = "uint8"
    _: KW_ONLY
    lora: Sequence[Any] | None = option(
        None,
        "an adapter in diffusers' layout and its strength (1); several are added one after the other",
        parse=_lora,
        metavar="FILE[:SCALE]",
        repeat=True,
    )
    num_videos: int = option(
        1, "videos of each prompt, of seed, seed + 1, ...; default: 1", stage="generate", recorded=False, parse=int
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
        if isinstance(self, ResolvedRequest) and getattr(self, "_resolved_for", None) == manifest.configs:
            return self
        manifest.check_complete("the model")
        family, configs, faults = manifest.model_family, manifest.configs, _Faults()
        defaults = family.defaults(configs)
        filled: dict[str, Any] = {
            field.name: getattr(defaults, field.name)
            for field in dataclasses.fields(defaults)
            if getattr(self, field.name) is None
        }
        if self.guidance_scale is None and manifest.guidance_scale is not None:
            filled["guidance_scale"] = manifest.guidance_scale
        if is_finite_number(self.guidance_scale):
            filled["guidance_scale"] = float(self.guidance_scale)  # type: ignore[arg-type]
        with faults.caught():
            filled["prompt"], filled["negative_prompt"] = check_prompts(self.prompt, self.negative_prompt)
        size = None
        with faults.caught():
            size = family.resolve_size(configs, self.num_frames, self.height, self.width)
            filled |= size.video
        if self.lora is not None:
            adapters = [self.lora] if isinstance(self.lora, str | os.PathLike) else self.lora
            with faults.caught():
                filled["lora"] = [_described(adapter, manifest) for adapter in adapters]
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        result = ResolvedRequest(**given | filled)
        with faults.caught():
            result._check_values()
        with faults.caught():
            sampler = result.sampler(manifest)
            sampler.plan(result.num_inference_steps)
            if size is not None and not faults:
                result._check_arrays(size, sampler)
        if self.tiling:
            with faults.caught():
                family.check_tiling(configs)
        faults.raise_all()
        assert size is not None
        for warning in family.size_warnings(configs, size):
            log.warning(warning)
        object.__setattr__(result, "_resolved_for", configs)
        return result


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

    @property
    def batch(self) -> int:
        """Videos that are made at once."""
        return len(self.prompt)

    @property
    def guided(self) -> bool:
        """Whether guidance is on."""
        return self.guidance_scale > 1

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
        object.__setattr__(result, "_resolved_for", getattr(self, "_resolved_for", None))
        return result

    def _check_values(self) -> None:
        """Refuse values that no model takes, or that do not go together.

        Raises:
            InputError: all faults in one message.
        """
        faults = []
        if not is_finite_number(self.guidance_scale):
            faults.append(
                f"guidance_scale is {shown(self.guidance_scale)}; expected a number (about 6 is usual, 1 is no "
                "guidance)"
            )
        if self.use_dynamic_cfg not in (False, True, "index"):
            faults.append(f"use_dynamic_cfg is {shown(self.use_dynamic_cfg)}; expected False, True or 'index'")
        for check, value in ((check_num_videos, self.num_videos), (check_fps, self.fps)):
            try:
                check(value)
            except InputError as e:
                faults.append(str(e))
        following = self.num_videos - 1 if is_count(self.num_videos, MAX_VIDEOS) else 0
        if not _is_whole(self.seed) or not 0 <= self.seed <= MAX_SEED - following:
            less = f" less the {following} that follow" if following else ""
            faults.append(f"seed is {shown(self.seed)}; expected a whole number from 0 to {MAX_SEED}{less}")
        if self.output_type not in OUTPUT_TYPES:
            faults.append(f"unknown output_type {self.output_type!r}; known are {', '.join(OUTPUT_TYPES)}")
        if self.one_program and self.output_type == "latent":
            faults.append('one program ends in frames; leave one_program off for output_type "latent"')
        if self.num_videos != 1 and (self.latents is not None or self.noise is not None):
            faults.append("num_videos draws noise of several seeds; leave it at 1 where latents or noise are given")
        if faults:
            raise InputError("\n".join(faults))

    def _check_arrays(self, size: Size, sampler: Scheduler) -> None:
        """Refuse initial latents, or noise for the sampler, that do not go with the run.

        Raises:
            InputError: another shape, or noise for a sampler that takes none.
        """
        shape = size.latent_shape(self.batch)
        if self.latents is not None and tuple(self.latents.shape) != shape:
            extra = f", the {size.extra_latents} extra included" if size.extra_latents else ""
            raise InputError(f"latents must be [B, T, h, w, C] = {shape}{extra}; got {tuple(self.latents.shape)}")
        if self.noise is None:
            return
        if not sampler.needs_noise:
            raise InputError(f"noise is for samplers that draw some; {sampler.config.kind} does not")
        if tuple(self.noise.shape) != (self.num_inference_steps, *shape):
            expected = (self.num_inference_steps, *shape)
            raise InputError(f"noise must be [N, B, T, h, w, C] = {expected}; got {tuple(self.noise.shape)}")


class _Faults:
    """Collects errors, to raise them together."""

    def __init__(self) -> None:
        self._found: list[InputError] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        try:
            yield
        except InputError as e:
            self._found.append(e)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_all(self) -> None:
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise InputError("\n".join(map(str, self._found)))


def check_prompts(
    prompt: str | Sequence[str], negative_prompt: str | Sequence[str] = ""
) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts as lists of equal length.

    Raises:
        InputError: no prompt, something that is not a string or not Unicode, or counts that do not agree.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
    if not prompts:
        raise InputError("the list of prompts is empty; give at least one prompt")
    for text in (*prompts, *negatives):
        if not isinstance(text, str):
            raise InputError(f"prompts must be strings; got {type(text).__name__}: {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the prompt {text!r} is not valid Unicode at character {e.start}; retype it") from e
    if len(negatives) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(negatives)} negative prompts; give one for all, or one each")
    return prompts, negatives


def check_num_videos(num_videos: int) -> None:
    """Refuse a number of videos per prompt that is out of range.

    Raises:
        InputError: it is.
    """
    if not is_count(num_videos, MAX_VIDEOS):
        raise InputError(f"num_videos is {shown(num_videos)}; expected a whole number from 1 to {MAX_VIDEOS}")


def check_fps(fps: int | None) -> None:
    """Refuse a frame rate that no video is written at; None is the release's.

    Raises:
        InputError: it is none.
    """
    if fps is not None and not is_count(fps, MAX_WRITTEN_FPS):
        raise InputError(f"fps is {shown(fps)}; expected a whole number from 1 to {MAX_WRITTEN_FPS} frames per second")


def options(*stages: Stage) -> dict[str, Option]:
    """Field of the request -> its option, for those of these stages."""
    fields = dataclasses.fields(GenerationRequest)
    found = {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}
    return {name: option for name, option in found.items() if option.stage in stages}


def _described(adapter: Any, manifest: Manifest) -> dict[str, Any]:
    """An adapter's `LoRARecord`, from what a user gives."""
    from cogvideox_flax.lora import describe_lora

    record = _lora(os.fspath(adapter)) if isinstance(adapter, str | os.PathLike) else adapter
    if not isinstance(record, Mapping) or "file" not in record:
        raise InputError(f"lora holds {shown(adapter)}; expected a file, 'FILE:SCALE', or a record with file and scale")
    family = manifest.model_family
    if kind := manifest.quantized(family.lora.component):
        raise InputError(f"adapters go with weights as they were trained; those of this model are {kind}")
    return dict(
        describe_lora(family, record["file"], record.get("scale", 1.0), manifest.configs[family.lora.component])
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
