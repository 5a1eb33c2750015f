"""A fine-tuning job: everything that is known before any weights are converted or loaded, and what it will need."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from cogvideox_flax import checkpoint, hub, lora, sharding
from cogvideox_flax.checkpoint import Manifest
from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.media import UNSEEN, Media, describe_fit, resolve_media
from cogvideox_flax.generate.request import GenerationRequest
from cogvideox_flax.generate.resolve import check_model, log_warnings, resolve
from cogvideox_flax.generate.run import Run, shapes_on
from cogvideox_flax.io.contents import Contents
from cogvideox_flax.io.paths import cache_dir, check_free_space, check_writable, existing_parent
from cogvideox_flax.lora.files import LowRankPair
from cogvideox_flax.models.model import Component, VideoModel
from cogvideox_flax.models.sizes import Size
from cogvideox_flax.nn.quantized import quantize_frozen
from cogvideox_flax.nn.remat import RematChoice, choice_of
from cogvideox_flax.runtime.multihost import hosts
from cogvideox_flax.runtime.settings import random_key
from cogvideox_flax.schedulers import TimestepLaw
from cogvideox_flax.schedulers.base import DiffusionScheduler
from cogvideox_flax.training.buckets import bucket_of
from cogvideox_flax.training.clips import Clip, clip_contents, clips_fingerprint, find_clips
from cogvideox_flax.training.conditions import Condition, ControlClip, FirstFrame, MaskedClip, condition_of
from cogvideox_flax.training.config import AUTO, TrainingConfig, config_json, config_of_json, read_config, require
from cogvideox_flax.training.metrics import check_tensorboard
from cogvideox_flax.training.optimizer import make_optimizer

RECORD_FILE = hub.TRAINING_RECORD
DEFAULT_RANK = 64


@dataclass(frozen=True, kw_only=True)
class FinetuneJob:
    """A checked run: its settings, clips, and the model's configs. `check` and `open_job` make one.

    devices: those of its mesh; None: JAX's.
    """

    config: TrainingConfig
    manifest: Manifest
    clips: Sequence[Clip] = ()
    devices: Sequence[jax.Device] | None = None

    def __post_init__(self) -> None:
        """Fill in the dtype: that of a run of the model."""
        if (loop := self.config.loop).dtype is None:
            loop = dataclasses.replace(loop, dtype=self.manifest.default_dtype)
            object.__setattr__(self, "config", dataclasses.replace(self.config, loop=loop))

    @cached_property
    def mesh(self) -> Mesh | None:
        return sharding.mesh_of(self.config.mesh, self.devices)

    @cached_property
    def samples(self) -> Run:
        """The videos of the sample prompts, by the checkpoint's own scheduler with constant guidance."""
        config, sample = self.config, self.config.sample
        request = GenerationRequest(
            list(sample.prompts) or [""],
            image=[UNSEEN] if "image" in self._sample_files else None,  # `sample_media`
            control_video=[UNSEEN] if "control_video" in self._sample_files else None,
            num_frames=config.num_frames,
            height=config.height,
            width=config.width,
            num_inference_steps=sample.num_inference_steps,
            guidance_scale=sample.guidance_scale,
            use_dynamic_cfg=False,
            scheduler=self.manifest.configs["scheduler"].kind,
            seed=sample.seed,
            force=True,  # it learns this size
        )
        return resolve(request, self.manifest, config.loop.dtype, self._warn)

    @property
    def _sample_files(self) -> dict[str, list[str]]:
        """Field of the request -> the images or clips of the sample videos; with the fields that the model needs."""
        sample, condition = self.config.sample, self.condition
        if isinstance(condition, ControlClip):
            return {"control_video": list(sample.control_videos)}
        has_images = isinstance(condition, FirstFrame) or (isinstance(condition, MaskedClip) and sample.images)
        return {"image": list(sample.images)} if has_images else {}

    @cached_property
    def sample_media(self) -> dict[str, list[Media]]:
        """Field of the request -> the images or clips of the sample videos. Process 0 has their files.

        Raises:
            InputError: one cannot be read, or is too short.
        """
        files = {name: values for name, values in self._sample_files.items() if values}
        if not hosts.is_first():
            return {name: [UNSEEN] * len(values) for name, values in files.items()}
        found, size = resolve_media(self.model, files, self.samples.batch), self.size
        for name, values in found.items():
            for media in values:
                describe_fit(name, media, size.num_frames, size.height, size.width, self.samples.request.fit)
        return found

    @cached_property
    def condition(self) -> Condition:
        """What the model sees beside the noisy latents."""
        return condition_of(self.model, self.config.image_noise, self.config.image_dropout)

    def _warn(self, warnings: Sequence[str]) -> None:
        """Log warnings but for those of words, which the model learns now."""
        summary = None if self.manifest.domain is None else self.manifest.domain.summary
        log_warnings([warning for warning in warnings if summary is None or not warning.endswith(summary)])

    @cached_property
    def size(self) -> Size:
        """The size of a clip, and of the sample videos."""
        return self.samples.size

    @cached_property
    def buckets(self) -> list[Size]:
        """The sizes of the clips: one, or those of the buckets."""
        return [self.model.resolve_size(*bucket) for bucket in self.config.buckets] or [self.size]

    @cached_property
    def largest(self) -> Size:
        """The size of the clips with the most tokens, whose step needs the most memory."""
        return max(self.buckets, key=lambda size: self.model.workload(size).tokens)

    @cached_property
    def members(self) -> list[list[int]]:
        """The indices of the clips in each bucket."""
        places = [bucket_of(clip, self.buckets) if self.config.buckets else 0 for clip in self.clips]
        return [[i for i, place in enumerate(places) if place == bucket] for bucket in range(len(self.buckets))]

    def in_buckets(self, clips: Sequence[int]) -> list[list[int]]:
        """These clips, by bucket; without the buckets that have none of them."""
        chosen = set(clips)
        return [found for members in self.members if (found := [i for i in members if i in chosen])]

    @property
    def fps(self) -> int:
        """Frames per second of the clips, as the model was trained."""
        return self.samples.request.fps

    @property
    def model(self) -> VideoModel:
        return self.manifest.model

    @property
    def timesteps(self) -> TimestepLaw:
        """The law of the timesteps: that of the settings, and where they say nothing the model's own."""
        stated = {name: value for name, value in vars(self.config.timesteps).items() if value is not None}
        return dataclasses.replace(self.model.recipe.timesteps, **stated)

    @property
    def remat(self) -> RematChoice:
        """What is recomputed; "auto" was decided before (`forecast.first_fit`)."""
        assert self.config.remat != AUTO
        return choice_of(self.config.remat)

    @property
    def tokens(self) -> int:
        """Tokens of one clip, its text included."""
        return self.model.workload(self.size).tokens

    @cached_property
    def held_out(self) -> list[int]:
        """The indices of the clips that are not trained on: the first of a shuffle of all."""
        order = np.random.default_rng([self.config.seed, len(self.clips)]).permutation(len(self.clips))
        return sorted(order[: self.config.validation.clips].tolist())

    @cached_property
    def trained_on(self) -> list[int]:
        """The other clips."""
        return [i for i in range(len(self.clips)) if i not in set(self.held_out)]

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The linear maps that get adapters."""
        if self._init is not None:
            return tuple(self._init)
        targets = self.config.lora.targets
        return self.model.lora.default_targets if targets is None else targets

    @cached_property
    def _init(self) -> dict[str, LowRankPair] | None:
        """The targets of the adapter from which training goes on; None: adapters are new."""
        init, model = self.config.lora.init, self.model
        return None if init is None else lora.trained_targets(model, self.manifest.configs[model.denoiser], init)

    @property
    def made_of_lora(self) -> dict[str, Any]:
        """What decides the adapters at the start, as JSON."""
        settings = dataclasses.asdict(self.config.lora) | {"targets": self.lora_targets}
        if settings["quantize"] is None:  # as in all runs of earlier versions, which have no name for it
            del settings["quantize"]
        if (init := settings.pop("init")) is not None:
            return settings | {"init": lora.adapter_hash(lora.find_adapter(init))}
        return settings | {"rank": settings["rank"] or DEFAULT_RANK}

    def check_init(self) -> None:
        """Refuse an adapter from which training cannot go on, or other settings than its own."""
        stated, own = self.config.lora, f"as {self.config.lora.init} has"
        for target, pair in (self._init or {}).items():
            rank, alpha = pair.rank, pair.alpha
            same_targets = stated.targets is None or set(stated.targets) == set(self.lora_targets)
            require(
                self.config,
                ("lora.rank", stated.rank in (None, rank), f"{rank}, {own} for {target}"),
                ("lora.alpha", stated.alpha in (None, alpha), f"{alpha:g}, {own} for {target}"),
                ("lora.targets", same_targets, f"{', '.join(self.lora_targets)}, {own}"),
            )

    @cached_property
    def parameters(self) -> int:
        """Parameters of the denoiser, without adapters."""
        return self._component.num_parameters(self.manifest.configs[self.model.denoiser])

    @cached_property
    def _abstract_trained(self) -> Any:
        """What is trained, as shapes in float32."""
        trained = self._abstract_denoiser
        if self.config.method == "lora":
            trained = lora.lora_parameters(jax.eval_shape(partial(self.add_lora, mesh=None), trained))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), trained)
        return {self.model.denoiser: shapes}

    @cached_property
    def trainable(self) -> int:
        """Parameters that are trained."""
        return sum(x.size for x in jax.tree.leaves(self._abstract_trained))

    @cached_property
    def moments(self) -> int:
        """Bytes of the optimizer's state."""
        config = self.config.trainer
        moments = jax.eval_shape(make_optimizer(config.optimizer, config.steps).init, self._abstract_trained)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(moments))

    @cached_property
    def contents(self) -> list[Contents]:
        """The contents of each clip, on process 0; reads all files when it is first asked for."""
        return clip_contents(self.clips)

    @cached_property
    @hosts.broadcast_result
    def clips_fingerprint(self) -> str:
        """Fingerprint of the clips' `contents` and captions."""
        return clips_fingerprint(self.clips, self.contents)

    @cached_property
    def _abstract_denoiser(self) -> Any:
        return self.manifest.abstract(self.model.denoiser)

    @property
    def _component(self) -> Component:
        return self.model.components[self.model.denoiser]

    @property
    def quantization(self) -> str | None:
        """The quantization of the weights beside adapters: that of the checkpoint, or of the settings."""
        return self.manifest.quantized(self.model.denoiser) or self.config.lora.quantize

    def add_lora(self, denoiser: Any, mesh: Mesh | None) -> Any:
        """The denoiser with new adapters, which change nothing yet, or with those from which training goes on; its own
        weights are quantized where they are to be."""
        if self.quantization is not None:
            denoiser = self._quantized(denoiser, mesh)
        if (init := self.config.lora.init) is not None:
            own = self.manifest.configs[self.model.denoiser]
            return lora.load_adapters(self.model, own, denoiser, init, self.lora_targets, mesh=mesh)
        config, rngs = self.config.lora, nnx.Rngs(random_key(self.config.seed))
        targets = self.lora_targets
        rank = config.rank or DEFAULT_RANK
        return lora.add_lora(self.model, denoiser, rank, config.alpha, targets, rngs=rngs, mesh=mesh)

    def _quantized(self, denoiser: Any, mesh: Mesh | None) -> Any:
        assert self.quantization is not None
        quantize = partial(quantize_frozen, maps=self._component.linear_maps, kind=self.quantization)
        if mesh is None:
            return quantize(denoiser)
        shapes = shapes_on(jax.eval_shape(quantize, denoiser), mesh, self._component.sharding)
        return jax.jit(quantize, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))(denoiser)

    def memory(self) -> dict[str, int]:
        """Bytes on all devices together that are held during the whole run, by kind. Activations come on top."""
        loop = self.config.loop
        itemsize, full = jnp.dtype(loop.dtype).itemsize, self.config.method == "full"
        configs, components = self.manifest.configs, self.model.components
        encoders = self.condition.encoders
        frozen = checkpoint.cast(self._abstract_denoiser, self.config.trainer.dtype)
        if self.quantization is not None:
            frozen = jax.eval_shape(partial(self._quantized, mesh=None), frozen)
        return {
            "frozen weights": 0 if full else sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(frozen)),
            "encoder": itemsize * sum(components[name].num_parameters(configs[name]) for name in encoders),
            "trained weights": 4 * self.trainable,
            f"their {loop.dtype} copy": itemsize * self.trainable if full and itemsize < 4 else 0,
            "gradients": 4 * self.trainable,
            "moments": self.moments,
            "moving average": 4 * self.trainable if loop.ema_decay else 0,
        }

    def disk(self) -> int:
        """Bytes that the run writes, about: prepared clips, training states, and the result."""
        loop, features = self.config.loop, self.model.feature_shapes(1).values()
        examples = len(self.clips) * 4 * sum(map(math.prod, features))
        for bucket, members in zip(self.buckets, self.members, strict=True):
            beside = self.condition.arrays(bucket).values()
            nbytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in beside)
            examples += len(members) * (2 * 2 * math.prod(bucket.latent_shape(1)) + nbytes)
        state = (8 if loop.ema_decay else 4) * self.trainable + self.moments
        result = 4 * self.trainable
        if self.config.method == "full":
            kept = self.model.components.keys() - {self.model.denoiser}
            copied = [name for name in kept if not self._can_link(name)]
            result = sum(map(self._stored_bytes, (self.model.denoiser, *copied)))
        return examples + (loop.keep + 1) * state + result

    def _can_link(self, component: str) -> bool:
        """Whether the result can hold a hard link to this component of the base: both are on one file system."""
        native = hub.native_here(self.config.model or "embedded") or cache_dir()
        return _file_system(checkpoint.weights_file(native, component)) == _file_system(self.config.out / RECORD_FILE)

    def _stored_bytes(self, component: str) -> int:
        dtype = self.manifest.weights.get(component, {}).get("dtype", self.manifest.default_dtype)
        stored = checkpoint.cast(self.manifest.abstract(component), dtype)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))

    def describe(self, step: str) -> str:
        """Describe what the run would do and need, as a table for people.

        step: what its training step needs.
        """
        config = self.config
        release, steps, count = self.manifest.release, config.loop.steps, len(self.clips)
        memory = {name: nbytes for name, nbytes in self.memory().items() if nbytes}
        rows = {
            "model": f"{config.model or hub.EMBEDDED.name} ({release.name if release else 'not a released model'})",
            "clips": f"{count} in {config.clips}",
            **self._describe_sizes(),
            "training": f"{self.trainable:,} of {self.parameters:,} parameters ({config.method})",
            "steps": f"{steps} of {config.batch} clips in {config.loop.accumulate} micro-batches, "
            f"{steps * config.batch / count:.1f} times each clip",
            "memory": f"{_gib(sum(memory.values()))} over all devices, and activations",
            **{f"  {name}": _gib(nbytes) for name, nbytes in memory.items()},
            "step": step,
            "disk": f"{_gib(self.disk())} in {config.out}",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows.items())

    def _describe_sizes(self) -> dict[str, str]:
        rows, size = {}, self.size
        for number, (bucket, members) in enumerate(zip(self.buckets, self.members, strict=True), 1):
            shape, tokens = "x".join(map(str, bucket.video.values())), self.model.workload(bucket).tokens
            rows[f"bucket {number}"] = f"{shape} at {self.fps} fps, {tokens:,} tokens per clip: {len(members)} clips"
        single = {
            "size": f"{size.num_frames} frames of {size.height}x{size.width} at {self.fps} fps",
            "tokens": f"{self.tokens:,} per clip, text included",
        }
        return rows if self.config.buckets else single


def open_job(path: Path, overrides: Mapping[str, Any]) -> FinetuneJob:
    """`check` the settings in a file. On several hosts process 0 does, with its files, and sends the others the job.

    Arguments and errors as for `read_config` and `check`; also InputError for a mesh that leaves out a host.
    """
    made: list[FinetuneJob] = []

    def decide() -> dict[str, Any]:
        job = check(read_config(path, overrides))
        made.append(job)
        clips = [clip.to_json() for clip in job.clips]
        return {"config": config_json(job.config), "manifest": job.manifest.to_json(), "clips": clips}

    decided = hosts.broadcast(decide)
    if not made:
        clips = [Clip.from_json(clip) for clip in decided["clips"]]
        config, manifest = config_of_json(decided["config"]), Manifest.from_json(decided["manifest"])
        made.append(FinetuneJob(config=config, manifest=manifest, clips=clips))
    hosts.check_mesh(made[0].mesh)
    return made[0]


def check(config: TrainingConfig) -> FinetuneJob:
    """Check a run as far as is possible before anything is converted, loaded or written.

    Raises:
        InputError: a model that cannot be trained (incomplete, or all of a quantized one); adapters that it does not
            have; a size, mesh or batch that does not fit it; faulty clips, prompts, images, control clips or sampling
            options; or a directory that cannot be written.
    """
    loop = config.loop
    job = FinetuneJob(config=config, manifest=hub.peek(config.model, config.revision, variant=config.variant))
    check_trainable(job, config.model or hub.EMBEDDED)
    if config.sample.prompts:
        sharding.check_batch(job.mesh, job.samples.denoiser_batch)
    fewest = min(bucket.num_frames for bucket in job.buckets)
    clips = find_clips(config.clips, fewest, job.fps, control=isinstance(job.condition, ControlClip))
    if config.id_token:
        clips = [dataclasses.replace(clip, caption=f"{config.id_token} {clip.caption}") for clip in clips]
    job = dataclasses.replace(job, clips=clips)
    most = len(job.clips) - 1
    require(config, ("validation.clips", config.validation.clips <= most, f"0 to {most}: some must be trained on"))
    if loop.tensorboard:
        check_tensorboard()
    check_writable(config.out / RECORD_FILE)
    check_free_space(config.out, job.disk())
    return job


def check_trainable(job: FinetuneJob, where: object) -> None:
    """Check what needs no clips.

    Args:
        where: the model, for messages.

    Raises:
        InputError: as `check`.
    """
    config, manifest, model = job.config, job.manifest, job.model
    loop, targets = config.loop, config.lora.targets
    check_model(manifest, where, config.trainer.dtype, job.mesh)
    kind = manifest.quantized(model.denoiser)
    if kind and config.method == "full":
        raise InputError(
            f"the {model.denoiser} of {where} is quantized and cannot be trained; take the checkpoint it is from, or "
            'train adapters beside it, method = "lora"'
        )
    is_own = kind is None or config.lora.quantize in (None, kind)
    require(config, ("lora.quantize", is_own, f"{kind}, as this checkpoint is, or none"))
    has_snr = isinstance(model.scheduler(), DiffusionScheduler)
    require(config, ("min_snr", config.min_snr is None or has_snr, "none: this model's noise schedule is a flow"))
    _check_conditions(job)
    known = model.lora.targets
    are_known = targets is None or set() < set(targets) <= known.keys()
    require(config, ("lora.targets", are_known, f"some of {', '.join(known)}"))
    job.check_init()
    if job.mesh is not None:
        sharding.named(job.mesh, ("batch",), (config.batch // loop.accumulate,), "the clips of a micro-batch")


def _check_conditions(job: FinetuneJob) -> None:
    """Refuse settings about images and control clips that are not the model's, and files that cannot be read."""
    config, condition, sample = job.config, job.condition, job.config.sample
    has_image, is_masked = isinstance(condition, FirstFrame), isinstance(condition, MaskedClip)
    few = any(size.num_frames == 1 for size in job.buckets)
    where = "buckets" if config.buckets else "num_frames"
    one_each = {1, len(sample.prompts)} if sample.prompts else {0}
    images = one_each if has_image else one_each | {0} if is_masked else {0}
    controls = one_each if isinstance(condition, ControlClip) else {0}
    require(
        config,
        ("image_noise", config.image_noise is None or condition.takes_noise, "none: no image of this model has noise"),
        ("image_dropout", config.image_dropout is None or has_image, "none: this model takes no image"),
        (where, not (has_image and few), "more than one frame: an image that is a whole clip leaves nothing to learn"),
        ("sample.images", len(sample.images) in images, _so_many(images)),
        ("sample.control_videos", len(sample.control_videos) in controls, _so_many(controls)),
    )
    if config.sample.prompts:
        _ = job.sample_media


def _so_many(counts: set[int]) -> str:
    return f"{' or '.join(map(str, sorted(counts)))} of them"


def _file_system(path: Path) -> int:
    """The device number of the file system that a file is on, or will be on."""
    return os.stat(existing_parent(path)).st_dev


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
