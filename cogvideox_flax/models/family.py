"""`ModelFamily`: everything that differs between model families.

A family is a folder under models/ with a `ModelFamily`, mapping tables under conversion/, and a row in
models/registry.py. All other code reads the properties of a family from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float, Float32

from cogvideox_flax.config import Config
from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import shown
from cogvideox_flax.models.denoiser import Features, Tokens, predict
from cogvideox_flax.nn import quantized
from cogvideox_flax.schedulers import Scheduler
from cogvideox_flax.sharding import ParameterRows

Configs = Mapping[str, Any]
"""Component, "tokenizer" or "scheduler" -> its config."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a run: of the video, and of the latents that are denoised.

    extra_latents: latent frames that are denoised at the start and dropped before decoding, in models that patch time.
    latent_frames: all denoised latent frames, extra ones included.
    """

    num_frames: int
    height: int
    width: int
    latent_frames: int
    extra_latents: int
    latent_height: int
    latent_width: int
    latent_channels: int

    def latent_shape(self, batch: int) -> tuple[int, int, int, int, int]:
        """[B, T, h, w, C] of the latents that are denoised."""
        return batch, self.latent_frames, self.latent_height, self.latent_width, self.latent_channels

    @property
    def video(self) -> dict[str, int]:
        """`num_frames`, `height` and `width`."""
        return {"num_frames": self.num_frames, "height": self.height, "width": self.width}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The defaults of a run, besides its size. scheduler: the name of a sampler."""

    fps: int
    num_inference_steps: int
    guidance_scale: float
    use_dynamic_cfg: bool
    scheduler: str


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

        def make() -> nnx.Module:
            module = self.module(config, rngs=nnx.Rngs(0))
            return quantized.quantize(module, self.linear_maps, kind) if kind else module

        return jax.eval_shape(make)

    @lru_cache(maxsize=64)  # noqa: B019  (components live as long as the process)
    def num_parameters(self, config: Config) -> int:
        """The number of its parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract(config)))


@dataclass(frozen=True, kw_only=True)
class LoRALayout:
    """The linear maps that can have adapters, and their names in files.

    Attributes:
        component: the component that is adapted.
        targets: name of a target -> path of its stacked linear map, such as "blocks.attn.q".
        default_targets: the targets that are trained by default.
        sources: name of a target -> its name in a block of diffusers' model.
        blocks: diffusers' name of the list of blocks.
    """

    component: str
    targets: Mapping[str, str]
    default_targets: tuple[str, ...]
    sources: Mapping[str, str]
    blocks: str = "transformer_blocks"


@dataclass(frozen=True, kw_only=True)
class Release:
    """One released model: its configs and the settings its authors recommend.

    `configs` are of the components, of the "scheduler" and the "tokenizer".
    `dtype` is the dtype it was trained in; a bfloat16 release overflows in float16.
    Sizes are (height, width) in pixels; trained frame counts are n * frame_step + 1.
    """

    name: str
    hub_id: str
    family: str
    configs: Mapping[str, Any]
    dtype: str = "bfloat16"
    height: int = 480
    width: int = 720
    num_frames: int = 49
    max_frames: int = 49
    frame_step: int = 8
    fps: int = 8
    num_inference_steps: int = 50
    guidance_scale: float = 6.0
    sampler: str = "dpm"
    use_dynamic_cfg: bool = True
    any_size: bool = False  # trained on many sizes: shorter side `height`, longer side up to `width`


@dataclass(frozen=True, kw_only=True)
class TextStage:
    """One text encoder of a family: prompts to tokens, tokens to features.

    Attributes:
        component: its name.
        tokenize: (tokenizer, prompts) -> a pytree of token arrays.
        token_shapes: (configs, batch) -> the shapes of these arrays.
        encode: (module, tokens) -> features.
    """

    component: str
    tokenize: Callable[[Any, Sequence[str]], Any]
    token_shapes: Callable[[Configs, int], Any]
    encode: Callable[[Any, Any], Features]


@dataclass(frozen=True, kw_only=True)
class VisualStage:
    """How one kind of picture or clip becomes latents.

    Attributes:
        input: the field of the request: "image" or "last_image", one frame; "video", from whose latents the run starts;
            "control_video"; "mask_video". Without it there is no such stage.
        feature: the name of the result, a feature of the denoiser, except for "video".
        component: what encodes it.
        encode: (module, frames [B, F, H, W, 3 or 4] in [-1, 1], standard normal noise, tiled=) -> latents, not scaled;
            or other features, of `shape`.
        scale: what they are multiplied by.
        required: whether the checkpoint needs it.
        noise: the shape of the noise, that of the latents or of the frames; None: it is 0.
        mask_channels: how many channels the feature has more than latents. Above 0, the frames are those of a whole
            video with a fourth channel, the mask: 1 where it is made anew, else -1. With input "image" the video is
            that picture (and last_image), masked elsewhere; with "mask_video" it is the request's video and mask.
        frame_size: height and width that the frames, cropped to the video's aspect ratio, are resized to (bicubic);
            None: the video's own.
        shape: of one item's result, where that is not latents.
    """

    input: str
    feature: str
    component: str
    encode: Callable[..., Float32[Array, "B T h w C"]]
    scale: float
    required: bool = False
    noise: Literal["latents", "frames"] | None = "latents"
    mask_channels: int = 0
    frame_size: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """One architecture: its components, their properties, and the functions that a run computes.

    Attributes:
        components: name, also of the directory -> component; in the order in which a run needs them.
        scheduler: the type of scheduler/scheduler_config.json; its `kind` names the checkpoint's own sampler.
        tokenizer: the type of the tokenizer's config.
        tokenizer_files: the files that the tokenizer reads where they are there, relative to the checkpoint.
        read_tokenizer: (tokenizer/tokenizer_config.json, the components' configs) -> the tokenizer's config.
        make_tokenizer: (directory, configs) -> tokenizer; raises InputError where a file is missing or damaged.
        license: one line about the weights' license, printed when they are downloaded; None: there is nothing to say.
        releases: name -> release.
        find_release: the release whose architecture some configs have, or None.
        check: raises InputError for configs of components that do not fit together, or that no run can use.
        check_tiling: raises InputError if decoding in tiles is not possible.
        lora: targets and file names of adapters.
        samplers: name -> class.
        is_guided: guidance scale -> whether guidance is on; else the prediction is that of the prompt alone.
        defaults: configs -> the defaults of a run.
        resolve_size: (configs, num_frames, height, width) -> Size: fills in None and checks the rules.
        size_warnings: (configs, size) -> sentences about sizes outside of those trained.
        latent_channels: configs -> channels of the latents that are denoised.
        workload: (configs, size) -> the size of the denoiser's computation.
        text: the text encoders.
        feature_shapes: (configs, batch) -> shapes of the text features.
        visual: configs -> the pictures and clips that the checkpoint takes.
        picture_size: (configs, height, width of a picture that is given) -> height and width of the video, where none
            are asked for; None: those of `resolve_size`.
        check_inputs: (configs, names of the given ones) -> raises InputError if these are not what it takes.
        fit_frames: (configs, n) -> the largest supported number of frames of at most n, or the smallest.
        longest: configs -> the most frames that the model was trained on.
        embed: (denoiser, latents, features, timestep or one per item, *, next_timestep=None) -> the tokens.
            features: of the text, and of the pictures.
            next_timestep: to which the step leads, 0 after the last; for step-distilled checkpoints that take it.
        encode: (decoder, video [B, F, H, W, 3] in [-1, 1]) -> mean and logvar of the latents, not scaled.
        latent_scale: configs -> what encoded latents are multiplied by for the denoiser.
        decode: (decoder, scaled latents, tiled) -> video [B, F, H, W, 3] in about [-1, 1], float32.
        decoder_pieces: latent frames of a clip -> those of each of its pieces, of few different lengths.
        decode_piece: (decoder, scaled latents of a piece, cache of the piece before or None) -> (video, cache):
            together exactly `decode`. Caches are [..., B, T, H, W, C], split as `sharding.spatial_split` says.
        positions: configs -> name of a way to extend positions to longer clips -> what takes the place of `embed`.
    """

    name: str
    components: Mapping[str, Component]
    scheduler: type[Config]
    tokenizer: type[Config]
    tokenizer_files: tuple[str, ...]
    read_tokenizer: Callable[[Mapping[str, Any], Configs], Config]
    make_tokenizer: Callable[[Path, Configs], Any]
    releases: Mapping[str, Release]
    find_release: Callable[[Configs], Release | None]
    check: Callable[[Configs], None]
    check_tiling: Callable[[Configs], None]
    lora: LoRALayout
    samplers: Mapping[str, type[Scheduler]]
    defaults: Callable[[Configs], Defaults]
    resolve_size: Callable[[Configs, int | None, int | None, int | None], Size]
    size_warnings: Callable[[Configs, Size], list[str]]
    latent_channels: Callable[[Configs], int]
    workload: Callable[[Configs, Size], Workload]
    text: tuple[TextStage, ...]
    feature_shapes: Callable[[Configs, int], dict[str, tuple[int, ...]]]
    visual: Callable[[Configs], tuple[VisualStage, ...]]
    check_inputs: Callable[[Configs, Sequence[str]], None]
    fit_frames: Callable[[Configs, int], int]
    longest: Callable[[Configs], int]
    embed: Callable[..., Tokens]
    encode: Callable[[Any, Float[Array, "B F H W 3"]], tuple[Float[Array, "B T h w C"], Float[Array, "B T h w C"]]]
    latent_scale: Callable[[Configs], float]
    decode: Callable[[Any, Float32[Array, "B T h w C"], bool], Float32[Array, "B F H W 3"]]
    is_guided: Callable[[float], bool] = lambda scale: scale > 1
    license: str | None = None
    picture_size: Callable[[Configs, int, int], tuple[int, int]] | None = None
    decoder_pieces: Callable[[int], Sequence[int]] = lambda frames: [frames]
    decode_piece: Callable[..., tuple[Float32[Array, "B F H W 3"], Any]] | None = None
    positions: Callable[[Configs], Mapping[str, Callable[..., Tokens]]] = lambda configs: {}

    @property
    def config_types(self) -> dict[str, type[Config]]:
        """The types of all configs of a checkpoint: tokenizer, components, scheduler."""
        components = {name: component.config for name, component in self.components.items()}
        return {"tokenizer": self.tokenizer, **components, "scheduler": self.scheduler}

    @property
    def denoiser(self) -> str:
        """The name of the component that denoises."""
        return next(name for name, component in self.components.items() if component.stage == "denoise")

    @property
    def decoder(self) -> str:
        """The name of the component that decodes latents to frames."""
        return next(name for name, component in self.components.items() if component.stage == "decode")

    @property
    def quantizable(self) -> tuple[str, ...]:
        """The names of the components that can be quantized."""
        return tuple(name for name, component in self.components.items() if component.linear_maps)

    def predict(self, denoiser: Any, *args: Any, remat: bool = False) -> Float32[Array, "B T h w C"]:
        """The denoiser's prediction; arguments as for `predict`, without `embed`."""
        return predict(self.embed, denoiser, *args, remat=remat)

    def heads(self, configs: Configs) -> dict[str, int]:
        """Component -> its number of attention heads, each of which stays on one device."""
        fields = {name: component.heads for name, component in self.components.items()}
        return {name: getattr(configs[name], field) for name, field in fields.items() if field is not None}

    def sampler(self, configs: Configs, name: str) -> Scheduler:
        """A sampler by its name, on the checkpoint's noise schedule.

        Raises:
            InputError: the family has no such sampler.
        """
        if name not in self.samplers:
            raise InputError(f"unknown scheduler {shown(name)}; known are {', '.join(self.samplers)}")
        kind: Any = self.samplers[name]
        return _make_sampler(kind, configs["scheduler"])


@lru_cache(maxsize=64)
def _make_sampler(kind: Any, config: Any) -> Scheduler:
    """Cached, so that equal configs give the same object, by which compiled programs are identified."""
    return kind(config)
