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

TEACACHE = {
    "hunyuanvideo1.5-480p-t2v": (-29719.0924, 22283.4983, -4374.1836, 339.340251, -10.1365855, 0.129101768),
    "hunyuanvideo1.5-480p-i2v": (8085.28429, -2446.07178, 249.489589, -9.10697865, 0.120261379),
    "hunyuanvideo1.5-720p-t2v": (-30890.7507, 16778.6188, -3191.78643, 260.740519, -8.19205881, 0.107913775),
    "hunyuanvideo1.5-720p-i2v": (3843.00014, -1392.47433, 169.167679, -7.07679232, 0.102419011),
}
"""Release -> polynomial of the relative change of the first block's modulated input. Source: LightX2V's configurations,
which decide for each half of guidance alone; here both decide together."""
