"""A second model family in small, with names of its own: what a new family is made of, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32
from safetensors.numpy import save_file

from cogvideox_flax import sharding
from cogvideox_flax.config import Config, require
from cogvideox_flax.conversion.rules import Rule, Tables, linear
from cogvideox_flax.errors import InputError
from cogvideox_flax.models.codec import Codec, LatentStatistics
from cogvideox_flax.models.model import (
    Component,
    LoRALayout,
    Release,
    TextInput,
    VideoModel,
    VisualInput,
    Workload,
)
from cogvideox_flax.models.sizes import Size, SizeRule
from cogvideox_flax.nn.layers import Linear
from cogvideox_flax.nn.stack import scan_layers, stack
from cogvideox_flax.schedulers import FlowMatchConfig, FlowMatchScheduler
from cogvideox_flax.tokenizer import TokenizerConfig


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
    """latent_mean, latent_std: of each channel, in thousandths."""

    latent_channels: int = 8
    latent_mean: tuple[int, ...] = (100, 200, 50, 100, 10, 20, 30, 40)
    latent_std: tuple[int, ...] = (1500, 1400, 2000, 800, 1000, 1000, 1000, 1000)

    spatial_compression = 4
    temporal_compression = 4

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> CodecConfig:
        return cls(latent_channels=raw["latent_channels"])


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


class Autoencoder(nnx.Module):
    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.out = Linear(config.latent_channels, 3, rngs=rngs)

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


def encode(video: Array) -> tuple[Array, Array]:
    """Each latent pixel is the colour of a pixel."""
    small = video[:, :, ::4, ::4]
    frames = jnp.concatenate([small[:, :1], small[:, 1::4]], 1)
    mean = jnp.concatenate([frames, jnp.zeros((*frames.shape[:-1], 5))], -1)
    return mean, jnp.full_like(mean, -10.0)


def encode_clip(vae: Autoencoder, video: Array, noise: Array, *, tiled: bool, statistics: LatentStatistics) -> Array:
    return statistics.normalize(encode(video)[0])


class TinyCodec(Codec):
    @property
    def statistics(self) -> LatentStatistics:
        """Of each channel."""
        mean, std = ([n / 1000 for n in each] for each in (self.config.latent_mean, self.config.latent_std))
        return LatentStatistics(tuple(1 / n for n in std), tuple(mean))

    def check_tiling(self) -> None:
        raise InputError("the tiny codec has no tiles")

    def encode(self, vae: Autoencoder, video: Array) -> tuple[Array, Array]:
        return encode(video)

    def decode(self, vae: Autoencoder, latents: Array, tiled: bool) -> Array:
        return vae(self.statistics.denormalize(latents))


class WordTokenizer:
    """The place of each word in the vocabulary."""

    def __init__(self, path: Path, max_length: int):
        self.words, self.max_length = path.read_text().split(), max_length

    def __call__(self, prompts: list[str]) -> Int32[np.ndarray, "B L"]:
        ids = [[self.words.index(word) for word in prompt.split()] for prompt in prompts]
        return np.array([row + [0] * (self.max_length - len(row)) for row in ids], np.int32)


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
    max_frames=17,
    fps=8,
    num_inference_steps=4,
    guidance_scale=3.0,
    scheduler="flow_match",
)
MAPS = {"up": ("blocks.mlp.up", "ffn.fc1"), "down": ("blocks.mlp.down", "ffn.fc2")}
COMPONENTS = {
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
        linear_maps=tuple(path for path, _ in MAPS.values()),
        heads="heads",
        class_names=("TinyTransformer3DModel",),
    ),
    "codec": Component(
        config=CodecConfig,
        module=Autoencoder,
        stage="decode",
        sharding=((r"out\..*", sharding.REPLICATED),),
        class_names=("AutoencoderTiny",),
    ),
}


class Tiny(VideoModel):
    name = "tiny"
    components = COMPONENTS
    scheduler_config = FlowMatchConfig
    schedulers = MappingProxyType({"flow_match": FlowMatchScheduler})
    tokenizer = TokenizerConfig
    tokenizer_files = ("tokenizer/words.txt",)
    releases = MappingProxyType({RELEASE.name: RELEASE})
    lora = LoRALayout(
        component="denoiser",
        maps=MAPS,
        default_targets=("up",),
        blocks="layers",
    )
    embed = staticmethod(embed)

    @property
    def codec(self) -> Codec:
        return TinyCodec(self.configs["codec"])

    def make_tokenizer(self, folder: Path) -> WordTokenizer:
        return WordTokenizer(folder / "tokenizer" / "words.txt", self.configs["tokenizer"].max_length)

    def check(self) -> None:
        if self.configs["text_encoder_1"].width != self.configs["denoiser"].text_width:
            raise InputError("the denoiser takes another width")

    def workload(self, size: Size) -> Workload:
        config, head = self.configs["denoiser"], self.configs["denoiser"].width // self.configs["denoiser"].heads
        return Workload(layers=config.layers, heads=config.heads, head_dim=head, tokens=6, modulation=1)

    def unreleased(self) -> Release:
        return replace(RELEASE, configs=self.configs)

    @property
    def size_rule(self) -> SizeRule:
        return SizeRule(first=1, period=4, step=4)

    @property
    def text(self) -> tuple[TextInput, ...]:
        return (
            TextInput(
                component="text_encoder_1",
                tokenize=lambda tokenizer, prompts: tokenizer(prompts),
                lengths=self.configs["tokenizer"].max_length,
                encode=encode_text,
            ),
        )

    def feature_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (batch, 6, 16), "pooled_embeds": (batch, 16)}

    @property
    def visual(self) -> tuple[VisualInput, ...]:
        how = {"component": "codec", "encode": encode_clip, "statistics": self.codec.statistics}
        return (VisualInput(input="video", feature="video_latents", **how),)

    @property
    def inputs(self) -> tuple[str, tuple[str, ...]]:
        return "a tiny model", ("video",)


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
        "codec": {"to_rgb.weight": (3, CodecConfig().latent_channels), "to_rgb.bias": (3,)},
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
        "codec/config.json": {"_class_name": "AutoencoderTiny", "latent_channels": CodecConfig().latent_channels},
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
