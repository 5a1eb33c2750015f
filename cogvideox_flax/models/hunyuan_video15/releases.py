"""The released HunyuanVideo-1.5 models, in diffusers' layout."""

from __future__ import annotations

from typing import Any

from cogvideox_flax.models.hunyuan_video15.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.hunyuan_video15.qwen import QwenConfig
from cogvideox_flax.models.hunyuan_video15.siglip import VisionConfig
from cogvideox_flax.models.hunyuan_video15.sizes import LANDSCAPE, NUM_FRAMES, bucket_of
from cogvideox_flax.models.hunyuan_video15.tokenizer import TokenizersConfig
from cogvideox_flax.models.model import Release
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers import FlowMatchConfig

FAMILY, IMAGE_FAMILY = "hunyuan_video15", "hunyuan_video15_i2v"
"""Text-to-video and image-to-video checkpoints; the latter have an image encoder, so they are a family of their own."""

FPS = 24
STEPS, DISTILLED_STEPS = 50, 12
GUIDANCE_SCALE = 6.0

BYT5 = TextEncoderConfig(vocab_size=1510, width=1472, layers=12, heads=6, head_dim=64, mlp_width=3584)
"""ByT5-small with the tokens of Glyph-SDXL-v2."""


def recommended(transformer: TransformerConfig, vae: VAEConfig) -> dict[str, Any]:
    """The defaults of a run with any checkpoint of this architecture, as fields of a `Release`."""
    height, width = bucket_of(*LANDSCAPE, transformer.target_size, vae.spatial_compression)
    return {
        "height": height,
        "width": width,
        "num_frames": NUM_FRAMES,
        "max_frames": NUM_FRAMES,
        "frame_step": vae.temporal_compression,
        "fps": FPS,
        "num_inference_steps": DISTILLED_STEPS if transformer.use_meanflow else STEPS,
        "guidance_scale": 1.0 if transformer.use_meanflow else GUIDANCE_SCALE,
        "scheduler": "flow_match",
    }


def _release(name: str, shift: float) -> Release:
    """name: as in the hub id, such as "480p_i2v_step_distilled"."""
    is_image, is_distilled = "i2v" in name, name.endswith("distilled")
    transformer = TransformerConfig(
        target_size=960 if "720p" in name else 640, use_meanflow=name.endswith("step_distilled")
    )
    vae = VAEConfig()
    configs = {
        "tokenizer": TokenizersConfig(),
        "text_encoder": QwenConfig(),
        "text_encoder_2": BYT5,
        **({"image_encoder": VisionConfig()} if is_image else {}),
        "transformer": transformer,
        "vae": vae,
        "scheduler": FlowMatchConfig(shift=shift),
    }
    distilled = {"guidance_scale": 1.0} if is_distilled else {}
    return Release(
        name=f"hunyuanvideo1.5-{name.replace('_', '-')}",
        hub_id=f"hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-{name}",
        family=IMAGE_FAMILY if is_image else FAMILY,
        configs=configs,
        **recommended(transformer, vae) | distilled,
    )


RELEASES: dict[str, Release] = {
    release.name: release
    for release in (
        _release("480p_t2v", 5.0),
        _release("480p_t2v_distilled", 5.0),
        _release("720p_t2v", 9.0),
        _release("480p_i2v", 5.0),
        _release("480p_i2v_distilled", 5.0),
        _release("480p_i2v_step_distilled", 7.0),
        _release("720p_i2v", 7.0),
        _release("720p_i2v_distilled", 7.0),
    )
}


def releases_of(family: str) -> dict[str, Release]:
    """Name -> release, of one of the two families."""
    return {name: release for name, release in RELEASES.items() if release.family == family}
