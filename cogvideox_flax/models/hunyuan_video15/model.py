"""HunyuanVideo-1.5: Qwen2.5-VL and ByT5 text encoders, a dual-stream transformer, a causal video VAE; image-to-video
checkpoints also have a SigLIP image encoder.

Source: arXiv 2511.18870; diffusers `HunyuanVideo15Pipeline`, `HunyuanVideo15ImageToVideoPipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import Array, Float, Float32

from cogvideox_flax.attention import SparseTiles
from cogvideox_flax.errors import InputError
from cogvideox_flax.models import t5
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.hunyuan_video15 import qwen, releases, sharding, siglip, text, visual
from cogvideox_flax.models.hunyuan_video15.adapters import LORA
from cogvideox_flax.models.hunyuan_video15.autoencoder import Autoencoder
from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.hunyuan_video15.few_steps import DISTILLATIONS, TEACACHE
from cogvideox_flax.models.hunyuan_video15.sizes import NUM_FRAMES, bucket_of, size_buckets
from cogvideox_flax.models.hunyuan_video15.tokenizer import TOKENIZER_FILES, Tokenizers, TokenizersConfig
from cogvideox_flax.models.hunyuan_video15.transformer import Tokens, Transformer
from cogvideox_flax.models.model import (
    Component,
    Configs,
    Release,
    TextInput,
    TrainingRecipe,
    VideoModel,
    VisualInput,
    Workload,
)
from cogvideox_flax.models.sizes import Size, SizeRule
from cogvideox_flax.schedulers import FLOW_SCHEDULERS, FlowMatchConfig, TimestepLaw
from cogvideox_flax.sharding import REPLICATED

LICENSE = (
    "HunyuanVideo-1.5 is under the Tencent Hunyuan Community License, which excludes the EU, the UK and South Korea: "
    "https://huggingface.co/tencent/HunyuanVideo-1.5/blob/main/LICENSE"
)
"""One line, printed when weights are downloaded."""


RECIPE = TrainingRecipe(
    timesteps=TimestepLaw(law="logit_normal", shift=3.0, margin=1e-5),
    source="Tencent's train.py of HunyuanVideo-1.5; of the image musubi-tuner, which never drops it",
)


def embed(
    transformer: Transformer,
    latents: Float32[Array, "B T h w C"],
    features: Features,
    timestep: Float[Array, "*B"],
    *,
    next_timestep: Float[Array, "*B"] | None = None,
    sparse: SparseTiles | None = None,
) -> Tokens:
    """The transformer's tokens; as in the reference, text-to-video checkpoints take no second timestep.

    sparse: as for `Transformer.embed`.
    """
    takes_next = transformer.config.use_meanflow and "image_embeds" in features
    return transformer.embed(
        visual.with_condition(latents, features),
        timestep,
        text=features["prompt_embeds"],
        text_mask=features["prompt_embeds_mask"],
        glyphs=features["prompt_embeds_2"],
        glyph_mask=features["prompt_embeds_mask_2"],
        image=features.get("image_embeds"),
        image_mask=features.get("image_mask"),
        next_timestep=next_timestep if takes_next else None,
        sparse=sparse,
    )


def embed_sliding(transformer: Transformer, latents: Float32[Array, "B T h w C"], *args: Any, **steps: Any) -> Tokens:
    """`embed` with sliding tile attention."""
    return embed(transformer, latents, *args, **steps, sparse=sparse_tiles(latents.shape[1], selective=False))


def embed_selective(transformer: Transformer, latents: Float32[Array, "B T h w C"], *args: Any, **steps: Any) -> Tokens:
    """`embed` with selective and sliding tile attention."""
    return embed(transformer, latents, *args, **steps, sparse=sparse_tiles(latents.shape[1], selective=True))


def sparse_tiles(frames: int, *, selective: bool) -> SparseTiles:
    """The released settings for this number of latent frames.

    Source: Tencent's `hunyuanvideo_1_5_transformer.py` (`attn_param`) and `attention.py`.
    """
    if frames == 1:
        return SparseTiles(tile=(1, 16, 24), window=(1, 1, 1), selected=64 if selective else 0)
    return SparseTiles(selected=(32 if frames <= SHORT_CLIP else 64) if selective else 0)


SHORT_CLIP = 31
"""Latent frames: five seconds."""


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


class HunyuanVideo15(VideoModel):
    """Text-to-video checkpoints."""

    name = releases.FAMILY
    components = _TEXT_ENCODERS | _DIFFUSION
    scheduler_config = FlowMatchConfig
    schedulers = FLOW_SCHEDULERS
    tokenizer = TokenizersConfig
    tokenizer_files = TOKENIZER_FILES
    releases = releases.releases_of(releases.FAMILY)
    lora = LORA
    distillations = DISTILLATIONS
    teacache = TEACACHE
    license = LICENSE
    recipe = RECIPE
    embed = staticmethod(embed)

    @property
    def sparse_attention(self) -> dict[str, Callable[..., Tokens]]:
        return {"sliding": embed_sliding, "selective": embed_selective}

    def hf_files(self) -> dict[str, dict[str, Any]]:
        index = {
            "_class_name": "HunyuanVideo15Pipeline",
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "tokenizer_2": ["transformers", "ByT5Tokenizer"],
            "guider": ["diffusers", "ClassifierFreeGuidance"],
        }
        scale = self.guidance_scale
        if scale is None:
            scale = self.release.guidance_scale if self.release else 6.0
        guider = {"_class_name": "ClassifierFreeGuidance", "guidance_scale": scale, "enabled": scale != 1}
        files: dict[str, dict[str, Any]] = {"guider/guider_config.json": guider}
        if "image_encoder" in self.configs:
            index |= {
                "_class_name": "HunyuanVideo15ImageToVideoPipeline",
                "feature_extractor": ["transformers", "SiglipImageProcessor"],
            }
            half, side = [0.5, 0.5, 0.5], self.configs["image_encoder"].image_size
            processor: dict[str, Any] = {
                "image_processor_type": "SiglipImageProcessor",
                "size": {"height": side, "width": side},
            }
            processor |= {"resample": 3, "image_mean": half, "image_std": half}
            files["feature_extractor/preprocessor_config.json"] = processor
        return {"model_index.json": index} | files

    @classmethod
    def is_release(cls, release: Release, configs: Configs) -> bool:
        """Also by the noise schedule's shift, where it is known.

        A CFG-distilled release has the configs of the one that it was made from; its guider's config tells them apart.
        """
        named = [name for name in ("transformer", "scheduler") if name in configs]
        return all(configs[name] == release.configs[name] for name in named)

    @property
    def transformer(self) -> TransformerConfig:
        return self.configs["transformer"]

    @property
    def lengths(self) -> TokenizersConfig:
        return self.configs["tokenizer"]

    @property
    def vision(self) -> siglip.VisionConfig | None:
        """The image encoder's config."""
        return self.configs.get("image_encoder")

    def make_tokenizer(self, folder: Path) -> Tokenizers:
        rows, glyph_rows = (self.configs[name].vocab_size for name in ("text_encoder", "text_encoder_2"))
        return Tokenizers(folder, self.lengths, vocab_size=rows, glyph_vocab_size=glyph_rows)

    def check(self) -> None:
        config, latent = self.transformer, self.codec.latent_channels
        wanted = {"text_encoder": config.text_width, "text_encoder_2": config.glyph_width}
        wanted |= {"image_encoder": config.image_width} if self.vision is not None else {}
        faults = [
            f"the {name.replace('_', ' ')} gives {self.configs[name].width} channels, the transformer takes {width}"
            for name, width in wanted.items()
            if self.configs[name].width != width
        ]
        if (config.in_channels, config.out_channels) != (2 * latent + 1, latent):
            faults.append(
                f"the transformer takes {config.in_channels} channels and gives {config.out_channels}; latents of "
                f"{latent}, a condition and a mask are {2 * latent + 1}"
            )
        if faults:
            raise InputError("\n".join(faults))

    def workload(self, size: Size) -> Workload:
        config, image = self.transformer, 0 if self.vision is None else self.vision.tokens
        video = size.latent_frames * size.latent_height * size.latent_width
        return Workload(
            layers=config.layers,
            heads=config.heads,
            head_dim=config.head_dim,
            tokens=video + self.lengths.max_length + self.lengths.glyph_length + image,
            modulation=config.width,
        )

    def unreleased(self) -> Release:
        return Release(
            name="",
            hub_id="",
            family=self.name,
            configs=self.configs,
            **releases.recommended(self.transformer, self.configs["vae"]),
        )

    @property
    def size_rule(self) -> SizeRule:
        return SizeRule(1, self.codec.temporal_compression, self.codec.spatial_compression)

    def size_warnings(self, size: Size) -> list[str]:
        target, found = self.transformer.target_size, []
        if (size.height, size.width) not in size_buckets(target, self.codec.spatial_compression):
            height, width = self.size_from_image(size.height, size.width)
            found.append(
                f"this model was trained on sizes with the area of {target}x{target}, not {size.height}x{size.width}: "
                f"expect worse video. With this aspect ratio it was {height}x{width}"
            )
        if size.num_frames > NUM_FRAMES:
            found.append(
                f"this model was trained on up to {NUM_FRAMES} frames, not {size.num_frames}: expect worse video"
            )
        return found

    def size_from_image(self, height: int, width: int) -> tuple[int, int]:
        return bucket_of(height, width, self.transformer.target_size, self.codec.spatial_compression)

    @property
    def text(self) -> tuple[TextInput, ...]:
        return text.text_inputs(self.lengths)

    def feature_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        config, lengths = self.transformer, self.lengths
        return {
            "prompt_embeds": (batch, lengths.max_length, config.text_width),
            "prompt_embeds_mask": (batch, lengths.max_length),
            "prompt_embeds_2": (batch, lengths.glyph_length, config.glyph_width),
            "prompt_embeds_mask_2": (batch, lengths.glyph_length),
        }

    @property
    def visual(self) -> tuple[VisualInput, ...]:
        return visual.visual_inputs(self.vision, self.codec.statistics)

    @property
    def inputs(self) -> tuple[str, tuple[str, ...]]:
        return ("a text-to-video model", ("video",)) if self.vision is None else ("an image-to-video model", ("image",))

    @staticmethod
    def is_guided(scale: float) -> bool:
        """As diffusers' guider."""
        return not math.isclose(scale, 1)


class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    """Image-to-video checkpoints, which have an image encoder."""

    name = releases.IMAGE_FAMILY
    components = _TEXT_ENCODERS | _IMAGE_ENCODER | _DIFFUSION
    releases = releases.releases_of(releases.IMAGE_FAMILY)
