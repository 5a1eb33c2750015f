"""Adapters of CogVideoX that were distilled to a few steps, and the settings that they were trained for."""

from __future__ import annotations

from cogvideox_flax.models.model import Distillation

DISTILLATIONS = (
    Distillation(
        name="tdm",
        source="Luo-Yihong/TDM_CogVideoX-2B_LoRA",
        releases=("cogvideox-2b",),
        scheduler="ddim",
        timesteps=(999, 856, 665, 399),
        files=r"tdm[-_]cogvideox",
        basis="its authors' README and code",
    ),
    Distillation(
        name="psa",
        source="GYP666/BLADE, cogvideox-5b-psa-lora",
        releases=("cogvideox-5b",),
        scheduler="dpm",
        num_inference_steps=4,
        files=r"cogvideox-5b-psa",
        basis="its authors' code, without its sparse attention",
    ),
    Distillation(
        name="blade",
        source="GYP666/BLADE",
        releases=("cogvideox-5b",),
        scheduler="dpm",
        num_inference_steps=8,
        files=r"blade(?!.*psa)",
        basis="hearsay: the paper has 8 steps; timesteps and guidance were not seen",
    ),
)
"""TDM: arXiv 2503.06674; BLADE: arXiv 2508.10774."""
