"""HunyuanVideo-1.5: Qwen2.5-VL and ByT5 text encoders, a dual-stream transformer, a causal video VAE; image-to-video
checkpoints also have a SigLIP image encoder.

Source: arXiv 2511.18870; diffusers `HunyuanVideo15Pipeline`, `HunyuanVideo15ImageToVideoPipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from cogvideox_flax.errors import InputError
from cogvideox_flax.models import t5
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.family import Component, Configs, Defaults, LoRALayout, ModelFamily, Size, Workload
from cogvideox_flax.models.hunyuan_video15 import qwen, releases, sharding, siglip, text, visual
from cogvideox_flax.models.hunyuan_video15.autoencoder import Autoencoder
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.hunyuan_video15.sizes import NUM_FRAMES, bucket_of, resolve_size, size_rule, size_warnings
from cogvideox_flax.models.hunyuan_video15.tokenizer import TOKENIZER_FILES, Tokenizers, TokenizersConfig
from cogvideox_flax.models.hunyuan_video15.transformer import Tokens, Transformer
from cogvideox_flax.models.posterior import encode
from cogvideox_flax.schedulers import FlowMatchConfig, FlowMatchScheduler
from cogvideox_flax.sharding import REPLICATED

LICENSE = (
    "HunyuanVideo-1.5 is under the Tencent Hunyuan Community License, which excludes the EU, the UK and South Korea: "
    "https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE"
)
"""One line, printed when weights are downloaded."""

LORA = LoRALayout(
    component="transformer",
    targets={
        "q": "blocks.video.attn.q",
        "k": "blocks.video.attn.k",
        "v": "blocks.video.attn.v",
        "out": "blocks.video.attn.out",
        "up": "blocks.video.mlp.up",
        "down": "blocks.video.mlp.down",
        "text_q": "blocks.text.attn.q",
        "text_k": "blocks.text.attn.k",
        "text_v": "blocks.text.attn.v",
        "text_out": "blocks.text.attn.out",
        "text_up": "blocks.text.mlp.up",
        "text_down": "blocks.text.mlp.down",
    },
    default_targets=("q", "k", "v", "out"),
    sources={
        "q": "attn.to_q",
        "k": "attn.to_k",
        "v": "attn.to_v",
        "out": "attn.to_out.0",
        "up": "ff.net.0.proj",
        "down": "ff.net.2",
        "text_q": "attn.add_q_proj",
        "text_k": "attn.add_k_proj",
        "text_v": "attn.add_v_proj",
        "text_out": "attn.to_add_out",
        "text_up": "ff_context.net.0.proj",
        "text_down": "ff_context.net.2",
    },
)


def _check(configs: Configs) -> None:
    transformer, latent = configs["transformer"], configs["vae"].latent_channels
    wanted = {"text_encoder": transformer.text_width, "text_encoder_2": transformer.glyph_width}
    wanted |= {"image_encoder": transformer.image_width} if "image_encoder" in configs else {}
    faults = [
        f"the {name.replace('_', ' ')} gives {configs[name].width} channels, the transformer takes {width}"
        for name, width in wanted.items()
        if configs[name].width != width
    ]
    if (transformer.in_channels, transformer.out_channels) != (2 * latent + 1, latent):
        faults.append(
            f"the transformer takes {transformer.in_channels} channels and gives {transformer.out_channels}; latents "
            f"of {latent}, a condition and a mask are {2 * latent + 1}"
        )
    if faults:
        raise InputError("\n".join(faults))


def embed(
    transformer: Transformer,
    latents: Float32[Array, "B T h w C"],
    features: Features,
    timestep: Float[Array, "*B"],
    *,
    next_timestep: Float[Array, "*B"] | None = None,
) -> Tokens:
    """The transformer's tokens; as in the reference, text-to-video checkpoints take no second timestep."""
    takes_next = transformer.config.use_meanflow and "image_embeds" in features
    return transformer.embed(
        visual.with_condition(latents, features),
        timestep,
        text=features["prompt_embeds"],
        text_mask=features["prompt_embeds_mask"],
        glyphs=features["prompt_embeds_2"],
        glyph_mask=features["prompt_embeds_mask_2"],
        image=features.get("image_embeds"),
        next_timestep=next_timestep if takes_next else None,
    )


def decode(vae: Autoencoder, latents: Float[Array, "B T h w C"], tiled: bool) -> Float32[Array, "B F H W 3"]:
    """Scaled latents to a video in about [-1, 1], one item at a time; tiled: in the reference's overlapping tiles."""
    z = latents / vae.config.scaling_factor
    tiling = vae.config.tiling if tiled else None
    return vae.decode(z, tiling=tiling, slicing=len(latents) > 1).astype(jnp.float32)


def _feature_shapes(configs: Configs, batch: int) -> dict[str, tuple[int, ...]]:
    transformer, lengths = configs["transformer"], configs["tokenizer"]
    return {
        "prompt_embeds": (batch, lengths.max_length, transformer.text_width),
        "prompt_embeds_mask": (batch, lengths.max_length),
        "prompt_embeds_2": (batch, lengths.glyph_length, transformer.glyph_width),
        "prompt_embeds_mask_2": (batch, lengths.glyph_length),
    }


def _defaults(configs: Configs) -> Defaults:
    distilled = configs["transformer"].use_meanflow
    return Defaults(
        fps=releases.FPS,
        num_inference_steps=releases.DISTILLED_STEPS if distilled else releases.STEPS,
        guidance_scale=1.0 if distilled else releases.GUIDANCE_SCALE,
        use_dynamic_cfg=False,
        scheduler=FlowMatchScheduler.kind,
    )


def _resolve_size(configs: Configs, num_frames: int | None, height: int | None, width: int | None) -> Size:
    return resolve_size(configs["transformer"], configs["vae"], num_frames, height, width)


def _picture_size(configs: Configs, height: int, width: int) -> tuple[int, int]:
    return bucket_of(height, width, configs["transformer"].target_size, configs["vae"].spatial_compression)


def _make_tokenizer(folder: Path, configs: Configs) -> Tokenizers:
    rows = configs["text_encoder"].vocab_size, configs["text_encoder_2"].vocab_size
    return Tokenizers(folder, configs["tokenizer"], vocab_size=rows[0], glyph_vocab_size=rows[1])


def _workload(configs: Configs, size: Size) -> Workload:
    config, lengths = configs["transformer"], configs["tokenizer"]
    image = configs["image_encoder"].tokens if "image_encoder" in configs else 0
    video = size.latent_frames * size.latent_height * size.latent_width
    return Workload(
        layers=config.layers,
        heads=config.heads,
        head_dim=config.head_dim,
        tokens=video + lengths.max_length + lengths.glyph_length + image,
        modulation=config.width,
    )


_TEXT_ENCODERS = {
    "text_encoder": Component(
        config=qwen.QwenConfig,
        module=qwen.QwenEncoder,
        stage="encode",
        sharding=qwen.SHARDING,
        linear_maps=qwen.LINEAR_MAPS,
        class_names=qwen.CLASS_NAMES,
    ),
    "text_encoder_2": Component(
        config=t5.TextEncoderConfig,
        module=t5.TextEncoder,
        stage="encode",
        sharding=((r".*", REPLICATED),),  # small, and six heads are rarely a multiple of tensor parallelism
        linear_maps=t5.LINEAR_MAPS,
        class_names=("T5EncoderModel",),
    ),
}
_IMAGE_ENCODER = {
    "image_encoder": Component(
        config=siglip.VisionConfig,
        module=siglip.VisionEncoder,
        stage="encode",
        sharding=siglip.SHARDING,
        linear_maps=siglip.LINEAR_MAPS,
        heads="heads",
        class_names=("SiglipVisionModel",),
    ),
}
_DIFFUSION = {
    "transformer": Component(
        config=TransformerConfig,
        module=Transformer,
        stage="denoise",
        sharding=sharding.TRANSFORMER,
        linear_maps=tuple(LORA.targets.values()),
        heads="heads",
        class_names=("HunyuanVideo15Transformer3DModel",),
    ),
    "vae": Component(
        config=VAEConfig,
        module=Autoencoder,
        stage="decode",
        sharding=sharding.VAE,
        class_names=("AutoencoderKLHunyuanVideo15",),
    ),
}


def _family(name: str, components: Mapping[str, Component]) -> ModelFamily:
    return ModelFamily(
        name=name,
        components=components,
        scheduler=FlowMatchConfig,
        tokenizer=TokenizersConfig,
        tokenizer_files=TOKENIZER_FILES,
        read_tokenizer=lambda raw, configs: TokenizersConfig(),
        make_tokenizer=_make_tokenizer,
        is_guided=lambda scale: not math.isclose(scale, 1),  # as diffusers' guider
        license=LICENSE,
        releases=releases.releases_of(name),
        find_release=partial(releases.find_release, name),
        check=_check,
        check_tiling=lambda configs: configs["vae"].tiling.check(configs["vae"].spatial_compression),
        lora=LORA,
        samplers={FlowMatchScheduler.kind: FlowMatchScheduler},
        defaults=_defaults,
        resolve_size=_resolve_size,
        picture_size=_picture_size,
        size_warnings=lambda configs, size: size_warnings(configs["transformer"], configs["vae"], size),
        latent_channels=lambda configs: configs["vae"].latent_channels,
        workload=_workload,
        text=text.STAGES,
        feature_shapes=_feature_shapes,
        visual=visual.stages,
        check_inputs=visual.check_inputs,
        fit_frames=lambda configs, count: size_rule(configs["vae"]).fit_frames(count),
        longest=lambda configs: NUM_FRAMES,
        embed=embed,
        encode=encode,
        latent_scale=lambda configs: configs["vae"].scaling_factor,
        decode=decode,
    )


TEXT_TO_VIDEO = _family(releases.FAMILY, _TEXT_ENCODERS | _DIFFUSION)
IMAGE_TO_VIDEO = _family(releases.IMAGE_FAMILY, _TEXT_ENCODERS | _IMAGE_ENCODER | _DIFFUSION)
