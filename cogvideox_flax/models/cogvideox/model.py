"""CogVideoX: a T5 text encoder, a transformer over text and video tokens, a causal video VAE.

Source: arXiv 2408.06072.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from cogvideox_flax.errors import InputError
from cogvideox_flax.models import t5
from cogvideox_flax.models.chunks import chunk_sizes, sizes_after_first
from cogvideox_flax.models.codec import Codec
from cogvideox_flax.models.cogvideox import releases, sharding, visual
from cogvideox_flax.models.cogvideox.autoencoder import DECODE_CHUNK, Autoencoder
from cogvideox_flax.models.cogvideox.config import TransformerConfig, VAEConfig
from cogvideox_flax.models.cogvideox.few_steps import DISTILLATIONS, TEACACHE
from cogvideox_flax.models.cogvideox.transformer import Tokens, Transformer
from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.model import (
    Component,
    Configs,
    LoRALayout,
    Release,
    TextInput,
    TrainingRecipe,
    VideoModel,
    VisualInput,
    Workload,
)
from cogvideox_flax.models.sizes import Size, SizeRule
from cogvideox_flax.schedulers import SCHEDULERS
from cogvideox_flax.schedulers.config import SchedulerConfig
from cogvideox_flax.tokenizer import JSON_FILE, SPIECE_FILE, Tokenizer, TokenizerConfig

COMFYUI = {
    **{f"blocks.{{i}}.{name}": f"transformer_blocks.{{i}}.attn1.to_{name}" for name in "qkv"},
    "blocks.{i}.attn_out": "transformer_blocks.{i}.attn1.to_out.0",
    "blocks.{i}.ff_proj": "transformer_blocks.{i}.ff.net.0.proj",
    "blocks.{i}.ff_out": "transformer_blocks.{i}.ff.net.2",
    **{f"blocks.{{i}}.norm{n}.linear": f"transformer_blocks.{{i}}.norm{n}.linear" for n in (1, 2)},
    **{f"{name}_embedding_linear_{n}": f"{name}_embedding.linear_{n}" for name in ("time", "ofs") for n in (1, 2)},
    **{name: name for name in ("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out")},
}
"""Names of the linear maps in ComfyUI's model (comfy/ldm/cogvideo) -> diffusers'."""

LORA = LoRALayout(
    component="transformer",
    maps={
        "q": ("blocks.attn.q", "attn1.to_q"),
        "k": ("blocks.attn.k", "attn1.to_k"),
        "v": ("blocks.attn.v", "attn1.to_v"),
        "out": ("blocks.attn.out", "attn1.to_out.0"),
        "up": ("blocks.mlp.up", "ff.net.0.proj"),
        "down": ("blocks.mlp.down", "ff.net.2"),
    },
    default_targets=("q", "k", "v", "out"),
    other_names={
        # SAT's, with the number of its matrices
        "layers.{i}.attention.query_key_value.0": "transformer_blocks.{i}.attn1.to_q",
        "layers.{i}.attention.query_key_value.1": "transformer_blocks.{i}.attn1.to_k",
        "layers.{i}.attention.query_key_value.2": "transformer_blocks.{i}.attn1.to_v",
        "layers.{i}.attention.dense.0": "transformer_blocks.{i}.attn1.to_out.0",
        **COMFYUI,
    },
    written={"comfyui": COMFYUI},
)


COMPONENTS = {
    "text_encoder": Component(
        config=t5.TextEncoderConfig,
        module=t5.TextEncoder,
        stage="encode",
        sharding=t5.SHARDING,
        linear_maps=t5.LINEAR_MAPS,
        heads="heads",
        class_names=("T5EncoderModel",),
    ),
    "transformer": Component(
        config=TransformerConfig,
        module=Transformer,
        stage="denoise",
        sharding=sharding.TRANSFORMER,
        linear_maps=tuple(LORA.targets.values()),
        heads="heads",
        class_names=("CogVideoXTransformer3DModel",),
    ),
    "vae": Component(
        config=VAEConfig,
        module=Autoencoder,
        stage="decode",
        sharding=sharding.VAE,
        class_names=("AutoencoderKLCogVideoX",),
    ),
}

RECIPE = TrainingRecipe(
    image_noise=(-3.0, 0.5),
    image_dropout=0.05,
    mask_dropout=0.9,
    source="CogVideo's sat/ and finetune/; of inpainting and control models VideoX-Fun's scripts/cogvideox_fun",
)

OFS = 2.0
"""The motion scalar (ofs) of the released pipeline, for releases that have this input."""


def encode_text(encoder: t5.TextEncoder, ids: Int32[Array, "B L"]) -> Features:
    """`prompt_embeds` [B, L, E]: every position, padding included, is attended."""
    return {"prompt_embeds": encoder(ids)}


def embed(
    transformer: Transformer,
    latents: Float32[Array, "B T h w C"],
    features: Features,
    timestep: Int[Array, ""] | Int[Array, " B"],
    *,
    next_timestep: Int[Array, ""] | None = None,
    riflex: bool = False,
) -> Tokens:
    """The tokens from which the transformer predicts v = sqrt(abar) noise - sqrt(1 - abar) x0.

    Args:
        next_timestep: ignored, since no release takes it.
        riflex: as for `Transformer`.
    """
    ofs = None if transformer.config.ofs_width is None else OFS
    beside = visual.with_visual(latents, features, transformer.config)
    return transformer.embed(beside, features["prompt_embeds"], timestep, ofs, riflex=riflex)


def embed_riflex(
    transformer: Transformer,
    latents: Float32[Array, "B T h w C"],
    features: Features,
    timestep: Int[Array, ""] | Int[Array, " B"],
    *,
    next_timestep: Int[Array, ""] | None = None,
) -> Tokens:
    """`embed` with rotary positions extended by RIFLEx."""
    return embed(transformer, latents, features, timestep, next_timestep=next_timestep, riflex=True)


class CogVideoXCodec(Codec):
    """The causal VAE, which decodes a clip in chunks of a few latent frames."""

    decodes_chunks = True

    @property
    def preview_matrix(self) -> Float32[np.ndarray, "C+1 3"] | None:
        released = self.config.block_channels == VAEConfig().block_channels
        return np.array(releases.PREVIEW, np.float32) if released else None

    def chunks(self, frames: int) -> list[int]:
        """diffusers' chunks; for even T, of which these make 4 T frames, VideoX-Fun's, which make 4 (T - 1) + 1."""
        return (chunk_sizes if frames % 2 else sizes_after_first)(frames, DECODE_CHUNK)

    def decode_chunk(
        self, vae: Autoencoder, latents: Float[Array, "B t h w C"], cache: Any
    ) -> tuple[Float32[Array, "B F H W 3"], Any]:
        video, cache = vae.decode_chunk(self.statistics.denormalize(latents), cache)
        return video.astype(jnp.float32), cache


class CogVideoX(VideoModel):
    """CogVideoX 1.0 and 1.5: a T5 encoder, joint attention over text and video, a causal VAE."""

    name = releases.FAMILY
    components = COMPONENTS
    scheduler_config = SchedulerConfig
    schedulers = SCHEDULERS
    tokenizer = TokenizerConfig
    tokenizer_files = (SPIECE_FILE, JSON_FILE)
    releases = releases.RELEASES
    lora = LORA
    distillations = DISTILLATIONS
    teacache = TEACACHE
    recipe = RECIPE
    embed = staticmethod(embed)

    @classmethod
    def read_tokenizer(cls, raw: Mapping[str, Any], configs: Configs) -> TokenizerConfig:
        """The transformer's text length wins over the tokenizer's own limit."""
        transformer = configs.get("transformer")
        return TokenizerConfig.from_hf(raw, transformer.text_length if transformer else None)

    def hf_files(self) -> dict[str, dict[str, Any]]:
        pipelines = {"image": "CogVideoXImageToVideoPipeline", "control": "CogVideoXFunControlPipeline"}
        pipeline = pipelines.get(self.transformer.takes or "", "CogVideoXPipeline")
        tokenizer = {"tokenizer_class": "T5Tokenizer", "model_max_length": self.configs["tokenizer"].max_length}
        return {
            "model_index.json": {"_class_name": pipeline, "tokenizer": ["transformers", "T5Tokenizer"]},
            "tokenizer/tokenizer_config.json": tokenizer,
        }

    @classmethod
    def tokenizer_files_in(cls, folder: Path) -> list[str]:
        """The first alone: each is a whole tokenizer."""
        return super().tokenizer_files_in(folder)[:1]

    @classmethod
    def is_release(cls, release: Release, configs: Configs) -> bool:
        return configs["transformer"].architecture() == release.configs["transformer"].architecture()

    @property
    def transformer(self) -> TransformerConfig:
        return self.configs["transformer"]

    @property
    def codec(self) -> Codec:
        return CogVideoXCodec(self.configs["vae"])

    def make_tokenizer(self, folder: Path) -> Tokenizer:
        ids, words = self.configs["tokenizer"], self.configs["text_encoder"].vocab_size
        file = next(iter(self.tokenizer_files_in(folder)), SPIECE_FILE)
        return Tokenizer(folder / file, ids.max_length, vocab_size=words)

    def check(self) -> None:
        text = self.configs["text_encoder"].width
        if text != self.transformer.text_width:
            raise InputError(
                f"the text encoder gives {text} channels, the transformer takes {self.transformer.text_width}"
            )
        latent = self.codec.latent_channels
        if self.transformer.takes is None or self.transformer.out_channels != latent:
            raise InputError(
                f"its transformer takes {self.transformer.in_channels} channels; text-to-video has {latent}, "
                f"image-to-video and control {2 * latent}, inpainting {2 * latent + 1}; take a checkpoint of one of "
                "these kinds"
            )

    def workload(self, size: Size) -> Workload:
        config = self.transformer
        video = size.latent_frames // self.temporal_patch * size.latent_height * size.latent_width
        return Workload(
            layers=config.layers,
            heads=config.heads,
            head_dim=config.head_dim,
            tokens=config.text_length + video // config.patch_size**2,
            modulation=config.time_width,
        )

    def unreleased(self) -> Release:
        """The size of the training, and what all releases share."""
        config, pixels = self.transformer, self.codec.spatial_compression
        return Release(
            name="",
            hub_id="",
            family=self.name,
            configs=self.configs,
            height=config.sample_height * pixels,
            width=config.sample_width * pixels,
            num_frames=self.size_rule.fit_frames(config.sample_frames),
            max_frames=config.sample_frames,
            fps=16 if config.patch_size_t and config.takes != "inpaint" else 8,
            scheduler=self.configs["scheduler"].kind,
        )

    @property
    def size_rule(self) -> SizeRule:
        config, codec = self.transformer, self.codec
        c, patch, step = codec.temporal_compression, self.temporal_patch, codec.spatial_compression * config.patch_size
        if config.takes == "inpaint" and patch > 1:  # these have no extra latent frames
            return SizeRule(c * (patch - 1) + 1, c * patch, step)
        # diffusers' decoder turns an odd number n of latents into c (n - 1) + 1 frames, an even number into c n
        return SizeRule(1, 2 * c, step)

    @property
    def temporal_patch(self) -> int:
        return self.transformer.patch_size_t or 1

    def size_warnings(self, size: Size) -> list[str]:
        found, config, release = [], self.transformer, self.release
        here = (size.height, size.width)
        learned = tuple(side * self.codec.spatial_compression for side in (config.sample_height, config.sample_width))
        if config.learned_positions and here != learned:
            found.append(
                f"the learned positions are those of {learned[0]}x{learned[1]} and are left out at "
                f"{size.height}x{size.width}; the rotary ones stay"
            )
        if release is None:
            return found
        if release.any_size:
            trained = min(here) == release.height and max(here) <= release.width
            sizes = f"shorter side {release.height}, longer side up to {release.width}"
        else:
            trained = here == (release.height, release.width)
            sizes = f"{release.height}x{release.width}"
        if not trained:
            found.append(f"{release.name} was trained at {sizes}, not {size.height}x{size.width}: expect worse video")
        if size.num_frames > release.max_frames or size.num_frames % release.frame_step != 1:
            frames = f"{release.frame_step} n + 1 frames up to {release.max_frames}"
            found.append(f"{release.name} was trained on {frames}, not {size.num_frames}: expect worse video")
        return found

    @property
    def text(self) -> tuple[TextInput, ...]:
        lengths = self.configs["tokenizer"].max_length
        return (TextInput(component="text_encoder", tokenize=_tokenize, lengths=lengths, encode=encode_text),)

    def feature_shapes(self, batch: int) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (batch, self.transformer.text_length, self.transformer.text_width)}

    @property
    def visual(self) -> tuple[VisualInput, ...]:
        return visual.visual_inputs(self.transformer, self.configs["vae"], self.codec.statistics)

    @property
    def inputs(self) -> tuple[str, tuple[str, ...]]:
        assert self.transformer.takes is not None  # `check`
        return visual.INPUTS[self.transformer.takes]

    def check_inputs(self, given: Sequence[str]) -> None:
        super().check_inputs(given)
        if self.transformer.takes == "inpaint":
            visual.check_masked(given)

    @property
    def positions(self) -> dict[str, Callable[..., Tokens]]:
        """RIFLEx is for models whose positions are rotary alone."""
        return {"riflex": embed_riflex} if self.transformer.rotary and not self.transformer.learned_positions else {}


def _tokenize(tokenizer: Tokenizer, prompts: Sequence[str]) -> Any:
    return tokenizer(prompts)
