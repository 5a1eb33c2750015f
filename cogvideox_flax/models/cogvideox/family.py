"""CogVideoX: a T5 text encoder, a transformer over text and video tokens, a causal video VAE.

Source: arXiv 2408.06072.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.errors import InputError
from cogvideox_flax.models import t5
from cogvideox_flax.models.chunks import chunk_sizes, sizes_after_first
from cogvideox_flax.models.cogvideox import sharding, visual
from cogvideox_flax.models.cogvideox.autoencoder import DECODE_CHUNK, Autoencoder
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.cogvideox.releases import FAMILY, RELEASES, find_release
from cogvideox_flax.models.cogvideox.sizes import check_channels, fit_frames, resolve_size, size_warnings
from cogvideox_flax.models.cogvideox.transformer import Tokens, Transformer
from cogvideox_flax.models.cogvideox.visual import with_visual
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.family import (
    Component,
    Configs,
    Defaults,
    LoRALayout,
    ModelFamily,
    Size,
    TextStage,
    Workload,
)
from cogvideox_flax.models.posterior import encode
from cogvideox_flax.models.t5 import TextEncoder
from cogvideox_flax.schedulers import SCHEDULERS
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import SPIECE_FILE, Tokenizer, TokenizerConfig

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


def _read_tokenizer(raw: Mapping[str, Any], configs: Configs) -> TokenizerConfig:
    """The transformer's text length wins over the tokenizer's own limit."""
    transformer = configs.get("transformer")
    return TokenizerConfig.from_hf(raw, transformer.text_length if transformer else None)


def _make_tokenizer(folder: Path, configs: Configs) -> Tokenizer:
    return Tokenizer(
        folder / SPIECE_FILE, configs["tokenizer"].max_length, vocab_size=configs["text_encoder"].vocab_size
    )


def _check(configs: Configs) -> None:
    text, transformer = configs["text_encoder"].width, configs["transformer"].text_width
    if text != transformer:
        raise InputError(f"the text encoder gives {text} channels, the transformer takes {transformer}")
    check_channels(configs["transformer"], configs["vae"])


def _check_tiling(configs: Configs) -> None:
    configs["vae"].tiling.check(configs["vae"].spatial_compression)


OFS = 2.0
"""The motion scalar (ofs) of the released pipeline, for releases that have this input."""


def encode_text(encoder: TextEncoder, ids: Int32[Array, "B L"]) -> Features:
    """`prompt_embeds` [B, L, E]: every position, padding included, is attended."""
    return {"prompt_embeds": encoder(ids)}


def embed(
    transformer: Transformer,
    latents: Float32[Array, "B T h w C"],
    features: Features,
    timestep: Int[Array, ""] | Int[Array, " B"],
    *,
    next_timestep: Int[Array, ""] | None = None,
    riflex: bool = False,
) -> Tokens:
    """The tokens from which the transformer predicts v = sqrt(abar) noise - sqrt(1 - abar) x0.

    Args:
        next_timestep: ignored, since no release takes it.
        riflex: as for `Transformer`.
    """
    ofs = None if transformer.config.ofs_width is None else OFS
    beside = with_visual(latents, features, transformer.config)
    return transformer.embed(beside, features["prompt_embeds"], timestep, ofs, riflex=riflex)


def embed_riflex(
    transformer: Transformer,
    latents: Float32[Array, "B T h w C"],
    features: Features,
    timestep: Int[Array, ""] | Int[Array, " B"],
    *,
    next_timestep: Int[Array, ""] | None = None,
) -> Tokens:
    """`embed` with rotary positions extended by RIFLEx."""
    return embed(transformer, latents, features, timestep, next_timestep=next_timestep, riflex=True)


def _positions(configs: Configs) -> dict[str, Callable[..., Any]]:
    """RIFLEx is for models whose positions are rotary alone."""
    config = configs["transformer"]
    return {"riflex": embed_riflex} if config.rotary and not config.learned_positions else {}


def decode(vae: Autoencoder, latents: Float[Array, "B T h w C"], tiled: bool) -> Float32[Array, "B F H W 3"]:
    """Scaled latents to a video in about [-1, 1], one item at a time; tiled: in the reference's overlapping tiles."""
    tiling = vae.config.tiling if tiled else None
    chunks = _decoder_pieces(latents.shape[1])
    z = latents / vae.config.scaling_factor
    video = vae.decode(z, tiling=tiling, slicing=len(latents) > 1, chunks=chunks)
    return video.astype(jnp.float32)


def decode_piece(
    vae: Autoencoder, latents: Float[Array, "B t h w C"], cache: Any
) -> tuple[Float32[Array, "B F H W 3"], Any]:
    """`decode` of a piece of a clip, of `decoder_pieces`: its video, and the cache for the next piece."""
    video, cache = vae.decode_piece(latents / vae.config.scaling_factor, cache)
    return video.astype(jnp.float32), cache


def _decoder_pieces(frames: int) -> list[int]:
    """diffusers' chunks; for an even number of latents, of which these make 4 T frames, VideoX-Fun's: 4 (T - 1) + 1."""
    return (chunk_sizes if frames % 2 else sizes_after_first)(frames, DECODE_CHUNK)


def _tokenize(tokenizer: Tokenizer, prompts: Sequence[str]) -> Int32[np.ndarray, "B L"]:
    return tokenizer(prompts)


def _token_shapes(configs: Configs, batch: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, configs["tokenizer"].max_length), "int32")


def _feature_shapes(configs: Configs, batch: int) -> dict[str, tuple[int, ...]]:
    config: TransformerConfig = configs["transformer"]
    return {"prompt_embeds": (batch, config.text_length, config.text_width)}


def _defaults(configs: Configs) -> Defaults:
    """The release's defaults; for an unreleased architecture, those that all releases share."""
    release, transformer = find_release(configs), configs["transformer"]
    if release is None:
        return Defaults(
            fps=16 if transformer.patch_size_t and transformer.takes != "inpaint" else 8,
            num_inference_steps=50,
            guidance_scale=6.0,
            use_dynamic_cfg=False,
            scheduler=configs["scheduler"].kind,
        )
    return Defaults(
        fps=release.fps,
        num_inference_steps=release.num_inference_steps,
        guidance_scale=release.guidance_scale,
        use_dynamic_cfg=release.use_dynamic_cfg,
        scheduler=release.sampler,
    )


def _resolve_size(configs: Configs, num_frames: int | None, height: int | None, width: int | None) -> Size:
    given: Sequence[int | None] = (num_frames, height, width)
    return resolve_size(configs["transformer"], configs["vae"], find_release(configs), *given)


def _size_warnings(configs: Configs, size: Size) -> list[str]:
    return size_warnings(configs["transformer"], configs["vae"], find_release(configs), size)


def _fit_frames(configs: Configs, count: int) -> int:
    return fit_frames(configs["transformer"], configs["vae"], count)


def _longest(configs: Configs) -> int:
    release = find_release(configs)
    return configs["transformer"].sample_frames if release is None else release.max_frames


def _workload(configs: Configs, size: Size) -> Workload:
    config: TransformerConfig = configs["transformer"]
    video = size.latent_frames // (config.patch_size_t or 1) * size.latent_height * size.latent_width
    return Workload(
        layers=config.layers,
        heads=config.heads,
        head_dim=config.head_dim,
        tokens=config.text_length + video // config.patch_size**2,
        modulation=config.time_width,
    )


COGVIDEOX = ModelFamily(
    name=FAMILY,
    components={
        "text_encoder": Component(
            config=t5.TextEncoderConfig,
            module=t5.TextEncoder,
            stage="encode",
            sharding=t5.SHARDING,
            linear_maps=t5.LINEAR_MAPS,
            heads="heads",
            class_names=("T5EncoderModel",),
        ),
        "transformer": Component(
            config=TransformerConfig,
            module=Transformer,
            stage="denoise",
            sharding=sharding.TRANSFORMER,
            linear_maps=tuple(LORA.targets.values()),
            heads="heads",
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
    check_tiling=_check_tiling,
    lora=LORA,
    samplers=SCHEDULERS,
    defaults=_defaults,
    resolve_size=_resolve_size,
    size_warnings=_size_warnings,
    latent_channels=lambda configs: configs["vae"].latent_channels,
    workload=_workload,
    text=(TextStage(component="text_encoder", tokenize=_tokenize, token_shapes=_token_shapes, encode=encode_text),),
    feature_shapes=_feature_shapes,
    visual=visual.stages,
    check_inputs=visual.check_inputs,
    fit_frames=_fit_frames,
    longest=_longest,
    embed=embed,
    positions=_positions,
    encode=encode,
    latent_scale=lambda configs: configs["vae"].scaling_factor,
    decode=decode,
    decoder_pieces=_decoder_pieces,
    decode_piece=decode_piece,
)
