"""The released CogVideoX models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cogvideox_flax.config import Config
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.family import Release
from cogvideox_flax.models.t5 import TextEncoderConfig
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import TokenizerConfig

FAMILY = "cogvideox"

_5B = TransformerConfig(layers=42, heads=48, rotary=True)
_1_5 = dataclasses.replace(_5B, patch_size_t=2, sample_height=96, sample_width=170, sample_frames=81)
_VAE_5B = VAEConfig(scaling_factor=0.7)
_VAE_1_5 = VAEConfig(scaling_factor=0.7, invert_scale_latents=True)
_UNSHIFTED = SchedulerConfig(snr_shift_scale=1.0)


def _configs(transformer: TransformerConfig, vae: VAEConfig, scheduler: SchedulerConfig) -> dict[str, Config]:
    return {
        "tokenizer": TokenizerConfig(),
        "text_encoder": TextEncoderConfig(),
        "transformer": transformer,
        "vae": vae,
        "scheduler": scheduler,
    }


RELEASES: dict[str, Release] = {
    release.name: release
    for release in (
        Release(
            family=FAMILY,
            name="cogvideox-2b",
            hub_id="zai-org/CogVideoX-2b",
            configs=_configs(TransformerConfig(), VAEConfig(), SchedulerConfig()),
            dtype="float16",
            sampler="ddim",
            use_dynamic_cfg=False,
        ),
        Release(
            family=FAMILY,
            name="cogvideox-5b",
            hub_id="zai-org/CogVideoX-5b",
            configs=_configs(_5B, _VAE_5B, _UNSHIFTED),
        ),
        Release(
            family=FAMILY,
            name="cogvideox-5b-i2v",
            hub_id="zai-org/CogVideoX-5b-I2V",
            configs=_configs(dataclasses.replace(_5B, in_channels=32, learned_positions=True), _VAE_5B, _UNSHIFTED),
        ),
        Release(
            family=FAMILY,
            name="cogvideox1.5-5b",
            hub_id="zai-org/CogVideoX1.5-5B",
            configs=_configs(_1_5, _VAE_1_5, _UNSHIFTED),
            height=768,
            width=1360,
            num_frames=81,
            max_frames=161,
            frame_step=16,
            fps=16,
            any_size=True,
        ),
        Release(
            family=FAMILY,
            name="cogvideox1.5-5b-i2v",
            hub_id="zai-org/CogVideoX1.5-5B-I2V",
            configs=_configs(dataclasses.replace(_1_5, in_channels=32, ofs_width=512), _VAE_1_5, _UNSHIFTED),
            height=768,
            width=1360,
            num_frames=81,
            max_frames=161,
            frame_step=16,
            fps=16,
            any_size=True,
        ),
    )
}


def find_release(configs: Mapping[str, Any]) -> Release | None:
    """The release whose transformer has this architecture, or None.

    The `sample_*` fields do not count: the 1.5 configs were re-uploaded with another nominal size.
    """

    def architecture(config: TransformerConfig) -> TransformerConfig:
        unused = {"add_noise_in_inpaint_model": False}  # by all releases
        return dataclasses.replace(config, sample_height=1, sample_width=1, sample_frames=1, **unused)

    if (transformer := configs.get("transformer")) is None:
        return None
    releases = RELEASES.values()
    return next((r for r in releases if architecture(r.configs["transformer"]) == architecture(transformer)), None)
