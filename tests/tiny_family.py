"""A second model family in small, with names of its own: what a new family is made of, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32
from safetensors.numpy import save_file

from cogvideox_flax import sharding
from cogvideox_flax.config import Config, require
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.family import (
    Component,
    Configs,
    Defaults,
    LoRALayout,
    ModelFamily,
    Release,
    Size,
    TextStage,
    VisualStage,
    Workload,
)
from cogvideox_flax.nn.layers import Linear
from cogvideox_flax.nn.stack import scan_layers, stack
from cogvideox_flax.schedulers import FlowMatchConfig, FlowMatchScheduler
from cogvideox_flax.tokenizer import TokenizerConfig
from conversion.rules import Rule, Tables, linear


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Config):
    vocab_size: int = 12
    width: int = 16

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> EncoderConfig:
        return cls(vocab_size=raw["vocab_size"], width=raw["hidden_size"])


@dataclass(frozen=True, kw_only=True)
class DenoiserConfig(Config):
    layers: int = 3
    heads: int = 4
    width: int = 32
    text_width: int = 16

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DenoiserConfig:
        require("denoiser", raw, qk_norm="rms_norm")
        return cls(layers=raw["num_layers"], heads=raw["num_heads"], width=raw["dim"], text_width=raw["text_dim"])

    def check_dtype(self, dtype: str | None) -> None:
        if dtype == "float16":
            raise InputError("the tiny denoiser does not survive float16")


@dataclass(frozen=True, kw_only=True)
class CodecConfig(Config):
    channels: int = 8

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> CodecConfig:
        return cls(channels=raw["latent_channels"])


class Encoder(nnx.Module):
    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.width)))

    def __call__(self, ids: Int32[Array, "B L"]) -> Float[Array, "B L E"]:
        return self.embedding[...][ids]


class MLP(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.up = Linear(width, 2 * width, rngs=rngs)
        self.down = Linear(2 * width, width, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.mlp = MLP(width, rngs=rngs)


DENOISER_ROWS = (
    (r"blocks\.mlp\.up\.kernel", (None, "stored", "hidden")),
    (r"blocks\.mlp\.up\.(bias|scale)", (None, "hidden")),
    (r"blocks\.mlp\.down\.kernel", (None, "hidden", "stored")),
    (r"blocks\.mlp\.down\.(bias|scale)", sharding.REPLICATED),
    (r"blocks\.mlp\.(up|down)\.(a|b)", sharding.REPLICATED),
    (r"text_in\..*", sharding.REPLICATED),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """x: of the prompt. The others pass the blocks by."""

    x: Float[Array, "B L D"]
    pooled: Float[Array, "B E"]
    latents: Float[Array, "B T h w C"]
    timestep: Array


class Denoiser(nnx.Module):
    def __init__(self, config: DenoiserConfig, *, rngs: nnx.Rngs):
        self.text_in = Linear(config.text_width, config.width, rngs=rngs)
        self.blocks = stack(config.layers, lambda rngs: Block(config.width, rngs=rngs), rngs)

    def __call__(self, context: Float[Array, "B L E"]) -> Float[Array, "B L D"]:
        return self._run_layers(self.text_in(context))

    def run_blocks(self, tokens: Tokens, *, start: int = 0, stop: int | None = None, remat: bool = False) -> Tokens:
        return replace(tokens, x=self._run_layers(tokens.x, start, stop))

    def head(self, tokens: Tokens) -> Float[Array, "B T h w C"]:
        """Noise - x0, where x0 has one colour, which the prompt decides."""
        hidden = tokens.x.mean(1)[:, :8] + tokens.pooled[:, :8]
        t = jnp.asarray(tokens.timestep, jnp.float32).reshape(-1, 1, 1, 1, 1)
        return (tokens.latents - jnp.tanh(hidden)[:, None, None, None]) * 1000 / jnp.maximum(t, 1)

    def _run_layers(self, x: Float[Array, "B L D"], start: int = 0, stop: int | None = None) -> Float[Array, "B L D"]:
        def layer(x: Array, block: Block) -> tuple[Array, None]:
            mlp = sharding.layer_weights(DENOISER_ROWS, block).mlp
            return x + mlp.down(jnp.tanh(mlp.up(x))), None

        return scan_layers(layer, x, self.blocks, start, stop)


class Codec(nnx.Module):
    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.out = Linear(config.channels, 3, rngs=rngs)

    def __call__(self, latents: Float[Array, "B T h w C"]) -> Float[Array, "B F H W 3"]:
        video = jnp.tanh(self.out(latents)).repeat(4, 2).repeat(4, 3)
        return jnp.concatenate([video[:, :1], video[:, 1:].repeat(4, 1)], 1)


def encode_text(encoder: Encoder, ids: Int32[Array, "B L"]) -> dict[str, Array]:
    """Two features: of each token, and of the whole prompt."""
    x = encoder(ids)
    return {"prompt_embeds": x, "pooled_embeds": x.mean(1)}


def embed(
    denoiser: Denoiser, latents: Array, text: dict[str, Array], timestep: Array, *, next_timestep: Array | None = None
) -> Tokens:
    return Tokens(denoiser.text_in(text["prompt_embeds"]), text["pooled_embeds"], latents, timestep)


def encode(codec: Codec, video: Array) -> tuple[Array, Array]:
    """Each latent pixel is the colour of a pixel."""
    small = video[:, :, ::4, ::4]
    frames = jnp.concatenate([small[:, :1], small[:, 1::4]], 1)
    mean = jnp.concatenate([frames, jnp.zeros((*frames.shape[:-1], 5))], -1)
    return mean, jnp.full_like(mean, -10.0)


def encode_clip(codec: Codec, video: Array, noise: Array, *, tiled: bool) -> Array:
    return encode(codec, video)[0]


def decode(codec: Codec, latents: Array, tiled: bool) -> Array:
    return codec(latents)


class WordTokenizer:
    """The place of each word in the vocabulary."""

    def __init__(self, path: Path, max_length: int):
        self.words, self.max_length = path.read_text().split(), max_length

    def __call__(self, prompts: list[str]) -> Int32[np.ndarray, "B L"]:
        ids = [[self.words.index(word) for word in prompt.split()] for prompt in prompts]
        return np.array([row + [0] * (self.max_length - len(row)) for row in ids], np.int32)


def _check(configs: Mapping[str, Any]) -> None:
    if configs["text_encoder_1"].width != configs["denoiser"].text_width:
        raise InputError("the denoiser takes another width")


def _resolve_size(configs: Configs, num_frames: int | None, height: int | None, width: int | None) -> Size:
    num_frames, height, width = num_frames or 5, height or 16, width or 16
    if num_frames % 4 != 1:
        raise InputError(f"num_frames is {num_frames}; it must be 4 n + 1")
    return Size(
        num_frames=num_frames,
        height=height,
        width=width,
        latent_frames=num_frames // 4 + 1,
        extra_latents=0,
        latent_height=height // 4,
        latent_width=width // 4,
        latent_channels=configs["codec"].channels,
    )


def _refuse_tiles(configs: Configs) -> None:
    raise InputError("the tiny codec has no tiles")


def _workload(configs: Configs, size: Size) -> Workload:
    config = configs["denoiser"]
    return Workload(
        layers=config.layers, heads=config.heads, head_dim=config.width // config.heads, tokens=6, modulation=1
    )


CONFIGS = {
    "tokenizer": TokenizerConfig(max_length=6),
    "text_encoder_1": EncoderConfig(),
    "denoiser": DenoiserConfig(),
    "codec": CodecConfig(),
    "scheduler": FlowMatchConfig(shift=5.0),
}
RELEASE = Release(
    name="tiny-1",
    hub_id="nobody/tiny-1",
    family="tiny",
    configs=CONFIGS,
    height=16,
    width=16,
    num_frames=5,
    sampler="flow_match",
    use_dynamic_cfg=False,
)
MAPS = {"up": "blocks.mlp.up", "down": "blocks.mlp.down"}
TINY = ModelFamily(
    name="tiny",
    components={
        "text_encoder_1": Component(
            config=EncoderConfig,
            module=Encoder,
            stage="encode",
            sharding=((r"embedding", (None, "hidden")),),
            class_names=("TinyTextModel",),
        ),
        "denoiser": Component(
            config=DenoiserConfig,
            module=Denoiser,
            stage="denoise",
            sharding=DENOISER_ROWS,
            linear_maps=tuple(MAPS.values()),
            heads="heads",
            class_names=("TinyTransformer3DModel",),
        ),
        "codec": Component(
            config=CodecConfig,
            module=Codec,
            stage="decode",
            sharding=((r"out\..*", sharding.REPLICATED),),
            class_names=("AutoencoderTiny",),
        ),
    },
    scheduler=FlowMatchConfig,
    tokenizer=TokenizerConfig,
    tokenizer_files=("tokenizer/words.txt",),
    read_tokenizer=lambda raw, configs: TokenizerConfig.from_hf(raw),
    make_tokenizer=lambda folder, configs: WordTokenizer(
        folder / "tokenizer" / "words.txt", configs["tokenizer"].max_length
    ),
    releases={RELEASE.name: RELEASE},
    find_release=lambda configs: RELEASE if configs.get("denoiser") == RELEASE.configs["denoiser"] else None,
    check=_check,
    check_tiling=_refuse_tiles,
    samplers={"flow_match": FlowMatchScheduler},
    defaults=lambda configs: Defaults(
        fps=8, num_inference_steps=4, guidance_scale=3.0, use_dynamic_cfg=False, scheduler="flow_match"
    ),
    resolve_size=_resolve_size,
    size_warnings=lambda configs, size: [],
    latent_channels=lambda configs: configs["codec"].channels,
    workload=_workload,
    text=(
        TextStage(
            component="text_encoder_1",
            tokenize=lambda tokenizer, prompts: tokenizer(prompts),
            token_shapes=lambda configs, batch: jax.ShapeDtypeStruct((batch, 6), jnp.int32),
            encode=encode_text,
        ),
    ),
    feature_shapes=lambda configs, batch: {"prompt_embeds": (batch, 6, 16), "pooled_embeds": (batch, 16)},
    visual=lambda configs: (
        VisualStage(input="video", feature="video_latents", component="codec", encode=encode_clip, scale=1.0),
    ),
    check_inputs=lambda configs, given: None,
    fit_frames=lambda configs, count: (count - 1) // 4 * 4 + 1,
    longest=lambda configs: 17,
    embed=embed,
    encode=encode,
    latent_scale=lambda configs: 1.0,
    decode=decode,
    lora=LoRALayout(
        component="denoiser",
        targets=MAPS,
        default_targets=("up",),
        sources={"up": "ffn.fc1", "down": "ffn.fc2"},
        blocks="layers",
    ),
)

LAYER = r"layers\.(?P<slot>\d+)\.ffn\."
TABLES: Tables = {
    "text_encoder_1": lambda config: (Rule(r"embed_tokens\.weight", "embedding"),),
    "denoiser": lambda config: (
        *linear("context_embedder", "text_in"),
        *linear(LAYER + "fc1", "blocks.mlp.up"),
        *linear(LAYER + "fc2", "blocks.mlp.down"),
    ),
    "codec": lambda config: linear("to_rgb", "out"),
}


def save_layout(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Random weights in a Hugging Face layout. Returns component -> name -> tensor."""
    rng = np.random.default_rng(0)
    text, config = EncoderConfig(), DenoiserConfig()
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "text_encoder_1": {"embed_tokens.weight": (text.vocab_size, text.width)},
        "denoiser": {"context_embedder.weight": (config.width, text.width), "context_embedder.bias": (config.width,)},
        "codec": {"to_rgb.weight": (3, CodecConfig().channels), "to_rgb.bias": (3,)},
    }
    for i in range(config.layers):
        for name, shape in (("fc1", (2 * config.width, config.width)), ("fc2", (config.width, 2 * config.width))):
            shapes["denoiser"][f"layers.{i}.ffn.{name}.weight"] = shape
            shapes["denoiser"][f"layers.{i}.ffn.{name}.bias"] = shape[:1]
    sizes = {"num_layers": config.layers, "num_heads": config.heads, "dim": config.width, "text_dim": text.width}
    files = {
        "text_encoder_1/config.json": {
            "architectures": ["TinyTextModel"],
            "vocab_size": text.vocab_size,
            "hidden_size": text.width,
        },
        "denoiser/config.json": {"_class_name": "TinyTransformer3DModel"} | sizes,
        "codec/config.json": {"_class_name": "AutoencoderTiny", "latent_channels": CodecConfig().channels},
        "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0},
        "tokenizer/tokenizer_config.json": {"model_max_length": 6},
    }
    for file, raw in files.items():
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(json.dumps(raw))
    (folder / "tokenizer" / "words.txt").write_text("<pad> a red ball rolls")
    tensors = {
        component: {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in named.items()}
        for component, named in shapes.items()
    }
    for component, named in tensors.items():
        save_file(named, folder / component / "model.safetensors")
    return tensors
