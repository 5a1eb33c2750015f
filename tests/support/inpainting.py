"""Inpainting and control models of CogVideoX-Fun in small, and the reference's mask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.reference import make_transformer, save_layout


def save_inpainting_model(folder: Path, release: str, noisy: bool = False) -> Path:
    """A checkpoint as CogVideoX-Fun has it: keys in the transformer's config that diffusers does not know."""
    save_layout(folder, release, transformer=make_transformer(release, in_channels=33))
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text()) | {"add_noise_in_inpaint_model": noisy, "time_position_encoding_type": "3d"}
    path.write_text(json.dumps(config))
    return folder


def save_control_model(folder: Path, release: str) -> Path:
    """A checkpoint whose transformer takes the latents of a control clip."""
    save_layout(folder, release, transformer=make_transformer(release, in_channels=32))
    return folder


def reference_mask(mask: Any, shape: tuple[int, int, int]) -> torch.Tensor:
    """[F, H, W] to [1, 1, T, h, w]: first the first frame alone, then the others."""
    mask = torch.tensor(mask, dtype=torch.float32)[None, None]
    first = F.interpolate(mask[:, :, :1], size=(1, *shape[1:]), mode="trilinear", align_corners=False)
    rest = F.interpolate(mask[:, :, 1:], size=(shape[0] - 1, *shape[1:]), mode="trilinear", align_corners=False)
    return torch.cat([first, rest], 2)
