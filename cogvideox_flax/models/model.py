"""`VideoModel`: a model family bound to the configs of a checkpoint.

A family is a folder under models/ with a subclass of `VideoModel`, mapping tables under conversion/, and a row in
models/registry.py. All other code reads the properties of a model from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Num

from cogvideox_flax.config import Config
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import short_repr
from cogvideox_flax.models.codec import Codec, LatentStatistics
from cogvideox_flax.models.denoiser import Features, Tokens
from cogvideox_flax.models.sizes import Size, SizeRule
from cogvideox_flax.nn import quantized
from cogvideox_flax.nn.remat import Remat
from cogvideox_flax.schedulers import Scheduler, TimestepLaw
from cogvideox_flax.sharding import ParameterRows

Configs = Mapping[str, Any]
"""Component, "tokenizer" or "scheduler" -> its config."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The size of the denoiser's computation, from which the planner chooses how to split it.

    tokens: per sample, text included. modulation: input width of the per-layer modulation.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    modulation: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a model that has weights.

    Attributes:
        config: the type of its config.
        module: its NNX module, made by `module(config, rngs=...)`.
        stage: the stage of a run that needs it.
        sharding: the logical axes of its parameters.
        linear_maps: paths of the stacked linear maps that can be quantized, such as "blocks.attn.q".
        heads: the field of its config with the number of attention heads; None: it has none.
        class_names: its names in config.json (`_class_name` or `architectures`), by which the family of a directory is
            detected.
    """

    config: type[Config]
    module: Callable[..., nnx.Module]
    stage: Literal["encode", "denoise", "decode"]
    sharding: ParameterRows
    linear_maps: tuple[str, ...] = ()
    heads: str | None = None
    class_names: tuple[str, ...] = ()

    def abstract(self, config: Config, kind: str | None = None) -> Any:
        """The module with shapes in place of arrays, which needs no memory. kind: of quantized weights."""
        leaves, structure = self._traced(config, kind)
        return jax.tree.unflatten(structure, leaves)  # the caller's own, which it may change

    @lru_cache(maxsize=64)  # noqa: B019  (components live as long as the process)
    def _traced(self, config: Config, kind: str | None) -> tuple[list[jax.ShapeDtypeStruct], jax.tree_util.PyTreeDef]:
        """The module's leaves and structure, once for each config: tracing takes longer than all that asks for it."""

        def make() -> nnx.Module:
            module = self.module(config, rngs=nnx.Rngs(0))
            return quantized.quantize(module, self.linear_maps, kind) if kind else module

        return jax.tree.flatten(jax.eval_shape(make))

    @lru_cache(maxsize=64)  # noqa: B019  (components live as long as the process)
    def num_parameters(self, config: Config) -> int:
        """The number of its parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract(config)))


@dataclass(frozen=True, kw_only=True)
class LoRALayout:
    """The linear maps that can have adapters, and their names in files.

    Attributes:
        component: the component that is adapted.
        maps: name of a target -> path of its stacked linear map, such as "blocks.attn.q", and diffusers' name of it in
            a block.
        default_targets: the targets that are trained by default.
        blocks: diffusers' name of the list of blocks.
        other_names: name of a linear map in files of other trainers -> diffusers' name; several names where the file
            has one fused map, whose outputs are theirs one after the other. `{i}` stands for the layer.
        swapped: those of `other_names` whose outputs have their two halves in the other order.
        written: "comfyui" or "kohya" -> those of `other_names`, and of diffusers' own, with which such a file is
            written. Without a row, kohya's layout has diffusers' names.
    """

    component: str
    maps: Mapping[str, tuple[str, str]]
    default_targets: tuple[str, ...]
    blocks: str = "transformer_blocks"
    other_names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    swapped: tuple[str, ...] = ()
    written: Mapping[str, Mapping[str, str | tuple[str, ...]]] = field(default_factory=dict)

    @property
    def targets(self) -> dict[str, str]:
        """Name of a target -> path of its stacked linear map."""
        return {name: path for name, (path, _) in self.maps.items()}


@dataclass(frozen=True, kw_only=True)
class Release:
    """One released model: its configs and the settings its authors recommend, which are the defaults of a run.

    `configs` are of the components, of the "scheduler" and the "tokenizer".
    `dtype` is the dtype it was trained in; a bfloat16 release overflows in float16.
    Sizes are (height, width) in pixels; trained frame counts are n * frame_step + 1.
    `scheduler` is a name.
    """

    name: str
    hub_id: str
    family: str
    configs: Configs
    height: int
    width: int
    num_frames: int
    max_frames: int
    fps: int
    scheduler: str
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    use_dynamic_cfg: bool = False
    dtype: str = "bfloat16"
    frame_step: int = 8
    any_size: bool = False  # trained on many sizes: shorter side `height`, longer side up to `width`


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """How the releases of a family were trained, which is what fine-tuning does by default.

    Attributes:
        timesteps: the law of the timesteps.
        image_noise: mean and standard deviation of the logarithm of sigma, the noise in the pixels of an image or of a
            masked clip; None: it has none.
        image_dropout: share of clips that are trained without their image.
        mask_dropout: share of the clips that are masked all over whose condition is zeros, as in inference from text.
        source: where it is published.
    """

    timesteps: TimestepLaw = field(default_factory=TimestepLaw)
    image_noise: tuple[float, float] | None = None
    image_dropout: float = 0.0
    mask_dropout: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """An adapter that was trained to make videos in a few steps, and the settings that it was trained for.

    Attributes:
        name: for a request's `distilled`.
        source: where it is published.
        releases: the models that it was distilled of; "embedded" is the one of the package.
        scheduler: its name.
        timesteps: those that the denoiser sees; None: the scheduler's own.
        num_inference_steps: how many; None: as many as there are timesteps.
        guidance_scale: 1 is none: the half without the prompt is not computed.
        files: a regular expression for words of the name of its file, or of its hub id, in any case.
        basis: what these settings rest on.
    """

    name: str
    source: str
    releases: tuple[str, ...]
    scheduler: str
    timesteps: tuple[float, ...] | None = None
    num_inference_steps: int | None = None
    guidance_scale: float = 1.0
    use_dynamic_cfg: ClassVar[bool] = False
    files: str
    basis: str

    @property
    def steps(self) -> int:
        """The number of denoising steps."""
        count = self.num_inference_steps if self.timesteps is None else len(self.timesteps)
        assert count is not None
        return count

    def __str__(self) -> str:
        guidance = "no guidance" if self.guidance_scale == 1 else f"guidance {self.guidance_scale:g}"
        at = "" if self.timesteps is None else f" at {', '.join(f'{t:g}' for t in self.timesteps)}"
        return f"the distillation {self.name}: {self.steps} steps of {self.scheduler}{at}, {guidance}; by {self.basis}"


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """One text encoder's input: prompts to tokens, tokens to features.

    Attributes:
        component: its name.
        tokenize: (tokenizer, prompts) -> a pytree of token arrays, int32 [B, L].
        lengths: L of each of these arrays, in the same pytree.
        encode: (module, tokens) -> features; a function at module level, by whose name programs are cached.
    """

    component: str
    tokenize: Callable[[Any, Sequence[str]], Any]
    lengths: Any
    encode: Callable[[Any, Any], Features]

    def token_shapes(self, batch: int) -> Any:
        """The shapes of the token arrays of a batch of prompts."""
        return jax.tree.map(lambda length: jax.ShapeDtypeStruct((batch, length), "int32"), self.lengths)


@dataclass(frozen=True, kw_only=True)
class VisualInput:
    """One kind of image or clip that a model takes, and how it becomes latents.

    Attributes:
        input: the field of the request: "image" or "last_image", one frame; "video", from whose latents the run starts;
            "control_video"; "mask_video". Without it nothing is encoded.
        feature: the name of the result, a feature of the denoiser, except for "video".
        component: what encodes it.
        encode: (module, frames [B, F, H, W, 3 or 4] in [-1, 1], standard normal noise, tiled=, statistics=) ->
            normalized latents; or other features, of `shape`. A function at module level, as for `TextInput`.
        statistics: by which `encode` normalizes latents; a request's `image_scale` replaces the scale of an image.
        required: whether the checkpoint needs it.
        noise: the shape of the noise, that of the latents or of the frames; None: it is 0.
        mask_channels: how many channels the feature has more than latents. Above 0, the frames are those of a whole
            video with a fourth channel, the mask: 1 where it is made anew, else -1. With input "image" the video is
            that image (and last_image), masked elsewhere; with "mask_video" it is the request's video and mask.
        encode_masked: as `encode`, in training: (module, video, mask, standard normal noise, statistics=). None for
            inputs without a mask.
        frame_size: height and width that the frames, cropped to the video's aspect ratio, are resized to (bicubic);
            None: the video's own.
        shape: of one item's result, where that is not latents.
    """

    input: str
    feature: str
    component: str
    encode: Callable[..., Float32[Array, "B T h w C"]]
    statistics: LatentStatistics = field(default_factory=LatentStatistics)
    required: bool = False
    noise: Literal["latents", "frames"] | None = "latents"
    mask_channels: int = 0
    encode_masked: Callable[..., Float32[Array, "B T h w C"]] | None = None
    frame_size: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None


class VideoModel(ABC):
    """One architecture with the configs of a checkpoint: its components, its rules, and what a run computes.

    What a program holds is a plain function (`embed`, those of `text` and `visual`) or the `codec`: they have a stable
    name or compare by their configs, and modules know their own config.

    Class attributes:
        name: of the family.
        components: name, also of the directory -> component; in the order in which a run needs them.
        denoiser, decoder: the names of the components that denoise, and decode latents to frames.
        scheduler_config: the type of scheduler/scheduler_config.json; its `kind` names the checkpoint's own scheduler.
        schedulers: name -> class.
        tokenizer: the type of the tokenizer's config.
        tokenizer_files: the files that the tokenizer reads where they are there, relative to the checkpoint.
        releases: name -> release.
        lora: targets and file names of adapters.
        distillations: the known adapters for a few steps.
        teacache: release -> the coefficients that were published for TeaCache, that of the highest power first.
        license: one line about the weights' license, printed when they are downloaded; None: there is nothing to say.
        recipe: how its releases were trained.

    Attributes:
        configs: of the checkpoint's components, of the "scheduler" and the "tokenizer".
        release: the released model that it is, or None.
    """

    name: ClassVar[str]
    components: ClassVar[Mapping[str, Component]]
    denoiser: ClassVar[str]
    decoder: ClassVar[str]
    scheduler_config: ClassVar[type[Config]]
    schedulers: ClassVar[Mapping[str, type[Scheduler]]]
    tokenizer: ClassVar[type[Config]]
    tokenizer_files: ClassVar[tuple[str, ...]]
    releases: ClassVar[Mapping[str, Release]]
    lora: ClassVar[LoRALayout]
    distillations: ClassVar[Sequence[Distillation]] = ()
    teacache: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    license: ClassVar[str | None] = None
    recipe: ClassVar[TrainingRecipe] = TrainingRecipe()

    def __init_subclass__(cls) -> None:
        """Name the denoiser and the decoder: the first component of each stage."""
        names = {component.stage: name for name, component in reversed([*cls.components.items()])}
        cls.denoiser, cls.decoder = names["denoise"], names["decode"]

    def __init__(self, configs: Configs, release: Release | None = None, guidance_scale: float | None = None):
        """Bind the family to a checkpoint.

        Args:
            release: as the checkpoint names it; None: the one that has these configs.
            guidance_scale: that the checkpoint recommends, before its release.
        """
        self.configs, self.guidance_scale = configs, guidance_scale
        self.release = self.find_release(configs, guidance_scale) if release is None else release

    # --- what it is made of

    @classmethod
    def config_types(cls) -> dict[str, type[Config]]:
        """The types of all configs of a checkpoint: tokenizer, components, scheduler."""
        components = {name: component.config for name, component in cls.components.items()}
        return {"tokenizer": cls.tokenizer, **components, "scheduler": cls.scheduler_config}

    @classmethod
    def read_tokenizer(cls, raw: Mapping[str, Any], configs: Configs) -> Config:
        """The tokenizer's config, from tokenizer/tokenizer_config.json and the components' configs."""
        return cls.tokenizer.from_hf(raw)

    def hf_files(self) -> dict[str, dict[str, Any]]:
        """The JSON files of diffusers' layout beside the components' and the scheduler's: path -> contents.

        `model_index.json` has the pipeline's class, and the class of each of its parts that is no component.
        """
        return {"model_index.json": {}}

    @classmethod
    def tokenizer_files_in(cls, folder: Path) -> list[str]:
        """Those of `tokenizer_files` that the tokenizer of a checkpoint reads."""
        return [name for name in cls.tokenizer_files if (folder / name).exists()]

    @classmethod
    def find_release(cls, configs: Configs, guidance_scale: float | None = None) -> Release | None:
        """The release with these configs, or None; among several, the one with this guidance scale."""
        found = [each for each in cls.releases.values() if cls.denoiser in configs and cls.is_release(each, configs)]
        return next((each for each in found if each.guidance_scale == guidance_scale), found[0] if found else None)

    @classmethod
    def is_release(cls, release: Release, configs: Configs) -> bool:
        """Whether these configs, of the denoiser at least, are those of a release."""
        return configs[cls.denoiser] == release.configs[cls.denoiser]

    @abstractmethod
    def make_tokenizer(self, folder: Path) -> Any:
        """The tokenizer of a checkpoint.

        Raises:
            InputError: a file is missing or damaged.
        """

    @abstractmethod
    def check(self) -> None:
        """Refuse configs of components that do not fit together, or that no run can use."""

    @property
    def heads(self) -> dict[str, int]:
        """Component -> its number of attention heads, each of which stays on one device."""
        fields = {name: component.heads for name, component in self.components.items()}
        return {name: getattr(self.configs[name], field) for name, field in fields.items() if field is not None}

    @abstractmethod
    def workload(self, size: Size) -> Workload:
        """The size of the denoiser's computation."""

    # --- defaults and sizes

    @abstractmethod
    def unreleased(self) -> Release:
        """The stand-in for a release, for other checkpoints of this architecture."""

    @cached_property
    def defaults(self) -> Release:
        """The defaults of a run: the release's, with the guidance scale that the checkpoint recommends."""
        found = self.unreleased() if self.release is None else self.release
        return found if self.guidance_scale is None else replace(found, guidance_scale=self.guidance_scale)

    @property
    @abstractmethod
    def size_rule(self) -> SizeRule:
        """The frame counts, heights and widths that it can take."""

    def resolve_size(self, num_frames: int | None = None, height: int | None = None, width: int | None = None) -> Size:
        """Fill in the defaults and check the rules.

        Raises:
            InputError: all that the model does not support, with the nearest that it does.
        """
        num_frames = self.defaults.num_frames if num_frames is None else num_frames
        height = self.defaults.height if height is None else height
        width = self.defaults.width if width is None else width
        self.size_rule.check(num_frames, height, width)
        latents = (num_frames - 1) // self.codec.temporal_compression + 1
        extra = -latents % self.temporal_patch
        return Size(
            num_frames=num_frames,
            height=height,
            width=width,
            latent_frames=latents + extra,
            extra_latents=extra,
            latent_height=height // self.codec.spatial_compression,
            latent_width=width // self.codec.spatial_compression,
            latent_channels=self.codec.latent_channels,
        )

    @property
    def temporal_patch(self) -> int:
        """Latent frames in one token."""
        return 1

    def size_warnings(self, size: Size) -> list[str]:
        """Sentences about a size outside of those trained."""
        return []

    def size_from_image(self, height: int, width: int) -> tuple[int, int] | None:
        """Height and width of a video that continues an image of this size; None: those of `resolve_size`."""
        return None

    # --- inputs

    @property
    @abstractmethod
    def text(self) -> tuple[TextInput, ...]:
        """The text encoders."""

    @abstractmethod
    def feature_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the text features."""

    @property
    @abstractmethod
    def visual(self) -> tuple[VisualInput, ...]:
        """The images and clips that the checkpoint takes."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, tuple[str, ...]]:
        """The name of a checkpoint with these inputs, such as "a text-to-video model", and the inputs' names."""

    def check_inputs(self, given: Sequence[str]) -> None:
        """Refuse inputs that the checkpoint does not take, or whose lack it does not survive.

        Args:
            given: the names of those there are.
        """
        kind, names = self.inputs
        needed = dict.fromkeys(visual.input for visual in self.visual if visual.required)
        if missing := [name for name in needed if name not in given]:
            options = " and ".join(f"--{name.replace('_', '-')} ({name}=)" for name in missing)
            raise InputError(f"this is {kind}; give it {options}")
        if unknown := [name for name in given if name not in names]:
            raise InputError(f"this is {kind}, which takes no {' and no '.join(unknown)}; it takes {', '.join(names)}")

    # --- what a run computes

    @staticmethod
    @abstractmethod
    def embed(
        denoiser: Any,
        latents: Float32[Array, "B T h w C"],
        features: Features,
        timestep: Num[Array, "*B"],
        /,
        *,
        next_timestep: Num[Array, "*B"] | None = None,
    ) -> Tokens:
        """The tokens of a prediction; `denoiser.run_blocks` and `denoiser.head` do the rest.

        Args:
            features: of the text, and of the images.
            timestep: one, or one per item.
            next_timestep: to which the step leads, 0 after the last; for step-distilled checkpoints that take it.
        """

    @property
    def positions(self) -> Mapping[str, Callable[..., Tokens]]:
        """Name of a way to extend positions to longer clips -> what takes the place of `embed`."""
        return {}

    @property
    def sparse_attention(self) -> Mapping[str, Callable[..., Tokens]]:
        """Name of a way to leave pairs of tokens out -> what takes the place of `embed`."""
        return {}

    def embed_for(self, positions: str | None, sparse_attention: str | None) -> Callable[..., Tokens]:
        """`embed`, or what takes its place by these names; no model has both."""
        if positions is not None:
            return self.positions[positions]
        return self.embed if sparse_attention is None else self.sparse_attention[sparse_attention]

    @classmethod
    def predict(cls, denoiser: Any, *args: Any, remat: Remat = False) -> Float32[Array, "B T h w C"]:
        """The denoiser's prediction; arguments as for `embed`.

        remat: what is recomputed in the backward pass, see `nn.remat`.
        """
        tokens: Any = cls.embed(denoiser, *args)
        return denoiser.head(denoiser.run_blocks(tokens, remat=remat)).astype(jnp.float32)

    @staticmethod
    def is_guided(scale: float) -> bool:
        """Whether guidance is on at this scale; else the prediction is that of the prompt alone."""
        return scale > 1

    def own_scheduler(self, scheduler: Any) -> str | Scheduler:
        """A scheduler, or the name of one, as people give it: those of diffusers become ours of the same steps.

        Args:
            scheduler: a name, which may be of a class of diffusers; a `Scheduler`; or an object of such a class, which
                keeps its own noise schedule.

        Raises:
            InputError: anything else; or an object with options that ours does not have.
        """
        config: Any = self.configs["scheduler"]
        if isinstance(scheduler, str):
            return config.diffusers_names.get(scheduler, scheduler)
        if isinstance(scheduler, Scheduler):
            return scheduler
        if not isinstance(getattr(scheduler, "config", None), Mapping):
            raise InputError(
                f"scheduler is {short_repr(scheduler)}; expected one of {', '.join(self.schedulers)}, or a scheduler "
                "object of cogvideox_flax or diffusers"
            )
        own = type(config).from_hf({**scheduler.config, "_class_name": type(scheduler).__name__})
        kind: Any = self.schedulers[own.kind]
        return _make_scheduler(kind, own)

    def scheduler(self, name: str | None = None) -> Scheduler:
        """A scheduler by its name, on the checkpoint's noise schedule. name: None for the checkpoint's own.

        Raises:
            InputError: the family has no such scheduler.
        """
        config: Any = self.configs["scheduler"]
        name = config.kind if name is None else name
        if name not in self.schedulers:
            also = f", and diffusers' {', '.join(config.diffusers_names)}" if name.endswith("Scheduler") else ""
            raise InputError(f"unknown scheduler {short_repr(name)}; known are {', '.join(self.schedulers)}{also}")
        kind: Any = self.schedulers[name]
        return _make_scheduler(kind, config)

    @property
    def codec(self) -> Codec:
        """The autoencoder."""
        return Codec(self.configs[self.decoder])


Family = type[VideoModel] | VideoModel
"""A family, or a model of it: what code takes that needs the class attributes alone."""


@lru_cache(maxsize=64)
def _make_scheduler(kind: Any, config: Any) -> Scheduler:
    """Cached: compiled programs are identified by the object where its class is not of this package."""
    return kind(config)
