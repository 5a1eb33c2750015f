"""What differs between model families, and nothing else.

A family is a folder under models/ with a `ModelFamily`, mapping tables under conversion/, and a row in
models/registry.py. Everything else reads what it needs from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx

from cogvideox_flax.config import Config
from cogvideox_flax.nn import quantized
from cogvideox_flax.sharding import ParameterRows


@dataclass(frozen=True, kw_only=True)
class Component:
    """A part of a model that has weights.

    Attributes:
        config: the type of its config.
        module: its NNX module, made by `module(config, rngs=...)`.
        stage: of a run, in which it is needed.
        sharding: which logical axes its parameters have.
        linear_maps: paths of the stacked linear maps that can be quantized, such as "blocks.attn.q".
        class_names: what config.json calls it (`_class_name` or `architectures`); the family of a directory is
            recognised by them.
    """

    config: type[Config]
    module: Callable[..., nnx.Module]
    stage: Literal["encode", "denoise", "decode"]
    sharding: ParameterRows
    linear_maps: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    def abstract(self, config: Config, kind: str | None = None) -> Any:
        """The module with shapes in place of arrays; costs no memory. kind: of quantized weights."""

        def make() -> nnx.Module:
            module = self.module(config, rngs=nnx.Rngs(0))
            return quantized.quantize(module, self.linear_maps, kind) if kind else module

        return jax.eval_shape(make)

    @lru_cache(maxsize=64)  # noqa: B019  (components live as long as the process)
    def num_parameters(self, config: Config) -> int:
        """How many numbers its weights are."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract(config)))


@dataclass(frozen=True, kw_only=True)
class LoRALayout:
    """Where adapters go, and what files call them.

    Attributes:
        component: the component that is adapted.
        targets: name of a target -> path of its stacked linear map, such as "blocks.attn.q".
        default_targets: those that are trained unless told otherwise.
        sources: name of a target -> diffusers' name of it in a block.
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
    Sizes are (height, width) in pixels; `frame_step` is the rule of the trained frame counts, n * frame_step + 1.
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
class ModelFamily:
    """One architecture: its components and the facts about them. `configs` are as in `Release`.

    Attributes:
        components: name, which is also the directory's, -> component; in the order in which a run needs them.
        scheduler: the type of scheduler/scheduler_config.json.
        tokenizer: the type of the tokenizer's config.
        tokenizer_files: the files that the tokenizer needs, relative to the checkpoint.
        read_tokenizer: (tokenizer/tokenizer_config.json, the components' configs) -> the tokenizer's config.
        make_tokenizer: (directory, configs) -> tokenizer; raises InputError where a file is missing or damaged.
        releases: name -> release.
        find_release: the release whose architecture some configs have, or None.
        check: raises InputError for configs of components that do not belong together.
        lora: how adapters are laid out.
    """

    name: str
    components: Mapping[str, Component]
    scheduler: type[Config]
    tokenizer: type[Config]
    tokenizer_files: tuple[str, ...]
    read_tokenizer: Callable[[Mapping[str, Any], Mapping[str, Any]], Config]
    make_tokenizer: Callable[[Path, Mapping[str, Any]], Any]
    releases: Mapping[str, Release]
    find_release: Callable[[Mapping[str, Any]], Release | None]
    check: Callable[[Mapping[str, Any]], None]
    lora: LoRALayout

    @property
    def config_types(self) -> dict[str, type[Config]]:
        """Of every config of a checkpoint: tokenizer, components, scheduler."""
        components = {name: component.config for name, component in self.components.items()}
        return {"tokenizer": self.tokenizer, **components, "scheduler": self.scheduler}

    @property
    def denoiser(self) -> str:
        """The name of the component that denoises."""
        return next(name for name, component in self.components.items() if component.stage == "denoise")

    @property
    def quantizable(self) -> tuple[str, ...]:
        """The names of the components that can be quantized."""
        return tuple(name for name, component in self.components.items() if component.linear_maps)
