"""The cases of the comparison: a part at a size, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cogvideox_flax.models.hunyuan_video15.releases import FAMILY as HUNYUAN
from cogvideox_flax.models.model import Configs
from cogvideox_flax.models.registry import RELEASES

MODELS = ("text_encoder", "transformer", "encode", "decode", "video")
KERNELS = ("attention", "convolution")
"""Of one layer of the transformer, and of the decoder's last block for two frames; beside PyTorch's own."""
PARTS = (*MODELS, *KERNELS)
SIDES = ("ours", "diffusers")
STEPS = 4
"""Of the whole video."""
RELEASED = (
    ("cogvideox-5b", 480, 720, 13),
    ("cogvideox1.5-5b", 768, 1360, 21),
    ("hunyuanvideo1.5-480p-t2v", 480, 848, 31),
)
"""Release, height, width and latent frames that it was made for."""
OF_COGVIDEOX = ("text_encoder", "video")
"""Parts that are compared for CogVideoX alone."""
PROMPT = ("text", "text_mask", "glyphs", "glyph_mask")
"""What HunyuanVideo-1.5's transformer takes of a prompt."""
PROMPT_TOKENS = 200
"""Of that prompt, which has no quoted text."""
HUNYUAN_TIMESTEP = 992.0
"""A number that bfloat16 has, since diffusers rounds a timestep to it (999 becomes 1000)."""
COMPONENT = {"encode": "vae", "decode": "vae"}


def is_hunyuan(release: str) -> bool:
    """Whether the release is of HunyuanVideo-1.5."""
    return RELEASES[release].family == HUNYUAN


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
    def configs(self) -> Configs:
        return RELEASES[self.release].configs

    @property
    def is_hunyuan(self) -> bool:
        return is_hunyuan(self.release)

    @property
    def denoised_frames(self) -> int:
        """Latent frames that the transformer denoises: an even number in CogVideoX 1.5."""
        return self.latent_frames + -self.latent_frames % self._frames_per_token

    @property
    def tokens(self) -> int:
        """Of the transformer, those of the prompt included."""
        frames = self.denoised_frames // self._frames_per_token
        lengths = self.configs["tokenizer"]
        prompt = lengths.max_length + (lengths.glyph_length if self.is_hunyuan else 0)
        return prompt + frames * (self.height // 16) * (self.width // 16)

    @property
    def _frames_per_token(self) -> int:
        return 1 if self.is_hunyuan else self.configs["transformer"].patch_size_t or 1


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
    vae, denoises = case.configs["vae"], case.part == "transformer"
    h, w = case.height // vae.spatial_compression, case.width // vae.spatial_compression
    t = case.latent_frames if case.part == "decode" else case.denoised_frames

    def make(name: str) -> np.ndarray:
        random = np.random.default_rng("qkv".index(name) if case.part == "attention" else 0)
        if case.part == "attention":
            config = case.configs["transformer"]
            return random.standard_normal((1, case.tokens, config.heads, config.head_dim), np.float32)
        if case.part == "convolution":
            width = vae.block_channels[0]
            sizes = {"x": (1, 4, case.height, case.width, width), "kernel": (3, 3, 3, width, width), "bias": (width,)}
            scale = np.float32((27 * width) ** -0.5 if name == "kernel" else 1)
            return scale * random.standard_normal(sizes[name], np.float32)
        if name == "ids":
            return random.integers(2, 60, (1, 226)).astype(np.int32)
        if name == "latents":
            channels = case.configs["transformer"].in_channels if denoises else vae.latent_channels
            return random.normal(size=(1, t, h, w, channels)).astype(np.float32)
        if name == "context":
            return random.normal(size=(2, 226, 4096)).astype(np.float32)
        return random.uniform(-1, 1, (1, case.frames, case.height, case.width, 3)).astype(np.float32)

    if case.is_hunyuan and denoises:
        return {"latents": make("latents")} | hunyuan_prompt(case.configs, batch=2)
    return {name: make(name) for name in INPUTS[case.part]}


def hunyuan_prompt(configs: Configs, batch: int) -> dict[str, np.ndarray]:
    """`PROMPT`: random features and their masks, float32, as long as the release's prompts are."""
    config, lengths = configs["transformer"], configs["tokenizer"]
    text = np.random.default_rng(1).standard_normal((batch, lengths.max_length, config.text_width), np.float32)
    mask = np.broadcast_to(np.arange(lengths.max_length) < PROMPT_TOKENS, text.shape[:2]).astype(np.float32)
    glyphs = np.zeros((batch, lengths.glyph_length, config.glyph_width), np.float32)
    return dict(zip(PROMPT, (text, mask, glyphs, glyphs[..., 0]), strict=True))
