"""The released CogVideoX models."""

from __future__ import annotations

import dataclasses
from typing import Any

from cogvideox_flax.config import Config
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.model import Release
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import TokenizerConfig

FAMILY = "cogvideox"

_5B = TransformerConfig(layers=42, heads=48, rotary=True)
_1_5 = dataclasses.replace(_5B, patch_size_t=2, sample_height=96, sample_width=170, sample_frames=81)
_VAE_5B = VAEConfig(scaling_factor=0.7)
_VAE_1_5 = VAEConfig(scaling_factor=0.7, invert_scale_latents=True)
_UNSHIFTED = SchedulerConfig(snr_shift_scale=1.0)


_SIZE_1_0: dict[str, Any] = {"height": 480, "width": 720, "num_frames": 49, "max_frames": 49, "fps": 8}
_SIZE_1_5: dict[str, Any] = {"height": 768, "width": 1360, "num_frames": 81, "max_frames": 161, "fps": 16}
_SIZE_1_5 |= {"frame_step": 16, "any_size": True}


def _release(
    hub_name: str, transformer: TransformerConfig, vae: VAEConfig, noise_schedule: SchedulerConfig, **settings: Any
) -> Release:
    configs: dict[str, Config] = {
        "tokenizer": TokenizerConfig(),
        "text_encoder": TextEncoderConfig(),
        "transformer": transformer,
        "vae": vae,
        "scheduler": noise_schedule,
    }
    usual: dict[str, Any] = {"scheduler": "dpm", "use_dynamic_cfg": True}
    hub_id = f"zai-org/{hub_name}"
    return Release(name=hub_name.lower(), hub_id=hub_id, family=FAMILY, configs=configs, **usual | settings)


_IMAGE_5B = dataclasses.replace(_5B, in_channels=32, learned_positions=True)
_IMAGE_1_5 = dataclasses.replace(_1_5, in_channels=32, ofs_width=512)
_SETTINGS_2B: dict[str, Any] = {"dtype": "float16", "scheduler": "ddim", "use_dynamic_cfg": False}

RELEASES: dict[str, Release] = {
    release.name: release
    for release in (
        _release("CogVideoX-2b", TransformerConfig(), VAEConfig(), SchedulerConfig(), **_SIZE_1_0, **_SETTINGS_2B),
        _release("CogVideoX-5b", _5B, _VAE_5B, _UNSHIFTED, **_SIZE_1_0),
        _release("CogVideoX-5b-I2V", _IMAGE_5B, _VAE_5B, _UNSHIFTED, **_SIZE_1_0),
        _release("CogVideoX1.5-5B", _1_5, _VAE_1_5, _UNSHIFTED, **_SIZE_1_5),
        _release("CogVideoX1.5-5B-I2V", _IMAGE_1_5, _VAE_1_5, _UNSHIFTED, **_SIZE_1_5),
    )
}


PREVIEW = (
    (42.2, 45.6, 38.7),
    (0.8, 2.5, 3.8),
    (-0.2, -0.7, -0.7),
    (-0.2, 1.2, 0.2),
    (-0.9, -0.6, 1.5),
    (-1.4, -2.2, -2.8),
    (-1.8, -0.8, -1.6),
    (16.6, -2.4, 1.0),
    (-1.1, -2.0, 1.0),
    (0.0, 0.8, 1.2),
    (-4.9, -0.9, 3.3),
    (0.7, 3.2, 2.2),
    (2.2, 0.2, -1.3),
    (-4.8, -3.2, 3.0),
    (0.2, -0.1, -0.2),
    (-19.5, 3.8, 34.2),
    (121.7, 113.9, 140.3),
)
"""Latents of the released VAE, not normalized, to colours; the last row is the offset. Least squares on a clip of 49
frames and its latent by the released VAE, of pixels in [0, 1], the brighter half of the VAE's range: R^2 is 0.95."""
