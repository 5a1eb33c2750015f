"""CogVideoX: a T5 text encoder, a transformer over text and video tokens, a causal video VAE.

Source: arXiv 2408.06072.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.models import t5
from cogvideox_flax.models.cogvideox import sharding
from cogvideox_flax.models.cogvideox.autoencoder import Autoencoder
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.cogvideox.releases import FAMILY, RELEASES, find_release
from cogvideox_flax.models.cogvideox.transformer import Transformer
from cogvideox_flax.models.family import Component, LoRALayout, ModelFamily
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import Tokenizer, TokenizerConfig

SPIECE_FILE = "tokenizer/spiece.model"

LORA = LoRALayout(
    component="transformer",
    targets={
        "q": "blocks.attn.q",
        "k": "blocks.attn.k",
        "v": "blocks.attn.v",
        "out": "blocks.attn.out",
        "up": "blocks.mlp.up",
        "down": "blocks.mlp.down",
    },
    default_targets=("q", "k", "v", "out"),
    sources={
        "q": "attn1.to_q",
        "k": "attn1.to_k",
        "v": "attn1.to_v",
        "out": "attn1.to_out.0",
        "up": "ff.net.0.proj",
        "down": "ff.net.2",
    },
)


def _read_tokenizer(raw: Mapping[str, Any], configs: Mapping[str, Any]) -> TokenizerConfig:
    """The transformer's text length wins over the tokenizer's own limit."""
    transformer = configs.get("transformer")
    return TokenizerConfig.from_hf(raw, transformer.text_length if transformer else None)


def _make_tokenizer(folder: Path, configs: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer(
        folder / SPIECE_FILE, configs["tokenizer"].max_length, vocab_size=configs["text_encoder"].vocab_size
    )


def _check(configs: Mapping[str, Any]) -> None:
    text, transformer = configs["text_encoder"].width, configs["transformer"].text_width
    if text != transformer:
        raise InputError(f"the text encoder gives {text} channels, the transformer takes {transformer}")


COGVIDEOX = ModelFamily(
    name=FAMILY,
    components={
        "text_encoder": Component(
            config=t5.TextEncoderConfig,
            module=t5.TextEncoder,
            stage="encode",
            sharding=t5.SHARDING,
            linear_maps=t5.LINEAR_MAPS,
            class_names=("T5EncoderModel",),
        ),
        "transformer": Component(
            config=TransformerConfig,
            module=Transformer,
            stage="denoise",
            sharding=sharding.TRANSFORMER,
            linear_maps=tuple(LORA.targets.values()),
            class_names=("CogVideoXTransformer3DModel",),
        ),
        "vae": Component(
            config=VAEConfig,
            module=Autoencoder,
            stage="decode",
            sharding=sharding.VAE,
            class_names=("AutoencoderKLCogVideoX",),
        ),
    },
    scheduler=SchedulerConfig,
    tokenizer=TokenizerConfig,
    tokenizer_files=(SPIECE_FILE,),
    read_tokenizer=_read_tokenizer,
    make_tokenizer=_make_tokenizer,
    releases=RELEASES,
    find_release=find_release,
    check=_check,
    lora=LORA,
)
