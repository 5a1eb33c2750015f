"""What differs between model families, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxtyping import Array, Float, Float32, Int

from cogvideox_flax.errors import InputError
from cogvideox_flax.io.values import shown
from cogvideox_flax.schedulers import Scheduler

Configs = Mapping[str, Any]
"""Component, "tokenizer" or "scheduler" -> its config."""

Features = dict[str, Float[Any, "B ..."]]
"""Name -> what a text encoder made of each prompt. The names are those of stage 1's file."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a run: of the video, and of the latents that are denoised.

    extra_latents: latent frames that are denoised in front and dropped before decoding, for models that patch time.
    latent_frames: all that are denoised, extra ones included.
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
    """What a run does unless told otherwise, beside its size. scheduler: the name of a sampler."""

    fps: int
    num_inference_steps: int
    guidance_scale: float
    use_dynamic_cfg: bool
    scheduler: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The denoiser's work, as the choice of a mesh needs it.

    tokens: in one sample, text included. modulation: input width of the per-layer modulation.
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
class TextStage:
    """One text encoder of a family: prompts to tokens, tokens to features.

    component: its name.
    tokenizer: (native checkpoint, configs) -> a function from prompts to a pytree of token arrays.
    token_shapes: (configs, batch) -> the shapes of these arrays.
    encode: (module, tokens) -> features.
    """

    component: str
    tokenizer: Callable[[Path, Configs], Callable[[Sequence[str]], Any]]
    token_shapes: Callable[[Configs, int], Any]
    encode: Callable[[Any, Any], Features]


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFamily:
    """All that is special about a family. Functions take the configs of a checkpoint.

    name: as checkpoints call it.
    components: those with weights, in the order in which a run needs them.
    denoiser, decoder: the components that predict and that decode.
    text: the text encoders.
    feature_shapes: (configs, batch) -> shapes of the text features that `predict` takes.
    predict: (denoiser, latents, conditioning's text features, timestep) -> the prediction, float32.
    decode: (decoder, scaled latents, tiled) -> video [B, F, H, W, 3] in about [-1, 1], float32.
    resolve_size: (configs, num_frames, height, width) -> Size; None is filled in, rules are checked.
    size_warnings: (configs, size) -> what the size was not trained for, in sentences.
    defaults: configs -> Defaults.
    samplers: name -> class.
    check: (configs, where) raises InputError for configs that are no model a run can use.
    check_dtype: (configs, dtype) raises InputError for a dtype that the model does not survive.
    check_tiling: (configs) raises InputError where decoding in tiles is not possible.
    heads: configs -> component -> its attention heads, of which a mesh never cuts one.
    workload: (configs, size) -> Workload.
    """

    name: str
    components: tuple[str, ...]
    denoiser: str
    decoder: str
    text: tuple[TextStage, ...]
    feature_shapes: Callable[[Configs, int], dict[str, tuple[int, ...]]]
    predict: Callable[[Any, Float32[Array, "B T h w C"], Features, Int[Array, ""]], Float32[Array, "B T h w C"]]
    decode: Callable[[Any, Float32[Array, "B T h w C"], bool], Float32[Array, "B F H W 3"]]
    resolve_size: Callable[[Configs, int | None, int | None, int | None], Size]
    size_warnings: Callable[[Configs, Size], list[str]]
    defaults: Callable[[Configs], Defaults]
    samplers: Mapping[str, type[Scheduler]]
    check: Callable[[Configs, object], None]
    check_dtype: Callable[[Configs, str], None]
    check_tiling: Callable[[Configs], None]
    heads: Callable[[Configs], dict[str, int]]
    workload: Callable[[Configs, Size], Workload]

    def latent_channels(self, configs: Configs) -> int:
        """Channels of the latents that are denoised."""
        return self.resolve_size(configs, None, None, None).latent_channels

    def sampler(self, configs: Configs, name: str) -> Scheduler:
        """A sampler by its name, on the checkpoint's noise schedule.

        Raises:
            InputError: the family has no such sampler.
        """
        if name not in self.samplers:
            raise InputError(f"unknown scheduler {shown(name)}; known are {', '.join(self.samplers)}")
        kind: Any = self.samplers[name]
        return _make_sampler(kind, configs["scheduler"])


@cache
def _make_sampler(kind: Any, config: Any) -> Scheduler:
    """One object for equal configs, since programs are known by it."""
    return kind(config)
