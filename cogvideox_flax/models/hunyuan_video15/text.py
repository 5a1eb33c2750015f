"""From prompts to the features of both text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.family import Configs, TextStage
from cogvideox_flax.models.hunyuan_video15.qwen import QwenEncoder
from cogvideox_flax.models.hunyuan_video15.tokenizer import PREFIX_LENGTH, Tokenizers
from cogvideox_flax.models.t5 import TextEncoder

Tokens = dict[str, Int32[Array, "B L"]]
"""`ids`, and `mask`: 1 for tokens that are not padding."""


def encode_prompt(encoder: QwenEncoder, tokens: Tokens) -> Features:
    """`prompt_embeds` [B, L, E] and its mask, without the chat before the prompt; only where the mask is 1 they mean
    something."""
    features, mask = encoder(tokens["ids"]), tokens["mask"].astype(jnp.float32)
    return {"prompt_embeds": features[:, PREFIX_LENGTH:], "prompt_embeds_mask": mask[:, PREFIX_LENGTH:]}


def encode_glyphs(encoder: TextEncoder, tokens: Tokens) -> Features:
    """`prompt_embeds_2` [B, M, E] of the quoted text, and its mask; zeros for prompts without any."""
    mask = tokens["mask"].astype(jnp.float32)
    features = encoder(tokens["ids"], tokens["mask"])
    kept = jnp.where(mask.any(1)[:, None, None], features, 0)
    return {"prompt_embeds_2": kept, "prompt_embeds_mask_2": mask}


def tokenize_prompt(tokenizers: Tokenizers, prompts: Sequence[str]) -> Any:
    """What `encode_prompt` takes; errors as for `Tokenizers.prompts`."""
    return tokenizers.prompts(prompts)


def tokenize_glyphs(tokenizers: Tokenizers, prompts: Sequence[str]) -> Any:
    """What `encode_glyphs` takes; errors as for `Tokenizers.glyphs`."""
    return tokenizers.glyphs(prompts)


def _shapes(batch: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    return dict.fromkeys(("ids", "mask"), jax.ShapeDtypeStruct((batch, length), "int32"))


def prompt_shapes(configs: Configs, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of what `encode_prompt` takes."""
    return _shapes(batch, PREFIX_LENGTH + configs["tokenizer"].max_length)


def glyph_shapes(configs: Configs, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of what `encode_glyphs` takes."""
    return _shapes(batch, configs["tokenizer"].glyph_length)


STAGES = (
    TextStage(component="text_encoder", tokenize=tokenize_prompt, token_shapes=prompt_shapes, encode=encode_prompt),
    TextStage(component="text_encoder_2", tokenize=tokenize_glyphs, token_shapes=glyph_shapes, encode=encode_glyphs),
)
