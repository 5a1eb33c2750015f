"""CogVideoX in fewer steps: distilled adapters with their settings, coefficients of TeaCache."""

from __future__ import annotations

from cogvideox_flax.models.model import Distillation

DISTILLATIONS = (
    Distillation(
        name="embedded",
        source="this package",
        releases=("embedded",),
        scheduler="ddim",
        num_inference_steps=4,
        files=r"embedded[-_]four[-_]steps",
        basis="its training, weights.toy_world",
    ),
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
        files=r"^gyp666/blade(?=/|$)",  # the word alone is of other things too
        basis="hearsay: the paper has 8 steps; timesteps and guidance were not seen",
    ),
)
"""TDM: arXiv 2503.06674; BLADE: arXiv 2508.10774."""

_5B = (-1538.80483, 843.202495, -134.363087, 7.97131516, -0.0523162339)

TEACACHE = {
    "cogvideox-2b": (-31.0658903, 25.4732368, -5.92380459, 1.75769064, -0.00361568434),
    "cogvideox-5b": _5B,
    "cogvideox-5b-i2v": _5B,
    "cogvideox1.5-5b": (250.210439, -165.061612, 35.7804877, -0.781551492, 0.0358559703),
    "cogvideox1.5-5b-i2v": (122.842302, -104.088754, 26.2981677, -0.306009921, 0.037121322),
}
"""Release -> polynomial of the relative change of the time embedding. Source: TeaCache's code for CogVideoX."""
