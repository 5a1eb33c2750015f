"""From a request to one that can run: every None filled in, and everything checked that needs no weights."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cogvideox_flax import checkpoint, sharding
from cogvideox_flax.checkpoint import Domain, Manifest
from cogvideox_flax.errors import InputError, describe_file_error
from cogvideox_flax.generate import media
from cogvideox_flax.generate.distilled import with_distillation
from cogvideox_flax.generate.encode import NEGATIVE
from cogvideox_flax.generate.predict.windows import resolve_windows, window_size
from cogvideox_flax.generate.request import (
    DTYPES,
    MAX_SEED,
    STEP_CACHES,
    FilledRequest,
    GenerationRequest,
    check_option,
    given_options,
    parse_lora,
    types_of,
)
from cogvideox_flax.generate.run import Run
from cogvideox_flax.io.arrays import channels_last_advice, from_torch
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.lora import describe_lora
from cogvideox_flax.models.model import VideoModel
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.runtime.profiling import ProfilingOptions
from cogvideox_flax.schedulers import Scheduler
from cogvideox_flax.sharding.devices import find_devices

log = logging.getLogger(__name__)


def resolve(
    request: GenerationRequest,
    manifest: Manifest,
    dtype: str | None = None,
    warn: Callable[[Sequence[str]], None] | None = None,
    scheduler: Scheduler | None = None,
) -> Run:
    """Fill every None with the release's recommendation, and check everything that needs no weights.

    Warns of a size that the release was not trained for.

    Args:
        dtype: of weights and activations; default: the model's.
        warn: takes the warnings; default: each is logged.
        scheduler: in place of the release's, where neither the request nor a distillation names one.

    Raises:
        InputError: all that this model cannot serve, in one message.
    """
    manifest.check_complete("the model")
    model, faults = manifest.model, Faults()
    request = _typed_fields(request, model, faults)
    asked = given_options(request)
    with faults.caught():
        request = with_distillation(request, model)
        if request.distilled is not None:  # which no result records
            asked |= given_options(request)
    if request.scheduler is None and scheduler is not None:
        request = dataclasses.replace(request, scheduler=scheduler)
    run = Run(_filled(request, manifest, faults), manifest, dtype or manifest.default_dtype, asked)
    _check(run, faults)
    faults.raise_all()
    (log_warnings if warn is None else warn)(_warnings(run))
    return run


def _filled(request: GenerationRequest, manifest: Manifest, faults: Faults) -> FilledRequest:
    """The request with every None filled in, as far as it has no faults."""
    model = manifest.model
    filled = _recommended(request, manifest)
    if request.timesteps is not None:
        filled["timesteps"] = list(request.timesteps)
        if request.num_inference_steps is None:
            filled["num_inference_steps"] = len(request.timesteps)
    filled |= _fixed_settings(request, model, faults)
    with faults.caught():
        prompt = request.prompt if request.text_features is None else check_features(request, model)
        filled["prompt"], filled["negative_prompt"] = check_prompts(prompt, request.negative_prompt)
    num_frames = request.num_frames
    with faults.caught():
        files = {name: getattr(request, name) for name in media.MEDIA}
        filled |= media.resolve_media(model, files, len(filled.get("prompt", [""])))
        if num_frames is None:
            num_frames = media.frames_of_clips(model, filled, any_length=request.window is not None)
        media.check_image_scale(model, request.image_scale)
    steps = filled.get("num_inference_steps", request.num_inference_steps)
    strength, filled["strength"] = filled.get("strength", request.strength), None
    with faults.caught():
        has_video, has_mask = request.video is not None, request.mask_video is not None
        filled["strength"] = media.resolve_strength(strength, has_video, has_mask, steps)
    with faults.caught():
        sides = media.size_from_image(model, filled, (request.height, request.width))
        size = model.resolve_size(num_frames, *sides)
        filled |= size.video
        _check_size(request, manifest, size)
    if request.lora is not None:
        with faults.caught():
            filled["lora"] = [_describe_adapter(adapter, manifest) for adapter in request.lora]
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(GenerationRequest)}
    return FilledRequest(**fields | filled)


def _check(run: Run, faults: Faults) -> None:
    """Check what of a run goes together and what its model has."""
    with faults.caught():
        _check_forms(run)
    with faults.caught():
        _check_values(run)
    with faults.caught():
        _ = run.steps  # the scheduler's tables are checked as they are made
        if not faults:
            _check_step_cache(run)
            _check_skip_layer(run)
            _check_arrays(run)
            _check_negative_features(run)
    if run.request.tiling:
        with faults.caught():
            run.model.codec.check_tiling()


def _warnings(run: Run) -> list[str]:
    """Sentences about what the model was not trained for, or does not see, each once."""
    model, domain = run.model, run.manifest.domain
    # a model that restores clips was trained at sizes of its own, which its release does not tell
    sizes = [] if run.scheduler.needs_video else model.size_warnings(window_size(model, run.request, run.size))
    outside = [] if domain is None else _outside(run.request, domain)
    return list(dict.fromkeys([*sizes, *outside, *_unused_media(run)]))


def log_warnings(warnings: Sequence[str]) -> None:
    """Log each."""
    for warning in warnings:
        log.warning(warning)


def _typed_fields(request: GenerationRequest, model: VideoModel, faults: Faults) -> GenerationRequest:
    """The request with values that its fields take: numpy's numbers and arrays, and all sequences, become Python's.

    Args:
        faults: where other values go, see `check_option`; in the request, the field's default takes their place.
    """
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(GenerationRequest):
        name, kind, value = field.name, types_of(GenerationRequest)[field.name], getattr(request, field.name)
        if kind is Any:  # media are checked when opened
            continue
        changes[name] = "" if field.default is dataclasses.MISSING else field.default
        with faults.caught():
            changes[name] = _typed_field(name, value, model)
    return dataclasses.replace(request, **changes)


def _typed_field(name: str, value: Any, model: VideoModel) -> Any:
    if name == "scheduler":
        return value if value is None else model.own_scheduler(value)
    if name in ("latents", "noise"):
        return value if value is None else numbers(name, value)
    if name in ("encoder_noise", "text_features") and isinstance(value, Mapping):
        return {key: numbers(f"{name} of {short_repr(key)}", each) for key, each in value.items()}
    value = plain(value)
    if name == "lora" and value is not None and not isinstance(value, list):
        value = [value]
    return check_option(name, value)


def plain(value: Any) -> Any:
    """A value of numpy, and what is like it, as one of Python; paths as text, sequences as lists."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
    return [plain(each) for each in value] if is_list else value


def numbers(name: str, value: Any) -> Any:
    """An array of numbers; one of JAX stays where it is, a tensor of PyTorch becomes NumPy's."""
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(from_torch(value))
    except (TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"{name} is {short_repr(value)}; expected an array of numbers") from e
    if not (jax.dtypes.issubdtype(array.dtype, np.floating) or jax.dtypes.issubdtype(array.dtype, np.integer)):
        raise InputError(f"{name} is {short_repr(value)}; expected an array of numbers")
    return array


def _recommended(request: GenerationRequest, manifest: Manifest) -> dict[str, Any]:
    """What the release's authors, and the checkpoint, recommend for fields that are None."""
    names = ("fps", "num_inference_steps", "guidance_scale", "use_dynamic_cfg", "scheduler")
    return {name: getattr(manifest.model.defaults, name) for name in names if getattr(request, name) is None}


def _outside(request: FilledRequest, domain: Domain) -> list[str]:
    """Sentences about prompts and images that are unlike all of the model's training; adapters may add words."""
    prompts = [] if request.lora else dict.fromkeys((*request.prompt, *request.negative_prompt))
    images = [
        (each.file, each.read(1, domain.height, domain.width, request.fit)[0])
        for name in (*media.IMAGES, "video")
        for each in getattr(request, name) or ()
        if each.source is not None
    ]
    shown = any(getattr(request, name) for name in media.MEDIA)
    of_prompts = [said for prompt in prompts if (said := domain.prompt_warning(prompt, shown)) is not None]
    of_images = [said for image in images if (said := domain.image_warning(*image)) is not None]
    if of_prompts:
        of_prompts = ["; ".join(said.removesuffix(domain.summary) for said in of_prompts) + domain.summary]
    return [*of_prompts, *of_images]


def _unused_media(run: Run) -> list[str]:
    """Sentences about what of the images and clips the model does not see."""
    files = [(name, file) for name in media.MEDIA for file in getattr(run.request, name) or ()]
    video = (run.size.num_frames, run.size.height, run.size.width)
    return [said for name, file in files if (said := media.describe_fit(name, file, *video, run.request.fit))]


class Faults(list[InputError]):
    """Errors that are collected, to raise them together."""

    @contextmanager
    def caught(self) -> Iterator[None]:
        try:
            yield
        except InputError as e:
            self.append(e)
        except OSError as e:  # of a path that was given, such as one that is too long
            if (reason := describe_file_error(e)) is None:
                raise
            self.append(InputError(reason))

    def raise_all(self) -> None:
        if self:
            raise self[0] if len(self) == 1 else InputError("\n".join(map(str, self)))


def check_prompts(
    prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None = ""
) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts as lists of equal length.

    Raises:
        InputError: no prompt, something that is not Unicode, or counts that do not agree.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    negative_prompt = "" if negative_prompt is None else negative_prompt
    negatives = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str) else list(negative_prompt)
    if not prompts:
        raise InputError("the list of prompts is empty; give at least one prompt")
    for text in (*prompts, *negatives):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"the prompt {text!r} is not valid Unicode at character {e.start}; retype it") from e
    if len(negatives) != len(prompts):
        raise InputError(f"{len(prompts)} prompts but {len(negatives)} negative prompts; give one for all, or one each")
    return prompts, negatives


def check_features(request: GenerationRequest, model: VideoModel) -> list[str]:
    """Refuse text features that the model does not take.

    Returns:
        The prompts that stand for them, all empty.
    """
    features, shapes = request.text_features, model.feature_shapes(1)
    names = [*shapes, *(NEGATIVE + name for name in shapes)]
    if not isinstance(features, Mapping) or not features.keys() <= set(names):
        raise InputError(
            f"text_features are {short_repr(features)}; expected a mapping of {', '.join(names)} to arrays"
        )
    has_negative = any(name.startswith(NEGATIVE) for name in features)
    if missing := [name for name in shapes if name not in features]:
        if has_negative:
            raise InputError("negative_prompt_embeds go with prompt_embeds; give both, or the negative_prompt as text")
        raise InputError(f"text_features lack {', '.join(missing)}")
    for name, text, is_given in (("", request.prompt, True), (NEGATIVE, request.negative_prompt, has_negative)):
        if is_given and any([text] if isinstance(text, str) else text or ()):
            raise InputError(f"{name}prompt and {name}prompt_embeds both say what to make; give one of them")
    arrays = {name: np.shape(x) for name, x in features.items()}
    first = arrays[next(iter(shapes))]
    batch = first[0] if first else 1
    for name, shape in arrays.items():
        expected = model.feature_shapes(batch)[name.removeprefix(NEGATIVE)]
        if shape != expected:
            raise InputError(f"{name} must be {list(expected)} for {batch} prompts; got {list(shape)}")
    return [""] * batch


def _check_negative_features(run: Run) -> None:
    """Refuse text features of a part of the negative prompt, or that a whole run as one program has no place for."""
    request = run.request
    if request.text_features is None:
        return
    if request.one_program:
        raise InputError("one program begins with the prompts; leave prompt_embeds or one_program out")
    names = {NEGATIVE + name for name in run.model.feature_shapes(1)}
    if run.guided and names & request.text_features.keys() and (missing := names - request.text_features.keys()):
        raise InputError(f"text_features lack {', '.join(sorted(missing))}; or give the negative_prompt as text")


def _fixed_settings(request: GenerationRequest, model: VideoModel, faults: Faults) -> dict[str, Any]:
    """The fields that the request's scheduler fixes, with their values.

    Args:
        faults: where other values of the request go, and the lack of a clip that the scheduler starts from.
    """
    named = model.schedulers.get(request.scheduler) if isinstance(request.scheduler, str) else request.scheduler
    if named is None or not named.fixed:  # an unknown name is refused where the scheduler is made
        return {}
    asked = {name: getattr(request, name) for name in named.fixed}
    lacks_video = named.needs_video and request.video is None
    with faults.caught():
        if wrong := [name for name, value in asked.items() if value is not None and value != named.fixed[name]]:
            needed = ", ".join(f"{name} {named.fixed[name]} (got {short_repr(asked[name])})" for name in wrong)
            raise InputError(f"the {named.kind} scheduler needs {needed}; leave these out, or take another scheduler")
    with faults.caught():
        if lacks_video:
            raise InputError(f"the {named.kind} scheduler starts from a clip; give --video, or take another scheduler")
    return {name: value for name, value in named.fixed.items() if not (lacks_video and name == "strength")}


def _describe_adapter(adapter: Any, manifest: Manifest) -> dict[str, Any]:
    """An adapter's `LoRARecord`, from what a user gives."""
    record = parse_lora(adapter) if isinstance(adapter, str) else adapter
    if not isinstance(record, Mapping) or not isinstance(record.get("file"), str):
        raise InputError(
            f"lora holds {short_repr(adapter)}; expected a file, 'FILE:SCALE', or a record with file, scale and alpha"
        )
    name = manifest.model.lora.component
    scale, alpha = record.get("scale", 1.0), record.get("alpha")
    return dict(describe_lora(manifest.model, record["file"], scale, manifest.configs[name], alpha))


def _check_values(run: Run) -> None:
    """Refuse values that do not go together."""
    request, faults = run.request, []
    interval = request.guidance_interval
    if interval is not None and not interval[0] < interval[1]:
        faults.append(f"guidance_interval is {short_repr(interval)}; expected START below STOP")
    if interval is not None and request.step_cache is not None:
        faults.append("a step cache keeps both halves of guidance; leave step_cache or guidance_interval out")
    is_plain = (request.guidance, request.guidance_rescale, interval) == ("cfg", 0.0, None)
    if not is_plain and not run.guided:
        faults.append(f"guidance is off at a guidance_scale of {request.guidance_scale:g}; leave its other options out")
    if (last := request.seed + request.num_videos - 1) > MAX_SEED:
        faults.append(
            f"seed is {request.seed}; with num_videos {request.num_videos} the last is {last}, above {MAX_SEED}"
        )
    if request.one_program and request.output_type == "latent":
        faults.append('one program ends in frames; leave one_program off for output_type "latent"')
    if request.image_scale is not None and request.image is None:
        faults.append("image_scale is a factor of an image's latents; give an image, or leave it out")
    if request.num_videos != 1 and (request.latents is not None or request.noise is not None):
        faults.append("num_videos draws noise of several seeds; leave it at 1 where latents or noise are given")
    if faults:
        raise InputError("\n".join(faults))


def _check_arrays(run: Run) -> None:
    """Refuse initial latents, or noise for the encoders or the scheduler, that do not go with the run."""
    request, size = run.request, run.size
    shape = size.latent_shape(run.batch)
    if request.latents is not None and tuple(request.latents.shape) != shape:
        extra = f", the {size.extra_latents} extra included" if size.extra_latents else ""
        advice = channels_last_advice(request.latents.shape, shape[-1])
        raise InputError(
            f"latents must be [B, T, h, w, C] = {shape}{extra}; got {tuple(request.latents.shape)}{advice}"
        )
    drawn = {stage.input: run.media_shapes(stage)[1] for stage in run.visual if stage.noise is not None}
    for name, noise in (request.encoder_noise or {}).items():
        if name not in drawn:
            known = f"that of {' and '.join(drawn)}" if drawn else "no noise is drawn for what is given"
            raise InputError(f"encoder_noise is of {short_repr(name)}; expected {known}")
        if tuple(noise.shape) != drawn[name]:
            raise InputError(f"encoder_noise of {name!r} must be {drawn[name]}; got {tuple(noise.shape)}")
    if request.noise is None:
        return
    if not run.scheduler.needs_noise:
        raise InputError(f"noise is for schedulers that draw some; {run.scheduler.config.kind} does not")
    expected = (run.num_steps, *shape)
    if tuple(request.noise.shape) != expected:
        raise InputError(f"noise must be [N, B, T, h, w, C] = {expected}; got {tuple(request.noise.shape)}")


def check_dtype(manifest: Manifest, dtype: str, platform: str | None) -> None:
    """Refuse a dtype that a model or the devices cannot compute a run in.

    Args:
        platform: "cpu", "gpu" or "tpu"; None is JAX's default one, which is asked for only where it matters.

    Raises:
        InputError: unknown, float16 for a release that does not survive it, or float16 on TPUs.
    """
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    manifest.configs[manifest.model.denoiser].check_dtype(dtype)
    if dtype == "float16" and (platform or jax.default_backend()) == "tpu":
        raise InputError(
            "float16 is not served on TPUs, whose kernels compute in bfloat16 or float32; use one of these"
        )


def check_model(manifest: Manifest, where: object, dtype: str | None, mesh: Mesh | None) -> None:
    """Refuse a model that its configs alone rule out.

    Raises:
        InputError: not a complete text-to-video model, a dtype that it does not survive or its devices (those of the
            mesh, or JAX's own) do not serve, or a mesh that its weights do not divide over. Or no devices at all.
    """
    manifest.check_complete(where)
    find_devices()
    check_dtype(manifest, dtype or manifest.default_dtype, None if mesh is None else mesh.devices.flat[0].platform)
    try:
        manifest.model.check()
    except InputError as e:
        raise InputError(f"{where} cannot be run: {e}") from e
    if mesh is None:
        return
    for name, heads in manifest.model.heads.items():
        sharding.check_heads(mesh, heads, name.replace("_", " "))
    for name, component in manifest.model.components.items():
        for parameter, leaf in checkpoint.parameters(manifest.abstract(name)).items():
            sharding.parameter_sharding(mesh, component.sharding, parameter, leaf.shape)


def check_run(run: Run, mesh: Mesh | None, profiling: ProfilingOptions) -> None:
    """Refuse a run that does not divide over a mesh, or a profile of steps that it does not have."""
    request = run.request
    # else there are predictions of the prompts alone
    alone = request.guidance_interval, request.skip_layer
    form = None if request.step_cache is None else STEP_CACHES[request.step_cache]
    halves = run.guided and alone == (None, None) and not (form and form.needs_guidance)
    sharding.check_batch(mesh, run.batch * (2 if halves else 1))
    profiling.check(run.num_steps, request.compiled_loop or request.one_program)


def _check_skip_layer(run: Run) -> None:
    """Refuse a block that the model does not have, and what skip-layer guidance does not go with."""
    request = run.request
    block, layers = request.skip_layer, run.model.workload(run.size).layers
    if block is None:
        return
    if block >= layers:
        raise InputError(f"skip_layer is {short_repr(block)}; expected a block from 0 to {layers - 1}")
    for name in ("step_cache", "window", "positions", "sparse_attention"):
        if getattr(request, name) is not None:
            raise InputError(f"skip_layer does not go with {name}; leave one of them out")


def _check_step_cache(run: Run) -> None:
    """Refuse options that the step cache, the model, or the run's steps do not have."""
    request = run.request
    name, schedule, full = request.step_cache, request.step_cache_schedule, request.step_cache_full
    steps = run.num_steps
    if name is None:
        for option in ("step_cache_schedule", "step_cache_threshold", "step_cache_full", "step_cache_ratios"):
            if getattr(request, option) is not None:
                raise InputError(f"{option} is of a step cache; give step_cache too ({' or '.join(STEP_CACHES)})")
        return
    form = STEP_CACHES[name]
    if form.needs_guidance and not run.guided:
        raise InputError(
            f"{name} leaves out a half of guidance, which is off at a guidance_scale of {request.guidance_scale:g}"
        )
    _ = run.predict  # the form is made for the model, or refused
    if request.step_cache_threshold is not None and form.threshold is None:
        others = ", ".join(other for other, row in STEP_CACHES.items() if row.threshold is not None)
        raise InputError(f"step_cache_threshold is of {others}; leave it out for {name}")
    if request.step_cache_ratios is not None and not form.has_ratios:
        raise InputError(f"step_cache_ratios are of magcache; leave them out for {name}")
    if full is not None and schedule is not None:
        raise InputError("step_cache_full and step_cache_schedule both say which steps are full; give one")
    if full is not None and (0 not in full or max(full) >= steps):
        raise InputError(
            f"step_cache_full is {short_repr(list(full))}; expected steps from 0 to {steps - 1}, the first among them"
        )
    if schedule is None:
        return
    if form.threshold is not None:
        raise InputError(f"{name} decides itself which steps are full; leave step_cache_schedule out")
    start, end, _ = schedule
    if not start <= end <= steps:
        raise InputError(
            f"step_cache_schedule has START {start} and END {end}; expected START <= END <= {steps}, the number of "
            "steps that are done"
        )


def _check_forms(run: Run) -> None:
    """Refuse a form of positions or of sparse attention that this model does not have."""
    for name, known, none, otherwise in (
        ("positions", run.model.positions, "none that can be extended", "those of the training"),
        ("sparse_attention", run.model.sparse_attention, "none", "attention of all to all"),
    ):
        if (value := getattr(run.request, name)) is not None and value not in known:
            has = ", ".join(known) or none
            raise InputError(f"{name} is {short_repr(value)}; this model has {has}. Leave it out for {otherwise}")


def _check_size(request: GenerationRequest, manifest: Manifest, size: Size) -> None:
    """Check the options of long clips, and that a model which knows its domain was trained for the size."""
    model = manifest.model
    if resolve_windows(model, request, size) is not None:
        check_chunks(model, request.tiling)
        if request.step_cache is not None:
            raise InputError("a step cache is of one clip that is denoised whole; leave step_cache or the window out")
    domain, denoiser_size = manifest.domain, window_size(model, request, size)
    if domain is not None and not request.force and (warning := domain.size_warning(denoiser_size)):
        raise InputError(f"{warning}. Leave size and length out, or go on with force (--force)")


def check_chunks(model: VideoModel, tiled: bool) -> None:
    """Refuse to decode in chunks where the family cannot, or tiles are asked for too."""
    if not model.codec.decodes_chunks:
        raise InputError(f"{model.name} cannot decode a clip in chunks; leave the window out")
    if tiled:
        raise InputError("a long clip is decoded in chunks of frames, without tiles; leave tiling or the window out")
