"""From prompts to the features of both text encoders."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from cogvideox_flax.models.denoiser import Features
from cogvideox_flax.models.hunyuan_video15.qwen import QwenEncoder
from cogvideox_flax.models.hunyuan_video15.tokenizer import PREFIX_LENGTH, Tokenizers, TokenizersConfig
from cogvideox_flax.models.model import TextInput
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


def text_inputs(lengths: TokenizersConfig) -> tuple[TextInput, ...]:
    """Both text encoders."""
    prompt, glyphs = PREFIX_LENGTH + lengths.max_length, lengths.glyph_length
    return (
        TextInput(
            component="text_encoder",
            tokenize=Tokenizers.prompts,
            lengths=dict.fromkeys(("ids", "mask"), prompt),
            encode=encode_prompt,
        ),
        TextInput(
            component="text_encoder_2",
            tokenize=Tokenizers.glyphs,
            lengths=dict.fromkeys(("ids", "mask"), glyphs),
            encode=encode_glyphs,
        ),
    )
