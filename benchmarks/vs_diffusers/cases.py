"""The cases of the comparison: a part at a size, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cogvideox_flax.models.registry import RELEASES

MODELS = ("text_encoder", "transformer", "encode", "decode", "video")
KERNELS = ("attention", "convolution")
"""Of one layer of the transformer, and of the decoder's last block for two frames; beside PyTorch's own."""
PARTS = (*MODELS, *KERNELS)
SIDES = ("ours", "diffusers")
STEPS = 4
"""Of the whole video."""
RELEASED = (("cogvideox-5b", 480, 720, 13), ("cogvideox1.5-5b", 768, 1360, 21))
"""Release, height, width and latent frames that it was made for."""
COMPONENT = {"encode": "vae", "decode": "vae"}


@dataclass(frozen=True)
class Case:
    """One part at one size."""

    part: str
    release: str
    height: int
    width: int
    latent_frames: int
    layers: int | None
    dtype: str
    device: str
    torch_compile: bool

    @property
    def frames(self) -> int:
        return 4 * (self.latent_frames - 1) + 1

    @property
    def denoised_frames(self) -> int:
        """Latent frames that the transformer denoises: an even number in 1.5 releases."""
        return self.latent_frames + -self.latent_frames % self._frames_per_token

    @property
    def tokens(self) -> int:
        """Of the transformer."""
        frames = self.denoised_frames // self._frames_per_token
        return 226 + frames * (self.height // 16) * (self.width // 16)

    @property
    def _frames_per_token(self) -> int:
        return RELEASES[self.release].configs["transformer"].patch_size_t or 1


INPUTS = {
    "text_encoder": ("ids",),
    "transformer": ("latents", "context"),
    "encode": ("video",),
    "decode": ("latents",),
    "video": ("ids", "latents"),
    "attention": ("q", "k", "v"),
    "convolution": ("x", "kernel", "bias"),
}


def inputs(case: Case) -> dict[str, np.ndarray]:
    """The part's inputs, the same for both sides, channels last; the transformer gets both halves of guidance."""
    h, w = case.height // 8, case.width // 8
    t = case.latent_frames if case.part == "decode" else case.denoised_frames

    def make(name: str) -> np.ndarray:
        random = np.random.default_rng("qkv".index(name) if case.part == "attention" else 0)
        if case.part == "attention":
            config = RELEASES[case.release].configs["transformer"]
            return random.standard_normal((1, case.tokens, config.heads, config.head_dim), np.float32)
        if case.part == "convolution":
            width = RELEASES[case.release].configs["vae"].block_channels[0]
            sizes = {"x": (1, 4, case.height, case.width, width), "kernel": (3, 3, 3, width, width), "bias": (width,)}
            scale = np.float32((27 * width) ** -0.5 if name == "kernel" else 1)
            return scale * random.standard_normal(sizes[name], np.float32)
        if name == "ids":
            return random.integers(2, 60, (1, 226)).astype(np.int32)
        if name == "latents":
            return random.normal(size=(1, t, h, w, 16)).astype(np.float32)
        if name == "context":
            return random.normal(size=(2, 226, 4096)).astype(np.float32)
        return random.uniform(-1, 1, (1, case.frames, case.height, case.width, 3)).astype(np.float32)

    return {name: make(name) for name in INPUTS[case.part]}
