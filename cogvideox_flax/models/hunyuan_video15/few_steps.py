"""Adapters of HunyuanVideo-1.5 that were distilled to a few steps, and the settings that they were trained for."""

from __future__ import annotations

from cogvideox_flax.models.model import Distillation

_SHIFT = 5

DISTILLATIONS = (
    Distillation(
        name="lightx2v",
        source="Comfy-Org/HunyuanVideo_1.5_repackaged, hunyuanvideo1.5_t2v_480p_lightx2v_4step_lora_rank_32_bf16",
        releases=("hunyuanvideo1.5-480p-t2v",),
        scheduler="flow_match",
        timesteps=tuple(1000 * _SHIFT * u / (1 + (_SHIFT - 1) * u) for u in (1, 0.75, 0.5, 0.25)),
        files=r"lightx2v.*4step",
        basis="LightX2V's code: shift 5 in its configuration, 9 in its example",
    ),
)
"""Its distilled releases are releases of their own, with their settings as defaults."""
